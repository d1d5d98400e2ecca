"""Watches the files of the target's code, and reports when they have changed and rest.

Editors write a file in several steps, and one change of a developer's (a rename, a checkout) touches many files. So a
change is reported once no further one has followed for `QUIET_SECONDS`.
"""

import asyncio
import contextlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from perdure.errors import Misuse
from perdure.telemetry.log_records import log_event

QUIET_SECONDS = 0.2
"""Longer than an editor takes to write a file and format it, and too short to be waited for."""
MAX_QUIET_SECONDS = 3.0
"""The longest wait for a rest, for a program that writes code all the time."""
ALWAYS = ("*.py",)
"""Which files are code, whatever else is included."""


@dataclass(frozen=True, kw_only=True)
class WatchedCode:
    """Decides which files are code."""

    folders: tuple[Path, ...]
    includes: tuple[str, ...] = ()
    """Further files: patterns of their names."""
    excludes: tuple[str, ...] = ()
    """Files and folders that are not code: patterns of their names, or paths of folders."""
    files: tuple[Path, ...] = ()
    """The only files that are code, each in one of the folders itself; without them all that fit are."""
    store: Path | None = None
    """The file of the log, which changes with every event. The names of files beside it begin with its name."""

    def is_code(self, path: Path, is_ignored: Callable[[str], bool]) -> bool:
        """`is_ignored` knows the caches and lock files of common tools, by paths below the watched folder."""
        if self.files:
            return path in self.files
        below = next((path.relative_to(folder) for folder in self.folders if path.is_relative_to(folder)), None)
        is_store = self.store is not None and (path == self.store or str(path).startswith(f"{self.store}-"))
        if below is None or is_ignored(str(below)) or is_store:
            return False
        if any(entry.match(pattern) for pattern in self.excludes for entry in (below, *below.parents)):
            return False
        if any(path.is_relative_to(Path(pattern).resolve()) for pattern in self.excludes if os.sep in pattern):
            return False
        return any(below.match(pattern) for pattern in (*ALWAYS, *self.includes))


def code_folder(target: str) -> Path:
    """Return the folder from which a target's code is imported. The target is not imported, and need not exist."""
    place = target.rpartition(":")[0] or target
    here = Path.cwd()
    if place.endswith(".py") or os.sep in place:
        folder = Path(place).resolve().parent
        return folder if folder.is_dir() else here
    package = place.partition(".")[0]
    if importlib.machinery.PathFinder.find_spec(package, [str(here)]) is not None:
        return here
    spec = importlib.machinery.PathFinder.find_spec(package, sys.path)
    inside = list(spec.submodule_search_locations or ()) if spec else []
    return Path(inside[0]).resolve() if inside else here


def watched_paths(paths: Collection[Path], *, but: Path | None) -> list[WatchedCode]:
    """Return what to watch for the code of any language: every file below a folder, and files by themselves. `but`: a
    folder that is not code."""
    folders = tuple(path for path in paths if path.is_dir())
    files = tuple(path for path in paths if not path.is_dir())
    found = []
    if folders:
        excludes = () if but is None else (f"{but}{os.sep}",)
        found.append(WatchedCode(folders=folders, includes=("*",), excludes=excludes))
    if files:  # their folders are watched, because editors put another file in the place of one
        found.append(WatchedCode(folders=tuple({path.parent for path in files}), files=files))
    return found


def need_watchfiles(what: str) -> None:
    """Raise `Misuse` if watchfiles, an extra, is not installed."""
    try:
        import watchfiles  # noqa: F401
    except ModuleNotFoundError as error:
        raise Misuse(f"{what} needs watchfiles: pip install 'perdure[dev]'") from error


async def watch_code(
    code: WatchedCode,
    on_change: Callable[[str], None],
    *,
    quiet: float = QUIET_SECONDS,
    option: str = "--reload-dir",
) -> None:
    """Report each change of the code, with the names of the files, until this task is cancelled. `option`: by which the
    user chooses what is watched."""
    from watchfiles import Change, DefaultFilter, awatch

    logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it counts changes, also those that are no code
    names = ", ".join(map(str, code.files or code.folders))
    log_event(logging.INFO, "code.watched", f"the code in {names} is watched, and loaded again when it changes")
    common, deleted = DefaultFilter(), asyncio.Event()

    def is_wanted(change: Change, path: str) -> bool:
        if change is Change.deleted and Path(path) in code.folders:
            deleted.set()
        return code.is_code(Path(path), lambda below: not common(change, below))

    def report(changed: Collection[Path]) -> None:
        forget_bytecode(changed)
        on_change(describe(changed))

    step, longest = int(quiet * 1000), int(MAX_QUIET_SECONDS * 1000)
    while True:
        deleted.clear()
        try:
            async for batch in awatch(
                *code.folders,
                watch_filter=is_wanted,
                stop_event=deleted,
                step=step,
                debounce=longest,
                recursive=not code.files,
            ):
                report({Path(path) for _, path in batch})
        except (OSError, RuntimeError) as reason:
            raise Misuse(f"the code cannot be watched: {reason}; choose what is watched with {option}") from reason
        # The watch is not notified of a folder that is made in the place of a deleted one.
        while not all(folder.is_dir() for folder in code.folders):  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(QUIET_SECONDS)
        report(code.folders)  # as after a checkout of another branch


def describe(changed: Iterable[Path]) -> str:
    first, *others = sorted(changed)
    more = f" and {len(others)} other file{'s'[: len(others) > 1]}" if others else ""
    return first.name + more


def forget_bytecode(changed: Iterable[Path]) -> None:
    """Remove the compiled form of changed files. Python compares whole seconds and sizes, so after two quick changes of
    one length it would take the first for the second."""
    for path in changed:
        if path.suffix == ".py":
            with contextlib.suppress(OSError, NotImplementedError):
                Path(importlib.util.cache_from_source(str(path))).unlink()
