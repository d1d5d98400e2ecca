"""The configurations of proxies in `deploy/` work: real nginx and Caddy in front of two real servers on one store."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.support.clients.wire_client import Web, progress_of, text_of
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.serving import ROOT, serving
from tests.support.servers.gate_file_tools import open_gate
from tests.support.servers.in_process import until
from tests.support.stores.postgres import free_port

pytestmark = pytest.mark.anyio

DEPLOY = ROOT / "deploy"
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"

Start = Callable[[Path, int, list[int]], list[str]]


def nginx(folder: Path, port: int, servers: list[int]) -> list[str]:
    """The file as it is, but for its certificate, its port and the addresses of the servers."""
    site = (DEPLOY / "nginx/perdure.conf").read_text()
    site = re.sub(r"\n *ssl_\S+ [^;]+;", "", site).replace("listen 443 ssl", f"listen 127.0.0.1:{port}")
    addresses = " ".join(f"server 127.0.0.1:{server};" for server in servers)
    (folder / "site.conf").write_text(site.replace("server 127.0.0.1:8000;", addresses))
    main = f"""
        daemon off; pid {folder}/pid; error_log stderr; worker_processes 1;
        events {{ worker_connections 64; }}
        http {{
            access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
            fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
            include {folder}/site.conf;
        }}
    """
    (folder / "nginx.conf").write_text(main)
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def caddy(folder: Path, port: int, servers: list[int]) -> list[str]:
    site = (DEPLOY / "caddy/Caddyfile").read_text()
    addresses = " ".join(f"127.0.0.1:{server}" for server in servers)
    site = site.replace("mcp.example.com {", f"http://127.0.0.1:{port} {{").replace("127.0.0.1:8000", addresses)
    (folder / "Caddyfile").write_text(f"{{\n\tadmin off\n\tstorage file_system {folder}\n}}\n{site}")
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[None]:
    with (folder / "said").open("wb") as said:
        program = subprocess.Popen(command, stdout=said, stderr=said, env={"HOME": str(folder), "PATH": PATH})
        try:
            yield
        finally:
            program.terminate()
            program.wait(20)


@asynccontextmanager
async def site(start: Start, folder: Path) -> AsyncIterator[str]:
    """The address of a proxy in front of two servers."""
    name, store, port = start.__name__, f"sqlite:{folder / 'log.db'}", free_port()
    if shutil.which(name, path=PATH) is None:
        pytest.skip(f"{name} is not installed here")
    options = ("--store", store, "--forwarded-allow-ips", "127.0.0.1")
    async with serving(GATE_FILE_TOOLS, *options) as a, serving(GATE_FILE_TOOLS, *options) as b:
        with running(start(folder, port, [a.port, b.port]), folder):
            address = f"http://127.0.0.1:{port}"
            async with httpx2.AsyncClient() as client:

                async def answers() -> bool:
                    try:
                        return (await client.get(f"{address}/healthz")).status_code == 200
                    except httpx2.TransportError:
                        return False

                await until(answers)
            yield address


@pytest.mark.parametrize("start", [nginx, caddy])
async def test_events_come_at_once_and_a_cut_call_resumes_at_whichever_server(start: Start, tmp_path: Path) -> None:
    async with site(start, tmp_path) as address:
        web = Web(f"{address}/mcp")
        peer = await web.join()
        gate = tmp_path / "gate"
        wire = await peer.call("count", n=3, gate=str(gate), pauses=[1, 2], token=1)
        # The tool waits: a proxy that buffers would show nothing now.
        seen = await wire.messages(1)
        await wire.drop()
        older = await peer.get(wire.last_id)
        open_gate(f"{gate}.1")
        seen += await older.messages(1)
        newer = await peer.get(older.last_id)  # the newest reader wins, at either server
        assert await older.rest() == []
        open_gate(f"{gate}.2")
        seen += await newer.rest()
        assert progress_of(seen) == [1, 2, 3]
        assert text_of(seen[-1]) == "counted to 3"
        await web.aclose()


@pytest.mark.parametrize("start", [nginx, caddy])
async def test_what_stands_beside_the_endpoint_is_carried_and_nothing_else(start: Start, tmp_path: Path) -> None:
    async with site(start, tmp_path) as address, httpx2.AsyncClient(base_url=address) as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        assert "perdure_sessions" in (await client.get("/metrics")).text  # from this machine
        broker = await client.post("/resume/open", json={})
        assert broker.headers["content-type"].startswith("application/json")
        assert broker.status_code != 404
        assert (await client.get("/")).status_code == 404
        assert (await client.get("/other")).status_code == 404
