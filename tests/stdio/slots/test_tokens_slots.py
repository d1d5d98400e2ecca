"""Several bridges at once: each has a slot, and a token is for one host and one target (T7, T9)."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

import pytest

from perdure._files.private import Folder
from perdure.stdio.identity import Identity
from perdure.stdio.resume_slot import SlotChooser, Target, open_slot
from tests.stdio.fake_hosts import Living, host, kept, killed, opened, place, said, target, token


def test_bridges_of_one_host_have_a_slot_each(folder: Path) -> None:
    """T1, T9: the first has exactly the name of T1, the others a suffix."""
    slots = [opened(folder) for _ in range(3)]
    assert all(slot.keep(token(number)) for number, slot in enumerate(slots))
    assert sorted(path.name for path in folder.glob("*/token-*")) == ["token-7-70", "token-7-70.2", "token-7-70.3"]
    assert len({slot.holder for slot in slots}) == 3
    slots[1].release()
    again = opened(folder)
    assert (again.token(), again.holder) == (token(1), slots[1].holder)


def test_a_token_is_for_one_target(folder: Path) -> None:
    """T9: URL, arguments, working directory and credential; each makes another one."""
    fields = [
        Target(url="https://a/mcp"),
        Target(url="https://b/mcp"),
        Target(url="https://a/mcp", secret="ann's"),
        Target(url="https://a/mcp", secret="bob's"),
        Target(url="https://a/mcp", arguments=["A"]),
        Target(url="https://a/mcp", directory="A"),
        Target(url="https://a/mcp", arguments=["A", "B"]),
        Target(url="https://a/mcp", arguments=["A B"]),
        Target(url="https://a/mcp", directory="/caf\udce9"),
    ]
    assert len({what.digest for what in fields}) == len(fields)
    for number, what in enumerate(fields):
        slot = opened(folder, what=what)
        assert slot.token() is None
        assert slot.keep(token(number))
        slot.release()
    for number, what in enumerate(fields):
        assert opened(folder, what=what).token() == token(number)
    assert "bob" not in "".join(path.name for path in folder.rglob("*"))


def test_a_bridge_waits_for_the_one_that_is_just_ending(folder: Path) -> None:
    """T9: hosts start the new one before the old one has ended."""
    old = opened(folder)
    assert old.keep(token(1))

    async def overlap() -> str | None:
        coming = asyncio.create_task(open_slot(folder, host(), target(), processes=Living({(7, 70)}), patience=60))
        await asyncio.sleep(0)
        assert not coming.done()
        old.release()
        return (await coming).token()

    assert asyncio.run(overlap()) == token(1)
    assert [path.name for path in folder.glob("*/token-*")] == ["token-7-70"]


def test_a_bridge_that_waited_in_vain_takes_a_new_slot(folder: Path) -> None:
    """T9."""
    first = opened(folder)
    assert first.keep(token(1))
    second = opened(folder, patience=0.05)
    assert second.token() is None
    assert second.keep(token(2))
    assert first.token() == token(1)


def test_a_bridge_does_not_wait_for_slots_of_other_targets(folder: Path) -> None:
    first = opened(folder, what=target("another"))
    assert first.keep(token(1))
    assert opened(folder, patience=1_000).keep(token(2))


@pytest.mark.parametrize("stopped", [(0, 1), (1, 0)])
def test_bridges_that_cannot_be_told_apart_begin_fresh_sessions(
    folder: Path, caplog: pytest.LogCaptureFixture, stopped: tuple[int, int]
) -> None:
    """T7: hosts stop and start their bridges in any order, so the order in which two of them stopped says nothing."""
    slots = [opened(folder) for _ in range(3)]
    assert [slot.keep(token(number)) for number, slot in enumerate(slots)] == [True, True, True]
    for number in stopped:
        slots[number].release()
    slots[2].release()
    said(caplog)
    again, other, third = [opened(folder) for _ in range(3)]
    assert [slot.token() for slot in (again, other, third)] == [None, None, None]
    assert said(caplog) == [
        "Several sessions of this host wait and cannot be told apart, starting fresh session",
        *["Token file not found (first run or clean slate)"] * 3,
    ]
    assert (again.keep(token(2)), other.keep(token(3))) == (True, True)
    third.release()
    # From here on each of them is resumed as before, one at a time.
    for slot, number in ((again, 2), (other, 3)):
        killed(slot)
        assert opened(folder).token() == token(number)
    assert sorted(path.name for path in folder.glob("*/token-*")) == ["token-7-70", "token-7-70.2"]


@pytest.mark.parametrize(("ending", "goes_on"), [(1, True), (2, False)])
def test_a_bridge_that_finds_several_running_waits_whether_one_of_them_ends_or_more(
    folder: Path, ending: int, goes_on: bool
) -> None:
    """T7, T9: a host that starts the new bridges before the old ones have ended may do so for one, or for all."""
    slots = [opened(folder) for _ in range(3)]
    for number, slot in enumerate(slots):
        assert slot.keep(token(number))
    coming = SlotChooser(Folder(place(folder)), host())
    assert coming.take(is_late=False) is None
    slots[0].release()
    assert coming.take(is_late=False) is None  # another one may be about to end
    for slot in slots[1:ending]:
        slot.release()
    taken = coming.take(is_late=True)
    assert taken is not None
    assert (place(folder) / taken.name.file("token")).exists() is goes_on


def test_a_bridge_that_cannot_look_at_the_others_begins_a_fresh_session(folder: Path) -> None:
    """T7: another one is looking, and was stopped in the middle."""
    kept(folder, token(1))
    with Folder(place(folder)).alone() as is_alone:
        assert is_alone
        assert opened(folder, patience=0.05).token() is None
    assert opened(folder).token() == token(1)


def test_a_slot_with_a_token_is_better_than_one_without(folder: Path) -> None:
    first, second = opened(folder), opened(folder)
    assert first.keep(token(1))
    for slot in (first, second):
        killed(slot)
    os.utime(place(folder) / "lock-7-70.2", ns=(2 * 10**18, 2 * 10**18))
    assert opened(folder).token() == token(1)


def test_a_lock_on_a_file_that_was_removed_meanwhile_does_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that removes the files of a dead host has the lock until the file is deleted."""
    opened_folder, flock = Folder(place(folder)), fcntl.flock

    def late(file: int, operation: int) -> None:
        (place(folder) / "lock-7-70").unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert opened_folder.lock("lock-7-70") is None
    monkeypatch.undo()
    assert opened_folder.lock("lock-7-70") is not None


@pytest.mark.parametrize("other", [host(boot="next"), host(space="container")])
def test_the_same_pid_and_start_elsewhere(folder: Path, other: Identity) -> None:
    """T7: in the machine's next start, or in another container, where the host may well live: its slot stays."""
    path = kept(folder, token(1))
    slot = opened(folder, other)
    assert slot.token() is None
    assert slot.keep(token(2))
    assert path.read_text() == token(1)
    assert (place(folder, other) / "token-7-70").read_text() == token(2)


def test_two_hosts_keep_their_sessions_apart(folder: Path) -> None:
    """T7: also one of the same pid after the other, before and after the machine's start, and in two containers."""
    hosts = [host(), host(pid=8), host(start=71), host(boot="next"), host(space="container")]
    slots = []
    for number, who in enumerate(hosts):
        living = Living({(one.pid, one.start) for one in hosts})
        slot = opened(folder, who, target(), processes=living)
        assert slot.token() is None
        assert slot.keep(token(number))
        slots.append(slot)
    assert len({slot.holder for slot in slots}) == len(hosts)


def test_a_host_has_a_bounded_number_of_slots(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise 6: where all are in use, resume is off."""
    monkeypatch.setattr("perdure.stdio.resume_slot.MAX_SLOTS", 3)
    slots = [opened(folder) for _ in range(3)]
    said(caplog)
    assert not opened(folder).holder
    assert said(caplog)[-1].endswith("slots of this host are in use")
    slots[1].release()
    assert opened(folder).holder == slots[1].holder


def test_a_child_that_was_forked_does_not_keep_the_slot(folder: Path) -> None:
    """T9: the lock ends with the bridge, not with what it started."""
    slot = opened(folder)
    assert slot.keep(token(1))
    ready, told = os.pipe()
    waits, ends = os.pipe()
    if (child := os.fork()) == 0:
        os.write(told, b"1" if slot.token() is None and not slot.keep(token(2)) else b"0")
        os.read(waits, 1)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"1"
        killed(slot)
        assert opened(folder).token() == token(1)
    finally:
        os.write(ends, b"1")
        os.waitpid(child, 0)
        for end in (ready, told, waits, ends):
            os.close(end)


def test_a_released_slot_is_free_though_a_child_still_has_its_file(folder: Path) -> None:
    """T9: a program that the bridge is starting in this moment has all its files for a while."""
    slot = opened(folder)
    assert slot.keep(token(1))
    files = {int(name): os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    (lock,) = [file for file, path in files.items() if path == str(place(folder) / "lock-7-70")]
    copy = os.dup(lock)
    slot.release()
    assert opened(folder).token() == token(1)
    os.close(copy)
