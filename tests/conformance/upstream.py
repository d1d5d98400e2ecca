"""Serves `examples/everything.py` with the SDK alone, as an upstream of the gateway.

python -m tests.conformance.upstream stdio
python -m tests.conformance.upstream sessions --port 0       over HTTP, in both eras; prints its address
python -m tests.conformance.upstream modern --port 0         the same at 2026-07-28 only, as servers do that reject
                                                             sessions: `initialize` gets 400 and -32022
"""

from __future__ import annotations

import argparse
import json
import logging

import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.types import ASGIApp, Receive, Scope, Send

from perdure.serve.listener import listen
from perdure.serve.target import load_target
from tests.support.processes.starting import ROOT


class WithoutSessions:
    """Refuses every request of a revision that has sessions."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (b"mcp-protocol-version", b"2026-07-28") in scope["headers"]:
            await self._app(scope, receive, send)
            return
        error = {"code": -32022, "message": "Unsupported protocol version", "data": {"supported": ["2026-07-28"]}}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
        await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("stdio", "sessions", "modern"))
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    server = load_target(f"{ROOT / 'examples' / 'everything.py'}:server")
    assert isinstance(server, MCPServer)
    if given.kind == "stdio":
        server.run("stdio")
        return
    app: ASGIApp = server.streamable_http_app()
    if given.kind == "modern":
        app = WithoutSessions(app)
    with listen("127.0.0.1", given.port) as listener:
        print(f"perdure: serving on http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
        logging.getLogger().handlers = [logging.NullHandler()]  # the SDK shows each session
        uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none")).run([listener])


if __name__ == "__main__":
    main()
