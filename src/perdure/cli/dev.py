"""Defines `perdure dev`: `perdure serve` that loads the code again when it changes, with the console beside it.

The console is a process of its own, so that it shows what happens when a server fails. Its input is a pipe of this
process, and it ends with that pipe: also if this process is killed.
"""

import contextlib
import copy
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from perdure.cli.options import Name, ServeOption
from perdure.cli.serve import run_serve, serve
from perdure.cli.upstreams import BEHIND
from perdure.errors import Misuse
from perdure.serve.worker_pool import VARIABLE

_WATCHED = "What is watched"
_SHOWN = "What is shown"
RUN_UNTIL_INPUT_ENDS = "from perdure.cli.dev import run_until_input_ends; run_until_input_ends()"
#: Seconds for the end of such a process. The console ends at once; one that is stuck in a target's code is killed.
STOP_SECONDS = 5.0
_ABOUT = """\
Serve TARGET as perdure serve does, and load its code again whenever it changes. Sessions and running calls go on.

A running call finishes with the code that it began with; every later call gets the new code. Code that cannot be
imported is shown with its traceback, and the old code continues to serve until the next change.

"""


def _dev(
    *,
    target: str | None,
    command: tuple[str, ...] | None,
    store: str,
    reload_dirs: tuple[str, ...],
    reload_includes: tuple[str, ...],
    reload_excludes: tuple[str, ...],
    console: bool,
    opens: bool,
    **given: Any,
) -> int:
    from perdure.serve.code_watch import WatchedCode, code_folder, need_watchfiles, watch_code

    if command is not None or (target or "").startswith(("http://", "https://")):
        what = "what follows -- is a program" if command is not None else f"{target} is an address"
        raise Misuse(
            f"perdure dev loads Python code again when it changes, and {what}; perdure serve takes programs and"
            " addresses"
        )
    if target is None:
        ctx = click.get_current_context()
        raise click.MissingParameter(ctx=ctx, param=ctx.command.params[0])
    # This logger reports each start and end of a part of the SDK that serves no session here.
    logging.getLogger("mcp.server.streamable_http_manager").setLevel(logging.WARNING)
    given = {**given, "target": target, "store": store}
    if VARIABLE in os.environ:
        return run_serve(**given)
    if opens and not console:
        raise Misuse("--open opens the console, and --no-console leaves it out; give one of them")
    need_watchfiles("perdure dev")
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
    with contextlib.ExitStack() as stack:

        def start_console() -> None:
            if console:
                # The store is in the environment, because every user of the machine can read arguments.
                env = {**os.environ, "PERDURE_STORE": store}
                stack.enter_context(running("console", "--port", "0", *["--open"] * opens, env=env))

        return run_serve(**given, watch=functools.partial(watch_code, code), on_served=start_console)


@contextlib.contextmanager
def running(*arguments: str, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of `perdure` in a process that ends with this block, and with this process."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_UNTIL_INPUT_ENDS, *arguments],
        stdin=subprocess.PIPE,
        process_group=0,  # so that Ctrl-C, which a terminal sends to the whole group, is left to this process
        **how,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_until_input_ends() -> None:
    """Run the command of this process's arguments until its input ends, as it does with the process that started it."""
    from perdure.cli.entry import main

    def end_with_input() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_input, daemon=True).start()
    main(sys.argv[1:])


def _make_dev() -> click.Command:
    """Return the command, with the options of `perdure serve` and those of its own after `--log-level`."""

    def watched(name: str, field: str, metavar: str, says: str, kind: Any) -> ServeOption:
        return ServeOption([name, field], group=_WATCHED, metavar=metavar, help=says, multiple=True, type=kind)

    folder = "folder to watch, in place of the one that has TARGET"
    files = "files that are code beside *.py, such as *.sql"
    own = [
        watched("--reload-dir", "reload_dirs", "DIR", folder, click.Path()),
        watched("--reload-include", "reload_includes", "GLOB", files, Name()),
        watched("--reload-exclude", "reload_excludes", "GLOB", "files and folders that are not watched", Name()),
        ServeOption(
            ["--console/--no-console"], group=_SHOWN, default=True, shown="on", help="serve the console on a free port"
        ),
        ServeOption(["--open", "opens"], group=_SHOWN, is_flag=True, shown="off", help="open it in a browser"),
    ]
    command = copy.copy(serve)
    command.name, command.callback = "dev", _dev
    command.short_help = "Serve, and load the code again when it changes."
    command.help = _ABOUT + (serve.help or "").split("\n\n")[1]
    command.params = []
    for param in serve.params:
        if isinstance(param, ServeOption) and param.group == BEHIND:
            continue
        if param.name == "log_level" and isinstance(param, ServeOption):
            param = copy.copy(param)
            param.default = param.shown = "info"
            command.params += [param, *own]
        else:
            command.params.append(param)
    return command


dev = _make_dev()
