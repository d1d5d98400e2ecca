"""Files and folders that are not trusted or cannot be used: each has its named answer (T4, T5, T8)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.stdio.resume_slot import Slot, open_slot
from tests.stdio.fake_hosts import host, kept, opened, place, said, target, token

CORRUPTED = "Token file corrupted, treating as stale"
NOBODY = 65_534

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def _owned_by_nobody(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


_NO_TOKEN = "a token has 64 characters of base64url, these are {} bytes of something else"
BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: path.write_text(token()[:-1]), _NO_TOKEN.format(63)),
    "no text": (lambda path: path.write_bytes(b"\xff" * 64), _NO_TOKEN.format(64)),
    "readable by the group": (lambda path: path.chmod(0o640), "others may use it (mode 0640)"),
    "a link": (_link, "it is a link"),
    "of two names": (lambda path: path.with_name("second").hardlink_to(path), "it has a second name"),
    "a pipe": (_pipe, "it is not a plain file"),
    "of another owner": (_owned_by_nobody, "it belongs to another user"),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=[only_root] if "owner" in how else []) for how in BAD_FILES])
def test_a_token_file_that_is_not_trusted(how: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T4, T8: the log says why, it is deleted, and the session starts fresh; what a link points to stays."""
    spoil, reason = BAD_FILES[how]
    spoil(kept(folder))
    slot = opened(folder)
    assert slot.token() is None
    assert said(caplog) == [CORRUPTED, f"The token file {place(folder) / 'token-7-70'} is not used: {reason}"]
    assert not os.path.lexists(place(folder) / "token-7-70")
    assert (place(folder) / "elsewhere").exists() == (how == "a link")
    assert slot.keep(token(2))
    assert slot.token() == token(2)


def test_a_token_file_that_cannot_be_read(others_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T4."""
    (kept(others_folder)).chmod(0)
    slot = opened(others_folder)
    assert slot.token() is None
    first, second = said(caplog)
    assert first == CORRUPTED
    assert second.endswith(" is not used: it cannot be opened: Permission denied")
    assert slot.keep(token(2))


def test_a_folder_in_the_place_of_the_token(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T4, T5: it is left, and the session goes on without resume."""
    path = kept(folder)
    path.unlink()
    path.mkdir()
    slot = opened(folder)
    assert slot.token() is None
    assert not slot.keep(token())
    first, why, second = said(caplog)
    assert first == CORRUPTED
    assert why.endswith(" is not used: it is not a plain file")
    assert second.startswith("Failed to write token file: [Errno 21] Is a directory")
    assert [found.name for found in folder.glob("*/*.new")] == []


@pytest.mark.parametrize("bad", ["", "a" * 63, "a" * 65, "é" * 64, "a" * 63 + "\n", "../" * 20])
def test_what_is_no_token_is_not_kept(bad: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T5: a server that answers nonsense does not spoil the existing files."""
    slot = opened(folder)
    assert slot.keep(token(1))
    assert not slot.keep(bad)
    assert said(caplog)[-1].startswith("Failed to write token file: a token has 64 characters of base64url")
    assert slot.token() == token(1)


# Folders that cannot be used


@pytest.fixture
def others_folder() -> Iterator[Path]:
    """A folder of a user whom the system refuses things: root is another user for a while."""
    with tempfile.TemporaryDirectory() as home:
        if os.geteuid() == 0:
            os.chown(home, NOBODY, NOBODY)
            os.seteuid(NOBODY)
            try:
                yield Path(home) / "state"
            finally:
                os.seteuid(0)
        else:
            yield Path(home) / "state"


def _open_folder(path: Path) -> None:
    path.mkdir(parents=True)
    path.chmod(0o755)


def _linked_folder(path: Path) -> None:
    path.with_name("real").mkdir(0o700, parents=True)
    path.symlink_to("real")


def _file_instead(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("")


def _folder_of_nobody(path: Path) -> None:
    path.mkdir(0o700, parents=True)
    os.chown(path, NOBODY, NOBODY)


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "open to others": (_open_folder, "others may use it (mode 0755; chmod 700 it)"),
    "a link": (_linked_folder, "it is a link"),
    "a file": (_file_instead, "Not a directory"),
    "below a file": (lambda path: path.parent.write_text(""), "Not a directory"),
    "of another owner": (_folder_of_nobody, "it belongs to another user"),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=[only_root] if "owner" in how else []) for how in BAD_FOLDERS])
def test_a_folder_that_is_not_trusted(how: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T8: resume is off, and the log says what is wrong; nothing is put there."""
    make, reason = BAD_FOLDERS[how]
    make(folder)
    slot = opened(folder)
    assert not slot.holder
    (sentence,) = said(caplog)
    assert sentence.startswith("Session resume disabled for this instance: ")
    assert reason in sentence
    assert not list(folder.glob("*/lock*"))


def test_a_folder_that_cannot_be_written(others_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T5, T6: from the start resume is off; later, the old token stays and the session goes on."""
    folder = others_folder
    path = kept(folder, token(1))
    slot = opened(folder)
    for each in (place(folder), folder):
        each.chmod(0o500)
    assert not slot.keep(token(2))
    assert said(caplog)[-1].startswith("Failed to write token file: [Errno 13] Permission denied")
    slot.release()
    assert path.read_text() == token(1)
    assert not opened(folder, what=target("another")).holder
    assert "Permission denied" in said(caplog)[-1]
    assert opened(folder).token() == token(1)
    for each in (folder, place(folder)):
        each.chmod(0o700)
    folder.parent.chmod(0o500)
    assert not opened(folder.with_name("new")).holder
    assert "Permission denied" in said(caplog)[-1]
    folder.parent.chmod(0o700)


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T5: the old token stays, whole; with room again, the next one is kept."""
    with small_disk(tmp_path / "disk") as disk:
        slot = opened(disk / "state")
        assert slot.keep(token(1))
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        assert not slot.keep(token(2))
        assert said(caplog)[-1].startswith("Failed to write token file: [Errno 28] No space left on device")
        assert slot.token() == token(1)
        other = opened(disk / "state", what=target("another"))
        assert not other.keep(token(3))
        filler.unlink()
        assert slot.keep(token(2))
        assert other.keep(token(3))
        slot.release()
        other.release()
        assert opened(disk / "state").token() == token(2)
        assert opened(disk / "state", what=target("another")).token() == token(3)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A disk of its own, seen through the process that mounted it."""
    path.mkdir()
    mount = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=64k x "$0" && echo && read -r _',
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen([*mount, str(path)], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdout.readline():
            pytest.skip("this system does not let us mount a disk in a namespace of its own")
        yield Path(f"/proc/{process.pid}/root{path}")
        process.stdin.close()


def test_no_more_open_files(folder: Path) -> None:
    """T6: whatever the system refuses, nothing is raised."""
    kept(folder)

    async def without_files() -> Slot:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            return await open_slot(folder, host(), target())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert not asyncio.run(without_files()).holder


def test_no_folder_is_known(caplog: pytest.LogCaptureFixture) -> None:
    assert not opened(None).holder
    assert said(caplog) == ["Session resume disabled for this instance: no directory for its tokens is known"]


def test_a_lock_that_was_removed_protects_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T9: a second bridge may have the slot by now, so the first one writes no more."""
    slot = opened(folder)
    assert slot.keep(token(1))
    (place(folder) / "lock-7-70").unlink()
    assert opened(folder).token() == token(1)
    assert not slot.keep(token(2))
    assert said(caplog)[-1] == "Failed to write token file: lock-7-70 was removed, so the slot may be another bridge's"
