"""`perdure call` and `perdure list`, against real servers: what they print, ask, survive and refuse."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from perdure.cli.tool_calls import listing_lines
from tests.cli.command_line_tools import has_noted
from tests.cli.pty_program import on_a_pty
from tests.support.processes.serving import Served, serving
from tests.support.processes.starting import can_fork, start
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

KITCHEN = "tests.cli.command_line_tools:server"
ERAS = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
needs_pty = pytest.mark.skipif(not can_fork(), reason="the program is given its terminal as a fork")


async def perdure(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Status, output and errors of a command."""
    program = await start("perdure", *arguments, env={**os.environ, **(env or {})})
    said, errors = await program.communicate()
    return await program.wait(), said.decode(), errors.decode()


async def refusal(*arguments: str) -> str:
    """The one line that a command refuses with, without the name before it."""
    status, said, errors = await perdure(*arguments)
    assert (status, said, errors.count("\n")) == (2, "", 1), (status, said, errors)
    return errors.removeprefix("perdure: ").rstrip()


async def test_a_server_is_tried_from_the_command_line(tmp_path: Path) -> None:
    async with serving(KITCHEN, "--store", "memory:") as served:
        await _tools_are_listed(served)
        await _calls_print_results(served)
        await _bad_input_calls_nothing(served)


async def _tools_are_listed(served: Served) -> None:
    (status, said, errors), (_, whole, _) = await asyncio.gather(
        perdure("list", served.url), perdure("list", served.url, "--json", "--mode", "2026-07-28")
    )
    assert (status, errors) == (0, "")
    for line in (
        "kitchen 2, MCP 2025-11-25",
        "Ask the cook.",
        "  bake  (idempotent)",
        "    Bake bread, loaf by loaf.",
        "      loaves  integer  How many",
        "      oven    wood | gas, default wood",
        "      dough  object of flour, grams  What is kneaded.",
        "  menu://today  (text/plain)",
        "      bread  (required)",
    ):
        assert line in said.splitlines()
    found = json.loads(whole)
    assert found["protocolVersion"] == "2026-07-28"
    assert [tool["name"] for tool in found["tools"]] == ["bake", "knead", "order", "wait", "burn"]
    assert [one["uri"] for one in found["resources"]] == ["menu://today"]
    assert [one["name"] for one in found["prompts"]] == ["recipe"]


PANTRY = """\
import base64
from pathlib import Path

from mcp.server.mcpserver import Image, MCPServer

print("the pantry opens")
mcp = MCPServer("pantry")
DATA = bytes(range(256))

@mcp.tool()
def picture(count: int = 1) -> list[Image]:
    print("a tool prints")
    return [Image(data=DATA, format="png")] * count

@mcp.tool()
def recipe() -> str:
    return "flour, water"

@mcp.resource("pantry://salt", mime_type="application/octet-stream")
def salt() -> bytes:
    return DATA
"""


async def test_a_file_is_served_for_one_call_and_what_is_no_text_is_saved(tmp_path: Path) -> None:
    (pantry := tmp_path / "pantry.py").write_text(PANTRY)
    out, data = tmp_path / "out.png", bytes(range(256))
    one, typo = await asyncio.gather(
        perdure("call", f"{pantry}:mcp", "picture", "--output", str(out)), perdure("list", str(tmp_path / "pantyr.py"))
    )
    assert one[:2] == (0, "")
    assert "the pantry opens" in one[2]  # not on the output, where the result belongs
    assert (typo[0], typo[2]) == (2, f"perdure: no file '{tmp_path}/pantyr.py'; did you mean '{pantry}'?\n")
    async with serving(str(pantry), "--store", "memory:") as served:
        two, text, raw, unsaved = await asyncio.gather(
            perdure("call", served.url, "picture", "count=2", "--output", str(tmp_path / "two.png")),
            perdure("call", served.url, "recipe", "--output", str(tmp_path / "recipe.txt")),
            perdure("call", served.url, "pantry://salt", "--output", str(tmp_path / "salt")),
            perdure("call", served.url, "picture"),
        )
    assert [found[0] for found in (two, text, raw)] == [0] * 3
    assert [file.read_bytes() for file in (out, tmp_path / "two.png", tmp_path / "two-2.png")] == [data] * 3
    assert ((tmp_path / "salt").read_bytes(), (tmp_path / "recipe.txt").read_text()) == (data, "flour, water\n")
    assert unsaved[:2] == (0, "[image: image/png, 256 B; --output FILE saves it]\n")


async def test_a_server_without_a_version_has_only_its_name_in_the_first_line() -> None:
    offers = {"serverInfo": {"name": "bakery", "version": ""}, "protocolVersion": "2025-11-25"}
    empty: dict[str, Any] = {"tools": [], "resources": [], "resourceTemplates": [], "prompts": []}
    assert list(listing_lines(offers | empty)) == ["bakery, MCP 2025-11-25", "", "No tools"]


async def _calls_print_results(served: Served) -> None:
    baked, kneaded, burnt, read, asked, prompt = await asyncio.gather(
        perdure("call", served.url, "bake", "loaves=2", "oven=gas"),
        perdure("call", served.url, "knead", 'dough={"flour": "rye"}', "seeds=7", "seeds=8", "hot=true", "--json"),
        perdure("call", served.url, "burn"),
        perdure("call", served.url, "menu://today"),
        perdure("call", served.url, "order"),
        perdure("call", served.url, "recipe", "bread=7", "--prompt"),
    )
    assert baked == (
        0,
        "2 loaves from the gas oven\n",
        "bake: 1 of 2 (50%) loaf 1\nbake: 2 of 2 (100%) loaf 2\n",
    )
    assert json.loads(kneaded[1])["structuredContent"] == {
        "dough": {"flour": "rye", "grams": 500},
        "seeds": ["7", "8"],
        "turns": None,
        "hot": True,
        "salt": None,
    }
    assert burnt == (1, "", "Error executing tool burn\n")
    assert read == (0, "rye, spelt\n", "")
    assert prompt == (0, "user: How do I bake 7?\n", "")
    refused = "perdure: not answered, because stdin is not a terminal: What shall it be?"
    assert asked == (0, "cancel\n", f"server: info: the cook listens\n{refused}\n")


async def _bad_input_calls_nothing(served: Served) -> None:
    url = served.url
    lines = await asyncio.gather(
        refusal("call", url, "bke"),
        refusal("call", url, "bake", "loaves=many"),
        refusal("call", url, "recipe", "--prompt"),
        refusal("call", url.replace("/mcp", "/elsewhere"), "bake"),
        refusal("list", url.removesuffix("/mcp")),
        refusal("list", "http://127.0.0.1:1/mcp", "--patience", "0"),
    )
    assert list(lines) == [
        f"{url} has no tool 'bke'; did you mean 'bake'?",
        "bake: loaves: 'many' is not of the type integer",
        "recipe needs bread=…; perdure list shows its arguments",
        f"there is no MCP server at {url.replace('/mcp', '/elsewhere')} (HTTP 404)",
        f"there is no MCP server at {url.removesuffix('/mcp')} (HTTP 404); its address has a path, most often /mcp",
        "no server answers at http://127.0.0.1:1/mcp: [Errno 111] Connect call failed ('127.0.0.1', 1)",
    ]


@ERAS
async def test_a_call_goes_on_over_a_cut_and_over_a_killed_server(tmp_path: Path, mode: str) -> None:
    log, gate = tmp_path / "diary", tmp_path / "gate"
    options = ("--store", f"sqlite:{tmp_path / 'log.db'}", "--retry", "50ms", "--task-after", "60")
    async with serving(KITCHEN, *options) as first, cutting_proxy(first.port) as proxy:
        cut = proxy.cut_after(b"loaf 1")
        words = ("loaves=3", f"gate={gate}", f"log={log}")
        call = asyncio.create_task(perdure("call", proxy.url, "bake", *words, "--mode", mode))
        await cut.passed()
        await until(lambda: len(diary(log)) == 1)
        # The second connection of the call: behind the standalone stream, or behind discover, list and the first one.
        await (proxy.answered("GET", times=2) if mode == "legacy" else proxy.answered("POST", times=4))
        await first.kill()
        async with serving(KITCHEN, *options, port=first.port) as second:
            open_gate(gate)
            status, said, errors = await call
        assert (status, said) == (0, "3 loaves from the wood oven\n")
        assert [pid for _, pid in diary(log)] == [first.pid, second.pid]
        assert f"perdure: {proxy.url} answers again\n" in errors


@ERAS
async def test_a_server_that_does_not_answer_yet_is_waited_for(mode: str) -> None:
    """Its start, or a kill in that moment, resets connections."""
    async with serving(KITCHEN, "--store", "memory:") as served, cutting_proxy(served.port) as proxy:
        proxy.refuse()
        call = asyncio.create_task(perdure("call", proxy.url, "bake", "loaves=1", "--mode", mode, "--patience", "90s"))
        await until(lambda: proxy.accepted >= 2)
        proxy.accept()
        status, said, errors = await call
    assert (status, said) == (0, "1 loaves from the wood oven\n")
    assert errors.startswith(f"perdure: waiting for {proxy.url}, for 90s at most: ")
    assert f"perdure: {proxy.url} answers again\n" in errors


#: A pattern that takes for ever to match what the server answers.
ENDLESS = {"type": "object", "properties": {"said": {"type": "string", "pattern": "^(a+)+$"}}}
ESCAPES = "\x1b[31m \x9b31m \u202e \x07"


class Liar(BaseHTTPRequestHandler):
    """A server that does not keep to the protocol, nor to its own schemas."""

    protocol_version = "HTTP/1.1"
    tools: ClassVar = [
        {"name": "lie", "inputSchema": {"type": "object"}, "outputSchema": ENDLESS},
        {"name": "mumble", "description": ESCAPES, "inputSchema": {"type": "object"}},
    ]

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        match message["method"], message.get("params"):
            case "initialize", _:
                about = {"serverInfo": {"name": "liar", "version": ESCAPES}, "capabilities": {"tools": {}}}
                self._answer(message, about | {"protocolVersion": "2025-11-25"})
            case "tools/list", _:
                self._answer(message, {"tools": self.tools})
            case "tools/call", {"name": "lie"}:
                self._answer(message, {"content": [], "structuredContent": {"said": "a" * 40 + "!"}})
            case "tools/call", _:
                self._answer(message, {"content": [{"type": "text", "text": 5}]})
            case _:
                self._answer(message, None)

    def do_GET(self) -> None:
        self.send_error(405)

    def _answer(self, message: dict[str, Any], result: object) -> None:
        body = b"" if "id" not in message else json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
        data = body.encode() if isinstance(body, str) else body
        self.send_response(200 if data else 202)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


async def test_a_server_that_does_not_keep_to_the_protocol_is_told_of_in_one_line_without_its_escape_codes() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/mcp"
            lie, mumble, listed = await asyncio.gather(
                perdure("call", url, "lie", "--mode", "legacy"),
                perdure("call", url, "mumble", "--mode", "legacy"),
                perdure("list", url, "--json", "--mode", "legacy"),
            )
        finally:
            server.shutdown()
            thread.join()
    assert (lie[0], json.loads(lie[1]), lie[2]) == (0, {"said": "a" * 40 + "!"}, "")
    said = "perdure: the server's answer is not as MCP has it: content.0.TextContent.text: "
    assert (*mumble[:2], mumble[2][: len(said)], mumble[2].count("\n")) == (1, "", said, 1)
    assert (listed[0], listed[1].removesuffix("\n").isprintable()) == (0, True)
    assert json.loads(listed[1])["tools"][1]["description"] == ESCAPES


@needs_pty
@ERAS
async def test_a_tool_asks_on_the_terminal_and_an_answer_that_does_not_fit_is_asked_for_again(mode: str) -> None:
    async with (
        serving(KITCHEN, "--store", "memory:") as served,
        on_a_pty("perdure", "call", served.url, "order", "--mode", mode) as user,
    ):
        for question, answer in (
            ("server: info: the cook listens", ""),
            ("What shall it be?", ""),
            ("Bread (rye | spelt): ", "wheat\n"),
            ("'wheat' is not one of 'rye', 'spelt'.", ""),
            ("Bread (rye | spelt): ", "spelt\n"),
            ("Loaves (integer) [2]: ", "13\n"),
            ("13 is not in the range 1<=x<=12.", ""),
            ("Loaves (integer) [2]: ", "\n"),
            ("Sliced (y/n): ", "\n"),
            ("Sliced (y/n): ", "y\n"),
            ("Weight (number) [1.5]: ", "2.25\n"),
            ("Name on the box (text) []: ", "Ada\n"),
        ):
            await user.sees(question)
            user.types(answer)
        await user.sees('{"bread":"spelt","loaves":2,"sliced":true,"weight":2.25,"name":"Ada"}')
        assert await user.end() == 0
        assert "yawns" not in user.screen


@needs_pty
async def test_on_a_terminal_progress_is_drawn_and_taken_away_and_a_question_can_be_declined(tmp_path: Path) -> None:
    async with serving(KITCHEN, "--store", "memory:") as served:
        async with on_a_pty("perdure", "call", served.url, "bake", "loaves=4") as user:
            await user.sees("\r\x1b[Kbake: 2 of 4 (50%) loaf 2")
            await user.sees("\r\x1b[K4 loaves from the wood oven")
            assert await user.end() == 0
        async with on_a_pty("perdure", "call", served.url, "order") as user:
            await user.sees("Bread (rye | spelt): ")
            user.types("\x04")
            await user.sees("decline\r\n")
            assert await user.end() == 0


@ERAS
async def test_ctrl_c_cancels_the_call_at_the_server(tmp_path: Path, mode: str) -> None:
    log = tmp_path / "diary"
    async with serving(KITCHEN, "--store", "memory:") as served:
        program = await start("perdure", "call", served.url, "wait", f"log={log}", "--mode", mode, env=os.environ)
        await until(lambda: has_noted(log, "began"))
        program.send_signal(signal.SIGINT)
        assert (await program.communicate(), await program.wait()) == ((b"", b"perdure: cancelled\n"), 130)
        await until(lambda: has_noted(log, "cancelled"))


async def test_the_token_comes_from_a_file_and_its_absence_is_told(tmp_path: Path) -> None:
    tokens, token = tmp_path / "tokens", tmp_path / "token"
    tokens.write_text("ada:0123456789abcdef\n")
    token.write_text("0123456789abcdef\n")
    for file in (tokens, token):
        file.chmod(0o600)
    async with serving(KITCHEN, "--store", "memory:", "--tokens", str(tokens)) as served:
        given, missing = await asyncio.gather(
            perdure("call", served.url, "bake", "loaves=1", "--token-file", str(token)),
            refusal("call", served.url, "bake", "loaves=1"),
        )
        assert given[:2] == (0, "1 loaves from the wood oven\n")
        assert missing == f"{served.url} wants a token: see --token-env and --token-file (HTTP 401)"
