"""Several bridges at once: each has a slot, and a token is for one host and one target (T7, T9)."""

from __future__ import annotations

import asyncio
import fcntl
import os
from dataclasses import replace
from pathlib import Path

import pytest

from perdure._files.private import Folder
from perdure.stdio.resume_slot import Label, SlotChooser, SlotName, Target, open_slot, this_machine
from tests.support.processes.fake_hosts import Living, host, kept, killed, opened, said, target, token


def test_bridges_of_one_host_have_a_slot_each(folder: Path) -> None:
    """T1, T9: the first has exactly the name of T1, the others a suffix."""
    slots = [opened(folder) for _ in range(3)]
    assert all(slot.keep(token(number)) for number, slot in enumerate(slots))
    assert sorted(path.name for path in folder.glob("token-*")) == ["token-7-70", "token-7-70.2", "token-7-70.3"]
    assert len({slot.holder for slot in slots}) == 3
    slots[1].release()
    again = opened(folder)
    assert (again.token(), again.holder) == (token(1), slots[1].holder)


def test_a_token_is_for_one_target(folder: Path) -> None:
    """T9: URL, credential, arguments and working directory; each makes another one."""
    fields = [
        Target(url="https://a/mcp"),
        Target(url="https://b/mcp"),
        Target(url="https://a/mcp", credential="A"),
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
    assert [path.name for path in folder.glob("token-*")] == ["token-7-70"]


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
    # Each says why.
    again, other, third = [opened(folder) for _ in range(3)]
    assert [slot.token() for slot in (again, other, third)] == [None, None, None]
    assert said(caplog) == [
        *["Several sessions of this host wait and cannot be told apart, starting fresh session"] * 3,
        *["Token file not found (first run or clean slate)"] * 3,
    ]
    assert (again.keep(token(2)), other.keep(token(3))) == (True, True)
    third.release()
    # Once: a bridge that comes later has lost nothing.
    opened(folder).release()
    assert said(caplog) == []
    # From here on each of them is resumed as before, one at a time.
    for slot, number in ((again, 2), (other, 3)):
        killed(slot)
        assert opened(folder).token() == token(number)
    assert sorted(path.name for path in folder.glob("token-*")) == ["token-7-70", "token-7-70.2"]


@pytest.mark.parametrize(("ending", "goes_on"), [(1, True), (2, False)])
def test_a_bridge_that_finds_several_running_waits_whether_one_of_them_ends_or_more(
    folder: Path, ending: int, goes_on: bool
) -> None:
    """T7, T9: a host that starts the new bridges before the old ones have ended may do so for one, or for all."""
    slots = [opened(folder) for _ in range(3)]
    for number, slot in enumerate(slots):
        assert slot.keep(token(number))
    mine = Label(machine=this_machine(), boot="boot", space="space", target=target().digest)
    coming = SlotChooser(Folder(folder), SlotName(pid=7, start=70), mine)
    assert coming.take(is_late=False) is None
    slots[0].release()
    assert coming.take(is_late=False) is None  # another one may be about to end
    for slot in slots[1:ending]:
        slot.release()
    taken = coming.take(is_late=True)
    assert taken is not None
    assert (folder / taken.name.file("token")).exists() is goes_on


def test_a_bridge_that_cannot_look_at_the_others_begins_a_fresh_session(folder: Path) -> None:
    """T7: another one is looking, and was stopped in the middle."""
    kept(folder, token(1))
    with Folder(folder).alone() as is_alone:
        assert is_alone
        assert opened(folder, patience=0.05).token() is None
    assert opened(folder).token() == token(1)


def test_a_slot_with_a_token_is_better_than_one_without(folder: Path) -> None:
    first, second = opened(folder), opened(folder)
    assert first.keep(token(1))
    for slot in (first, second):
        killed(slot)
    os.utime(folder / "lock-7-70.2", ns=(2 * 10**18, 2 * 10**18))
    assert opened(folder).token() == token(1)


def test_bridges_that_differ_in_their_credentials_alone_get_their_own_back(folder: Path) -> None:
    """T9: the variable has the same name and another value. A renewed value takes what is left, and is known then."""
    ann, bob = (replace(target(), credential="TOKEN", secret=secret) for secret in ("ann's", "bob's"))
    first, second = opened(folder, what=ann), opened(folder, what=bob)
    assert first.keep(token(1))
    assert second.keep(token(2))
    first.release()
    second.release()
    first, second = opened(folder, what=ann), opened(folder, what=bob)
    assert (first.token(), second.token()) == (token(1), token(2))  # though the other one was used later
    # While its own is locked, a new one is taken rather than the other's.
    first.release()
    assert opened(folder, what=bob).token() is None
    second.release()
    first = opened(folder, what=ann)
    assert first.token() == token(1)
    renewed = opened(folder, what=replace(bob, secret="bob's next"))
    assert renewed.token() == token(2)
    assert "bob" not in "".join(file.read_text() for file in folder.glob("target-*"))


def test_a_credential_that_the_server_does_not_accept_leaves_the_session_to_its_own(folder: Path) -> None:
    """T9: alice, bob, alice. Bob is another person, whose bridge tries the only session that waits."""
    alice, bob = (replace(target(), credential="TOKEN", secret=secret) for secret in ("alice's", "bob's"))
    first = opened(folder, what=alice)
    assert first.keep(token(1))
    assert first.positions is not None
    first.positions.write_text("hers")
    first.release()
    second = opened(folder, what=bob)
    assert (second.token(), second.holder, second.positions) == (token(1), first.holder, first.positions)
    second.on_rejected()  # the server says no
    assert second.holder != first.holder
    assert second.positions != first.positions
    assert second.keep(token(2))
    second.release()
    for _ in range(2):
        again, other = opened(folder, what=alice), opened(folder, what=bob)
        assert (again.token(), other.token()) == (token(1), token(2))
        assert (again.holder, again.positions, first.positions.read_text()) == (first.holder, first.positions, "hers")
        again.release()
        other.release()
    # Two that wait, and neither is carol's: which of them was renewed is not known. Both stay.
    carol = opened(folder, what=replace(alice, secret="carol's"))
    assert carol.token() is None
    assert opened(folder, what=alice).token() == token(1)


def test_a_borrowed_slot_without_room_for_another_turns_resume_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 6: and the slot is as it was."""
    monkeypatch.setattr("perdure.stdio.resume_slot.MAX_SLOTS", 1)
    alice, bob = (replace(target(), credential="TOKEN", secret=secret) for secret in ("alice's", "bob's"))
    first = opened(folder, what=alice)
    assert first.keep(token(1))
    first.release()
    second = opened(folder, what=bob)
    assert second.token() == token(1)
    second.on_rejected()
    assert (second.holder, second.positions, second.keep(token(2))) == ("", None, False)
    assert opened(folder, what=alice).token() == token(1)


def test_a_slot_that_was_taken_while_we_looked_is_left_to_its_holder(folder: Path) -> None:
    """T9: between the look and the lock a whole bridge may have lived."""

    class Overtaken(Folder):
        def lock(self, name: str) -> int | None:
            if not (folder / "token-7-70").exists():
                other = opened(folder, what=target("another"))
                assert other.keep(token(1))
                other.release()
            return super().lock(name)

    mine = Label(machine=this_machine(), boot="boot", space="space", target=target().digest)
    taken = SlotChooser(Overtaken(folder), SlotName(pid=7, start=70), mine).take_new()
    assert taken is not None
    assert taken.name.number == 2
    assert opened(folder, what=target("another")).token() == token(1)


def test_a_lock_on_a_file_that_was_removed_meanwhile_does_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who removes what a dead host left has the lock until the file is gone."""
    place, flock = Folder(folder), fcntl.flock

    def late(file: int, operation: int) -> None:
        (folder / "lock-7-70").unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert place.lock("lock-7-70") is None
    monkeypatch.undo()
    assert place.lock("lock-7-70") is not None


def test_the_same_pid_and_start_after_the_machine_was_started_again(folder: Path) -> None:
    """T7: the old token is removed."""
    kept(folder)
    slot = opened(folder, host(boot="next"))
    assert slot.token() is None
    assert not (folder / "token-7-70").exists()
    assert slot.keep(token(2))
    assert slot.token() == token(2)


def test_the_same_pid_and_start_in_another_container(folder: Path) -> None:
    """T7: the host there may well live, so its slot stays, and this one has the next."""
    path = kept(folder, token(1))
    slot = opened(folder, host(space="container"))
    assert slot.token() is None
    assert slot.keep(token(2))
    assert path.read_text() == token(1)
    assert (folder / "token-7-70.2").read_text() == token(2)


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
    """Promise 6: the target that was not used for longest goes; where all are in use, resume is off."""
    monkeypatch.setattr("perdure.stdio.resume_slot.MAX_SLOTS", 3)
    for number in range(3):
        slot = opened(folder, what=target(str(number)))
        assert slot.keep(token(number))
        slot.release()
        for path in folder.glob("*" if number == 0 else f"*.{number + 1}"):
            os.utime(path, ns=(10**18 + number, 10**18 + number))
    fourth = opened(folder, what=target("3"))
    assert fourth.token() is None
    assert fourth.keep(token(3))
    assert opened(folder, what=target("2")).token() == token(2)
    assert opened(folder, what=target("1")).token() == token(1)
    said(caplog)
    assert not opened(folder, what=target("0")).holder
    assert said(caplog)[-1].endswith("slots of this host are in use")


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
    (lock,) = [file for file, path in files.items() if path == str(folder / "lock-7-70")]
    copy = os.dup(lock)
    slot.release()
    assert opened(folder).token() == token(1)
    os.close(copy)
