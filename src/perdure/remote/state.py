"""The state that a client remembers to go on after its process ends, and its form on disk.

Written whole each time: it is as small as the handshake and the calls that run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: Of the form. A newer release may raise it; an older one then refuses the file.
VERSION = 1


class BadState(ValueError):
    """These bytes are not a client's state."""


class NewerState(ValueError):
    """The state was written by a newer release."""


@dataclass(kw_only=True)
class Handshake:
    """The session as both sides agreed on it."""

    session: str
    request: dict[str, Any]
    """The params of `initialize`."""
    result: dict[str, Any]
    initialized: bool = False
    """Only then both sides have accepted it, and another process may go on with it."""

    @property
    def version(self) -> str:
        return str(self.result.get("protocolVersion", ""))

    def fits(self, request: Mapping[str, Any]) -> bool:
        """Whether a client that would say this goes on in the session: the server holds both sides to these two."""
        return all(self.request.get(key) == request.get(key) for key in ("protocolVersion", "capabilities"))


@dataclass(kw_only=True)
class Running:
    """A tool's call that was sent, or is about to be, and has no answer yet."""

    id: str
    params: dict[str, Any]
    position: str | None = None
    retry: int | None = None

    def moved(self, position: str | None, retry: int | None) -> None:
        """The next process goes on from there."""
        self.position = position
        if retry is not None:
            self.retry = retry

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
class State:
    """All of it. `start` counts the processes: it is a part of every request's id."""

    url: str
    start: int = 0
    handshake: Handshake | None = None
    position: str | None = None
    """Of the standalone stream."""
    retry: int | None = None
    calls: dict[str, Running] = field(default_factory=dict)
    asks: dict[str, Ask] = field(default_factory=dict)
    sticky: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Requests whose effect a new session must have as well, by what they are about."""

    def forget_session(self) -> None:
        self.handshake = None
        self.position = None
        self.retry = None
        self.calls.clear()
        self.asks.clear()
        self.sticky.clear()

    def replace_session(self, handshake: Handshake) -> None:
        """Another one begins; calls that run still belong to the old one, and end by themselves."""
        self.handshake = handshake
        self.position = None
        self.retry = None
        self.asks.clear()

    def moved(self, position: str | None, retry: int | None) -> None:
        """The standalone stream was read up to there."""
        self.position = position
        if retry is not None:
            self.retry = retry

    def end(self, call: str) -> None:
        """A call is over, and so is what it asked."""
        self.calls.pop(call, None)
        self.asks = {key: ask for key, ask in self.asks.items() if ask.call != call}

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
    try:
        found = json.loads(data)
        if isinstance(found, dict) and isinstance(found.get("perdure"), int) and found["perdure"] > VERSION:
            raise NewerState(f"the state has form {found['perdure']}; this release knows {VERSION}")
        if found.pop("perdure") != VERSION:
            raise BadState("the state has no known form")
        handshake, calls, asks = found.pop("handshake"), found.pop("calls"), found.pop("asks")
        state = State(
            **found,
            handshake=None if handshake is None else Handshake(**handshake),
            calls={key: Running(**call) for key, call in calls.items()},
            asks={key: Ask(**ask) for key, ask in asks.items()},
        )
        _check(state)
        return state
    except NewerState:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadState(f"not a client's state: {error}") from error


def _check(state: State) -> None:
    """What would fail later, in the middle of things, fails here."""
    known = _is(state.url, str) and _is(state.start, int) and state.start >= 0 and _is_place(state)
    if not (known and _is(state.sticky, dict) and all(_is(sticky, dict) for sticky in state.sticky.values())):
        raise BadState("url, start, position or sticky requests are of another kind")
    handshake = state.handshake
    if handshake is not None and not (
        _is(handshake.session, str)
        and _is(handshake.request, dict)
        and _is(handshake.result, dict)
        and _is(handshake.initialized, bool)
    ):
        raise BadState("the handshake is of another kind")
    for key, call in state.calls.items():
        if not (key == call.id and _is(call.params, dict) and _is_place(call)):
            raise BadState("a call is of another kind")
    if not all(_is(ask.message, dict) and (ask.call is None or _is(ask.call, str)) for ask in state.asks.values()):
        raise BadState("a question is of another kind")


def _is(value: object, kind: type) -> bool:
    return type(value) is kind  # True is an int, elsewhere


def _is_place(of: State | Running) -> bool:
    """Whether a stream can be resumed from there."""
    return (of.position is None or _is(of.position, str)) and (
        of.retry is None or (_is(of.retry, int) and of.retry >= 0)
    )
