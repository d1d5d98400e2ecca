"""Decides what becomes of a call whose node died, or was stopped.

`rerun` decides by the method whether a request may run again; for a tool the server's tool list decides
(`may_run_again`). The table then has the verdict for each occasion. Before the table, on any occasion, a call that its
client has cancelled is answered as cancelled (`Verdict.CANCEL`).
"""

import enum
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from perdure._core import session_tasks
from perdure._core.jsonrpc import JsonObject
from perdure._core.sticky import METHODS as STICKY

MOST_ATTEMPTS = 2
"""A request that was interrupted before does not run again if its process or server dies now, perhaps because of it."""

MOST_RUNS = 20
"""A process that is stopped was not killed by its requests, and in a deploy all of them are stopped, one after the
other. The limit is for a request because of which its processes are stopped."""

MOST_STEPPED_RUNS = 1_000
"""A call that gets on with its steps runs as often as it has steps (`_core.tool_steps.MOST_STEPS`). Runs that
ended in a sleep or in a question count here as well: a call because of which its processes die must end."""

READS = frozenset(
    {
        "ping",
        "tools/list",
        "resources/list",
        "resources/templates/list",
        "resources/read",
        "prompts/list",
        "prompts/get",
        "completion/complete",
    }
)
"""Requests that the specification makes reads: they may run again."""

TASK_READS = frozenset({"tasks/get", "tasks/result", "tasks/list"})
"""The reads of 2025-11-25's tasks, Perdure's or the server's own."""


class Occasion(enum.Enum):
    """The reason why the calls of another process are settled."""

    NODE_DIED = "node died"
    """Their node died, and they need no credentials: their session has no principal."""
    NODE_LEFT = "node left"
    """The same of a node that was stopped, and left in good order."""
    PRINCIPAL_AWAY = "principal away"
    """Their node died or left, and the credentials of their principal are not at hand."""
    PRINCIPAL_BACK = "principal back"
    """Their principal has sent a request, whose credentials are at hand."""
    GRACE_PASSED = "grace passed"
    """Their principal has not returned in time."""
    CALL_CANCELLED = "call cancelled"
    """The client has cancelled a call beside them, on the same stream."""
    HANDED_OVER = "handed over"
    """Another node has accepted them, and they run at the session's home, which is here."""
    UPSTREAM_DIED = "upstream died"
    """The server that ran them, outside this process, died or lost them."""
    STORE_BEHIND = "store behind"
    """The store has lost that they ended: they ran, and their answers are gone."""


class Rerun(enum.Enum):
    """Whether a call may run again."""

    YES = "yes"
    NO = "no"
    ASK = "ask"
    """Only the server knows: it declares for each tool whether it may."""
    STEPS = "steps"
    """Its tool continues after its finished steps."""
    HIDDEN = "hidden"
    """The server does not show the tool to the caller that asked."""
    FOLLOW = "follow"
    """It need not: a server outside its process may still run it, and is known how to be asked."""


class Verdict(enum.Enum):
    RERUN = "rerun"
    """It runs again, into the same stream."""
    BEGIN = "begin"
    """It runs for the first time."""
    FOLLOW = "follow"
    """Its answer is read from the server that runs it, without a second run."""
    UNKNOWN = "unknown"
    """It is answered: interrupted, outcome unknown."""
    CANCEL = "cancel"
    """It is answered: cancelled by its client."""
    WAIT = "wait"
    """It waits for its principal."""
    ASK = "ask"
    """The server is asked about its tool, and its answer is the next column in the same row."""
    KEEP = "keep"
    """It stays as it is."""


_CAN_RUN = {
    Rerun.YES: Verdict.RERUN,
    Rerun.NO: Verdict.UNKNOWN,
    Rerun.ASK: Verdict.ASK,
    Rerun.STEPS: Verdict.RERUN,
    Rerun.HIDDEN: Verdict.UNKNOWN,
    Rerun.FOLLOW: Verdict.FOLLOW,
}
VERDICTS: Mapping[Occasion, Mapping[Rerun, Verdict]] = {
    Occasion.NODE_DIED: _CAN_RUN,
    Occasion.NODE_LEFT: _CAN_RUN,
    Occasion.PRINCIPAL_AWAY: {
        **_CAN_RUN,
        Rerun.YES: Verdict.WAIT,
        Rerun.STEPS: Verdict.WAIT,
        Rerun.HIDDEN: Verdict.WAIT,
        Rerun.FOLLOW: Verdict.WAIT,
    },
    Occasion.PRINCIPAL_BACK: _CAN_RUN,
    Occasion.GRACE_PASSED: dict.fromkeys(Rerun, Verdict.UNKNOWN),
    Occasion.CALL_CANCELLED: dict.fromkeys(Rerun, Verdict.KEEP),
    Occasion.HANDED_OVER: dict.fromkeys(Rerun, Verdict.BEGIN),
    Occasion.UPSTREAM_DIED: {**_CAN_RUN, Rerun.ASK: Verdict.UNKNOWN, Rerun.FOLLOW: Verdict.UNKNOWN},
    Occasion.STORE_BEHIND: dict.fromkeys(Rerun, Verdict.UNKNOWN),
}


@dataclass(frozen=True, kw_only=True)
class UpstreamCall:
    """The part of a call's row that is for a server outside the process (`CallRecord.upstream`)."""

    may_run_again: bool | None = None
    """Whether its tool said so when the call began; `None` if that is not known."""
    follow: JsonObject | None = None
    """How the server can be asked for its answer."""
    own: bool = False
    """Perdure itself answers it, with what became of another call: no process dies because of it."""

    def encode(self) -> bytes:
        if self.follow is None and not self.own:
            return _ENCODED[self.may_run_again]  # of nearly all calls
        kept = {"rerun": self.may_run_again, "follow": self.follow, **({"own": True} if self.own else {})}
        return json.dumps(kept, separators=(",", ":")).encode()


NOTHING_KEPT = UpstreamCall()

_ENCODED: Mapping[bool | None, bytes] = {
    None: b"",
    True: b'{"rerun":true,"follow":null}',
    False: b'{"rerun":false,"follow":null}',
}


def decode_kept(kept: bytes) -> UpstreamCall:
    if not kept:
        return NOTHING_KEPT
    found = json.loads(kept)
    return UpstreamCall(may_run_again=found["rerun"], follow=found["follow"], own=found.get("own", False))


def is_wait(method: str, kept: UpstreamCall) -> bool:
    """Whether a request only waits for what becomes of another call: the end of its process is not due to it."""
    return kept.own or method == session_tasks.RESULT


def rerun(
    method: str,
    *,
    attempt: int,
    occasion: Occasion,
    kept: UpstreamCall = NOTHING_KEPT,
    progressed: int = 0,
    claims: int = 1,
) -> Rerun:
    """Whether a request may run again that was interrupted in this attempt. One that waits for its principal was judged
    when its node ended. `progressed`: the last attempt in which a step of its tool ended; only those after it count.
    `claims`: how often nodes have claimed its stream, at least once for each run."""
    if kept.follow is not None:
        return Rerun.FOLLOW
    is_death = occasion in (Occasion.NODE_DIED, Occasion.UPSTREAM_DIED)
    waits = is_wait(method, kept) and occasion is not Occasion.UPSTREAM_DIED
    is_suspect = not waits and attempt - progressed >= (MOST_ATTEMPTS if is_death else MOST_RUNS)
    if is_suspect or max(attempt, claims) >= MOST_STEPPED_RUNS:
        return Rerun.NO
    if method in READS or method in STICKY or method in TASK_READS:
        return Rerun.YES
    if method != "tools/call":
        return Rerun.NO
    return Rerun.ASK if kept.may_run_again is None else Rerun.YES if kept.may_run_again else Rerun.NO


def progress_in(payload: bytes, tokens: Collection[int | str] | None = None) -> float | None:
    """The progress that a message reports under one of the tokens, or any; `None` if it reports none that can be
    compared."""
    if b"notifications/progress" not in payload:
        return None
    try:
        params = json.loads(payload).get("params")
    except ValueError:  # a number with more digits than Python reads
        return None
    if not isinstance(params, dict) or (tokens is not None and params.get("progressToken") not in tokens):
        return None
    return as_progress(params.get("progress"))


def as_progress(sent: object) -> float | None:
    """Progress as the ledger keeps it: the smallest float that is not below it. Values up to it were sent."""
    if isinstance(sent, bool) or not isinstance(sent, int | float) or sent != sent:
        return None
    try:
        progress = float(sent)
    except OverflowError:
        return math.inf if sent > 0 else None
    return progress if progress >= sent else math.nextafter(progress, math.inf)


def may_run_again(tool: Mapping[str, Any]) -> bool:
    """Whether a tool, as `tools/list` shows it, says that a second run does no harm."""
    hints = tool.get("annotations")
    if not isinstance(hints, Mapping):
        return False
    return hints.get("readOnlyHint") is True or hints.get("idempotentHint") is True
