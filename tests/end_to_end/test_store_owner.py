"""A store belongs to one server: another one that starts on it is refused, and a rename has a way through."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import perdure
from perdure.errors import Misuse
from tests.cli.test_sessions import ended, lines, start
from tests.support.clients.wire_client import Web
from tests.support.processes.serving import serving
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

SDK = "from mcp.server.mcpserver import MCPServer\nserver = MCPServer({name})\n"
FAST = "from fastmcp import FastMCP\nserver = FastMCP({name})\n"
STORES = [
    pytest.param(lambda: "sqlite:perdure.db", id="sqlite"),
    pytest.param(store_url, id="postgres", marks=pytest.mark.long),
]


def write(folder: Path, file: str, name: str = "", code: str = SDK) -> Path:
    path = folder / file
    path.write_text(code.format(name=repr(name) if name else ""))
    return path


async def refusal(folder: Path, file: str, store: str) -> str:
    """The one line of a server that does not start."""
    status, said, errors = await ended(await start(folder, "serve", file, "--port", "0", "--store", store))
    assert (status, said, errors.count("\n")) == (2, "", 1), errors
    return errors


async def serves(folder: Path, file: str, store: str, *options: str) -> None:
    async with serving(file, "--store", store, *options, cwd=folder) as served:
        web = Web(served.url)
        await web.join()
        await web.aclose()
        assert await served.stop() == 0


@pytest.mark.parametrize("address", STORES)
async def test_another_server_is_refused_until_the_store_is_disowned(
    tmp_path: Path, address: Callable[[], str]
) -> None:
    store = address()
    a, b = write(tmp_path, "a.py", "bakery"), write(tmp_path, "b.py", "mill")
    async with serving("a.py", "--store", store, cwd=tmp_path):
        said = await refusal(tmp_path, "b.py", store)
        assert f"belongs to the server 'bakery' ({a}), and this is 'mill' ({b}); " in said
        assert "give this one a store of its own (--store sqlite:mill.db)" in said
        command = re.search(r"`perdure (store disown \S+)`", said)
        assert command is not None
        with pytest.raises(Misuse, match="belongs to the server 'bakery'"):
            async with perdure.asgi(_named("mill"), store=_beside(tmp_path, store)).lifespan():
                pass
        async with perdure.asgi(_named("bakery"), store=_beside(tmp_path, store)).lifespan():
            pass
    [told] = await lines(tmp_path, *command[1].split())
    assert told.endswith(f"belonged to 'bakery' ({a}); it belongs to the next server that starts")
    await serves(tmp_path, "b.py", store)
    assert "belongs to the server 'mill'" in await refusal(tmp_path, "a.py", store)


def _named(name: str) -> object:
    from mcp.server.mcpserver import MCPServer

    return MCPServer(name)


def _beside(folder: Path, store: str) -> str:
    return store.replace("sqlite:", f"sqlite:{folder}/")


async def test_a_copy_beside_a_server_is_another_server_and_a_renamed_file_is_the_same(tmp_path: Path) -> None:
    store = "sqlite:perdure.db"
    a = write(tmp_path, "a.py", "demo")
    write(tmp_path, "b.py", "demo")
    await serves(tmp_path, "a.py", store)
    assert "belongs to the server 'demo'" in await refusal(tmp_path, "b.py", store)
    write(tmp_path, "a.py", "bakery")  # another name in the same file
    await serves(tmp_path, "a", store)
    a.rename(tmp_path / "c.py")
    await serves(tmp_path, "c.py", store)
    write(tmp_path, "a.py", "new")  # it does not become the owner because a file of this name was
    assert "belongs to the server 'bakery'" in await refusal(tmp_path, "a.py", store)


@pytest.mark.parametrize("code", [SDK, FAST], ids=["sdk", "fastmcp"])
async def test_servers_without_a_name_go_by_their_file(tmp_path: Path, code: str) -> None:
    """FastMCP makes up another name for each process: workers and restarts are the same server all the same."""
    store = "sqlite:perdure.db"
    write(tmp_path, "a.py", code=code)
    write(tmp_path, "b.py", code=code)
    await serves(tmp_path, "a.py", store, "--workers", "2")
    await serves(tmp_path, "a.py", store)
    assert "belongs to the server 'a'" in await refusal(tmp_path, "b.py", store)
