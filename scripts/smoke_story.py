"""Uses an installed Perdure as a first user does: imports it, serves a server, calls its tool, and stops the server.

It runs with the Python of the environment in which the package was installed (`scripts/smoke.py`), and needs nothing
else. It prints one line.
"""

import asyncio
import platform
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import perdure

SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("bakery")


@server.tool()
def bake(loaves: int) -> str:
    return f"{loaves} loaves"
"""
#: Seconds. Starting takes two of them on a quiet machine.
PATIENCE = 60.0


async def called(url: str) -> str:
    async with perdure.connect(url) as client:
        result = await client.call_tool("bake", {"loaves": 3})
        return str(getattr(result.content[0], "text", result))


def main() -> None:
    program = str(Path(sys.executable).with_name("perdure"))
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    assert said == f"perdure {version('perdure')}\n" == f"perdure {perdure.__version__}\n", said
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "bakery.py").write_text(SERVER)
        serve = [program, "serve", "bakery.py:server", "--port", "0", "--store", "sqlite:log.db"]
        with subprocess.Popen(serve, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().rpartition(" ")[2].strip()
                answer = asyncio.run(asyncio.wait_for(called(url), PATIENCE))
                assert answer == "3 loaves", answer
            finally:
                server.send_signal(signal.SIGTERM)
        assert server.returncode == 0, f"the server ended with {server.returncode}"
    print(f"perdure {perdure.__version__} on Python {platform.python_version()}: imported, served and called")


if __name__ == "__main__":
    main()
