"""Counts what a request walks through: the files under `src/perdure`, and the returns of functions in them.

    .venv/bin/python -m bench.walks            three requests on SQLite, in this process
    .venv/bin/python -m bench.walks --files    also the files of each, with their returns

Counted is what runs from the arrival of the request to the end of its response, in all threads: every return of a named
function. A coroutine that waits has not returned. Each request is made several times, and the shortest walk counts,
because a chore of the process may run during any of them.
"""

from __future__ import annotations

import asyncio
import json
import opcode
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import perdure
from bench import tool_server
from bench.modern_calls import MODERN, TASKS

ROOT = str(Path(perdure.__file__).parent) + "/"
TIMES = 5
TASK = "2026-07-28 call that becomes a task"
Walk = Counter[str]

_WAITS = opcode.opmap["YIELD_VALUE"]


class Tracer:
    """Counts returns by file while it is on."""

    def __init__(self) -> None:
        self.walk: Walk | None = None

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "return" or self.walk is None or not code.co_filename.startswith(ROOT):
            return
        if not code.co_name.startswith("<") and code.co_code[frame.f_lasti] != _WAITS:
            self.walk[code.co_filename.removeprefix(ROOT)] += 1


async def walk(
    app: perdure.App, tracer: Tracer, method: str, headers: dict[str, str], body: Any = None
) -> tuple[Walk, dict[str, str], str]:
    """Make a request; returns its walk, and the headers and the body of its response."""
    payload = b"" if body is None else json.dumps(body).encode()
    given = {"host": "localhost", "accept": "application/json, text/event-stream", **headers}
    given |= {"content-type": "application/json", "content-length": str(len(payload))} if payload else {}
    scope = {
        "type": "http",
        "method": method,
        "path": app.path,
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
    }
    messages, over = [{"type": "http.request", "body": payload, "more_body": False}], asyncio.Event()
    seen: dict[str, str] = {}
    parts: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if not messages:
            await over.wait()
            return {"type": "http.disconnect"}
        return messages.pop()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.update({name.decode(): value.decode() for name, value in message["headers"]})
        else:
            parts.append(message["body"])
            if not message.get("more_body"):
                over.set()

    tracer.walk = walked = Counter()
    try:
        await app(scope, receive, send)
    finally:
        tracer.walk = None
    return walked, seen, b"".join(parts).decode()


async def walks(tracer: Tracer, folder: str) -> dict[str, Walk]:
    """The shortest walk of each request."""
    settings = perdure.Settings(task_after=0.05)
    app = perdure.asgi(tool_server.make(), store=f"sqlite:{folder}/walks.db", settings=settings)
    progress = {"name": "progress", "arguments": {"n": 3}, "_meta": {"progressToken": 1}}
    async with app.lifespan():
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "walk", "version": "1"}}
        hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        _, seen, _ = await walk(app, tracer, "POST", {}, hello)
        session = {"mcp-session-id": seen["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}
        await walk(app, tracer, "POST", session, {"jsonrpc": "2.0", "method": "notifications/initialized"})
        found: dict[str, list[Walk]] = {"POST with three progress events": [], "GET with a position": [], TASK: []}
        post, get, task = found.values()
        for number in range(TIMES):
            call = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": progress}
            walked, _, text = await walk(app, tracer, "POST", session, call)
            assert "sent 3" in text, text
            post.append(walked)
            position = text.split("id: ", 1)[1].split("\n", 1)[0]
            resume = {**session, "accept": "text/event-stream", "last-event-id": position}
            walked, _, text = await walk(app, tracer, "GET", resume)
            assert "sent 3" in text, text
            get.append(walked)
        for number in range(TIMES):
            meta = {
                "io.modelcontextprotocol/protocolVersion": MODERN,
                "io.modelcontextprotocol/clientInfo": {"name": "walk", "version": "1"},
                "io.modelcontextprotocol/clientCapabilities": TASKS,
            }
            slow = {"name": "sleep", "arguments": {"seconds": 0.2}, "_meta": meta}
            call = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": slow}
            modern = {"mcp-protocol-version": MODERN, "mcp-method": "tools/call", "mcp-name": "sleep"}
            walked, _, text = await walk(app, tracer, "POST", modern, call)
            assert '"taskId"' in text, text
            task.append(walked)
        return {name: min(several, key=Counter.total) for name, several in found.items()}


def main() -> None:
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(walks(tracer, folder))
    sys.setprofile(None)
    for name, walked in found.items():
        print(f"{name}: {len(walked)} files, {walked.total()} returns")
        if "--files" in sys.argv:
            for file, count in walked.most_common():
                print(f"    {count:4} {file}")


if __name__ == "__main__":
    main()
