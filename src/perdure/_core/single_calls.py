"""Single calls: requests of 2026-07-28, each of which is a session of one call.

A call with a key is found again by it: the ids of its record and its stream are made of the caller's name and the key,
and of a secret that all nodes share, so that no caller can guess the ids of another.
"""

import enum
import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from perdure._core.extension import CALLS, TASKS
from perdure._core.ids import SESSION_BYTES, STREAM_BYTES, SessionId, StreamId, id_text
from perdure._core.jsonrpc import JsonObject

MAX_KEY = 255
"""Characters of a key: as many as Stripe takes, and a UUID has 36."""

PROGRESS_TOKEN = "perdure"
"""The progress token of a call whose client gave none: a task tells its progress whether its client asked or not."""

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
class Client:
    """The client of a single call, as it describes itself with each request."""

    version: str
    info: object
    capabilities: object

    @property
    def told(self) -> JsonObject:
        """What is kept of it with a call."""
        return {"capabilities": self.capabilities, "clientInfo": self.info}

    @property
    def name(self) -> str:
        """The client's name; empty if it does not say one."""
        return str(self.info.get("name", "")) if isinstance(self.info, Mapping) else ""

    @property
    def takes_tasks(self) -> bool:
        return self._declares(TASKS)

    @property
    def repeats(self) -> bool:
        """It gives its calls keys, and sends again what a broken connection took, as Perdure's own clients do."""
        return self._declares(CALLS)

    def _declares(self, extension: str) -> bool:
        extensions = self.capabilities.get("extensions") if isinstance(self.capabilities, Mapping) else None
        return isinstance(extensions, Mapping) and extension in extensions

    @property
    def takes_asks(self) -> bool:
        """It can be asked something while a call runs."""
        capabilities = self.capabilities
        return isinstance(capabilities, Mapping) and any(isinstance(capabilities.get(name), dict) for name in _ASKED)

    def lacks(self, method: str, params: Mapping[str, Any] | None) -> JsonObject | None:
        """The capabilities that a client has to declare to be asked this, if it does not."""
        needed = _needed(method, params or {})
        if needed is None or _has(self.capabilities, needed):
            return None
        return needed


def _needed(method: str, params: Mapping[str, Any]) -> JsonObject | None:
    match method:
        case "elicitation/create":
            return {"elicitation": {"url": {}} if params.get("mode") == "url" else {}}
        case "sampling/createMessage":
            return {"sampling": {"tools": {}} if params.get("tools") or params.get("toolChoice") else {}}
        case "roots/list":
            return {"roots": {}}
    return None


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
    """Whether a client may give this as a key."""
    if not isinstance(given, str) or not 0 < len(given) <= MAX_KEY:
        return False
    return not any(character < " " or character == "\x7f" for character in given)


def call_digest(method: str, params: Mapping[str, Any]) -> bytes:
    """Stands for what a request asks for: equal for requests that a tool cannot tell apart."""
    asked = [method, params.get("name"), params.get("arguments") or {}]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, separators=(",", ":")).encode()).digest()


def parse_task_rules(rules: Iterable[str]) -> Mapping[str, TaskSupport]:
    """Read what the operator says of tools, as `NAME=required|optional|never`. Raises `ValueError`."""
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


def task_support(name: str, rules: Mapping[str, TaskSupport], tool: Mapping[str, Any] | None) -> TaskSupport:
    """How a tool is served: as the operator says, else as the tool says of itself, else as a task where it can be."""
    if (rule := rules.get(name, rules.get("*"))) is not None:
        return rule
    execution = None if tool is None else tool.get("execution")
    said = execution.get("taskSupport") if isinstance(execution, Mapping) else None
    return {"required": TaskSupport.REQUIRED, "forbidden": TaskSupport.NEVER}.get(str(said), TaskSupport.OPTIONAL)
