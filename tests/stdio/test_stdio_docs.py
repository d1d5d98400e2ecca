"""What docs/stdio.md shows is valid, runs, and is what the bridge says."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.remote.message import messages_in
from perdure.stdio.host_side import report_of
from perdure.stdio.state_files import RunningCall
from tests.stdio import tiny_server
from tests.stdio.test_stock_hosts import started
from tests.support.processes.serving import ROOT
from tests.support.servers import basic_tools
from tests.support.servers.in_process import serve

PAGE = (ROOT / "docs" / "stdio.md").read_text()
SNIPPETS = [json.loads(text) for text in re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
SENTENCES = re.findall(
    r"^\| `([^`]+)`(?:, `([^`]+)`)? \|",
    PAGE.partition("## What the log says")[2].partition("## Files")[0],
    re.MULTILINE,
)


def servers(snippet: dict[str, Any]) -> list[dict[str, Any]]:
    [named] = snippet.values()
    return list(named.values())


@pytest.mark.anyio
async def test_every_configuration_starts_a_bridge(folder: Path) -> None:
    """A host would do the same: the command, its arguments and its environment, with an address that answers."""
    assert len(SNIPPETS) == 3
    shutil.copy(tiny_server.__file__, folder / "bakery.py")
    async with serve(basic_tools.server) as site:
        here = {"http://127.0.0.1:8000/mcp": site.url, "python": sys.executable, "/home/ada": str(folder)}
        here |= {"/home/ada/bakery.py": str(folder / "bakery.py")}
        for snippet in SNIPPETS:
            for server in servers(snippet):
                assert server["command"] == "perdure"
                arguments = [here.get(word, word) for word in server["args"]]
                words = ["env", *(f"{name}={value}" for name, value in server.get("env", {}).items())]
                async with started([*words, sys.executable, "-m", "perdure", *arguments], folder) as bridge:
                    assert "protocolVersion" in await bridge.handshake()


def test_the_report_looks_as_the_page_says() -> None:
    [shown] = re.findall(r"^```json report\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    result = json.dumps(json.loads(shown)["params"]["data"]["result"])
    answer = f'{{"jsonrpc":"2.0","id":3,"result":{result}}}'
    noted = RunningCall(id="3", method="tools/call", name="bake")
    assert json.loads(report_of(noted, *messages_in(answer))) == json.loads(shown)


def test_every_sentence_of_the_table_is_in_the_source() -> None:
    source = "".join(
        path.read_text() for room in ("stdio", "remote") for path in (ROOT / "src/perdure" / room).rglob("*.py")
    )
    plain = re.sub(r"\{[^{}]*\}", "…", source)
    said = [sentence for row in SENTENCES for sentence in row if sentence]
    assert len(said) > 8
    for sentence in said:
        for part in sentence.split("…"):
            assert part.strip(" :") in plain, sentence
