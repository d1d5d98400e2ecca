"""Defines `perdure dev`: `perdure serve` that loads the code again when it changes."""

import copy
import functools
import logging
import os
from pathlib import Path
from typing import Any

import click

from perdure.cli.options import Name, ServeOption
from perdure.errors import Misuse
from perdure.serve.worker_pool import VARIABLE

_WATCHED = "What is watched"
_ABOUT = """\
Serve TARGET as perdure serve does, and load its code again whenever it changes. Sessions and running calls go on.

A running call finishes with the code that it began with; every later call gets the new code. Code that cannot be
imported is shown with its traceback, and the old code goes on serving until the next change.

"""


def make_dev(serve: click.Command) -> click.Command:
    """The command, with the options of `perdure serve`."""
    command = copy.copy(serve)
    command.name = "dev"
    command.short_help = "Serve, and load the code again when it changes."
    command.help = _ABOUT + (serve.help or "").partition("\n\n")[2]
    command.params = [_for_developers(param) for param in serve.params] + _options()
    command.callback = functools.partial(dev_command, serve.callback)
    return command


def _for_developers(param: click.Parameter) -> click.Parameter:
    if param.name != "log_level" or not isinstance(param, ServeOption):
        return param
    mine = copy.copy(param)
    mine.default = mine.shown = "info"
    return mine


def _options() -> list[click.Parameter]:
    def option(name: str, field: str, metavar: str, says: str, **attributes: Any) -> ServeOption:
        attributes = {"type": Name(), **attributes}
        return ServeOption([name, field], group=_WATCHED, metavar=metavar, help=says, multiple=True, **attributes)

    folder = "folder to watch, in place of the one that has TARGET"
    return [
        option("--reload-dir", "reload_dirs", "DIR", folder, type=click.Path()),
        option("--reload-include", "reload_includes", "GLOB", "files that are code beside *.py, such as *.sql"),
        option("--reload-exclude", "reload_excludes", "GLOB", "files and folders that are not watched"),
    ]


def dev_command(
    serve: Any,
    *,
    target: str,
    store: str,
    reload_dirs: tuple[str, ...],
    reload_includes: tuple[str, ...],
    reload_excludes: tuple[str, ...],
    **given: Any,
) -> int:
    from perdure.serve.code_watch import WatchedCode, code_folder, need_watchfiles, watch_code

    # It tells at every start and end of a part of the SDK that serves no session here.
    logging.getLogger("mcp.server.streamable_http_manager").setLevel(logging.WARNING)
    given = {**given, "target": target, "store": store}
    if VARIABLE in os.environ:
        return int(serve(**given))
    need_watchfiles()
    for folder in reload_dirs:
        if not Path(folder).is_dir():
            raise Misuse(f"--reload-dir: {folder!r} is not a folder")
    scheme, _, rest = store.partition(":")
    code = WatchedCode(
        folders=tuple(Path(folder).resolve() for folder in reload_dirs) or (code_folder(target),),
        includes=reload_includes,
        excludes=reload_excludes,
        store=Path(rest.partition("?")[0]).resolve() if scheme == "sqlite" else None,
    )
    return int(serve(**given, watch=functools.partial(watch_code, code)))
