"""What dead hosts left is removed when it is seen; what living ones have, never."""

from __future__ import annotations

import subprocess
from pathlib import Path

from perdure.stdio.identity import Identity, ProcFs
from perdure.stdio.resume_slot import FORGOTTEN, parse_name
from tests.stdio.fake_hosts import Living, host, opened, place, target, token


def test_files_of_dead_hosts_are_removed_and_those_of_living_ones_stay(folder: Path) -> None:
    living = Living({(7, 70), (8, 80)})
    for who in (host(pid=8, start=80), host(pid=9, start=90), host(pid=11, space="else")):
        slot = opened(folder, who, target(), processes=living)
        assert slot.keep(token())
        assert slot.positions is not None
        slot.positions.write_text("x")
        if who.pid == 9:
            slot.positions.with_name(slot.positions.name + ".new").write_text("x")
        slot.release()
    busy = opened(folder, host(pid=12), target(), processes=living)
    assert busy.keep(token())
    foreign = ["token-1", "token-9-90.1", "token-9-90.x", "a token-9-90", "token-0-1", "token-09-90", "positions"]
    for name in foreign:
        (place(folder) / name).write_text("another's")
    (place(folder) / "token-13-130").symlink_to("token-1")

    opened(folder, host(), target(), processes=living)
    left = {path.name.split("-")[1] for path in folder.glob("*/*") if parse_name(path.name)}
    assert left == {"7", "8", "11", "12", "13"}
    assert all((place(folder) / name).read_text() == "another's" for name in foreign)


def test_a_link_in_the_place_of_a_dead_hosts_file_stays(folder: Path) -> None:
    """No bridge here has made it."""
    dead = opened(folder, host(pid=9, start=90))
    assert dead.keep(token())
    dead.release()
    (place(folder) / "positions-9-90").symlink_to("elsewhere")
    opened(folder).release()
    assert [path.name for path in folder.glob("*/*-9-90")] == ["positions-9-90"]


def test_files_of_hosts_that_cannot_be_seen_are_removed_when_they_are_very_old(folder: Path) -> None:
    there = host(pid=11, space="another container")
    slot = opened(folder, there)
    assert slot.keep(token())
    slot.release()
    written = place(folder, there).stat().st_mtime
    opened(folder, now=written + FORGOTTEN - 60).release()
    assert (place(folder, there) / "token-11-70").exists()
    opened(folder, now=written + FORGOTTEN + 60).release()
    assert not place(folder, there).exists()


def test_a_real_dead_process_is_known_as_dead(folder: Path) -> None:
    """With the processes of this machine."""
    table = ProcFs()
    with subprocess.Popen(["sleep", "60"]) as child:
        seen = table.look(child.pid)
        assert seen is not None
        who = Identity(pid=seen.pid, start=seen.start, boot=table.boot, space=table.space)
        slot = opened(folder, who, target(), processes=table)
        assert slot.keep(token())
        slot.release()
        mine = host(boot=table.boot, space=table.space)
        opened(folder, mine, target("another"), processes=table).release()
        assert (place(folder, who) / f"token-{who.pid}-{who.start}").exists()
        child.kill()
    opened(folder, mine, target("another"), processes=table).release()
    assert not (place(folder, who) / f"token-{who.pid}-{who.start}").exists()
