"""One candidate in a process of its own: `python -m bench.servers KIND`, until standard input ends.

It prints one line of JSON: the port and path, or why this candidate is not available.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp_types import JSONRPCMessage

from bench import tool_server

KEPT_EVENTS = 500  # of one stream: Perdure's own default, given to the in-memory store as well


class MemoryEvents(EventStore):
    """The least that lets the SDK resume: one bounded deque per stream. Nothing survives the process."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._numbers = itertools.count(1)
        self._streams: dict[str, deque[tuple[int, JSONRPCMessage | None]]] = {}

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        number = next(self._numbers)
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = deque(maxlen=self._keep)
        stream.append((number, message))
        return f"{number}/{stream_id}"

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        after, _, stream_id = last_event_id.partition("/")
        for number, message in tuple(self._streams.get(stream_id, ())):
            if number > int(after) and message is not None:
                await send_callback(EventMessage(message, f"{number}/{stream_id}"))
        return stream_id


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a candidate is started with."""

    log: str
    settings: dict[str, Any]

    @property
    def kept_events(self) -> int:
        return int(self.settings.get("max_stream_events", KEPT_EVENTS))


@dataclass(frozen=True, kw_only=True)
class Served:
    """What uvicorn runs, and where its endpoint is."""

    app: Any
    path: str = "/mcp"


def _perdure(store: str, options: Options, server: MCPServer) -> Served:
    import perdure

    return Served(app=perdure.asgi(server, store=store, settings=perdure.Settings(**options.settings)))


def perdure_sqlite(server: MCPServer, options: Options) -> Served:
    return _perdure(f"sqlite:{options.log}", options, server)


def perdure_sqlite_full(server: MCPServer, options: Options) -> Served:
    return _perdure(f"sqlite:{options.log}?sync=full", options, server)


def perdure_postgres(server: MCPServer, options: Options) -> Served:
    return _perdure(options.log, options, server)


def perdure_memory(server: MCPServer, options: Options) -> Served:
    return _perdure("memory:", options, server)


def sdk(server: MCPServer, options: Options) -> Served:
    return Served(app=server.streamable_http_app())


def sdk_memory(server: MCPServer, options: Options) -> Served:
    return Served(app=server.streamable_http_app(event_store=MemoryEvents(options.kept_events)))


def mcp_persist(server: MCPServer, options: Options) -> Served:
    from mcp_persist import with_persistence

    app = with_persistence(server, backend="sqlite", url=options.log, ttl=3600, durable_sessions=True)
    # It is mounted, so "/mcp" without the slash would cost a redirect for each request.
    return Served(app=app, path="/mcp/")


KINDS: dict[str, Callable[[MCPServer, Options], Served]] = {
    "perdure-sqlite": perdure_sqlite,
    "perdure-sqlite-full": perdure_sqlite_full,
    "perdure-postgres": perdure_postgres,
    "perdure-memory": perdure_memory,
    "sdk": sdk,
    "sdk-memory": sdk_memory,
    "mcp-persist": mcp_persist,
}


def serve(kind: str, options: Options) -> None:
    """Serve until standard input ends, which it also does when the driver dies."""
    try:
        served = KINDS[kind](tool_server.make(), options)
    except (ImportError, AttributeError) as why:
        print(json.dumps({"unavailable": f"{type(why).__name__}: {why}"}), flush=True)
        return
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    config = uvicorn.Config(
        served.app,
        http="httptools",
        loop="uvloop",
        ws="none",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)

    def stop_with_the_driver() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=stop_with_the_driver, daemon=True).start()
    print(json.dumps({"port": listener.getsockname()[1], "path": served.path}), flush=True)
    server.run(sockets=[listener])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--log", required=True, help="path of the SQLite file, or address of the database")
    parser.add_argument("--cores", default="", help="cores this process may use, such as 0 or 0,1")
    parser.add_argument("--settings", default="{}", help="perdure.Settings as JSON")
    given = parser.parse_args()
    if given.cores:
        # Before any thread starts: threads inherit it.
        os.sched_setaffinity(0, {int(core) for core in given.cores.split(",")})
    serve(given.kind, Options(log=given.log, settings=json.loads(given.settings)))


if __name__ == "__main__":
    main()
