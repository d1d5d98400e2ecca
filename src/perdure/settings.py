"""The table of settings: name, default, range and reason of each.

The command line, the environment and the documentation are made from this table, so they cannot disagree.
Durations are seconds.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from perdure._core.durable_calls import parse_task_rules
from perdure._core.early_answers import parse_answer_rules
from perdure._core.text import format_duration, format_size, parse_count, parse_duration, parse_size
from perdure.errors import BadSetting

Eras = Literal["auto", "both", "session"]
RequestState = Literal["shared", "own"]
OnStoreFailure = Literal["hold", "refuse"]
Recover = Literal["auto", "strict", "reissue"]

_DAY = 86_400.0
_YEAR = 366 * _DAY

SECURITY = "Who may connect"


class Number(NamedTuple):
    """How numbers of a kind are written, and the range of one whose row names none."""

    parse: Callable[[str], float]
    format: Callable[[Any], str]
    metavar: str
    unit: str
    low: float
    high: float


NUMBERS = {
    "duration": Number(parse_duration, format_duration, "TIME", "seconds", 0.001, _YEAR),
    "count": Number(parse_count, "{:,}".format, "N", "", 1, 10_000_000),
    "bytes": Number(parse_size, format_size, "SIZE", "bytes", 1_024, 1 << 30),
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which values a setting may have, and what it is for."""

    kind: Literal["duration", "count", "bytes", "flag", "choice", "names"]
    group: str
    why: str
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        if number := NUMBERS.get(self.kind):
            spelled = f"{number.format(self.low)} to {number.format(self.high)}"
            plain = f"{self.low:,.15g} to {self.high:,.15g} {number.unit}"
            return f"{plain} ({spelled})" if number.unit else f"a whole number from {spelled}"
        return {"flag": "true or false", "choice": " or ".join(self.choices), "names": "a list of names"}[self.kind]

    def fits(self, value: object) -> bool:
        if self.kind == "choice":
            return value in self.choices
        if self.kind == "names":
            return isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)
        if self.kind == "flag" or isinstance(value, bool):
            return self.kind == "flag" and isinstance(value, bool)
        kinds = int | float if self.kind == "duration" else int
        return isinstance(value, kinds) and self.low <= value <= self.high


_KINDS: dict[type, Any] = {float: "duration", int: "count", bool: "flag", str: "choice", tuple: "names"}
"""What a default of this type is. Only sizes in bytes are named as such in the table."""


def _setting(group: str, default: Any, why: str, *, kind: Any = "", low: Any = None, high: Any = None) -> Any:
    """A row of the table. In place of a default there may be the choices, as a `Literal`: the first is the default."""
    if choices := get_args(default):
        default = choices[0]
    kind = kind or _KINDS[type(default)]
    if number := NUMBERS.get(kind):
        low, high = number.low if low is None else low, number.high if high is None else high
    rule = Rule(kind=kind, group=group, why=why, low=low, high=high, choices=choices)
    return dataclasses.field(default=default, metadata={"rule": rule})


# The chapters of the table, in the order in which help and documentation show them.
_kept = functools.partial(_setting, "How long things are kept")
_connection = functools.partial(_setting, "How connections behave")
_limit = functools.partial(_setting, "How much is kept and done at once")
_size = functools.partial(_limit, kind="bytes")
_failure = functools.partial(_setting, "What happens when the store fails")
_access = functools.partial(_setting, SECURITY)


OTHER_NAMES = {"retry_timeout": "retry"}
"""Names of settings in other documents, which the command line and the configuration file take as well."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How Perdure serves. A value out of its range is refused with its name and the range (`BadSetting`)."""

    event_ttl: float = _kept(3_600.0, "how long an event that is not a final answer is kept")
    replay_window: float = _kept(_DAY, "how long final answers, and a session after its last activity, are kept")
    task_ttl: float = _kept(
        _DAY, "how long a task, and the answer to a call with a key, is kept; never longer than `replay_window`"
    )
    session_grace: float = _kept(1_800.0, "how long a session with no connection and no running call stays loaded")
    runtime_idle: float = _kept(300.0, "how long an unused runtime stays in memory; the next request loads it again")
    cleanup_interval: float = _kept(300.0, "how often expired events, answers and sessions are removed")
    enable_replay: bool = _kept(True, "whether clients may resume; if off, every position is answered as lost")

    retry: float = _connection(5.0, "how long clients wait before they reconnect", high=3_600.0)
    keepalive_interval: float = _connection(
        30.0, "how often a comment is sent on an idle connection, so that load balancers keep it open"
    )
    heartbeat: float = _connection(
        15.0,
        "how often a silent call sends progress to a client that gave a progress token, so that the client does"
        " not give up; 0: never",
        low=0,
    )
    stream_timeout: float = _connection(
        300.0, "how long a client may leave sent bytes unread before its connection is ended"
    )
    drain_timeout: float = _connection(
        30.0, "how long running calls may take to finish when the server stops; 0 ends them at once", low=0
    )
    task_drain: float = _connection(
        0.0,
        "how long tasks, calls with a key, and calls after an early answer may take to finish when the server stops,"
        " if that is longer than `drain_timeout`",
        low=0,
    )
    json_response: bool = _connection(False, "answer POSTs with one JSON body in place of an event stream")
    recover: Recover = _connection(  # noqa: RUF009
        Recover,
        "`reissue` answers a lost session with 404 and a new one, ready for use; `auto` does so if the store is in"
        " memory, where each restart loses all sessions",
    )
    eras: Eras = _connection(  # noqa: RUF009
        Eras,
        "`auto` leads clients of 2026-07-28 that declare no tasks to a session, where their calls outlive a connection;"
        " `both` serves every client in the revision that it prefers; `session` refuses 2026-07-28",
    )

    request_state: RequestState = _connection(  # noqa: RUF009
        RequestState,
        "`shared` seals the state of multi-round calls with keys that all processes share; `own` leaves it to the"
        " server, which has to share its keys itself",
    )

    tasks: tuple[str, ...] = _connection(
        (),
        "which tools run as tasks, `NAME=required|optional|never`, `*` for all that are not named; without it, as the"
        " tool declares, else optional; in sessions of 2025-11-25 else never",
    )
    answer_within: tuple[str, ...] = _connection(
        (),
        "after which time a client without tasks gets the answer that its call still runs, `CLIENT=TIME`, `*` for all"
        " that are not named, 1s to 1h; it gets the result by a tool of Perdure",
    )
    task_after: float = _connection(
        10.0, "how long a call may take before a client that takes tasks gets a handle in place of the answer", low=0
    )
    task_hold: float = _connection(
        2.0,
        "how long `tasks/get` waits for a change before it answers, for clients that declare `dev.perdure/calls`, as"
        " Perdure's do, and so ask again if it breaks",
        low=0,
        high=60.0,
    )

    max_stream_events: int = _limit(
        500, "events kept for one stream; a call waits while its reader is so many events behind"
    )
    max_streams: int = _limit(
        100,
        "streams of one session that keep events beside their answers; up to a twentieth more before the oldest are"
        " removed",
    )
    max_session_events: int = _limit(10_000, "events kept for one session, without final answers")
    max_answers: int = _limit(
        10_000, "final answers kept for one session; up to a twentieth more before the oldest are removed"
    )
    max_session_bytes: int = _size(
        64 << 20,
        "bytes kept for one session, events and answers together; beyond, the oldest events are removed first, then the"
        " oldest answers, never the newest answer",
        high=1 << 40,
    )
    max_sessions: int = _limit(10_000, "sessions open at once; 503 beyond")
    max_principal_sessions: int = _limit(1_000, "sessions open at once for one principal; 429 beyond")
    max_address_sessions: int = _limit(
        1_000,
        "sessions open at once from one address, of callers without a principal; 429 beyond. Behind a proxy see"
        " `--forwarded-allow-ips`",
    )
    max_share: int = _limit(
        25,
        "percent of `max_readers`, `max_sessionless`, `max_listeners`, `max_work` and the resources that listeners"
        " name, which one principal, or one address without a principal, may take; 429 beyond",
        high=100,
    )
    max_principal_calls: int = _limit(
        1_000,
        "requests running at once in one process, of all sessions and tasks of one principal, or of one address without"
        " a principal; 429 beyond",
    )
    max_calls: int = _limit(100, "requests running at once in one session, in all processes together; 429 beyond")
    max_readers: int = _limit(20_000, "event streams open at once; 503 beyond")
    max_sessionless: int = _limit(1_000, "requests of 2026-07-28 running at once; 503 beyond")
    max_tasks: int = _limit(
        10_000,
        "tasks, and calls with a key, kept at once in all processes, nearly; beyond, one of the caller's own that has"
        " ended is deleted; 503 if it has none",
    )
    max_principal_tasks: int = _limit(
        1_000,
        "tasks, and calls with a key, kept at once for one principal, or for one address without a principal; beyond,"
        " the answer of one that has ended is deleted; 429 if all of them run. Each process may exceed the limit by a"
        " hundredth",
    )
    max_listeners: int = _limit(10_000, "subscriptions of 2026-07-28 open at once in one process; 503 beyond")
    max_work: int = _size(
        512 << 20,
        "estimated memory of all messages that are being handled; 503 beyond. One session may take an eighth, and so"
        " may all POST bodies that are not complete yet",
        high=1 << 40,
    )
    max_body: int = _size(4 << 20, "size of a POST body; 413 beyond")
    max_headers: int = _size(32 << 10, "size of all headers; 431 beyond")

    store_timeout: float = _failure(
        1.0, "how long one store operation may take before the store counts as failing", high=60.0
    )
    lease: float = _failure(
        12.0,
        "how long another node may be silent before its calls are settled; a store on one machine uses a lock instead",
        low=1.0,
        high=3_600.0,
    )
    on_store_failure: OnStoreFailure = _failure(  # noqa: RUF009
        OnStoreFailure, "`hold` continues from memory, `refuse` answers 503"
    )
    max_held_events: int = _failure(10_000, "events held in memory while the store fails; calls wait beyond")

    allowed_hosts: tuple[str, ...] = _access(
        (), "Host headers accepted beside those of this machine (`name` or `name:port`)"
    )
    allowed_origins: tuple[str, ...] = _access((), "Origin headers accepted beside those of this machine")
    cors_origins: tuple[str, ...] = _access((), "origins whose pages may read the answers; `*` for all")

    broker: bool = _access(
        True, "serve the resume broker, `resume/…` beside the endpoint, to callers that the endpoint accepts"
    )
    metrics: bool = _access(True, "serve `GET /metrics` to callers that the endpoint accepts")

    @property
    def session_work(self) -> int:
        """The part of `max_work` that one session may take, and that unfinished bodies may: several sessions must reach
        the limit of all."""
        return max(1, self.max_work // 8)

    @property
    def longest_drain(self) -> float:
        """How long a stop may wait for what runs."""
        return max(self.drain_timeout, self.task_drain)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            rule, value = rule_of(field), getattr(self, field.name)
            if not rule.fits(value):
                raise BadSetting(f"{field.name} is {value!r}; allowed: {rule.allowed}")
        try:
            parse_task_rules(self.tasks)
        except ValueError as problem:
            raise BadSetting(f"tasks: {problem}") from None
        try:
            parse_answer_rules(self.answer_within)
        except ValueError as problem:
            raise BadSetting(f"answer_within: {problem}") from None


def rule_of(field: dataclasses.Field[Any]) -> Rule:
    rule: Rule = field.metadata["rule"]
    return rule
