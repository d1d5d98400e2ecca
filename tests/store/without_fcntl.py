"""Runs a module as `python -m MODULE ARGUMENTS` would on a system whose Python has no `fcntl`, as on Windows.

It is missing for Perdure alone: other packages look at the system's name, and import it where they know it to be.
"""

from __future__ import annotations

import builtins
import runpy
import sys
from typing import Any

_import = builtins.__import__


def without_fcntl(name: str, scope: dict[str, Any] | None = None, *rest: Any, **named: Any) -> Any:
    scope = scope or named.get("globals")
    if name == "fcntl" and str((scope or {}).get("__name__")).partition(".")[0] == "perdure":
        raise ModuleNotFoundError("No module named 'fcntl'", name=name)
    return _import(name, *(() if "globals" in named else (scope,)), *rest, **named)


if __name__ == "__main__":
    setattr(builtins, "__import__", without_fcntl)  # noqa: B010 - its type is narrower than what it takes
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
