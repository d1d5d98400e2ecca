"""Keeps servers of the tests that were made before a fork, until the fork imports them.

Making one (a model and a schema for each tool) takes half of the time in which a program of the tests starts. A kept
module is not in `sys.modules`; the fork's own import takes it from here, and sets up logging, as making a server does.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

from mcp.server.mcpserver.utilities.logging import configure_logging

FOLDER = "tests.support.servers."
#: Those that depend on nothing but their code: not on the environment, the arguments or a file. All log at WARNING.
KEPT = {
    f"{FOLDER}{name}"
    for name in (
        "asking_tools",
        "basic_tools",
        "gate_file_tools",
        "gated_tools",
        "round_tools",
        "silent_tool",
        "slow_tools",
        "step_tools",
        "waiting_tasks",
    )
}
#: A target, and the kept module that it imports.
BEHIND = {f"{FOLDER}stubborn_tools": f"{FOLDER}slow_tools"}


class PreloadedServers(MetaPathFinder, Loader):
    """The modules that are kept; put it first in `sys.meta_path`."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}

    def keep(self, arguments: Iterable[str]) -> None:
        """Import the modules that a program with these arguments will import."""
        root = logging.getLogger()
        targets = {argument.partition(":")[0] for argument in arguments}
        for name in {BEHIND.get(target, target) for target in targets} & (KEPT - self._modules.keys()):
            handlers, level = root.handlers[:], root.level
            importlib.import_module(name)
            root.handlers[:] = handlers
            root.setLevel(level)
            self._modules |= {made: sys.modules.pop(made) for made in KEPT & sys.modules.keys()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        return spec_from_file_location(fullname, self._modules[fullname].__file__, loader=self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        configure_logging("WARNING")
