"""The state that a client remembers to go on after its process ends, and its form on disk.

Written whole each time: it is as small as the handshake and the calls that run.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from perdure.remote.endpoint import Handshake

#: Of the form. A newer release may raise it; an older one then refuses the file.
VERSION = 1


class BadState(ValueError):
    """These bytes are not a client's state."""


class NewerState(ValueError):
    """The state was written by a newer release."""


@dataclass(kw_only=True)
class Place:
    """The place in a stream from which the next process goes on."""

    position: str | None = None
    retry: int | None = None

    def moved(self, position: str | None, retry: int | None) -> None:
        self.position = position
        if retry is not None:
            self.retry = retry


@dataclass(kw_only=True)
class Running(Place):
    """A tool's call that was sent, or is about to be, and has no answer yet."""

    id: str
    params: dict[str, Any]

    @property
    def tool(self) -> str:
        return str(self.params.get("name", ""))

    @property
    def arguments(self) -> dict[str, Any]:
        found = self.params.get("arguments")
        return dict(found) if isinstance(found, Mapping) else {}


@dataclass(kw_only=True)
class Ask:
    """A request of the server that was handed on and is not answered yet."""

    message: dict[str, Any]
    call: str | None
    """The call that asks; None for the standalone stream."""


@dataclass(kw_only=True)
class State(Place):
    """All of it. The place is that of the standalone stream."""

    url: str
    start: int = 0
    """Counts the processes: it is a part of every request's id."""
    handshake: Handshake | None = None
    calls: dict[str, Running] = field(default_factory=dict)
    asks: dict[str, Ask] = field(default_factory=dict)
    sticky: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Requests whose effect a new session must have as well, by what they are about."""

    def forget_session(self) -> None:
        self.replace_session(None)
        self.calls.clear()
        self.sticky.clear()

    def replace_session(self, handshake: Handshake | None) -> None:
        """Another one begins; calls that run still belong to the old one, and end by themselves."""
        self.handshake, self.position, self.retry = handshake, None, None
        self.asks.clear()

    def stick(self, method: str, params: Mapping[str, Any]) -> None:
        request = {"method": method, "params": {key: value for key, value in params.items() if key != "_meta"}}
        match method:
            case "logging/setLevel":
                self.sticky["level"] = request
            case "resources/subscribe":
                self.sticky[f"uri {params.get('uri')}"] = request
            case "resources/unsubscribe":
                self.sticky.pop(f"uri {params.get('uri')}", None)

    def encode(self) -> bytes:
        return json.dumps({"perdure": VERSION, **asdict(self)}, separators=(",", ":")).encode()


def decode(data: bytes) -> State:
    """What would fail later, in the middle of things, fails here."""
    try:
        found = json.loads(data)
        if isinstance(found, dict) and isinstance(found.get("perdure"), int) and found["perdure"] > VERSION:
            raise NewerState(f"the state has form {found['perdure']}; this release knows {VERSION}")
        if found.pop("perdure") != VERSION:
            raise BadState("the state has no known form")
        state = _read(State, found, "the state")
        assert isinstance(state, State)
        if not {"handshake", "calls", "asks"} <= found.keys():
            raise BadState("it has no handshake, calls or questions")
        if any(key != call.id for key, call in state.calls.items()):
            raise BadState("a call stands under another id")
        return state
    except NewerState:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadState(f"not a client's state: {error}") from error


def _read(kind: Any, value: Any, name: str) -> Any:
    """A value of JSON as what a field of this type holds; no number is negative."""
    if get_origin(kind) is UnionType:  # with None
        return None if value is None else _read(get_args(kind)[0], value, name)
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{key: _read(kinds[key], item, key) for key, item in value.items()})  # type: ignore[operator]
    plain = get_origin(kind) or kind
    if kind is not Any and (type(value) is not plain or (plain is int and value < 0)):  # True is an int, elsewhere
        raise BadState(f"{name} is of another kind")
    return {key: _read(get_args(kind)[1], item, name) for key, item in value.items()} if plain is dict else value
