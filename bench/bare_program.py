"""A server over stdio without an SDK, so that a gateway in front of it is the slower part. Standard library only.

Tools: `echo` (gives the text back), `progress` (sends n events in a tight loop), `pid` and `hang` (never answers).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

NAMES = ("echo", "progress", "pid", "hang")


def send(**members: Any) -> None:
    sys.stdout.buffer.write(json.dumps({"jsonrpc": "2.0", **members}, separators=(",", ":")).encode() + b"\n")


def call(name: str, params: dict[str, Any]) -> str:
    arguments = params.get("arguments") or {}
    if name == "progress":
        token, n = params["_meta"]["progressToken"], arguments["n"]
        for number in range(1, n + 1):
            about = {"progressToken": token, "progress": number, "total": n, "message": "on its way"}
            send(method="notifications/progress", params=about)
        return f"sent {n}"
    return str(os.getpid()) if name == "pid" else str(arguments["text"])


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        about = {"name": "bare", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in NAMES]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": call(params["name"], params)}]}
    return {}


for line in sys.stdin.buffer:
    message = json.loads(line)
    given = message.get("params") or {}
    if "id" in message and "method" in message and given.get("name") != "hang":
        send(id=message["id"], result=answer(message["method"], given))
        sys.stdout.buffer.flush()
