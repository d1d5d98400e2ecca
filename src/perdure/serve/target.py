"""Finds the object to serve: `package.module:name` or `path/file.py:name`.

`perdure.runtime` decides whether the object is an MCP server.
"""

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from perdure.errors import BadTarget

_FORMS = "write package.module:name or path/file.py:name"


def load_target(target: str) -> object:
    """The object that a target names. Raises `BadTarget` with one sentence: what is wrong, and what to do."""
    place, colon, name = target.rpartition(":")
    if not colon:
        raise BadTarget(f"{target!r} does not name an object; {_FORMS}")
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


def blame(error: BaseException) -> str:
    """An exception in one line: its type, its message, and the file and line that raised it."""
    message = str(error.msg) if isinstance(error, SyntaxError) else str(error)
    summary = f"{type(error).__name__}: {message}" if message else type(error).__name__
    # The innermost file and line outside of the import machinery.
    places = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ") and frame.filename != __file__
    ]
    if isinstance(error, SyntaxError) and error.filename:
        places = [(error.filename, error.lineno)]
    if not places:
        return summary
    # Relative to the current directory if the file is inside it, as compilers show it.
    path, line = Path(places[-1][0]), places[-1][1]
    return f"{summary} ({path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line})"


def _load(place: str) -> ModuleType:
    name, folder, spec = place, Path.cwd(), None
    if place.endswith(".py") or "/" in place or os.sep in place:
        path = Path(place)
        if not path.is_file():
            guess = path.with_name(path.name + ".py")
            raise BadTarget(f"no file {str(path)!r}" + (f"; did you mean {str(guess)!r}?" if guess.is_file() else ""))
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
        raise BadTarget(f"{place!r} is not the name of a module; {_FORMS}")
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
            raise BadTarget(f"no module named {missing!r} in this directory or among the installed packages") from error
        what = "ended the program when it was imported" if isinstance(error, SystemExit) else "cannot be imported"
        raise BadTarget(f"{name} {what}: {blame(error)}") from error
