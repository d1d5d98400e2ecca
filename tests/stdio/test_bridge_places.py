"""Places where a bridge is started: those that cannot work are reported, and never end in a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.client.odd_server import WELCOME, Odd, json_of, result
from tests.stdio.served_hosts import sentences
from tests.stdio.stdio_bridges import a_host
from tests.stdio.test_bridge_trouble import _self_signed, answering
from tests.support.processes.serving import python_path
from tests.support.servers.in_process import under_uvicorn

pytestmark = pytest.mark.anyio

PROXY = "the proxy that the environment names cannot be used: "
CERTIFICATES = "the certificates that are trusted (SSL_CERT_FILE) cannot be read: "


async def test_an_address_in_capitals_is_trusted_no_more_than_another(folder: Path) -> None:
    async with answering("200 OK", tls=_self_signed(folder)) as url, a_host(folder, "") as host:
        bridge = await host.start("--no-resume", url=url.replace("http:", "HTTPS:"))
        assert (await bridge.handshake())["error"]["data"] == {"reason": "tls"}


@pytest.mark.parametrize(
    ("environ", "scheme", "sentence"),
    [
        ({"HTTP_PROXY": "http://me:secret@127.0.0.1:x"}, "http", PROXY),
        ({"SSL_CERT_FILE": "nowhere"}, "https", CERTIFICATES),
    ],
)
async def test_an_environment_that_cannot_work_is_reported_to_the_host(
    folder: Path, environ: dict[str, Any], scheme: str, sentence: str
) -> None:
    async with a_host(folder, f"{scheme}://127.0.0.1:9/mcp") as host:
        bridge = await host.start(**environ)
        refused = await bridge.handshake()
        assert refused["error"]["code"] == -31021
        assert refused["error"]["message"].startswith(sentence)
        assert await bridge.end() == 2
        assert (await sentences(bridge))[-1] == refused["error"]["message"]
        assert "secret" not in bridge.log.read_text()


def test_a_bridge_whose_directory_is_gone_works_and_resumes_nothing(folder: Path) -> None:
    """T7: its target is not known, so no token is offered."""
    gone = folder / "gone"
    gone.mkdir()
    command = [sys.executable, "-P", "-m", "perdure", "stdio", "http://127.0.0.1:9/mcp", "--patience", "0s"]
    start = f"import os; os.rmdir({str(gone)!r}); os.execv({sys.executable!r}, {command!r})"
    request = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    ended = subprocess.run(
        (sys.executable, "-c", start),
        cwd=gone,
        env={**os.environ, "PYTHONPATH": python_path(), "PERDURE_TOKEN_DIR": str(folder / "tokens")},
        input=json.dumps(request).encode(),
        capture_output=True,
        timeout=110,
        check=True,
    )
    assert json.loads(ended.stdout) == {"jsonrpc": "2.0", "id": 1, "result": {}}
    assert b"Session resume disabled for this instance: " in ended.stderr
    assert not (folder / "tokens").exists()


async def test_a_server_on_this_machine_is_not_asked_for_through_a_proxy(folder: Path) -> None:
    async with under_uvicorn(Odd().app) as port, a_host(folder, f"http://localhost:{port}/mcp") as host:
        bridge = await host.start("--patience", "1s", ALL_PROXY="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9")
        assert "capabilities" in await bridge.handshake()


def test_a_bridge_without_a_host_says_so() -> None:
    start = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    ended = subprocess.run(
        (sys.executable, "-c", start, "-m", "perdure", "stdio", "http://127.0.0.1:9/mcp"),
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        timeout=110,
        check=False,
    )
    assert ended.stderr.decode() == "perdure: stdin or stdout is closed: a host speaks MCP over them\n"
    assert ended.returncode == 2


async def test_a_port_that_is_none_is_reported_and_ctrl_c_ends_what_only_refuses(folder: Path) -> None:
    async with a_host(folder, "http://127.0.0.1:99999/mcp") as host:
        bridge = await host.start()
        refused = await bridge.handshake()
        assert refused["error"]["message"] == "http://127.0.0.1:99999/mcp is not an address: there is no port 99999"
        await sentences(bridge)
        assert await bridge.kill(signal.SIGINT) == 130
        assert len(bridge.told()) == 1


async def test_a_handshake_is_answered_whatever_happens(folder: Path) -> None:
    """The session's name is one that no header can carry. That is not foreseen, and the host does not wait for ever."""
    odd = Odd()
    odd.initialize = lambda key: json_of(result(key, **WELCOME), headers={"mcp-session-id": "\xe9"})
    async with under_uvicorn(odd.app) as port, a_host(folder, f"http://127.0.0.1:{port}/mcp") as host:
        bridge = await host.start()
        assert (await bridge.handshake())["error"]["code"] == -32603
