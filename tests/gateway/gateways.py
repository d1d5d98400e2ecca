"""Gateways to the scripted server over stdio, in the test's own process, with real HTTP and real children."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from mcp.server.auth.provider import AccessToken, TokenVerifier

from perdure._core.ids import SessionId
from perdure._core.jsonrpc import JsonObject
from perdure.gateway.host import host_upstream
from perdure.gateway.upstream import Program, Text, Upstream
from perdure.settings import Settings
from perdure.store.records import SessionRecord
from tests.support.clients.wire_client import Message, Peer, Wire, answer_of
from tests.support.servers import scripted_stdio
from tests.support.servers.in_process import Site, serve, until

DEFAULTS = {"patience": 20.0, "era": "session"}
"""Of upstreams here: a busy machine starts a process slowly, and the server has sessions only."""

OUTCOME_UNKNOWN, UNAVAILABLE, CANCELLED = -31001, -31010, -32800


def scripted(folder: Path, *words: str, name: str = "scripted", **limits: Any) -> Upstream:
    """The scripted server as an upstream. `words` are its settings; limits are those of the upstream or of its
    program. It notes each start in the file `starts`, and each run of a tool in `runs`. The file `more` may hold
    settings for its next start."""
    notes = (f"starts={folder / 'starts'}", f"runs={folder / 'runs'}", f"more={folder / 'more'}")
    argv = (sys.executable, "-I", "-S", scripted_stdio.__file__, *notes, *words)
    env = {name: Text.plain(value) for name, value in limits.pop("env", {}).items()}
    own = {
        key: limits.pop(key)
        for key in list(limits)
        if key in ("patience", "call_timeout", "rerun", "on_restart", "era")
    }
    program = Program(argv=limits.pop("argv", argv), cwd=folder, env=env, **limits)
    return Upstream(name=name, program=program, **{**DEFAULTS, **own})


class Names(TokenVerifier):
    """Every token is the name of its principal, as long as it is good."""

    def __init__(self) -> None:
        self.good = {"ada", "bob"}

    async def verify_token(self, token: str) -> AccessToken | None:
        known = AccessToken(token=token, client_id=token, subject=token, scopes=[])
        return known if token in self.good else None


@dataclass
class Gateway:
    """A served gateway, and what its children have noted."""

    site: Site
    folder: Path
    peers: list[Peer] = field(default_factory=list)

    @property
    def runs(self) -> list[str]:
        """The tools that have run, in their order."""
        return lines(self.folder / "runs")

    @property
    def pids(self) -> list[int]:
        """The processes that were started, in their order."""
        return [int(line) for line in lines(self.folder / "starts")]

    async def join(self, **options: Any) -> Peer:
        return await self.site.join(**options)

    async def has_run(self, count: int = 1) -> None:
        await until(lambda: len(self.runs) >= count)

    async def record_of(self, peer: Peer) -> SessionRecord:
        """A session as the store has it."""
        record = await self.site.store.session(SessionId(peer.session))
        assert record is not None
        return record

    async def kill(self, pid: int | None = None) -> None:
        """Kill the newest child, or that one, and wait until the gateway has noticed."""
        killed = self.pids[-1] if pid is None else pid
        os.kill(killed, signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(killed))


@asynccontextmanager
async def gateway(
    folder: Path, *words: str, serving: Mapping[str, Any] | None = None, **limits: Any
) -> AsyncIterator[Gateway]:
    """A gateway to the scripted server. `serving`: what `serve` takes, settings among it."""
    how = dict(serving or {})
    settings = {key: value for key, value in how.items() if key in Settings.__dataclass_fields__}
    upstream = scripted(folder, *words, **limits)
    async with serve(host_upstream(upstream, Settings(**settings)), **how) as site:
        yield Gateway(site, folder)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def begin(peer: Peer, tool: str, *steps: JsonObject, token: object = 1, id: Any = None) -> Wire:  # noqa: A002
    """Begin a call of a tool of the scripted server, which does these steps."""
    return await peer.call(tool, id=id, token=token, do=list(steps))


async def text_of_call(peer: Peer, *steps: JsonObject, tool: str = "plain") -> str:
    """Call a tool to its end; the text of its result."""
    return await peer.result(tool, do=list(steps))


async def heard(peer: Peer) -> list[Message]:
    """All messages that the child of a session has received."""
    found: list[Message] = json.loads(await text_of_call(peer, {"heard": True}, tool="read_only"))
    return found


def error_of(answer: Message) -> Message:
    error: Message = answer["error"]
    return error


async def refused_handshake(served: Gateway) -> tuple[int, Message]:
    """Try to open a session, which fails: the status, and the error."""
    peer = Peer(served.site)
    response = await served.site.request("POST", headers=peer.headers(), body=peer.handshake())
    assert "mcp-session-id" not in response.headers
    return response.status_code, error_of(answer_of(response))


def methods_of(messages: Iterable[Message]) -> list[str]:
    return [message["method"] for message in messages if "method" in message]


async def until_method(wire: Wire, method: str) -> Message:
    """Read until a message of that method has come."""
    while (message := await wire.message()).get("method") != method:
        pass
    return message


def has_process(group: int) -> bool:
    """Whether a group has a process, a zombie among them."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
