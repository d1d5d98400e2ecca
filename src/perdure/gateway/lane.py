"""The interface between a runtime of the gateway and a lane, in plain values.

A *lane* is one live connection to an upstream: the pipe of a child process, or an HTTP session. It knows requests by
keys that its user chooses, and asks by keys of its own; the ids and progress tokens on the wire are the lane's. A lane
lives once: after `on_closed` its user opens another.
"""

import asyncio
import json
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, Self

from perdure._core.codes import METHOD_NOT_FOUND, REQUEST_CANCELLED, UPSTREAM_UNAVAILABLE
from perdure._core.jsonrpc import JsonObject
from perdure.runtime.base import Flow
from perdure.runtime.token_check import Challenge, end_check

LOG_MESSAGE = "notifications/message"

REFUSED_SECONDS = 0.5
"""From the first refusal of an upstream that was replaced by one of the other era to the end of the lane: others of its
requests are on their way, and are refused as well. Those that are not may run, at a server that has not ended yet."""

OWN_SECONDS = 30.0
"""How long the gateway's own requests in a session wait: one that is never answered would keep a server that hangs from
being found out, because no client cancels it."""

RequestKey = Hashable
"""The name of a request, chosen by the lane's user; it is not used again while the request runs."""

AskKey = Hashable
"""The name of a request from the upstream, chosen by the lane."""


class Reason(Enum):
    """Why an upstream is not available: `data.reason` of an answer -31010."""

    NO_PROGRAM = "no_program"
    DIED = "died"
    NO_HANDSHAKE = "no_handshake"
    VERSION = "version"
    BACKING_OFF = "backing_off"
    UNREACHABLE = "unreachable"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    NOT_MCP = "not_mcp"
    SERVER_ERROR = "server_error"
    LIMIT = "limit"


class UpstreamUnavailable(Exception):
    """The upstream did not run a request, or cannot be opened. The sentence is for a model and for people."""

    def __init__(
        self,
        reason: Reason,
        sentence: str,
        *,
        retry_after: float | None = None,
        challenge: str | None = None,
        code: int | None = None,
        advice: str = "",
    ) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.advice = advice or ADVICE[reason]
        """What a model, or its user, can do next."""
        self.retry_after = retry_after
        """Seconds until another try may succeed; `None` if waiting alone does not help."""
        self.challenge = challenge
        """The upstream has refused the credentials of a request: its `WWW-Authenticate`, or empty."""
        self.code = code
        """The upstream has refused a session: the code of its error."""

    def masked(self, mask: Callable[[str], str]) -> Self:
        how: dict[str, Any] = {"retry_after": self.retry_after, "challenge": self.challenge, "code": self.code}
        how["advice"] = self.advice
        return type(self)(self.reason, mask(str(self)), **how)

    def report_to(self, origin: object) -> None:
        """Have the HTTP request that `origin` is refused as the upstream has refused it, if its token was passed on."""
        if self.challenge is not None:
            status = 403 if self.reason is Reason.FORBIDDEN else 401
            end_check(origin, Challenge(status, self.challenge))


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A lane after its handshake."""

    version: str
    """The revision that is spoken to the upstream."""
    result: JsonObject
    """The upstream's `initialize` result; of an upstream of 2026-07-28, what its `server/discover` comes to."""
    is_new: bool = True
    """The upstream knows nothing of the session yet. Otherwise the lane goes on in a session of the upstream's that an
    earlier lane began."""
    passes: bool = False
    """Client and upstream speak 2026-07-28: requests pass as they are, and describe their clients themselves."""
    process: str = ""
    """The name of a process that sessions share. As long as it is the same, nothing that it keeps in memory is lost."""
    mask: Callable[[str], str] = field(default=str, repr=False, compare=False)
    """Hides the secrets that the upstream was given, in a text of the upstream's that is logged."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A request whose answer this lane will not bring."""

    ran: bool
    """Whether the upstream may have run it. A request that surely did not run may be sent again, also a tool's call."""
    why: str
    """Part of a sentence: "the server's process ended (SIGKILL)"."""
    unavailable: UpstreamUnavailable | None = None
    """Of a request that did not run: the answer to give if it is not sent again."""
    is_final: bool = False
    """The request has had its time: it must not run again, also if its tool allows that."""

    @property
    def has_other_era(self) -> bool:
        """The upstream was replaced by one of the other era, so the next lane may take the request."""
        return not self.ran and self.unavailable is not None and self.unavailable.reason is Reason.VERSION

    @property
    def may_be_sent_again(self) -> bool:
        """It did not run, and the lane is over: the next one may take it."""
        is_over = self.unavailable is not None and self.unavailable.reason in (Reason.DIED, Reason.VERSION)
        return not self.ran and is_over

    def masked(self, mask: Callable[[str], str]) -> Self:
        unavailable = self.unavailable and self.unavailable.masked(mask)
        return replace(self, why=mask(self.why), unavailable=unavailable)


class Retries:
    """Decides how often a request that did not run is sent again: each lane may have its handshake, and end."""

    __slots__ = ("_has_other_era", "_until")

    def __init__(self) -> None:
        self._until = math.inf
        self._has_other_era = False

    def take(self, lost: Lost, patience: float) -> bool:
        """Whether the request is sent again on the next lane: for `patience` seconds from the first loss on, and once
        because the upstream was replaced by one of the other era."""
        now = asyncio.get_running_loop().time()
        self._until = min(self._until, now + patience)
        is_refused_again = lost.has_other_era and self._has_other_era
        self._has_other_era |= lost.has_other_era
        return lost.may_be_sent_again and not is_refused_again and now <= self._until


class Rising:
    """The progress of one run of a request, as far as it was passed on."""

    __slots__ = ("_highest",)

    def __init__(self) -> None:
        self._highest: float | None = None

    def takes(self, progress: object) -> bool:
        """Whether this progress is higher than what was passed on before. What is no number is passed on."""
        if not isinstance(progress, int | float):
            return True
        if self._highest is not None and progress <= self._highest:
            return False
        self._highest = progress
        return True


def swap_token(params: JsonObject | None, token: object) -> tuple[JsonObject | None, object]:
    """Give a request another progress token, if it has one. Returns its params and the token that it had."""
    meta = None if params is None else params.get("_meta")
    old = meta.get("progressToken") if isinstance(meta, dict) else None
    if params is None or old is None:
        return params, None
    return {**params, "_meta": {**params["_meta"], "progressToken": token}}, old


REQUEST_ENDED: JsonObject = {"error": {"code": REQUEST_CANCELLED, "message": "The request has ended"}}
"""The answer to an ask of a request that is over."""


def no_asks(method: str) -> JsonObject:
    """The answer to an ask that reaches no client."""
    return {"error": {"code": METHOD_NOT_FOUND, "message": f"No client can be asked {method} here"}}


class Receiver(Protocol):
    """Takes what a lane brings. Every method is called in the event loop, in the order of the messages, and returns at
    once. Where a method returns a `Flow`, the lane waits for its room before it reads on. A receiver leaves out what it
    does nothing at."""

    def on_notification(self, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        """A notification that belongs to that request, as far as the lane knows. Progress has the progress token that
        the request was given. A withdrawn ask is `on_ask_withdrawn`."""
        return None

    def on_ask(self, ask: AskKey, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        """The upstream asks the client. (The lane has answered `ping`.)"""

    def on_ask_withdrawn(self, ask: AskKey, reason: str) -> None:
        """The upstream does not wait for that answer any more."""
        return

    def on_answer(self, key: RequestKey, body: bytes, *, failed: bool) -> None:
        """The one answer of a request: its result or, `failed`, its error object, as JSON of the upstream."""

    def on_lost(self, key: RequestKey, lost: Lost) -> None:
        """The request gets no answer from this lane; reported in place of `on_answer`."""

    def on_position(self, key: RequestKey, state: JsonObject) -> None:
        """How `Lane.follow` of a later process can go on with the request. The newest state replaces the earlier."""
        return

    def on_closed(self, why: str) -> None:
        """The lane is over, not by `aclose`. Every request was reported before. Nothing is called after it."""
        return


class SessionReceiver(Receiver, Protocol):
    """Takes what an HTTP lane brings: a lane whose session the upstream may lose."""

    async def on_gone(self) -> JsonObject | None:
        """The upstream does not know the session of an HTTP lane any more. Returns the `state` of the session that
        another node has begun in its place, or None: then the lane begins one. Raises `UpstreamUnavailable` if there
        shall be none now; with `retry_after` the lane asks again."""
        return None

    async def on_renewed(self, opened: Opened) -> None:
        """An HTTP lane has begun a session in place of the one that is gone. From now on messages go to it, at once;
        the requests that wait in the lane follow when this has returned. So the receiver sends
        `notifications/initialized` and sticky requests first, and waits for their answers. Raises
        `UpstreamUnavailable` if the session cannot be used; with `retry_after` the lane calls `on_gone` again."""
        return


class Lane(Protocol):
    """One live connection to an upstream.

    1. `open` comes first, once. Until it has returned nothing else is called but `aclose`.
    2. Each `request` and `follow` is reported once, by `on_answer` or by `on_lost`, unless `aclose` was called.
    3. Messages are sent in the order of the calls; none of the calls waits.
    """

    @property
    def state(self) -> JsonObject:
        """What a later lane needs to go on in the upstream's session; empty where none can."""

    async def open(self, client_params: JsonObject, state: JsonObject | None = None) -> Opened:
        """Start or reach the upstream, and make the handshake with these `initialize` params, without
        `notifications/initialized`. `state`: of an earlier lane, in whose session the lane goes on if it can. Raises
        `UpstreamUnavailable`, and the lane is over then; the reason is `VERSION` where the upstream may speak the other
        era."""

    def listen(self, wanted: bool) -> None:
        """Take what belongs to no request, or leave it to another node's lane in the same session. (A pipe always takes
        it.)"""

    def request(self, key: RequestKey, method: str, params: JsonObject | None) -> None:
        """Send a request. A progress token in the params is replaced on the wire, and put back."""

    def follow(self, key: RequestKey, method: str, params: JsonObject | None, state: JsonObject) -> None:
        """Go on with a request of an earlier process, by what `on_position` said, or report it lost. It is given as it
        was to `request`."""

    def cancel(self, key: RequestKey, params: JsonObject | None) -> None:
        """Cancel a request. Its answer, should it still come, is dropped, and nothing is reported."""

    def notify(self, method: str, params: JsonObject | None) -> None:
        """Send a notification."""

    def reply(self, ask: AskKey, response: JsonObject) -> None:
        """Answer an ask with an object that has `result` or `error`. An ask that is not known is ignored."""

    async def aclose(self, *, ended: bool) -> None:
        """Close the lane without a report. `ended`: its session is not used again, so an HTTP upstream gets DELETE."""


_WAITS_FOR = frozenset({Reason.DIED, Reason.BACKING_OFF})
"""Reasons that time alone may remove. (A lane over HTTP waits by itself.)"""


async def open_lane(
    make: Callable[[], Lane],
    client_params: JsonObject,
    state: JsonObject | None = None,
    *,
    patience: float,
    most_starts: int | None = None,
) -> tuple[Lane, Opened]:
    """Open a lane, and another one if the upstream ends in the handshake, within `patience` seconds and `most_starts`.
    Raises `UpstreamUnavailable`."""
    loop = asyncio.get_running_loop()
    deadline, starts = loop.time() + patience, 0
    while True:
        lane = make()
        try:
            return lane, await lane.open(client_params, state)
        except UpstreamUnavailable as failure:
            await lane.aclose(ended=True)
            starts += failure.reason is Reason.DIED
            pause = failure.retry_after or 0.0
            is_late = loop.time() + pause > deadline or (most_starts is not None and starts >= most_starts)
            if failure.reason not in _WAITS_FOR or is_late:
                raise
            await asyncio.sleep(pause)
        except BaseException:
            await lane.aclose(ended=True)
            raise


CORRECT_CLIENT = "Sending the request again does not help until the configuration of its MCP client is corrected."

_LATER = "Send the request again later; if it fails again, the operator of the gateway has to look at the server."
_OPERATOR = "Sending the request again does not help until the operator of the gateway has"

ADVICE: Mapping[Reason, str] = {
    Reason.NO_PROGRAM: f"{_OPERATOR} installed the program, or corrected its command.",
    Reason.DIED: _LATER,
    Reason.NO_HANDSHAKE: _LATER,
    Reason.VERSION: f"{_OPERATOR} updated the server.",
    Reason.BACKING_OFF: _LATER,
    Reason.UNREACHABLE: _LATER,
    Reason.UNAUTHORIZED: f"{_OPERATOR} given it other credentials for the server.",
    Reason.FORBIDDEN: f"{_OPERATOR} given it other credentials for the server.",
    Reason.NOT_FOUND: f"{_OPERATOR} corrected the server's address.",
    Reason.NOT_MCP: f"{_OPERATOR} corrected the server's command or address.",
    Reason.SERVER_ERROR: _LATER,
    Reason.LIMIT: "End a session or a call that is not needed, or send the request again later.",
}
"""What a model, or its user, can do next."""


def unavailable_error(upstream: str, failure: UpstreamUnavailable) -> bytes:
    """The error of a request that did not run, as JSON."""
    data: JsonObject = {"upstream": upstream, "reason": failure.reason.value, "ran": False}
    if failure.retry_after is not None:
        data["retryAfterMs"] = int(failure.retry_after * 1000)
    sentence = str(failure)
    if not sentence[:1].isupper():  # it begins with "it"
        sentence = f"The server {upstream} is not available: {sentence}"
    message = f"{sentence}{'' if sentence.endswith(('.', '!', '?')) else '.'} {failure.advice}"
    return json.dumps({"code": UPSTREAM_UNAVAILABLE, "message": message, "data": data}).encode()
