"""The last scene of the demo: a desktop host starts its MCP server, `perdure stdio`, kills it and starts it again.

This process is the host. It speaks MCP over the pipe in plain JSON lines, so that you see each step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import IO, Any, Protocol

LOAVES = 5
SEEN_BEFORE_THE_KILL = 2
RESULT = f"{LOAVES} loaves, still warm."
RESUMED = "Session resumed successfully"


class Teller(Protocol):
    def step(self, title: str) -> None: ...

    def line(self, text: str, *, mark: str = " ") -> None: ...


class Bridge:
    """One `perdure stdio` process, as a host starts it."""

    def __init__(self, url: str, tokens: str, teller: Teller) -> None:
        command = [sys.executable, "-m", "perdure", "stdio", url, "--token-dir", tokens]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._teller = teller

    def say(self, **message: Any) -> None:
        stdin = _there(self.process.stdin)
        stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        stdin.flush()

    def hear(self) -> dict[str, Any]:
        heard: dict[str, Any] = json.loads(_there(self.process.stdout).readline())
        return heard

    def told(self) -> str:
        """The next line of its log."""
        line = _there(self.process.stderr).readline().strip().removeprefix("perdure: ")
        self._teller.line(f"the bridge says: {line}", mark="•")
        return line

    def handshake(self) -> None:
        about = {"name": "desktop", "version": "1"}
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": about}
        self.say(id=0, method="initialize", params=params)
        self.hear()
        self.say(method="notifications/initialized")

    def end(self, *, kill: bool) -> None:
        if kill:
            self.process.kill()
        self.process.communicate()


def _there(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def restart_the_bridge(url: str, teller: Teller) -> list[str]:
    """Play the scene; return what was lost."""
    with tempfile.TemporaryDirectory(prefix="perdure-demo-") as tokens:
        teller.step("A desktop host starts its MCP server: perdure stdio URL")
        bridge = Bridge(url, tokens, teller)
        bridge.handshake()
        bridge.told()  # which process it takes for its host
        bridge.told()
        meta = {"progressToken": 1}
        bridge.say(id=1, method="tools/call", params={"name": "bake", "arguments": {"loaves": LOAVES}, "_meta": meta})
        for _ in range(SEEN_BEFORE_THE_KILL):
            teller.line(bridge.hear()["params"]["message"], mark="•")
        bridge.end(kill=True)
        teller.line(f"process {bridge.process.pid} is killed in the middle of the call", mark="✂")

        teller.step("The host starts it again, with an ordinary handshake")
        bridge = Bridge(url, tokens, teller)
        bridge.handshake()
        bridge.told()
        lost = [] if bridge.told() == RESUMED else ["the session was not resumed"]
        result = bridge.hear()["params"]["data"]["result"]["content"][0]["text"]
        teller.line(f"the result of the earlier call arrives as a log message: {result}", mark="•")
        lost += [] if result == RESULT else ["the call was lost"]
        bridge.end(kill=False)
        for loss in lost:
            teller.line(loss, mark="✗")
        if not lost:
            teller.line("the same session, and the call has run to its end", mark="✓")
        return lost
