"""Writes and reads the state that a client must keep over its own death.

A fact is written before it can matter: a call before it is sent, the end of a call when it is reported. Positions are
written a little later (`LAG`), many at a time: after a crash an old position repeats a few events and loses none.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from perdure._core import sticky

#: Of the form. A newer release may raise it; an older one then does not read the file.
VERSION = 1
#: Seconds by which a position on disk may be late. Each write is a new small file, about 0.1 ms.
LAG = 0.02
#: Large arguments make a large file: then positions are written so seldom that it takes a twentieth of the time.
SHARE = 20

T = TypeVar("T")


class BadState(ValueError):
    """These bytes are not a state that this release can read."""


class NewerState(BadState):
    """The state has the form of a newer release."""


def encode(state: Any) -> bytes:
    """The bytes of a dataclass, whole: it is as small as the handshake and the calls that run."""
    return json.dumps({"perdure": VERSION, **asdict(state)}, separators=(",", ":")).encode()


def decode(kind: type[T], data: bytes) -> T:
    """The state of this kind; raises `BadState` for everything that would fail later."""
    try:
        found = json.loads(data)
        version = found.pop("perdure")
        if isinstance(version, int) and version > VERSION:
            raise NewerState(f"the state has form {version}; this release knows {VERSION}")
        if version != VERSION:
            raise BadState("the state has no known form")
        if found.keys() != (members := get_type_hints(kind).keys()):
            raise BadState(f"it has other members: {', '.join(found.keys() ^ members)}")
        state: T = _read(kind, found, "the state")
    except BadState:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadState(f"not a client's state: {error}") from error
    return state


def _read(kind: Any, value: Any, name: str) -> Any:
    """A value of JSON as what a field of this type holds; no number is negative."""
    if get_origin(kind) is UnionType:  # with None
        return None if value is None else _read(get_args(kind)[0], value, name)
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{key: _read(kinds[key], item, key) for key, item in value.items()})  # type: ignore[operator]
    plain = get_origin(kind) or kind
    if kind is not Any and (type(value) is not plain or (plain is int and value < 0)):  # True is an int, elsewhere
        raise ValueError(f"{name} is of another kind")
    if plain is list:
        return [_read(get_args(kind)[0], item, name) for item in value]
    return {key: _read(get_args(kind)[1], item, name) for key, item in value.items()} if plain is dict else value


def with_sticky(kept: list[str], request: bytes) -> list[str]:
    """The requests to repeat in a new session once this one has succeeded, as a state keeps them."""
    return [one.decode() for one in sticky.after(tuple(earlier.encode() for earlier in kept), request)]


class StateWriter:
    """Calls `save`, which writes the state; it may raise any error, which ends nothing else.

    `on_failing` is called with the error when writing begins to fail, and with None when it works again.
    """

    def __init__(self, save: Callable[[], None], on_failing: Callable[[Exception | None], None]) -> None:
        self._save: Callable[[], None] | None = save
        self._on_failing = on_failing
        self._due: asyncio.TimerHandle | None = None
        self._lag = LAG
        self._is_failing = False

    def changed(self) -> None:
        """Write now."""
        if self._save is None:
            return
        if self._due is not None:
            self._due.cancel()
            self._due = None
        began = time.thread_time()
        try:
            self._save()
        except Exception as error:
            if not self._is_failing:
                self._on_failing(error)
            self._is_failing = True
            return
        finally:
            self._lag = max(LAG, SHARE * (time.thread_time() - began))
        if self._is_failing:
            self._on_failing(None)
        self._is_failing = False

    def moved(self) -> None:
        """Write soon."""
        if self._due is None and self._save is not None:
            self._due = asyncio.get_running_loop().call_later(self._lag, self.changed)

    def close(self) -> None:
        """Write what is due, and nothing afterwards: the file may belong to another process from now on."""
        if self._due is not None:
            self.changed()
        self._save = None
