"""The tools of `slow_tools` in an app that plain uvicorn runs, as in docs/using.md. Variables say where the log is, and
whether the app is told when the end begins."""

from __future__ import annotations

import os
import sys
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

import perdure
from perdure.serve.listener import listen
from tests.support.servers.slow_tools import server

mcp = perdure.asgi(server, store=os.environ["MOUNTED_STORE"])
app = Starlette(routes=[Mount("/", mcp)], lifespan=mcp.lifespan)


class Telling(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        mcp.begin_stop()
        super().handle_exit(sig, frame)


def main(how: str) -> None:
    config = uvicorn.Config(app, timeout_graceful_shutdown=1 if how == "limited" else None)
    made = Telling if how == "told" else uvicorn.Server
    with listen("127.0.0.1", 0) as listener:
        print(listener.getsockname()[1], flush=True)
        made(config).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
