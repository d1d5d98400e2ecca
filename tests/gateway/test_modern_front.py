"""Clients of 2026-07-28 in front of a stdio server with sessions: plain calls, rounds, tasks, keys, listening."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from perdure._core.envelope import CANCEL, LOG_LEVEL
from tests.clients.python_clients import PythonClient, python_client
from tests.clients.stock_client import USER_SAYS
from tests.gateway.gateways import (
    CANCELLED,
    OUTCOME_UNKNOWN,
    UNAVAILABLE,
    Gateway,
    Names,
    error_of,
    gateway,
    has_process,
    methods_of,
    text_of_call,
)
from tests.support.clients.listeners import listening
from tests.support.clients.modern_peer import FORM, TAKES_TASKS, CallPeer, accept, message_of, result_of, said
from tests.support.clients.raw_http import Answer, Exchange, bearer, progress
from tests.support.clients.wire_client import Message
from tests.support.servers.in_process import info_of, until

pytestmark = pytest.mark.anyio

BOTH: Message = {"eras": "both"}
SOON: Message = {**BOTH, "task_after": 0.1}
"""Calls that take longer become tasks."""

FORM_OF_A_NAME: Message = {"message": "name?", "requestedSchema": {"type": "object", "properties": {}}}
ASK: Message = {"ask": "elicitation/create", "params": FORM_OF_A_NAME}


def peer_of(served: Gateway, **options: Any) -> CallPeer:
    return CallPeer(port=served.site.port, **options)


def steps(*do: Message) -> Message:
    return {"do": list(do)}


async def call(peer: CallPeer, tool: str, *do: Message, **options: Any) -> Message:
    """Call a tool to its end; the response."""
    return message_of(await peer.call(tool, steps(*do), **options))


async def begin(peer: CallPeer, tool: str, *do: Message, **options: Any) -> Exchange:
    """Begin a call that wants progress."""
    params = {"_meta": {"progressToken": "t", **options.pop("meta", {})}}
    return await peer.begin_call(tool, steps(*do), params=params, **options)


# The stock client


async def test_modern_client_session_upstream(tmp_path: Path) -> None:
    """The official client at 2026-07-28: tools, progress, a round; tasks and keys as they are told. G39."""
    async with gateway(tmp_path, era="auto", serving=SOON) as served:
        async with python_client(served.site.url, mode="auto") as client:
            assert client.protocol == "2026-07-28"
            assert isinstance(client, PythonClient)
            assert isinstance(client.session, Client)
            tools = (await client.session.list_tools()).tools
            assert [tool.name for tool in tools] == ["plain", "idempotent", "read_only"]
            begun = await client.call("plain", do=[{"progress": 3}, {"say": "hello"}])
            await client.until(lambda: begun.answer is not None)
            assert (begun.progress, begun.answer) == ([1, 2, 3], "hello")
            answer = json.loads(await client.result("plain", do=[ASK]))
            assert (answer, client.asked) == ({"action": "accept", "content": {"answer": USER_SAYS}}, ["name?"])
            read = await client.session.read_resource("note://a")
            assert "this is note://a" in str(read.contents[0])
        peer = peer_of(served, capabilities=TAKES_TASKS)
        go = tmp_path / "go"
        task = result_of(await peer.call("plain", steps({"wait": str(go)}, {"say": "as a task"})))["taskId"]
        assert (await peer.get(task))["status"] == "working"
        go.touch()
        assert said((await peer.until_over(task))["result"]) == "as a task"
        runs = len(served.runs)
        keyed = [await call(peer_of(served), "plain", {"pid": True}, key="order-7") for _ in range(2)]
        assert keyed[0]["result"] == keyed[1]["result"]
        assert len(served.runs) == runs + 1


async def test_a_server_that_ends_at_a_probe_serves_clients_of_both_eras(tmp_path: Path) -> None:
    """It is a server of the Rust SDK, as far as a first request goes. G39."""
    async with gateway(tmp_path, "strict=1", era="auto", serving=BOTH) as served:
        assert said(result_of(await peer_of(served).call("plain", steps({"say": "modern"})))) == "modern"
        assert await text_of_call(await served.join(), {"say": "session"}) == "session"
        assert len(served.pids) == 3


async def test_results_have_what_the_revision_requires(tmp_path: Path) -> None:
    async with gateway(tmp_path, serving=BOTH) as served:
        peer = peer_of(served)
        discovered = result_of(await peer.rpc("server/discover", {}))
        assert discovered["supportedVersions"] == ["2026-07-28"]
        assert {"tools", "resources", "prompts", "extensions"} <= set(discovered["capabilities"])
        listed = result_of(await peer.rpc("tools/list", {}))
        assert (listed["resultType"], listed["ttlMs"], listed["cacheScope"]) == ("complete", 0, "private")
        assert listed["_meta"]["io.modelcontextprotocol/serverInfo"] == {"name": "scripted", "version": "1"}
        assert result_of(await peer.rpc("scripted/echo", {"a": [1, None]}))["params"] == {"a": [1, None]}
        for method in ("ping", "logging/setLevel", "resources/subscribe", "initialize"):
            assert error_of(message_of(await peer.rpc(method, {})))["code"] in (-32601, -32602), method
        refused = error_of(await call(peer, "plain", {"error": {"code": -5, "message": "own", "data": {"x": 1}}}))
        assert refused == {"code": -5, "message": "own", "data": {"x": 1}}


async def test_log_messages_come_where_the_request_wants_them(tmp_path: Path) -> None:
    async with gateway(tmp_path, serving=BOTH) as served:
        peer = peer_of(served)
        logs = ({"log": "low", "level": "info"}, {"log": "high", "level": "error"})
        silent = await peer.call("plain", steps(*logs))
        assert b"notifications/message" not in silent.body
        answer = await peer.call("plain", steps(*logs), params={"_meta": {LOG_LEVEL: "warning"}})
        assert [m["params"]["data"] for m in answer.messages if m.get("method") == "notifications/message"] == ["high"]


# Children that die


async def test_a_child_that_dies_in_a_plain_call_of_2026(tmp_path: Path) -> None:
    """On the same response: run again by its hint, else unknown; progress rises over both runs."""
    go = tmp_path / "go"
    async with gateway(tmp_path, serving=BOTH) as served:
        peer = peer_of(served)
        assert said((await call(peer, "plain", {"say": "up"}))["result"]) == "up"
        again = await begin(peer, "read_only", {"progress": 3}, {"wait": str(go)}, {"progress": 5}, {"say": "whole"})
        await again.until_messages(3)
        lost = await begin(peer, "plain", {"progress": 1}, {"wait": str(go)})
        await lost.until_messages(1)
        await served.kill()
        await served.has_run(4)
        go.touch()
        async with again, lost:
            whole, unknown = await again.answer(), await lost.answer()
        assert (progress(whole.messages), said(whole.messages[-1]["result"])) == ([1, 2, 3, 4, 5], "whole")
        error = error_of(unknown.messages[-1])
        assert (error["code"], error["data"]["reason"]) == (OUTCOME_UNKNOWN, "the server's process ended (SIGKILL)")
        assert sorted(served.runs) == ["plain", "plain", "read_only", "read_only"]
        twice = error_of(await call(peer, "idempotent", {"kill": True}))
        assert twice["code"] == OUTCOME_UNKNOWN
        assert served.runs.count("idempotent") == 2


async def test_a_child_that_dies_in_a_task(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with gateway(tmp_path, serving=SOON) as served:
        peer = peer_of(served, capabilities=TAKES_TASKS)
        marked = result_of(await peer.call("idempotent", steps({"wait": str(go)}, {"say": "again"})))["taskId"]
        plain = result_of(await peer.call("plain", steps({"wait": str(go)})))["taskId"]
        assert len(served.pids) == 1  # nobody can be asked, so they share a lane
        await served.kill()
        assert (await peer.until_over(plain))["error"]["code"] == OUTCOME_UNKNOWN
        await served.has_run(3)
        go.touch()
        assert said((await peer.until_over(marked))["result"]) == "again"
        assert sorted(served.runs) == ["idempotent", "idempotent", "plain"]


async def test_asks_of_a_dead_child_in_a_task(tmp_path: Path) -> None:
    """The question is withdrawn, and the second run asks again under another name. G17."""
    async with gateway(tmp_path, serving=SOON) as served:
        peer = peer_of(served, capabilities={**TAKES_TASKS, **FORM})
        task = result_of(await peer.call("idempotent", steps(ASK)))["taskId"]
        first = await peer.until_asked(task)
        await served.kill()
        second = await peer.until_asked(task, other_than=first)
        assert list(second.values()) == list(first.values())
        await peer.update(task, {name: accept(name="Ada") for name in second})
        assert json.loads(said((await peer.until_over(task))["result"])) == accept(name="Ada")


async def test_a_task_that_is_cancelled_is_cancelled_upstream(tmp_path: Path) -> None:
    async with gateway(tmp_path, serving=SOON) as served:
        peer = peer_of(served, capabilities=TAKES_TASKS)
        task = result_of(await peer.call("plain", steps({"sleep": 60})))["taskId"]
        await peer.cancel(task)
        assert (await peer.get(task))["status"] == "cancelled"
        messages = json.loads(said((await call(peer, "read_only", {"heard": True}))["result"]))
        assert "notifications/cancelled" in methods_of(messages)
        assert len(served.pids) == 1


async def test_the_time_to_a_handle_begins_with_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that takes longer uses up no time of the call, also not of a tool that always runs as a task. G27."""
    monkeypatch.setattr("perdure.http.durable_calls.REQUIRED_AFTER", 1.0)
    go = tmp_path / "go"
    serving = {**BOTH, "task_after": 1.0, "tasks": ("plain=required",)}
    async with gateway(tmp_path, f"wait={go}", serving=serving) as served:
        peer = peer_of(served, capabilities=TAKES_TASKS)
        calling = asyncio.create_task(peer.call("plain", steps({"say": "soon"})))
        await until(lambda: served.pids)
        await asyncio.sleep(2.2)  # the call itself waits for the list of tools for a second
        assert not calling.done()
        go.touch()
        assert said(result_of(await calling)) == "soon"


async def test_a_server_that_is_not_available(tmp_path: Path) -> None:
    async with gateway(tmp_path, "exit=1", patience=0.3, serving=BOTH) as served:
        for peer in (peer_of(served), peer_of(served, capabilities=TAKES_TASKS)):
            error = error_of(await call(peer, "plain"))
            assert error["code"] == UNAVAILABLE
            assert (error["data"]["upstream"], error["data"]["ran"]) == ("scripted", False)


async def test_a_call_of_2026_that_takes_too_long(tmp_path: Path) -> None:
    async with gateway(tmp_path, call_timeout=0.4, serving=BOTH) as served:
        for peer in (peer_of(served), peer_of(served, capabilities=FORM)):
            error = error_of(await call(peer, "idempotent", {"sleep": 30}))
            assert (error["code"], error["data"]["reason"]) == (
                OUTCOME_UNKNOWN,
                "the server did not answer within 0.4 s (call_timeout)",
            )
        assert served.runs == ["idempotent", "idempotent"]


# Lanes


async def test_asking_calls_do_not_share_a_lane(tmp_path: Path) -> None:
    """Each asks its own client, and a lane is used again when its call has ended. G42."""
    async with gateway(tmp_path, serving=BOTH) as served:
        peer = peer_of(served, capabilities=FORM)

        async def ask(word: str) -> str:
            asking = {"ask": "elicitation/create", "params": {**FORM_OF_A_NAME, "message": word}}
            arguments = steps(asking)
            before = result_of(await peer.call("plain", arguments))
            [(name, question)] = before["inputRequests"].items()
            assert question["params"]["message"] == word
            answer = await peer.round("plain", before, {name: accept(word=word)}, arguments=arguments)
            content: str = json.loads(said(result_of(answer)))["content"]["word"]
            return content

        assert await asyncio.gather(*(ask(word) for word in ("one", "two", "three"))) == ["one", "two", "three"]
        started = len(served.pids)
        assert 2 <= started <= 3
        assert await ask("four") == "four"
        assert len(served.pids) == started


async def test_a_cancelled_call_that_asks_leaves_its_lane(tmp_path: Path) -> None:
    """What it still asks would be taken for a question of the next call."""
    go = tmp_path / "go"
    async with gateway(tmp_path, serving=SOON) as served:
        peer = peer_of(served, capabilities={**TAKES_TASKS, **FORM})
        task = result_of(await peer.call("plain", steps({"stubborn": True}, {"wait": str(go)}, ASK)))["taskId"]
        await peer.cancel(task)
        second = result_of(await peer.call("plain", steps({"wait": str(go)}, {"say": "second"})))["taskId"]
        go.touch()
        assert said((await peer.until_over(second))["result"]) == "second"
        await until(lambda: not has_process(served.pids[0]))
        assert len(served.pids) == 2


async def test_one_lane_keeps_what_calls_leave_there(tmp_path: Path) -> None:
    """`lanes = 1`: the calls of a caller wait for each other in one process."""
    async with gateway(tmp_path, lanes=1, serving=BOTH) as served:
        peers = [peer_of(served), peer_of(served, capabilities=FORM), peer_of(served, capabilities=TAKES_TASKS)]
        pids = await asyncio.gather(*(call(peer, "plain", {"sleep": 0.05}, {"pid": True}) for peer in peers))
        assert len({said(answer["result"]) for answer in pids}) == 1
        other = CallPeer(port=served.site.port, address="127.0.0.9")
        assert said((await call(other, "plain", {"pid": True}))["result"]) != said(pids[0]["result"])


async def test_unused_lanes_end_and_make_room(tmp_path: Path) -> None:
    async with gateway(tmp_path, max_processes=1, serving=BOTH) as served:
        assert said((await call(peer_of(served), "plain", {"say": "one"}))["result"]) == "one"
        peer = await served.join()  # its process needs the room of the lane, which has nothing to do
        assert await text_of_call(peer, {"say": "two"}) == "two"
        assert not has_process(served.pids[0])
        full = error_of(await call(peer_of(served), "plain"))
        assert (full["code"], full["data"]["reason"]) == (UNAVAILABLE, "limit")


async def test_a_lane_with_nothing_to_do_is_stopped(tmp_path: Path) -> None:
    async with gateway(tmp_path, process_idle=0.2, serving=BOTH) as served:
        assert said((await call(peer_of(served), "plain", {"say": "one"}))["result"]) == "one"
        await until(lambda: not has_process(served.pids[0]))
        assert said((await call(peer_of(served), "plain", {"say": "two"}))["result"]) == "two"


async def test_a_client_that_does_not_read_a_plain_call_stops_no_other(tmp_path: Path) -> None:
    """It misses progress, which a plain call does not keep, and gets its answer."""
    async with gateway(tmp_path, serving={**BOTH, "small_buffers": True}) as served:
        peer = peer_of(served)
        assert said((await call(peer, "plain"))["result"]) == "done"
        unread = await begin(peer, "plain", {"progress": 3000, "size": 2000}, {"say": "flooded"})
        unread.stop_reading()
        assert said((await call(peer, "plain", {"say": "beside"}))["result"]) == "beside"
        assert len(served.pids) == 1
        async with unread:
            messages = (await unread.answer()).messages
        assert said(messages[-1]["result"]) == "flooded"
        seen = progress(messages)
        assert seen == sorted(set(seen))
        assert seen[-1] == 3000


async def test_hints_are_read_again_when_tools_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.gateway.pool.RELIST_SECONDS", 0.05)
    async with gateway(tmp_path, rerun={"late": True}, serving=BOTH) as served:
        peer = peer_of(served)
        await call(peer, "plain", {"tools": ["late"]})

        async def is_listed_again() -> bool:
            messages = json.loads(said((await call(peer, "plain", {"heard": True}))["result"]))
            return methods_of(messages).count("tools/list") == 2

        await until(is_listed_again)
        (tmp_path / "more").write_text("tools=late")  # of the next process
        assert error_of(await call(peer, "late", {"kill": True}))["code"] == OUTCOME_UNKNOWN
        assert served.runs.count("late") == 2


async def test_a_new_release_says_which_of_its_tools_may_run_again(tmp_path: Path) -> None:
    """Its own list is read before its first call, and a tool that has lost its hint runs once. G3."""
    async with gateway(tmp_path, serving=BOTH) as served:
        peer = peer_of(served)
        assert said((await call(peer, "idempotent", {"say": "once"}))["result"]) == "once"
        (tmp_path / "more").write_text('listed={"tools":[{"name":"idempotent","inputSchema":{"type":"object"}}]}')
        await served.kill()
        assert error_of(await call(peer, "idempotent", {"kill": True}))["code"] == OUTCOME_UNKNOWN
        assert served.runs == ["idempotent"] * 2


async def test_a_call_asks_while_the_gateway_reads_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's own request is not one that the server could ask for."""
    monkeypatch.setattr("perdure.gateway.pool.RELIST_SECONDS", 0.05)
    go = tmp_path / "go"
    go.touch()
    async with gateway(tmp_path, f"hold=tools/list,{go}", serving=BOTH) as served:
        peer = peer_of(served, capabilities=FORM)
        await call(peer, "plain")
        go.unlink()
        (held := tmp_path / "go.held").unlink()
        arguments = steps({"tools": ["late"]}, {"wait": str(held)}, ASK)
        before = result_of(await peer.call("plain", arguments))
        assert before["resultType"] == "input_required"
        go.touch()
        answers = {name: accept(name="Ada") for name in before["inputRequests"]}
        answer = await peer.round("plain", before, answers, arguments=arguments)
        assert json.loads(said(result_of(answer))) == accept(name="Ada")


async def test_a_list_that_is_not_answered_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a lane that is ended meanwhile, because nothing else uses it."""
    monkeypatch.setattr("perdure.gateway.pool.RELIST_SECONDS", 0.05)
    monkeypatch.setattr("perdure.gateway.pool.LIST_SECONDS", 1.0)
    go = tmp_path / "go"
    go.touch()

    def is_listing() -> bool:
        return any("_list_again" in str(task.get_coro()) for task in asyncio.all_tasks())

    async with gateway(tmp_path, f"hold=tools/list,{go}", process_idle=0.2, serving=BOTH) as served:
        await call(peer_of(served), "plain")
        go.unlink()
        (held := tmp_path / "go.held").unlink()
        await call(peer_of(served), "plain", {"tools": ["late"]}, {"wait": str(held)})
        assert is_listing()
        await until(lambda: not has_process(served.pids[0]))
        await until(lambda: not is_listing())


# Listening


async def test_lists_that_changed_reach_listeners(tmp_path: Path) -> None:
    """From the gateway's own process of the server, and from the session of another client. G23."""
    async with gateway(tmp_path, serving=BOTH) as served, listening(served.site.port, "tools", "note://a") as listener:
        listener.forget()
        await served.kill()  # the one that is listened to
        await listener.until_told("note://a")
        assert "tools" not in listener.told  # they are the same as before
        listener.forget()
        (tmp_path / "more").write_text("tools=late")
        await served.kill()
        await listener.until_told("tools", "note://a")
        listener.forget()
        peer = await served.join()
        await text_of_call(peer, {"tools": ["extra"]})
        await listener.until_told("tools")


async def test_a_listener_before_the_server_is_up(tmp_path: Path) -> None:
    """It is refused while the server is not available, and served later."""
    program = tmp_path / "more"
    program.write_text("exit=1")
    async with gateway(tmp_path, patience=0.2, serving=BOTH) as served:
        refused = await peer_of(served).rpc("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        assert "error" in message_of(refused)
        program.unlink()

        async def is_up() -> bool:
            return "result" in await call(peer_of(served), "plain")

        await until(is_up)  # there is a pause after deaths in a row
        async with listening(served.site.port, "tools") as listener:
            await text_of_call(await served.join(), {"tools": ["extra"]})
            await listener.until_told("tools")


# Owners


async def test_owners(tmp_path: Path) -> None:
    """What belongs to another principal is answered as what does not exist, to the byte. G47."""
    async with gateway(tmp_path, serving={**SOON, "auth": Names()}) as served:
        ada = peer_of(served, headers=bearer("ada"), capabilities=TAKES_TASKS)
        bob = peer_of(served, headers=bearer("bob"), capabilities=TAKES_TASKS)
        task = result_of(await ada.call("plain", steps({"sleep": 60})))["taskId"]
        unknown = task[:-4] + ("AAAA" if task[-4:] != "AAAA" else "BBBB")
        responses = {"inputResponses": {"ask-1": accept(name="Bob")}}
        for method, more in (("tasks/get", {}), ("tasks/update", responses), ("tasks/cancel", {})):
            answers = [await bob.rpc(method, {"taskId": one, **more}, id=7) for one in (task, unknown)]
            assert same(*answers), method
            assert "error" in message_of(answers[0])
        hers = result_of(await ada.call("plain", steps({"pid": True}), key="k", capabilities={}))
        his = result_of(await bob.call("plain", steps({"pid": True}), key="k", capabilities={}))
        assert said(hers) != said(his)  # another call, in another process
        waits = await ada.begin_call("plain", steps({"sleep": 60}), key="hers", capabilities={})
        await served.has_run(4)
        assert same(*[await bob.rpc(CANCEL, {"key": key}, id=7) for key in ("hers", "of nobody")])
        session = await served.join(token="ada")
        running = await session.call("plain", do=[{"sleep": 60}])
        await served.has_run(5)
        thief = await served.join(token="bob")
        cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
        seen = []
        for thief.session in (session.session, "A" * len(session.session)):
            listed, told = await thief.send(thief.request("tools/list", id=1)), await thief.send(cancelled)
            replies = (listed, told, await thief.try_get(), await thief.delete())
            seen.append([(reply.status_code, reply.content) for reply in replies])
        assert seen[0] == seen[1]
        assert {status for status, _ in seen[0]} == {404}
        assert (await ada.get(task))["status"] == "working"  # and so are the others
        assert len(info_of(served.site.app, session.session).running_calls) == 1
        assert result_of(await ada.rpc(CANCEL, {"key": "hers"})) != {}
        async with waits:
            assert error_of(message_of(await waits.answer()))["code"] == CANCELLED
        await running.drop()


def same(first: Answer, second: Answer) -> bool:
    return (first.status, first.body) == (second.status, second.body)
