"""Shows an error of the user's code by the user's own frames.

Between the line that a user can change and the error there are often many others: the import machinery, Perdure, the
SDK and the libraries below it. They are left out, unless nothing else is there, as with a target that is installed.
"""

import importlib
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

_PERDURE = Path(__file__).parents[1]
_IMPORTLIB = Path(importlib.__file__).parent
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
#: The folders of installed packages; the second one is Debian's.
_INSTALLED = {"site-packages", "dist-packages"}


def blame(error: BaseException) -> str:
    """An exception in one line: its type, its message, and the innermost line of the user's code."""
    message = str(error.msg) if isinstance(error, SyntaxError) else str(error)
    summary = f"{type(error).__name__}: {message}" if message else type(error).__name__
    places = [(frame.filename, frame.lineno) for frame in own_frames(traceback.extract_tb(error.__traceback__))]
    if isinstance(error, SyntaxError) and error.filename:
        places = [(error.filename, error.lineno)]
    if not places:
        return summary
    # Relative to the current directory if the file is inside it, as compilers show it.
    path, line = Path(places[-1][0]), places[-1][1]
    return f"{summary} ({path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line})"


def own_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, with the user's frames only; also those of its causes."""
    whole = traceback.TracebackException.from_exception(error)
    _leave_out_others(whole)
    return "".join(whole.format())


def own_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    ours_aside = [frame for frame in frames if not _is_machinery(frame.filename)]
    return [frame for frame in ours_aside if not _is_library(frame.filename)] or ours_aside


def _leave_out_others(summary: traceback.TracebackException) -> None:
    frames = own_frames(summary.stack)
    if hasattr(summary, "filename"):  # a syntax error says itself where it is: what was importing tells nothing more
        frames = [frame for frame in frames if not _is_library(frame.filename)]
    summary.stack = traceback.StackSummary.from_list(frames)
    # A list of causes ends: the class does not follow one that it has seen already.
    for further in (summary.__cause__, summary.__context__, *(summary.exceptions or ())):
        if further is not None:
            _leave_out_others(further)


def _is_machinery(filename: str) -> bool:
    path = Path(filename)
    return filename.startswith("<frozen ") or path.is_relative_to(_PERDURE) or path.is_relative_to(_IMPORTLIB)


def _is_library(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_STANDARD_LIBRARY) or not _INSTALLED.isdisjoint(path.parts)
