"""A chain in the file: as small after ten thousand renewals as after the first, and none of its tokens is in it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from perdure._core import chains
from perdure._core.chains import Action, Token
from perdure.store import notes
from perdure.store.sqlite import SqliteStore
from perdure.store.steps import PutSession
from perdure.testing._values import SESSION, a_session, put

pytestmark = pytest.mark.anyio

HOLDER = "ab" * 32
ROTATIONS = 2_000


async def test_thousands_of_renewals_take_no_room(tmp_path: Path) -> None:
    """T12, promise 6. The file does not hold any of the tokens either."""
    path = tmp_path / "log.db"
    token = Token(name=b"n" * chains.NAME_BYTES, secret=b"s" * chains.SECRET_BYTES)
    chain = chains.opened(token, session=SESSION, holder=HOLDER)
    async with SqliteStore(str(path)) as store:
        await put(store, PutSession(record=a_session()))
        await notes.put_chain(store, chain)
        sizes = [room(path)]
        for number in range(ROTATIONS):
            fresh = b"%032d" % number
            after, _ = chains.use(chain, Action.RESUME, token, fresh=fresh)
            assert after is not None
            assert await notes.change_chain(store, chain, after)
            chain, token = after, token.renewed(fresh)
        sizes.append(room(path))
    assert sizes[0] == sizes[1]
    content = path.read_bytes()
    assert chain.next.encode() in content
    for secret in (token.secret, token.name, token.text.encode(), HOLDER.encode()):
        assert secret not in content


def room(path: Path) -> tuple[int, int]:
    """Rows, and pages of the file."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (rows,) = connection.execute("SELECT count(*) FROM note").fetchone()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
    return rows, pages
