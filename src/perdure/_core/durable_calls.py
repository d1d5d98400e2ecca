"""Durable calls: requests of 2026-07-28 that the log keeps, each as a session of one call; and tasks, which show them.

A call with a key is found again by it: the ids of its record and its stream are made of the caller's name and the key,
and of a secret that all nodes share, so that no caller can guess the ids of another. A task has no state beside the
ledger's: its status follows from its call's row.
"""

import enum
import functools
import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeGuard

from perdure._core.codes import POSITION_LOST
from perdure._core.envelope import CALLS, TASKS, declares
from perdure._core.ids import SESSION_BYTES, STREAM_BYTES, SessionId, StreamId, id_text
from perdure._core.jsonrpc import JsonObject
from perdure._core.states import UNENDED, CallState

MAX_KEY = 255
"""Characters of a key: as many as Stripe takes, and a UUID has 36."""

PROGRESS_TOKEN = "perdure"
"""The progress token of a call whose client gave none: a task reports its progress whether its client asked or not."""

STATE_PREFIX = "perdure."
"""Begins the `requestState` of a call that waits for its client's input; the id of its record follows."""

_ASKED = ("elicitation", "sampling", "roots")
"""Capabilities of clients that can be asked something."""


class TaskSupport(enum.Enum):
    """Whether a tool runs as a task; the names are the protocol's, but for the last."""

    REQUIRED = "required"
    """Always; a client without tasks is refused."""
    OPTIONAL = "optional"
    """If its client declares tasks, and it takes long."""
    NEVER = "never"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallClient:
    """The client of a durable call, as it describes itself with each request."""

    version: str
    info: object
    capabilities: object

    @classmethod
    def from_params(cls, params: Mapping[str, Any], *, version: str = "") -> "CallClient":
        """Read the params of an `initialize`, or what is kept with a call."""
        return cls(version=version, info=params.get("clientInfo"), capabilities=params.get("capabilities"))

    @property
    def told(self) -> JsonObject:
        """The part that is kept with a call."""
        return {"capabilities": self.capabilities, "clientInfo": self.info}

    @property
    def name(self) -> str:
        """The client's name; empty if it does not say one."""
        return str(self.info.get("name", "")) if isinstance(self.info, Mapping) else ""

    @property
    def takes_tasks(self) -> bool:
        return declares(self.capabilities, TASKS)

    @property
    def repeats(self) -> bool:
        """Its calls have keys, and it sends requests again whose connection broke, as Perdure's own clients do."""
        return declares(self.capabilities, CALLS)

    @property
    def takes_asks(self) -> bool:
        """It can be asked something while a call runs."""
        capabilities = self.capabilities
        return isinstance(capabilities, Mapping) and any(isinstance(capabilities.get(name), dict) for name in _ASKED)

    def lacks(self, method: str, params: Mapping[str, Any] | None) -> JsonObject | None:
        """The capabilities that a client has to declare to be asked this, if it does not."""
        given, needed = params or {}, JsonObject()
        match method:
            case "elicitation/create":
                needed = {"elicitation": {"url": {}} if given.get("mode") == "url" else {}}
            case "sampling/createMessage":
                needed = {"sampling": {"tools": {}} if given.get("tools") or given.get("toolChoice") else {}}
            case "roots/list":
                needed = {"roots": {}}
        return None if not needed or _has(self.capabilities, needed) else needed


@functools.lru_cache(maxsize=256)
def client_of(client_params: bytes) -> CallClient:
    """The client of a session or durable call, as its record describes it."""
    return CallClient.from_params(json.loads(client_params) if client_params else {})


def _has(declared: object, needed: Mapping[str, Any]) -> bool:
    """Whether everything that is needed is declared, level by level."""
    return isinstance(declared, Mapping) and all(
        isinstance(declared.get(name), Mapping) and _has(declared[name], inner) for name, inner in needed.items()
    )


def key_names(secret: bytes, owner: str, key: str, state: str | None) -> tuple[SessionId, StreamId]:
    """The ids of the call with a key. Each round of a call that its tool interrupts with a state of its own (`state`)
    is a call of its own."""
    name = json.dumps([owner, key, state], ensure_ascii=True).encode()
    digest = hmac.digest(secret, name, hashlib.sha512)
    session, stream = digest[:SESSION_BYTES], digest[SESSION_BYTES : SESSION_BYTES + STREAM_BYTES]
    return SessionId(id_text(session)), StreamId(id_text(stream))


def is_key(given: object) -> TypeGuard[str]:
    """Whether a client may use this as a key."""
    if not isinstance(given, str) or not 0 < len(given) <= MAX_KEY:
        return False
    return not any(character < " " or character == "\x7f" for character in given)


def call_digest(method: str, params: Mapping[str, Any]) -> bytes:
    """Digest a request: equal for requests that a tool cannot tell apart."""
    asked = [method, params.get("name"), params.get("arguments") or {}]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, separators=(",", ":")).encode()).digest()


def parse_task_rules(rules: Iterable[str]) -> Mapping[str, TaskSupport]:
    """Read the operator's rules for tools, `NAME=required|optional|never`. Raises `ValueError`."""
    found: dict[str, TaskSupport] = {}
    for rule in rules:
        name, equals, word = rule.rpartition("=")
        try:
            found[name] = TaskSupport(word)
        except ValueError:
            found.pop(name, None)
        if not equals or not name or name not in found:
            words = "|".join(support.value for support in TaskSupport)
            raise ValueError(f"{rule!r} is not NAME={words}, with * as the name of all other tools")
    return found


def tools_on(page: Mapping[str, Any]) -> list[Any] | None:
    """The tools on a page of `tools/list`; `None` if a server has put something else there."""
    tools = page.get("tools") or []
    return tools if isinstance(tools, list) else None


def task_support(
    name: str, rules: Mapping[str, TaskSupport], tool: Mapping[str, Any] | None, *, usual: TaskSupport
) -> TaskSupport:
    """Decide how a tool is served: by the operator's rule, else by the tool's declaration, else as `usual`."""
    if (rule := rules.get(name, rules.get("*"))) is not None:
        return rule
    execution = None if tool is None else tool.get("execution")
    said = execution.get("taskSupport") if isinstance(execution, Mapping) else None
    declared = {"required": TaskSupport.REQUIRED, "optional": TaskSupport.OPTIONAL, "forbidden": TaskSupport.NEVER}
    return declared.get(str(said), usual)


# --- Tasks

POLL_LEAST = 0.5
POLL_MOST = 5.0
"""Seconds between two polls that a client is asked for: a tenth of the task's age, within these. A poll of
Perdure's own clients is held until something changes; any other client learns of the end with its next poll."""

_POLLS_OF_AGE = 10


class TaskStatus(enum.Enum):
    """The protocol's words."""

    WORKING = "working"
    INPUT_REQUIRED = "input_required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


INTERRUPTED = "Interrupted; it goes on with the next request of its principal"
_GONE: JsonObject = {"code": POSITION_LOST, "message": "The answer to this request is no longer retained"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFacts:
    """All that is shown of a task, as it was read at one moment."""

    id: str
    created: float
    updated: float
    state: CallState
    asks: Mapping[str, bytes]
    """Requests that wait for the client's answer, by their ids."""
    progress: JsonObject | None = None
    """The params of the last progress."""
    answer: bytes | None = None
    """The response, once there is one."""

    @property
    def is_over(self) -> bool:
        return self.state not in UNENDED

    @property
    def is_interrupted(self) -> bool:
        """It waits for its principal."""
        return self.state is CallState.WAITING


def response_of(facts: TaskFacts) -> JsonObject:
    """The response of a task that is over; empty before that."""
    if not facts.is_over:
        return {}
    found: JsonObject = {"error": _GONE} if facts.answer is None else json.loads(facts.answer)
    return found  # without an answer, only its row is left


def status_of(facts: TaskFacts, response: JsonObject) -> TaskStatus:
    match facts.state:
        case CallState.RUNNING:
            return TaskStatus.INPUT_REQUIRED if facts.asks else TaskStatus.WORKING
        case CallState.WAITING:
            return TaskStatus.WORKING
        case CallState.CANCELLED:
            return TaskStatus.CANCELLED
        case CallState.ANSWERED | CallState.SETTLED:
            return TaskStatus.COMPLETED if "result" in response else TaskStatus.FAILED


def kept_for(facts: TaskFacts, *, now: float, ttl: float) -> float:
    """Seconds from a task's creation, from which clients count. It is kept for `ttl` after its end."""
    age = max(0.0, now - facts.created)
    return ttl + (facts.updated - facts.created if facts.is_over else age if age > ttl / 2 else 0.0)


def task_view(facts: TaskFacts, *, now: float, ttl: float) -> JsonObject:
    """A task as `tasks/get` shows it. The times serve the client; nothing is decided by them."""
    age = max(0.0, now - facts.created)
    view: JsonObject = {
        "taskId": facts.id,
        "status": "",
        "createdAt": iso_time(facts.created),
        "lastUpdatedAt": iso_time(max(facts.updated, facts.created)),
        "ttlMs": round(1000 * kept_for(facts, now=now, ttl=ttl)),
        "pollIntervalMs": round(1000 * min(POLL_MOST, max(POLL_LEAST, age / _POLLS_OF_AGE))),
    }
    response = response_of(facts)
    status = status_of(facts, response)
    view["status"] = status.value
    match status:
        case TaskStatus.COMPLETED:
            view["result"] = response["result"]
        case TaskStatus.FAILED:
            view["error"] = response["error"]
            view["statusMessage"] = str(response["error"].get("message", "failed"))
        case TaskStatus.INPUT_REQUIRED:
            view["inputRequests"] = input_requests(facts.asks)
        case TaskStatus.WORKING if facts.is_interrupted:
            view["statusMessage"] = INTERRUPTED
        case TaskStatus.WORKING if facts.progress is not None:
            view["statusMessage"] = progress_text(facts.progress)
    return view


def handle_view(view: JsonObject) -> JsonObject:
    """A task as it is handed out: without its outcome."""
    left_out = ("result", "error", "inputRequests")
    return {name: value for name, value in view.items() if name not in left_out}


def input_requests(asks: Mapping[str, bytes]) -> JsonObject:
    """The questions to a client in the form of `inputRequests`."""
    requests = {name: json.loads(ask) for name, ask in asks.items()}
    return {name: {"method": ask["method"], "params": ask.get("params") or {}} for name, ask in requests.items()}


def progress_text(params: JsonObject) -> str:
    done, total, message = (params.get(name) for name in ("progress", "total", "message"))
    text = f"{done:.15g}" if isinstance(done, int | float) else ""
    if text and isinstance(total, int | float) and total:
        text += f" of {total:.15g}"
    said = str(message) if message else ""
    return f"{text}: {said}" if text and said else text or said


def iso_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
