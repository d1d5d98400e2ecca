"""Keeps what is on disk up with what is in memory, and reads it back.

What another process must know is written before it can matter: a call before it is sent, an end when it is reported.
Positions are written soon (`LAG`), many at a time: after a crash a position that is a little old repeats a few events
and loses none.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

#: Seconds by which a position on disk may be late. Each write is a new small file, about 0.1 ms.
LAG = 0.02
#: Large arguments make a large file: then positions are written so seldom that it takes a twentieth of the time.
SHARE = 20


class StateWriter:
    """`save` writes the state, whole; it may raise anything, and calls go on.

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
        """Write what is due, and nothing more: what is on disk may be another process's from now on."""
        if self._due is not None:
            self.changed()
        self._save = None


def read(kind: Any, value: Any, name: str) -> Any:
    """A value of JSON as what a field of this type holds; no number is negative.

    Raises `ValueError`, `TypeError`, `KeyError`, `AttributeError` or `RecursionError` for any other value.
    """
    if get_origin(kind) is UnionType:  # with None
        return None if value is None else read(get_args(kind)[0], value, name)
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{key: read(kinds[key], item, key) for key, item in value.items()})  # type: ignore[operator]
    plain = get_origin(kind) or kind
    if kind is not Any and (type(value) is not plain or (plain is int and value < 0)):  # True is an int, elsewhere
        raise ValueError(f"{name} is of another kind")
    if plain is list:
        return [read(get_args(kind)[0], item, name) for item in value]
    return {key: read(get_args(kind)[1], item, name) for key, item in value.items()} if plain is dict else value
