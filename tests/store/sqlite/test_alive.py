"""Which nodes live, and which hold unwritten steps, by locks (promises 11 and 15), with real processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from perdure._core.ids import NodeId
from perdure._core.states import ClaimState
from perdure._files.locks import flock
from perdure.errors import StoreError, StoreUnavailable
from perdure.store.interface import Liveness, reader_of, stream_by_id
from perdure.store.sqlite import SqliteStore
from perdure.store.sqlite import locks as _sqlite_locks
from perdure.store.sqlite.locks import Locks
from perdure.store.steps import Release
from perdure.testing._values import NODE, STREAM, a_session, dead_nodes, put
from tests.store.processes import process
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

OTHER = NodeId("other")


def view(store: SqliteStore, node: NodeId = NODE) -> Liveness:
    return store.liveness(node, lease=15.0, monotonic=time.monotonic)


def files(path: Path) -> set[str]:
    return {entry.name for entry in Path(f"{path}-nodes").iterdir()}


def leave_behind(path: Path, *names: str) -> None:
    for name in names:
        Path(f"{path}-nodes", name).touch()


async def test_a_killed_process_is_dead_at_once_and_until_it_is_buried(store: SqliteStore, path: Path) -> None:
    with process(path, OTHER) as other:
        assert other.does("open", STREAM, 1) is None
        other.does("read_as", "its reader", STREAM)
        assert await dead_nodes(view(store)) == []
        other.kill()
        alive = view(store)
        assert [await dead_nodes(alive) for _ in range(2)] == [[OTHER], [OTHER]]
    (stream,) = await store.written_by(OTHER)
    assert await store.claim(stream.id, node=NODE, held=stream.fence) is not None
    assert [read.id for read in await store.bury(OTHER, heir=NODE) or ()] == [STREAM]
    assert (await dead_nodes(view(store)), await reader_of(store, stream.id)) == ([], None)
    assert files(path) == {f"{NODE}.lock", f"{NODE}.well"}


async def test_a_process_that_stands_still_is_not_dead(store: SqliteStore, path: Path) -> None:
    with process(path, OTHER) as other:
        with other.stopped():
            assert await dead_nodes(view(store)) == []
        assert other.does("dead") == []


async def test_one_process_settles_a_dead_one_and_if_that_dies_the_next(store: SqliteStore, path: Path) -> None:
    with process(path, OTHER) as other, process(path, "settler") as settler:
        other.kill()
        assert settler.does("dead") == [OTHER]
        assert await dead_nodes(view(store)) == []
        settler.kill()
        assert sorted(await dead_nodes(view(store))) == [OTHER, "settler"]


async def test_a_node_that_another_process_buries_meanwhile_is_not_settled_again(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is free and its row was seen; under the lock the row is read again, and is gone."""
    take = Locks.take
    with process(path, OTHER) as other, process(path, "settler") as settler:
        other.kill()

        def take_late(locks: Locks, nodes: Iterable[NodeId]) -> tuple[list[NodeId], list[NodeId]]:
            assert settler.does("dead") == [OTHER]
            settler.does("bury", OTHER)
            return take(locks, nodes)

        monkeypatch.setattr(Locks, "take", take_late)
        assert await dead_nodes(view(store)) == []
    assert f"{OTHER}.lock" not in files(path)


def test_a_lock_on_a_file_that_was_removed_meanwhile_says_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened while its node lived, locked when the node had left and taken its file along: another file of that name
    may be locked by now."""
    owner, observer = Locks(str(path)), Locks(str(path))
    owner.join(OTHER)

    def lock_late(file: int) -> bool:
        owner.leave(OTHER)
        return flock(file)

    monkeypatch.setattr(_sqlite_locks, "flock", lock_late)
    assert observer.take([OTHER]) == ([], [OTHER])


async def test_who_left_nothing_behind_needs_no_burial(store: SqliteStore, path: Path) -> None:
    with process(path, OTHER) as other:
        assert other.does("open", STREAM) is None
        other.does("leave")
        assert [node.id for node in await store.nodes()] == [NODE, OTHER]
        assert await dead_nodes(view(store)) == [OTHER], "although its process still runs"
        await store.bury(OTHER, heir=NODE)
    fence = await store.join(NodeId("third"))
    held = await stream_by_id(store, (await store.streams(a_session().id))[0].id)
    assert held is not None
    claimed = await store.claim(held.id, node=NodeId("third"), held=held.fence)
    assert claimed is not None
    assert claimed.fence != fence
    assert list(await put(store, Release(stream=claimed.id, fence=claimed.fence))) == [None]
    await store.leave(NodeId("third"))
    assert [node.id for node in await store.nodes()] == [NODE]


async def test_nobody_is_dead_to_itself_and_its_claims_hold_until_it_leaves(store: SqliteStore) -> None:
    alive = view(store)
    assert (alive.node_claim.at(0.0), await dead_nodes(alive), alive.ages()) == (ClaimState.HOLDING, [], {NODE: 0.0})
    await store.leave(NODE)
    assert (alive.node_claim.at(0.0), await dead_nodes(alive)) == (ClaimState.BURIED, [])


async def test_two_may_not_join_under_one_name(store: SqliteStore, path: Path) -> None:
    async with SqliteStore(str(path)) as second:
        with pytest.raises(StoreError, match="node node has joined already"):
            await second.join(NODE)


async def test_what_a_node_tells_of_itself_is_written_only_when_it_changes(store: SqliteStore) -> None:
    alive = view(store)
    for facts in (b'{"calls":1}', b'{"calls":1}', b'{"calls":2}'):
        await alive.beat(facts)
    (record,) = await store.nodes()
    assert (record.beat, record.facts) == (2, b'{"calls":2}')


async def test_a_lock_that_was_left_before_its_node_had_joined_is_removed(store: SqliteStore, path: Path) -> None:
    leave_behind(path, "never.lock", "never.sock", "never.well")
    assert await dead_nodes(view(store)) == []
    assert files(path) == {f"{NODE}.lock", f"{NODE}.well"}


async def test_a_row_without_a_lock_is_that_of_a_dead_node(store: SqliteStore, path: Path) -> None:
    with process(path, OTHER) as other:
        other.kill()
    os.unlink(f"{path}-nodes/{OTHER}.lock")
    assert await dead_nodes(view(store)) == [OTHER]


async def test_closing_frees_the_locks_of_those_who_did_not_leave(store: SqliteStore, path: Path) -> None:
    second = SqliteStore(str(path))
    async with second:
        await second.join(OTHER)
        assert await dead_nodes(view(store)) == []
    assert await dead_nodes(view(store)) == [OTHER]


async def test_a_file_opened_by_a_link_has_the_same_locks(store: SqliteStore, path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.db"
    link.symlink_to(path)
    with process(link, OTHER) as other:
        assert (await dead_nodes(view(store)), other.does("dead")) == ([], [])


async def test_a_folder_for_the_locks_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.db-nodes").write_text("in the way")
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        with pytest.raises(StoreUnavailable, match=r"the locks in .*log\.db-nodes cannot be used: it is not a folder"):
            await store.join(NODE)
        assert list(await store.nodes()) == []


async def test_a_program_that_is_started_does_not_keep_the_lock(store: SqliteStore, path: Path) -> None:
    for name in ("lock", "well"):
        (held,) = (file for file in os.listdir("/proc/self/fd") if _names(file, f"{path}-nodes/{NODE}.{name}"))
        assert not os.get_inheritable(int(held))


# Holders


async def test_a_process_that_holds_is_named_by_others_and_also_while_it_stands_still(
    store: SqliteStore, path: Path
) -> None:
    with process(path, OTHER) as other:
        assert list(await view(store).holders()) == []
        other.does("hold", True)
        assert (list(await view(store).holders()), other.does("holders")) == ([OTHER], [])
        with other.stopped():
            assert list(await view(store).holders()) == [OTHER]
        other.does("hold", False)
        await until(lambda: _is_empty(store))


async def test_a_killed_process_holds_nothing(store: SqliteStore, path: Path) -> None:
    """Whichever process settles it, also while that process does."""
    with process(path, OTHER) as other:
        other.does("hold", True)
        other.kill()
        assert list(await view(store).holders()) == []
        assert await dead_nodes(view(store)) == [OTHER]
        assert list(await view(store).holders()) == []


async def test_holding_is_told_on_a_disk_that_takes_no_writes(store: SqliteStore, path: Path) -> None:
    """The file may be locked, and the folder closed to writes."""
    with process(path, OTHER) as other, contextlib.closing(sqlite3.connect(path, isolation_level=None)) as backup:
        backup.execute("BEGIN EXCLUSIVE")
        os.chmod(f"{path}-nodes", 0o500)
        try:
            other.does("hold", True)
            assert list(await view(store).holders()) == [OTHER]
        finally:
            os.chmod(f"{path}-nodes", 0o700)


async def test_a_look_of_another_process_does_not_keep_one_from_holding_nor_for_long_from_being_well(
    store: SqliteStore, path: Path
) -> None:
    """The second lock is taken again by the next round, if another process was reading it."""
    async with SqliteStore(str(path)) as second:
        await second.join(OTHER)
        theirs = view(second, OTHER)
        theirs.hold(True)
        assert list(await view(store).holders()) == [OTHER]
        looking = os.open(f"{path}-nodes/{OTHER}.well", os.O_RDONLY)
        fcntl.flock(looking, fcntl.LOCK_SH)
        theirs.hold(False)
        assert list(await view(store).holders()) == [OTHER], "a process looks and does not end"
        os.close(looking)
        assert await dead_nodes(theirs) == []
        assert list(await view(store).holders()) == []


async def test_a_node_of_a_release_without_that_file_holds_nothing(store: SqliteStore, path: Path) -> None:
    with process(path, OTHER):
        os.unlink(f"{path}-nodes/{OTHER}.well")
        assert list(await view(store).holders()) == []
        assert await dead_nodes(view(store)) == []


async def _is_empty(store: SqliteStore) -> bool:
    return not await view(store).holders()


def _names(file: str, path: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{file}") == path
    except OSError:
        return False
