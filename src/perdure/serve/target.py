"""Finds the object to serve: `package.module:name` or `path/file.py:name`, or either without the name.

`perdure.runtime` decides whether the object is an MCP server. An error of the user's code is shown by the user's own
frames. Between the line that a user can change and the error there are often many others: the import machinery,
Perdure, the SDK and the libraries below it. They are left out, unless there are no others, as with a target that is
installed.
"""

import difflib
import importlib
import importlib.util
import os
import platform
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from perdure.errors import BadTarget, TargetFailed
from perdure.store.owner import Owner

_FORMS = "write package.module:name or path/file.py:name"

_OTHERS = "; a server in another language needs -- COMMAND, or its URL"

USUAL_NAMES = ("server", "mcp", "app")
"""Names of servers: those that the commands of the SDK and of FastMCP search."""
MAX_SEEN = 8
"""Names that a refusal lists: enough to see what is in a module, and still one line."""

_PERDURE = Path(__file__).parents[1]
_IMPORTLIB = Path(importlib.__file__).parent
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
#: The folders of installed packages; the second one is Debian's.
_INSTALLED = {"site-packages", "dist-packages"}


def load_target(target: str) -> object:
    """Return the object that a target names. Raises `BadTarget` with one sentence: the fault and the next step."""
    if target.startswith(("http://", "https://")):
        raise BadTarget(
            f"{target} is the address of a server that runs; a target is its code, such as bakery.py. perdure serve,"
            " call, list and stdio take an address"
        )
    place, colon, name = target.rpartition(":")
    if not colon:
        return _find_server(_load(target), target)
    if not place or not name:
        raise BadTarget(f"{target!r} has nothing {'before' if not place else 'after'} the colon; {_FORMS}")
    found: object = _load(place)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            close = difflib.get_close_matches(part, [known for known in dir(found) if not known.startswith("_")])
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise BadTarget(f"{place} has no {name!r}{hint}") from None
    return found


def owner_of(target: str) -> Owner:
    """Return the origin of a loaded target, for the store."""
    place, colon, part = target.rpartition(":")
    place, part = (place, part) if colon else (target, "")
    is_path = place.endswith(".py")
    file = Path(place) if is_path else Path(getattr(sys.modules[place], "__file__", None) or place)
    name = (file if is_path else Path(place.rpartition(".")[2])).stem
    file = file.resolve()
    return Owner(name=name, machine=platform.node(), file=str(file), folder=str(file.parent), part=part)


def _find_server(module: ModuleType, place: str) -> object:
    """Return the server of a module: the first of the usual names that is a server, else the only server."""
    from perdure.runtime.server import is_server

    public = {
        name: found
        for name, found in vars(module).items()
        if not name.startswith("_") and not isinstance(found, ModuleType)
    }
    servers = {name: found for name, found in public.items() if is_server(found)}
    for name in USUAL_NAMES:
        if name in servers:
            return servers[name]
    if len({id(found) for found in servers.values()}) == 1:
        return next(iter(servers.values()))
    usual = f"{', '.join(USUAL_NAMES[:-1])} or {USUAL_NAMES[-1]}"
    if servers:
        seen, first = ", ".join(list(servers)[:MAX_SEEN]), next(iter(servers))
        raise BadTarget(
            f"{place} has {len(servers)} MCP servers ({seen}) and none is called {usual}; choose one: {place}:{first}"
        )
    seen = ", ".join(f"{name} ({type(found).__name__})" for name, found in list(public.items())[:MAX_SEEN])
    more = f" and {len(public) - MAX_SEEN} more" if len(public) > MAX_SEEN else ""
    raise BadTarget(
        f"{place} has no MCP server; it has {seen + more if seen else 'no public names'}; call one {usual}, or"
        f" write {place}:name"
    )


def _like(path: Path) -> str:
    """Return a hint at Python files with similar names, or at servers that are not Python."""
    files = {file.name: file for file in path.parent.glob("*.py")} if path.parent.is_dir() else {}
    wanted = path.name if path.suffix == ".py" else f"{path.name}.py"
    names = [wanted] if wanted in files else difflib.get_close_matches(wanted, list(files))
    if names:
        return f"; did you mean {' or '.join(repr(str(files[name])) for name in names)}?"
    return "" if path.suffix == ".py" else _OTHERS


def _load(place: str) -> ModuleType:
    name, folder, spec = place, Path.cwd(), None
    if place.endswith(".py") or "/" in place or os.sep in place:
        path = Path(place)
        if not path.is_file():
            raise BadTarget(f"no file {str(path)!r}{_like(path)}")
        path = path.resolve()
        if known := sys.modules.get(path.stem):
            file = getattr(known, "__file__", None)
            if file is not None and Path(file).resolve() == path:
                return known
            raise BadTarget(f"{path.name} has the name of a module that is in use, {path.stem!r}; rename the file")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise BadTarget(f"{str(path)!r} is not a Python file")
        name, folder = path.name, path.parent
    elif not all(part.isidentifier() for part in place.split(".")):
        raise BadTarget(f"{place!r} is not the name of a module; {_FORMS}{_OTHERS}")
    # Let modules in this folder be imported, as `python -m` does with the current directory and `python FILE` with the
    # file's.
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        if spec is None or spec.loader is None:
            return importlib.import_module(place)
        # Known before it runs, as the import statement does it: dataclasses and typing look their module up.
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        if spec is not None:
            sys.modules.pop(spec.name, None)
        missing = error.name if spec is None and isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            where = "in this directory or among the installed packages"
            raise BadTarget(f"no module named {missing!r} {where}{_like(Path(place))}") from error
        what = "ended the program when it was imported" if isinstance(error, SystemExit) else "cannot be imported"
        raise TargetFailed(f"{name} {what}: {blame(error)}", traceback=own_traceback(error)) from error


def blame(error: BaseException) -> str:
    """Describe an exception in one line: its type, its message, and the innermost line of the user's code."""
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
    """Return the traceback as Python prints it, with the frames of the user's code only, also of its causes."""
    whole = traceback.TracebackException.from_exception(error)
    _leave_out_others(whole)
    return "".join(whole.format())


def own_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    ours_aside = [
        frame
        for frame in frames
        if not frame.filename.startswith("<frozen ")
        and not any(Path(frame.filename).is_relative_to(folder) for folder in (_PERDURE, _IMPORTLIB))
    ]
    return [frame for frame in ours_aside if not _is_library(frame.filename)] or ours_aside


def _leave_out_others(summary: traceback.TracebackException) -> None:
    frames = own_frames(summary.stack)
    if hasattr(summary, "filename"):  # a syntax error names its place itself: the importing frames add nothing
        frames = [frame for frame in frames if not _is_library(frame.filename)]
    summary.stack = traceback.StackSummary.from_list(frames)
    # A list of causes ends: the class does not follow one that it has seen already.
    for further in (summary.__cause__, summary.__context__, *(summary.exceptions or ())):
        if further is not None:
            _leave_out_others(further)


def _is_library(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_STANDARD_LIBRARY) or not _INSTALLED.isdisjoint(path.parts)
