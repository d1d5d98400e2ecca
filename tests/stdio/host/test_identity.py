"""The host that started the bridge, found in real process trees (T2, T7, T11)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from perdure.stdio import identity as parent
from perdure.stdio.identity import MAX_COMMAND, Identity, Processes, ProcessInfo, ProcFs, Psutil, here, identify
from perdure.stdio.resume_slot import SlotName
from tests.stdio.host.process_trees import ProcessTree, make_process_tree

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

T = TypeVar("T")

NO_IDENTITY = "Could not verify parent process start time, session resume disabled for this instance"
US = ["perdure", "stdio", "URL"]
NODE = shutil.which("node", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

#: A command line that starts us, and how many processes are in between at least. The shells of some systems become
#: what they start last; `2>` or a second word of `dash` keeps most of them.
LAUNCHED: dict[str, tuple[Sequence[str], int]] = {
    "nothing": (US, 0),
    "a shell that prepares": (["bash", "-c", "cd /; perdure stdio URL 2>/dev/null"], 1),
    "a shell in a shell": (["bash", "-c", "cd /; bash -c 'cd /; perdure stdio URL 2>/dev/null' 2>/dev/null"], 2),
    "a shell script of our name": (["ROOT/wrapped/shell/perdure", "stdio", "URL"], 1),
    "Python with our module": (["PYTHON", "-S", "-m", "perdure", "stdio", "URL"], 1),
    "Python as pipx": (["pipx", "run", *US], 1),
    "Node with our script": (["node", "ROOT/wrapped/node/perdure.js", "stdio", "URL"], 1),
    "npx": (["npx", "--offline", "--yes", "ROOT/package", "stdio", "URL"], 3),
}

#: A command line whose process is a host, since it may start other things than us.
HOSTS: dict[str, Sequence[str]] = {
    "Python": ["PYTHON", "-S", "host.py", *US],
    "Python with code": ["PYTHON", "-S", "-c", "import subprocess as s; s.run(['perdure', 'stdio', 'URL'])"],
    "Node": ["node", "host.js", *US],
    "a shell script": ["bash", "start.sh"],
    "a shell with an alternative": ["bash", "-c", "perdure stdio URL || true"],
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> ProcessTree:
    return make_process_tree(tmp_path_factory.mktemp("tree"))


def above(pid: int, top: int) -> int:
    """How many processes are between the two."""
    count = 0
    while (pid := ProcFs().look(pid).parent) not in {top, 1}:  # type: ignore[union-attr]
        count += 1
    return count


def pid_of(identity: Identity | None) -> int | None:
    return None if identity is None else identity.pid


@pytest.mark.parametrize("way", LAUNCHED)
def test_a_launcher_is_skipped(way: str, tree: ProcessTree) -> None:
    """T11: the identity is that of the host above it, which is this test."""
    command, between = LAUNCHED[way]
    if NODE is None and {"npx", "node"} & set(command):
        pytest.skip("there is no node")
    with tree.started(command) as (_, bridge):
        assert above(bridge, os.getpid()) >= between
        assert pid_of(identify(ProcFs(), pid=bridge)) == os.getpid()
        assert pid_of(identify(Psutil(), pid=bridge)) == os.getpid()


@pytest.mark.parametrize("command", [["uv", "run", *US], ["uv", "tool", "uvx", *US]], ids=" ".join)
def test_what_is_called_uv_and_runs_something_is_skipped(command: Sequence[str], tree: ProcessTree) -> None:
    """T11: by its name and words alone."""
    shell = ["uv", "-c", 'perdure stdio "$0"; exit $?', *command[1:]]
    with tree.started(shell, program="/bin/sh") as (uv, bridge):
        assert above(bridge, os.getpid()) == 1
        assert bridge != uv
        assert pid_of(identify(ProcFs(), pid=bridge)) == os.getpid()


@pytest.mark.parametrize(
    "command",
    [
        ["uv", "run", "--offline", "--no-project", *US],
        pytest.param(
            ["uvx", "--offline", "--no-index", "--from", "ROOT/perdure-1.0.0-py3-none-any.whl", *US],
            marks=pytest.mark.long,
        ),
    ],
    ids=["uv run", "uvx"],
)
def test_the_real_uv_is_skipped(command: Sequence[str], tree: ProcessTree) -> None:
    """T11."""
    with tree.started(command) as (_, bridge):
        assert above(bridge, os.getpid()) >= 1
        assert pid_of(identify(ProcFs(), pid=bridge)) == os.getpid()


@pytest.mark.parametrize("way", HOSTS)
def test_a_host_is_not_skipped(way: str, tree: ProcessTree) -> None:
    """T7: a host may itself be a Python or Node program, or a script."""
    command = HOSTS[way]
    if NODE is None and "node" in command:
        pytest.skip("there is no node")
    with tree.started(command) as (started, bridge):
        below = started if above(bridge, started) == 0 else ProcFs().look(bridge).parent  # type: ignore[union-attr]
        assert below != os.getpid()
        assert pid_of(identify(ProcFs(), pid=bridge)) == below
        assert pid_of(identify(Psutil(), pid=bridge)) == below


def test_a_manager_is_no_identity(tree: ProcessTree, caplog: pytest.LogCaptureFixture) -> None:
    """T2."""
    program = tree.root / "systemd"
    program.symlink_to("/bin/sh")
    with tree.started(["systemd", "-c", "perdure stdio URL; exit $?"], program=str(program)) as (_, bridge):
        assert identify(ProcFs(), pid=bridge) is None
    assert [record.getMessage() for record in caplog.records] == [NO_IDENTITY]


def test_whose_parent_is_gone_has_no_identity(tree: ProcessTree) -> None:
    """T2: an orphan is adopted, and who adopts it knows nothing of the session."""
    with tree.started(["bash", "-c", "perdure stdio URL <&0 & exec sleep 60"]) as (host, bridge):
        assert pid_of(identify(ProcFs(), pid=bridge)) == host
        os.kill(host, signal.SIGKILL)
        adopter = wait_for(lambda: (now := ProcFs().look(bridge)) and now.parent != host and now.parent)
        if adopter != 1:
            pytest.skip("on this system orphans go to another process than pid 1")
        assert identify(ProcFs(), pid=bridge) is None


def test_a_launcher_that_dies_while_we_look_is_never_an_identity(tree: ProcessTree) -> None:
    """T7: whatever the moment, it is the host or none."""
    seen = set()
    for delay in range(7):
        with tree.started(["bash", "-c", "cd /; perdure stdio URL 2>/dev/null"]) as (launcher, bridge):
            table = ProcFs()
            with killed_after(launcher, looks=delay, table=table) as watched:
                found = {pid_of(identify(watched, pid=bridge)) for _ in range(3)}
            assert launcher not in found
            seen |= found
    assert os.getpid() in seen


def test_a_process_knows_its_own_host() -> None:
    """T2: without arguments it is about the process that asks; what it says twice is the same."""
    mine = ProcFs().look(os.getpid())
    assert mine is not None
    first, second = identify(), identify()
    assert first == second
    if first is not None:
        table = ProcFs()
        assert (first.boot, first.space) == (Path("/proc/sys/kernel/random/boot_id").read_text().strip(), table.space)
        assert str(SlotName(pid=first.pid, start=first.start)) == f"{first.pid}-{first.start}"
        assert not table.is_gone(first.pid, first.start)


def test_a_pid_that_is_used_again_is_another_identity(tree: ProcessTree) -> None:
    """T7: with real processes of the same pid, one after the other."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last, os.W_OK):
        pytest.skip("only root may choose the next pid")
    command = ["bash", "-c", "perdure stdio URL; true"]
    for _ in range(50):
        with tree.started(command) as (host, bridge):
            first = identify(ProcFs(), pid=bridge)
        assert first is not None
        assert ProcFs().is_gone(first.pid, first.start)
        wait_for_tick(first.start + 1)
        last.write_text(str(host - 1))
        with tree.started(command) as (again, bridge):
            if again != host:
                continue  # another process was faster
            second = identify(ProcFs(), pid=bridge)
            assert second is not None
            assert (second.pid, second.boot, second.space) == (first.pid, first.boot, first.space)
            assert second.start > first.start
            assert second != first
            assert ProcFs().is_gone(first.pid, first.start)
            return
    pytest.skip("the pid was never free again")


def test_nothing_is_known_of_windows() -> None:
    assert here("win32") is None
    assert here("freebsd14") is None
    assert isinstance(here("darwin"), Psutil)
    assert isinstance(here("linux"), ProcFs)


@pytest.mark.parametrize("unreadable", ["no files", "no boot id", "nonsense"])
def test_where_proc_says_nothing_there_is_no_identity(
    unreadable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """T2."""
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[1]")
    if unreadable == "no boot id":
        with pytest.raises(OSError, match="boot_id"):
            ProcFs(tmp_path)
        monkeypatch.setattr(parent, "here", lambda: None)
        assert identify() is None
    else:
        (tmp_path / "sys/kernel/random").mkdir(parents=True)
        (tmp_path / "sys/kernel/random/boot_id").write_text("1\n")
        if unreadable == "nonsense":
            (tmp_path / "7").mkdir()
            (tmp_path / "7/stat").write_text("7 (x) S\n")
            (tmp_path / "7/cmdline").write_bytes(b"x\0")
        assert identify(ProcFs(tmp_path), pid=7) is None
    assert [record.getMessage() for record in caplog.records] == [NO_IDENTITY]


def test_a_name_with_parentheses_is_read_as_it_is(tree: ProcessTree) -> None:
    program = tree.root / "a) S 1 (b"
    program.symlink_to("/bin/sh")
    with tree.started(["x y", "-c", "perdure stdio URL; exit $?"], program=str(program)) as (host, bridge):
        seen = ProcFs().look(host)
        assert seen is not None
        assert (seen.pid, seen.parent, seen.name) == (host, os.getpid(), "a) S 1 (b")
        assert seen.words == ("x y", "-c", "perdure stdio URL; exit $?")
        assert pid_of(identify(ProcFs(), pid=bridge)) == host


def test_a_command_line_that_is_cut_is_a_hosts(tree: ProcessTree) -> None:
    long = "x" * MAX_COMMAND
    with tree.started(["bash", "-c", f"cd /; perdure stdio {long} 2>/dev/null"]) as (host, bridge):
        assert pid_of(identify(ProcFs(), pid=bridge)) == host


# Tools


def wait_for_tick(tick: int) -> None:
    wait_for(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK") > tick + 1)


def wait_for(look: Callable[[], T]) -> T:
    deadline = time.monotonic() + 20
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return found


@contextlib.contextmanager
def killed_after(pid: int, *, looks: int, table: ProcFs) -> Iterator[Processes]:
    """A table that kills a process for real after some looks."""

    class Killing(Processes):
        boot = table.boot
        space = table.space
        left = looks

        def look(self, asked: int, /) -> ProcessInfo | None:
            if self.left == 0:
                os.kill(pid, signal.SIGKILL)
            self.left -= 1
            return table.look(asked)

        def is_gone(self, asked: int, start: int, /) -> bool:
            return table.is_gone(asked, start)

    yield Killing()
