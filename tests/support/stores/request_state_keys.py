"""Lets time pass for the keys of request state, and names the key that sealed a state."""

from __future__ import annotations

import base64
import contextlib
import sqlite3

from perdure.runtime.request_state import RING
from perdure.store.postgres.address import parse_address
from tests.support.clients.recording_client import looking
from tests.support.stores import postgres

_KEY_NAME = slice(0, 4)
"""Where the SDK writes the key's fingerprint, in a sealed state."""


def sealed_with(state: str) -> bytes:
    """Which key sealed a state."""
    form, _, sealed = state.partition(".")
    assert form == "v1", state
    return base64.urlsafe_b64decode(sealed + "=" * (-len(sealed) % 4))[_KEY_NAME]


def pass_life_of_a_key(address: str) -> None:
    """Give each key in a store the name that it has one life of a key later: a process that starts now finds what it
    would find then. Processes that run have not looked since, as for an hour behind each change of keys."""
    with looking(address) as rows:
        named = "SELECT name FROM note WHERE name LIKE ? ORDER BY length(name), name"
        names = [str(name) for (name,) in rows(named, f"{RING}-%")]
    older = {name: f"{RING}-{int(name.rpartition('-')[2]) - 1}" for name in names}
    if address.startswith("sqlite:"):
        with contextlib.closing(sqlite3.connect(address.partition(":")[2], timeout=20)) as file, file:
            file.executemany("UPDATE note SET name = ? WHERE name = ?", [(new, old) for old, new in older.items()])
        return
    with postgres.connection(address) as run:
        for old, new in older.items():  # the oldest first: its new name is free
            run(f"UPDATE {parse_address(address).schema}.note SET name = $1 WHERE name = $2", new, old)
