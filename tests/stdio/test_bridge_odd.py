"""Odd hosts and odd moments."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from starlette.responses import Response

from perdure import Patience
from perdure.remote.endpoint import Endpoint
from perdure.stdio import bridge as bridges
from perdure.stdio import pipes
from perdure.stdio.bridge import Bridge
from perdure.stdio.identity import Identity
from perdure.stdio.pipes import Output, lines
from perdure.stdio.resume_broker import ResumeBroker
from perdure.stdio.resume_slot import Target, open_slot
from perdure.stdio.state_files import KeysFile, PositionsFile
from tests.client.odd_server import Odd, event, events
from tests.stdio.served_hosts import RESUMED, noted_calls, question, sentences, serving_host
from tests.stdio.stdio_bridges import PATIENCE, PROMPTLY, a_host
from tests.stdio.test_bridge_trouble import _delete
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.in_process import under_uvicorn, until

pytestmark = pytest.mark.anyio


async def test_a_session_that_ends_between_token_and_handshake_is_replaced(folder: Path) -> None:
    async with serving_host(folder) as hosted:
        first = await hosted.host.session()
        await first.end()
        [file] = hosted.host.tokens.glob("*/token-*")
        kept = file.read_text()
        bridge = await hosted.host.start()
        await until(lambda: file.read_text() != kept)  # the broker has accepted the token, and given the next one
        await _delete(hosted)
        assert "capabilities" in await bridge.handshake()
        assert await bridge.call("count", n=1) == "counted to 1"
        await bridge.end()
        again = await hosted.host.session()
        assert await sentences(again) == [RESUMED]


async def test_positions_that_mean_nothing_cost_what_was_missed_alone(folder: Path) -> None:
    async with serving_host(folder) as hosted:
        first = await hosted.host.session()
        await first.call("announce", n=2)
        await first.until(lambda: first.notices() == [1, 2], "notices")
        await first.kill()
        [positions] = hosted.host.tokens.glob("*/positions-*[0-9]")
        for position in ("nonsense", "x" * 50, "é\n", ""):
            noted = json.loads(positions.read_text())
            noted["position"] = position
            positions.write_text(json.dumps(noted))
            bridge = await hosted.host.session()
            await bridge.call("announce", n=1, start=7)
            await bridge.until(lambda here=bridge: 7 in here.notices(), f"notice after {position!r}")  # type: ignore[misc]
            await bridge.kill()


async def test_the_end_of_stdin_ends_a_bridge_that_waits_for_the_server(folder: Path) -> None:
    """Also after messages that it has not read, because those before them cannot leave."""
    async with serving_host(folder) as hosted, cutting_proxy(hosted.site.port) as proxy:
        hosted.host.url = proxy.url
        bridge = await hosted.host.session("--no-resume")
        proxy.refuse()
        proxy.cut()
        for size in (3_000_000, 100_000, 100_000, 1):
            bridge.begin_call("wait", gate="x" * size)
        await bridge.logged("cannot be reached")
        async with asyncio.timeout(PROMPTLY):
            assert await bridge.end() == 0
        assert len(bridge.told()) == 1


async def test_a_result_that_the_host_has_when_it_leaves_is_not_reported_again(folder: Path) -> None:
    """T10: the bridge sees that the host leaves before it can know that an answer, or a report, is written."""
    async with serving_host(folder) as hosted:
        answered = await hosted.host.start(held="counted to 1")
        await answered.handshake()
        assert await answered.call("count", n=1) == "counted to 1"
        assert await answered.end() == 0
        assert noted_calls(hosted) == []
        killed = await hosted.host.session()
        killed.begin_call("wait", gate="w")
        await hosted.saw("waiting at w", killed)
        await killed.kill()
        hosted.tool_server.open("w")
        reporting = await hosted.host.start(held="went through w")
        await reporting.handshake()
        await reporting.until(lambda: len(reporting.reports()) == 1, "the report")
        assert await reporting.end() == 0
        assert noted_calls(hosted) == []


async def test_a_notice_that_the_host_has_when_it_leaves_is_not_given_again(folder: Path) -> None:
    """The same for what the standalone stream brought. What comes while the bridge leaves is for the next one."""
    async with serving_host(folder) as hosted:
        first = await hosted.host.start(held="notice://7")
        await first.handshake()
        for number in (7, 8):
            await first.request("resources/subscribe", {"uri": f"notice://{number}"})
        await hosted.tool_server.update("notice://7")
        await first.until(lambda: first.notices() == [7], "the notice")
        assert await first.end() == 0
        second = await hosted.host.session()
        await hosted.tool_server.update("notice://8")
        await second.until(lambda: 8 in second.notices(), "the next notice")
        assert second.notices() == [8]


async def test_a_host_that_leaves_and_does_not_read_ends_the_bridge_and_misses_nothing(folder: Path) -> None:
    """The bridge waits a moment for the host to take what is being written; the next one reports the result."""
    async with serving_host(folder) as hosted:
        bridge = await hosted.host.session()
        bridge.stop_reading()
        bridge.begin_call("flood", token=1, n=100, size=20_000)  # more than a pipe holds
        await hosted.saw("flooded", bridge)
        bridge.close_input()
        ending = asyncio.create_task(bridge.wait())
        await until(lambda: not Path(f"/proc/{bridge.pid}").exists())
        bridge.read_again()
        assert await ending == 0
        again = await hosted.host.session()
        await again.until(lambda: len(again.reports()) == 1, "the report")
        assert again.reports()[0]["result"]["structuredContent"] == {"result": "flooded 100"}


async def test_a_request_that_is_repeated_in_a_new_session_is_still_reported(folder: Path) -> None:
    async with serving_host(folder) as hosted:
        bridge = await hosted.host.session()
        await _delete(hosted)
        bridge.begin_call("wait", gate="g")
        await hosted.saw("waiting at g", bridge)
        await bridge.kill()
        hosted.tool_server.open("g")
        again = await hosted.host.session()
        await again.until(lambda: len(again.reports()) == 1, "the report")


async def test_a_position_that_the_server_refuses_is_given_up(folder: Path) -> None:
    """And one that no header can carry, since none ends with a space, is not asked for."""
    odd = Odd()
    said = event(
        b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}', at="odd "
    )  # no header ends with a space
    again = event(b'{"jsonrpc":"2.0","method":"notifications/prompts/list_changed"}', at="one")
    answers = [events(said), events(again), Response(status_code=400), events(said)]
    odd.get = lambda _: answers.pop(0) if answers else Response(status_code=405)
    async with under_uvicorn(odd.app) as port, a_host(folder, f"http://127.0.0.1:{port}/mcp") as host:
        bridge = await host.session()
        await bridge.until(lambda: len(bridge.heard) == 3, "what came before and after")


async def test_an_answer_is_known_however_its_id_is_spelled(folder: Path) -> None:
    asked = b'{"jsonrpc":"2.0","id":"\\u00e9\\/","method":"ping"}'
    odd = Odd()
    answers = [events(event(asked, at="one"))]
    odd.get = lambda _: answers.pop(0) if answers else Response(status_code=405)
    async with under_uvicorn(odd.app) as port, a_host(folder, f"http://127.0.0.1:{port}/mcp") as host:
        bridge = await host.session()
        await bridge.until(lambda: len(bridge.asked()) == 1, "the question")
        bridge.say_bytes('{"jsonrpc":"2.0","id":"é/","result":{}}\n'.encode())
        await until(lambda: len(odd.replies) == 1)


async def test_a_handshake_has_one_limit_for_the_broker_and_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Hosts give up after 30 s, and the sentence must come before that; a silent server takes 5 s for each word."""
    monkeypatch.setattr(bridges, "HANDSHAKE_SECONDS", 0.2)
    identity = Identity(pid=7, start=1, boot="b", space="s")
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    heard, said = os.pipe()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server, httpx2.AsyncClient() as client:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
        slot = await open_slot(folder / "tokens", identity, Target(url=url))
        assert slot.keep("a" * 64)
        endpoint = Endpoint(client, url, on_401="wants a token")
        broker = ResumeBroker(endpoint, slot)
        bridge = Bridge(endpoint, Output(said), broker, PositionsFile(None), KeysFile(), patience=Patience())

        async def host() -> AsyncIterator[bytes]:
            yield json.dumps(request).encode()
            assert json.loads(await asyncio.to_thread(os.read, heard, 1000))["error"]["code"] == -31020

        async with asyncio.timeout(PROMPTLY):
            await bridge.run(host(), lambda: None)
        assert slot.token() == "a" * 64
        slot.release()
    assert "cannot be reached" in caplog.text


async def test_a_hosts_answer_that_is_refused_ends_the_question(folder: Path) -> None:
    """JavaScript writes half an emoji as an escape, and no server takes it: the tool must not wait for ever."""
    async with serving_host(folder) as hosted:
        bridge = await hosted.host.session(elicitation={})
        call = bridge.begin_call("ask", question="?")
        asked = json.dumps((await question(bridge))["id"]).encode()
        content = b'{"action":"accept","content":{"answer":"\\ud83d"}}'
        bridge.say_bytes(b'{"jsonrpc":"2.0","id":' + asked + b',"result":' + content + b"}\n")
        answer = await bridge.answer(call)
        assert "cannot be sent on: it holds a lone surrogate" in json.dumps(answer)


async def test_pipes_that_do_not_block_are_waited_for() -> None:
    """Another process that shares the pipe or the terminal may have set it so; it has not ended for that."""
    heard, said = os.pipe()
    os.set_blocking(heard, False)
    os.set_blocking(said, False)
    output = Output(said)
    coming = lines(heard)
    first = asyncio.ensure_future(anext(coming))
    await asyncio.sleep(0)  # it reads, and there is nothing yet
    await output.write("x" * 300_000)
    assert await first == b"x" * 300_000
    os.close(said)
    assert [line async for line in coming] == []
    os.close(heard)


async def test_what_is_to_be_written_while_the_output_settles_is_left_to_the_next_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line that is on its way is written, and its writer goes on first."""
    monkeypatch.setattr(pipes, "SETTLE_SECONDS", PATIENCE)  # the machine may be busy
    heard, said = os.pipe()
    output, noted = Output(said), []

    async def deliver(line: str) -> None:
        await output.deliver(line)
        noted.append(line[:1])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(deliver("x" * 300_000))  # more than the pipe holds
        settling = tasks.create_task(output.settle())
        await asyncio.sleep(0)  # both have begun, in this order
        late = tasks.create_task(deliver("late"))
        coming = lines(heard)
        assert await anext(coming) == b"x" * 300_000
        await settling
        assert noted == ["x"]
        late.cancel()
    os.close(said)
    assert [line async for line in coming] == []
    os.close(heard)
