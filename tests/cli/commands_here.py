"""Runs a command of `perdure` in this process: as a process would, without the time that a process takes to start."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from perdure.cli.entry import main


async def run_here(folder: Path, *arguments: str, env: Mapping[str, str]) -> tuple[int, str, str]:
    """Status, output and errors. It has a thread, because commands run event loops of their own."""

    def run() -> int:
        with (
            contextlib.chdir(folder),
            mock.patch.dict(os.environ, env, clear=True),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
        ):
            try:
                main(arguments)
            except SystemExit as end:
                return int(end.code or 0)

    output, errors = io.StringIO(), io.StringIO()
    return await asyncio.to_thread(run), output.getvalue(), errors.getvalue()
