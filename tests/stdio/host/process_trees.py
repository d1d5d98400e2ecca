"""Real process trees: a bridge that does nothing, started by launchers and hosts of all kinds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Stands in for us: says which process it is, and waits for the end of its input. A shell starts fast.
_BRIDGE = "#!/bin/sh\necho $$\nread -r _\n"

#: Starts what its arguments say, as a child, and waits: a host, or, under another name, a launcher.
_PYTHON = "import subprocess, sys\nsys.exit(subprocess.run(sys.argv[1:]).returncode)\n"
_NODE = 'require("child_process").spawn(process.argv[2], process.argv.slice(3), { stdio: "inherit" });\n'

#: Wrappers called `perdure`: they start the bridge with their own arguments.
_PYTHON_WRAPPER = "import subprocess, sys\nsys.exit(subprocess.run([{bridge!r}, *sys.argv[1:]]).returncode)\n"
_NODE_WRAPPER = (
    '#!/usr/bin/env node\nrequire("child_process").spawn("{bridge}", process.argv.slice(2), {{ stdio: "inherit" }});\n'
)
_SHELL_WRAPPER = '#!/bin/sh\n"{bridge}" "$@"\nexit $?\n'


@dataclass(frozen=True, kw_only=True)
class ProcessTree:
    """A folder with a bridge (`bin/perdure`) and programs that start it."""

    root: Path
    python: str = sys.executable

    @property
    def environment(self) -> Mapping[str, str]:
        tools = str(Path(self.python).parent)
        path = os.pathsep.join([str(self.root / "bin"), os.environ["PATH"], tools])
        home = {"HOME": str(self.root), "npm_config_update_notifier": "false", "UV_CACHE_DIR": str(self.root / "uv")}
        return {**os.environ, **home, "PATH": path, "PYTHONPATH": str(self.root / "modules")}

    @contextlib.contextmanager
    def started(self, command: Sequence[str], *, program: str | None = None) -> Iterator[tuple[int, int]]:
        """The pids of what was started and of the bridge that came of it. `program` runs under the command's name."""
        pipe = subprocess.PIPE
        words = [word.replace("ROOT", str(self.root)).replace("PYTHON", self.python) for word in command]
        process = subprocess.Popen(
            words,
            executable=program,
            env=self.environment,
            cwd=self.root,
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            yield process.pid, int(process.stdout.readline())
            process.stdin.close()
            process.stdout.close()


def make_process_tree(root: Path) -> ProcessTree:
    bridge = root / "bin" / "perdure"
    _write(bridge, _BRIDGE)
    _write(root / "host.py", _PYTHON)
    _write(root / "modules/host.py", _PYTHON)
    _write(root / "host.js", _NODE)
    _write(root / "start.sh", "perdure stdio URL\nexit $?\n")
    _write(root / "exec.sh", "exec perdure stdio URL\n")
    _write(root / "bin/pipx", f"#!{sys.executable}\nimport sys; sys.argv.pop(1)\n{_PYTHON}")
    _write(root / "modules/perdure/__main__.py", _PYTHON_WRAPPER.format(bridge=str(bridge)))
    _write(root / "wrapped/python/perdure", _PYTHON_WRAPPER.format(bridge=str(bridge)))
    _write(root / "wrapped/node/perdure.js", _NODE_WRAPPER.format(bridge=bridge))
    _write(root / "wrapped/shell/perdure", _SHELL_WRAPPER.format(bridge=bridge))
    _write(root / "package/package.json", '{"name": "perdure", "version": "1.0.0", "bin": {"perdure": "run.js"}}')
    _write(root / "package/run.js", _NODE_WRAPPER.format(bridge=bridge))
    _make_wheel(root / "perdure-1.0.0-py3-none-any.whl", str(bridge))
    return ProcessTree(root=root)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def _make_wheel(path: Path, bridge: str) -> None:
    """A package whose command becomes the bridge: what a real installer needs, and nothing to download."""
    about = "perdure-1.0.0.dist-info"
    files = {
        "stand_in.py": f"import os, sys\ndef main():\n    os.execv({bridge!r}, sys.argv)\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: perdure\nVersion: 1.0.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": "[console_scripts]\nperdure = stand_in:main\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
