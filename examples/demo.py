"""Shows in the terminal how calls survive a cut connection and a killed server: `make demo`.

The demo starts `perdure serve examples/hello.py:server` and talks to it over real HTTP. It uses only an HTTP client and
a decoder of server-sent events, so that you see each step. Then the server stays up for you to try, with a page in
front of it (`front.py`). With STORE=postgres there are two servers, behind a balancer (`nodes.py`). One scene has a
tool of steps (`cake.py`), one a server from npm behind the gateway (`npm_server.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from examples.desktop import restart_the_bridge
from examples.front import Front, has_page
from examples.nodes import Nodes, NoServer, is_postgres, postgres
from examples.npm_server import NAME, NoNpm, kill_program, npm_server
from examples.task import run_a_task

from perdure._core.sse import Decoder, ServerSentEvent
from perdure.errors import Misuse
from perdure.serve.listener import listen
from perdure.store.postgres.address import without_password

BAKERY = Path(__file__).with_name("hello.py")
CAKE = Path(__file__).with_name("cake.py")
ROOT = BAKERY.parent.parent
LOAVES = 8
STEPS = ("mix", "rise", "bake", "ice")
SEEN_BEFORE_THE_LOSS = 3
#: Longer than one loaf takes, so that some events are missed.
RETRY = "1500ms"
#: Shorter than the tool takes, so that a client that declares tasks gets a handle.
TASK_AFTER = "1s"
#: A host without tasks that ends long calls, and how soon it is answered: before its tool ends.
IMPATIENT = "impatient"
ANSWER_WITHIN = "1s"
#: Seconds. Events that come this soon after the server has answered, or after one that was missed, were waiting. A loaf
#: takes longer.
AT_ONCE = 0.15

BAKE = {"name": "bake", "arguments": {"loaves": LOAVES}}
OPERATE = {"name": "trigger-long-running-operation", "arguments": {"duration": 0.4 * LOAVES, "steps": LOAVES}}

JSON_AND_SSE = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
VERSION = "2025-11-25"
PARAMS = {"protocolVersion": VERSION, "capabilities": {}}
INITIALIZED = {"jsonrpc": "2.0", "method": "notifications/initialized"}

CURL = """\
url={url}
json='Content-Type: application/json'
accept='Accept: application/json, text/event-stream'
session=$(curl -s -D - -o /dev/null "$url" -H "$json" -H "$accept" -d '{{"jsonrpc":"2.0","id":1,"method":"initialize",
  "params":{{"protocolVersion":"2025-11-25","capabilities":{{}},"clientInfo":{{"name":"curl","version":"1"}}}}}}' |
  tr -d '\\r' | awk 'tolower($1) == "mcp-session-id:" {{ print $2 }}')
curl -s "$url" -H "$json" -H "$accept" -H "Mcp-Session-Id: $session" \\
  -d '{{"jsonrpc":"2.0","method":"notifications/initialized"}}'
curl -sN "$url" -H "$json" -H "$accept" -H "Mcp-Session-Id: $session" -d '{{"jsonrpc":"2.0","id":2,
  "method":"tools/call","params":{{"name":"bake","arguments":{{"loaves":12}},"_meta":{{"progressToken":"p"}}}}}}'
"""
CURL_RESUME = """\
curl -sN "$url" -H 'Accept: text/event-stream' -H "Mcp-Session-Id: $session" -H 'Last-Event-ID: {position}'
"""
INSPECTOR = """\
npx @modelcontextprotocol/inspector --transport http --server-url {url}
"""
PYTHON = """\
import asyncio
from mcp import Client

async def told(done, total, message):
    print(message)

async def main():
    async with Client("{url}") as client:
        result = await client.call_tool("bake", {{"loaves": 5}}, progress_callback=told)
        print(result.content[0].text)

asyncio.run(main())
"""


class Terminal:
    """Prints steps and lines, in colour only if the output is a terminal."""

    def __init__(self) -> None:
        self.colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.steps = 0

    def paint(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.colour else text

    def step(self, title: str) -> None:
        self.steps += 1
        print(f"\n{self.paint('1', f'{self.steps}. {title}')}", flush=True)

    def line(self, text: str, *, mark: str = " ") -> None:
        colours = {"✓": "32", "✗": "31", "✂": "33", "•": "36"}
        print(f"   {self.paint(colours.get(mark, '0'), mark)} {text}", flush=True)

    def block(self, title: str, text: str) -> None:
        """Print a text to copy. It begins at the left edge."""
        print(f"\n   {self.paint('1', title)}\n\n{text}", end="", flush=True)


@dataclass
class Client:
    """A small MCP client with what the demo needs. It remembers every event that it has handled."""

    url: str
    terminal: Terminal
    tool: Mapping[str, Any] = field(default_factory=lambda: BAKE)
    http: httpx2.Client = field(default_factory=lambda: httpx2.Client(timeout=30, trust_env=False))
    headers: dict[str, str] = field(default_factory=dict)
    events: list[ServerSentEvent] = field(default_factory=list)
    position: str = ""
    retry: float = 0
    began: float = field(default_factory=time.monotonic)
    request_id: int = 1

    def open_session(self, name: str = "demo") -> str:
        params = {**PARAMS, "clientInfo": {"name": name, "version": "1"}}
        request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
        response = self.http.post(self.url, json=request, headers=JSON_AND_SSE).raise_for_status()
        session = response.headers["Mcp-Session-Id"]
        self.headers = {"Mcp-Session-Id": session, "MCP-Protocol-Version": VERSION}
        self.http.post(self.url, json=INITIALIZED, headers=JSON_AND_SSE | self.headers).raise_for_status()
        return str(session)

    def call(self) -> Generator[None, None, None]:
        """Call the tool, event by event. A caller that stops early closes the socket before the answer has ended."""
        self.request_id += 1
        self.events, self.began = [], time.monotonic()
        headers = JSON_AND_SSE | self.headers
        with self.http.stream("POST", self.url, json=self.body(), headers=headers) as response:
            for event in self.read(response):
                self.tell(event, "live")
                yield

    def body(self) -> dict[str, Any]:
        params = {**self.tool, "_meta": {"progressToken": f"token-{self.request_id}"}}
        return {"jsonrpc": "2.0", "id": self.request_id, "method": "tools/call", "params": params}

    def resume(self) -> None:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": self.position}
        with self.http.stream("GET", self.url, headers=headers | self.headers) as response:
            last_missed = time.monotonic()  # not when it was asked: another node has to load the session first
            for event in self.read(response):
                is_missed = (now := time.monotonic()) - last_missed < AT_ONCE
                last_missed = now if is_missed else last_missed
                self.tell(event, "was missed" if is_missed else "live")

    def read(self, response: httpx2.Response) -> Iterator[ServerSentEvent]:
        """Yield events with a message, until the server ends the stream. A priming event only sets the position."""
        response.raise_for_status()
        decoder = Decoder()
        for chunk in response.iter_raw():
            for event in decoder.feed(chunk):
                self.position = event.id
                self.retry = (decoder.retry or 0) / 1000
                if event.data:
                    self.events.append(event)
                    yield event

    def tell(self, event: ServerSentEvent, how: str) -> None:
        message = json.loads(event.data)
        said = text_of_progress(message["params"]) if "method" in message else "the result: " + text_of(message)
        at = f"{time.monotonic() - self.began:4.1f} s"
        self.terminal.line(f"{at}  {how:<10}  {said:<33}  {self.terminal.paint('2', event.id)}", mark="•")


def text_of_progress(params: dict[str, Any]) -> str:
    return str(params.get("message") or f"step {params['progress']} of {params['total']}")


def text_of(response: dict[str, Any]) -> str:
    return str(response["result"]["content"][0]["text"]) if "result" in response else json.dumps(response)


def losses(events: list[ServerSentEvent], request_id: int, loaves: int = LOAVES) -> list[str]:
    """List what is wrong with the events of a whole call: nothing, if each came once and in order."""
    messages = [json.loads(event.data) for event in events]
    progress = [message["params"]["progress"] for message in messages if "method" in message]
    found = []
    if progress != list(range(1, loaves + 1)):
        found.append(f"progress came as {progress}, not as 1 to {loaves} once each")
    if [message.get("id") for message in messages if "method" not in message] != [request_id]:
        found.append("the result did not come exactly once")
    if not messages or "result" not in messages[-1]:
        found.append("the last event was not the result")
    if len({event.id for event in events}) != len(events):
        found.append("two events had the same position")
    return found


def play(bakery: Bakery, url: str, folder: str, terminal: Terminal) -> list[str]:
    """Play the scenes; return what was lost."""
    client = Client(url=url, terminal=terminal)
    terminal.step("A client opens a session")
    terminal.line(f"Mcp-Session-Id: {client.open_session()}")
    lost = cut_the_connection(client, terminal) + kill_the_server(bakery, client, terminal)

    def kill() -> None:
        terminal.line(f"process {bakery.kill()} is dead", mark="✂")
        bakery.start()
        terminal.line(f"process {bakery.pid} is started on the same file, and runs the tool again, because it may")

    lost += run_a_task(url, kill, terminal) + answer_early(url, terminal)
    lost += restart_the_bridge(bakery.url, terminal)
    return lost + go_on_in_the_middle(folder, terminal) + serve_a_program(folder, terminal)


def cut_the_connection(client: Client, terminal: Terminal) -> list[str]:
    terminal.step(f"It calls a tool that takes a while: bake(loaves={LOAVES})")
    reading = client.call()
    for _ in range(SEEN_BEFORE_THE_LOSS):
        next(reading)

    terminal.step("The connection is cut in the middle of the call")
    reading.close()
    terminal.line(f"socket closed after {len(client.events)} events; the last position was {client.position}", mark="✂")
    terminal.line(f"the tool continues; the client waits for {client.retry:g} s, as the server asked")
    time.sleep(client.retry)

    terminal.step("The client comes back with that position: GET, Last-Event-ID")
    client.resume()
    return judge(client, terminal)


def kill_the_server(bakery: Bakery, client: Client, terminal: Terminal, *, name: str = "server") -> list[str]:
    terminal.step(f"It calls again, and the {name} is killed in the middle of the call: kill -9")
    reading = client.call()
    for _ in range(SEEN_BEFORE_THE_LOSS):
        next(reading)
    killed = bakery.kill()
    with contextlib.suppress(httpx2.TransportError):
        list(reading)  # the events that were on their way, then the end
    terminal.line(f"process {killed} is dead after {len(client.events)} events", mark="✂")

    terminal.step(f"The {name} is started again, on the same file")
    bakery.start()
    terminal.line(f"process {bakery.pid} is ready; the client makes no handshake")

    terminal.step("The client comes back: same session, same position")
    terminal.line("the tool declares that it may run twice, so it runs again; events that were sent are not sent again")
    client.resume()
    return judge(client, terminal)


def go_on_in_the_middle(folder: str, terminal: Terminal) -> list[str]:
    """Play the scene with a tool of four steps, which is killed in the third one; return what was lost."""
    terminal.step(f"A tool does its work in steps: {', '.join(STEPS)}")
    bakery, diary = Bakery(f"sqlite:{folder}/steps.db", [f"{CAKE}:server"]), Path(folder, "diary")
    bakery.start()
    try:
        terminal.line(f"perdure serve examples/cake.py:server; ready on {bakery.url}")
        client = Client(url=bakery.url, terminal=terminal, tool={"name": "cake", "arguments": {"diary": str(diary)}})
        client.open_session()
        reading = client.call()
        for _ in range(SEEN_BEFORE_THE_LOSS):
            next(reading)
        while not diary.exists() or len(diary.read_text().splitlines()) < SEEN_BEFORE_THE_LOSS:
            time.sleep(0.01)
        first = bakery.kill()
        with contextlib.suppress(httpx2.TransportError):
            list(reading)
        terminal.line(f"process {first} is dead in the step {STEPS[SEEN_BEFORE_THE_LOSS - 1]}", mark="✂")
        bakery.start()
        terminal.line(f"process {bakery.pid} is started; finished steps return, and the tool goes on at the third")
        client.resume()
        done = [line.split() for line in diary.read_text().splitlines()]
    finally:
        bakery.stop()
    for name, pid in done:
        terminal.line(f"{name:<5} done by process {pid}", mark="•")
    wanted = [*((name, str(first)) for name in STEPS[:3]), *((name, str(bakery.pid)) for name in STEPS[2:])]
    lost = losses(client.events, client.request_id, len(STEPS))
    if [(name, pid) for name, pid in done] != wanted:
        lost.append(f"steps were done as {done}")
    for loss in lost:
        terminal.line(loss, mark="✗")
    if not lost:
        terminal.line("the two steps before the kill were done once, the call has its result", mark="✓")
    return lost


def answer_early(url: str, terminal: Terminal) -> list[str]:
    """Play the scene with a host that knows no tasks and ends long calls; return what was lost."""
    terminal.step(f"A host that knows no tasks calls bake(loaves={LOAVES}); a rule answers it within {ANSWER_WITHIN}")
    client = Client(url=url, terminal=terminal)
    client.open_session(IMPATIENT)
    list(client.call())
    result = json.loads(client.events[-1].data)["result"]
    call = result.get("_meta", {}).get("dev.perdure/call")
    if call is None:
        terminal.line("the host was not answered in time", mark="✗")
        return ["the early answer did not come"]
    terminal.line("so the host's own limit is never met; its model calls the tool that it was told of")
    while call is not None:
        client.tool = {"name": "perdure_wait_for_result", "arguments": {"call": call["id"]}}
        list(client.call())
        result = json.loads(client.events[-1].data)["result"]
        call = result.get("_meta", {}).get("dev.perdure/call")
    if result["content"][0]["text"] != f"{LOAVES} loaves, still warm.":
        return ["the result of the call that was answered early did not come"]
    terminal.line("the tool ran once, to its end, and each request was answered in time", mark="✓")
    return []


def serve_a_program(folder: str, terminal: Terminal) -> list[str]:
    """Play the scene with a server in another language; return what was lost."""
    terminal.step(f"A server from npm, in TypeScript: {NAME}")
    try:
        command = npm_server()
    except NoNpm as why:
        terminal.line(f"this scene is left out: {why}")
        return []
    gateway = Bakery(f"sqlite:{folder}/gateway.db", ["--", *command])
    gateway.start()
    try:
        terminal.line(f"perdure serve -- {Path(command[1]).name}; ready on {gateway.url}")
        client = Client(url=gateway.url, terminal=terminal, tool=OPERATE)
        client.open_session()
        lost = kill_the_program(gateway, client, terminal)
        return lost + kill_the_server(gateway, client, terminal, name="gateway")
    finally:
        gateway.stop()


def kill_the_program(gateway: Bakery, client: Client, terminal: Terminal) -> list[str]:
    terminal.step("A client calls its tool, and the program is killed in the middle of the call: kill -9")
    reading = client.call()
    for _ in range(SEEN_BEFORE_THE_LOSS):
        next(reading)
    killed = kill_program(gateway.pid)
    terminal.line(f"process {killed} is dead after {len(client.events)} events; the gateway starts another", mark="✂")
    list(reading)  # on the same connection
    return judge(client, terminal)


def play_nodes(nodes: Nodes, url: str, terminal: Terminal) -> list[str]:
    """Play the scenes with several nodes; return what was lost."""
    client = Client(url=url, terminal=terminal)
    terminal.step("A client opens a session; the balancer gives each request to the next node")
    session = client.open_session()
    terminal.line(f"Mcp-Session-Id: {session}; the last request went to {nodes.name(nodes.last)}")
    lost = cut_the_connection(client, terminal) + kill_a_node(nodes, client, terminal)
    nodes.start_again()
    running = nodes.last

    def kill() -> None:
        nonlocal running
        running = nodes.last  # the call is the last request that the balancer has seen
        running.kill()
        terminal.line(f"{nodes.name(running)} is dead; the other one takes its call over", mark="✂")

    lost += run_a_task(url, kill, terminal)
    terminal.line(f"the task ran on {nodes.name(running)}, and its result came from {nodes.name(nodes.last)}")
    return lost


def kill_a_node(nodes: Nodes, client: Client, terminal: Terminal) -> list[str]:
    terminal.step("It calls again, and the node that runs the call is killed: kill -9")
    reading = client.call()
    next(reading)
    running = nodes.last
    terminal.line(f"the call runs on {nodes.name(running)}")
    for _ in range(SEEN_BEFORE_THE_LOSS - 1):
        next(reading)
    running.kill()
    with contextlib.suppress(httpx2.TransportError):
        list(reading)  # the events that were on their way, then the end
    terminal.line(f"{nodes.name(running)} is dead after {len(client.events)} events", mark="✂")

    terminal.step("The client comes back through the balancer: same session, same position")
    terminal.line("the other node finds the dead one by the lock that the database has freed, and takes its call over")
    client.resume()
    terminal.line(f"the rest came from {nodes.name(nodes.last)}")
    return judge(client, terminal)


def judge(client: Client, terminal: Terminal) -> list[str]:
    terminal.step("Was anything lost?")
    lost = losses(client.events, client.request_id)
    for loss in lost:
        terminal.line(loss, mark="✗")
    if not lost:
        terminal.line(f"no: {LOAVES} of {LOAVES} progress events, each once and in order, and the result", mark="✓")
    return lost


def invite(front: Front, terminal: Terminal) -> None:
    """Print how to try it yourself."""
    url = front.mcp
    terminal.step("Try it yourself; the server stays up until you press Ctrl-C")
    if has_page():
        terminal.block("a page that you can reload in the middle of a call", f"{front.url}\n")
    else:
        terminal.line("there is also a page, which is not built here; make page builds it, or says why it cannot")
    terminal.block("curl", CURL.format(url=url))
    again = "stop the last command with Ctrl-C before it ends, and continue after the last `id:` that you saw"
    terminal.block(again, CURL_RESUME.format(position="…"))
    terminal.block("the MCP Inspector (node 22)", INSPECTOR.format(url=url))
    terminal.block("the Python SDK", PYTHON.format(url=url))


class Bakery:
    """The server, in its own process. It can be started again on the same port and the same file."""

    def __init__(self, store: str, target: Sequence[str] = (f"{BAKERY}:server",)) -> None:
        self.port = 0
        self.url = ""
        self._target = target
        self._store = store
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self) -> None:
        """Start it, and read its URL from the line that says that it is ready."""
        command = [sys.executable, "-m", "perdure", "serve", "--port", str(self.port)]
        # Otherwise it would warn that the previous process died, in the middle of the scene.
        options = ["--store", self._store, "--retry", RETRY, "--task-after", TASK_AFTER, "--log-level", "error"]
        options += ["--answer-within", f"{IMPATIENT}={ANSWER_WITHIN}"]
        self._process = subprocess.Popen(
            [*command, *options, *self._target], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        if not ready:
            raise SystemExit(self._process.wait())  # it has printed why
        self.url = ready.rpartition(" ")[2].strip()
        self.port = int(self.url.rpartition(":")[2].partition("/")[0])

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> int:
        """Kill the process as a crash does; return its id."""
        self.process.kill()
        self.process.communicate()
        return self.pid

    def restart(self) -> None:
        """Kill it and start it again. May be called from any thread."""
        with self._lock:
            self.kill()
            self.start()

    def wait(self) -> None:
        """Wait until it ends by itself."""
        while True:
            process = self.process
            process.wait()
            with self._lock:
                if self.process is process:
                    return

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.communicate()


class Stock:
    """The same bakery as the SDK serves it, without Perdure, for comparison on the page.

    Its socket belongs to the demo, so a client whose server was just killed waits for the next one."""

    def __init__(self) -> None:
        self._listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/mcp"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        app, fd = "examples.hello:server.streamable_http_app", self._listener.fileno()
        command = [sys.executable, "-m", "uvicorn", "--factory", app, "--fd", str(fd), "--log-level", "critical"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[fd], stdin=quiet, stdout=quiet, stderr=quiet)
        # Whatever it answers, it is there: a call that only waits for it would survive the first kill.
        with contextlib.suppress(httpx2.TransportError):
            httpx2.get(self.url, timeout=30, trust_env=False)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def run(port: int, *, once: bool, scenes: bool, folder: str) -> int:
    terminal = Terminal()
    store = f"sqlite:{folder}/demo.db"
    bakery = Bakery(store)
    stock = Stock()
    front = Front(port, upstream=lambda: bakery.url, stock=stock.url, restart=lambda: restart(stock, bakery))
    terminal.step("A server starts, with its log in a file")
    terminal.line(f"perdure serve examples/hello.py:server --store {store}")
    try:
        bakery.start()
        front.start()
        terminal.line(f"ready on {front.mcp}")
        lost = play(bakery, front.mcp, folder, terminal) if scenes else []
        if not once and not lost:
            stock.start()
            invite(front, terminal)
            bakery.wait()
    finally:
        front.stop()
        bakery.stop()
        stock.stop()
    return 1 if lost else 0


def restart(stock: Stock, ours: Bakery | Nodes) -> None:
    """Kill both servers, and start them again."""
    stock.stop()
    ours.restart()
    stock.start()


def run_nodes(port: int, store: str, *, once: bool, scenes: bool, folder: str) -> int:
    """The same with two nodes on a PostgreSQL server."""
    terminal = Terminal()
    terminal.step("A PostgreSQL server")
    with postgres(store, Path(folder)) as (address, about):
        terminal.line(about)
        nodes = Nodes([Bakery(address), Bakery(address)])
        stock = Stock()
        front = Front(port, upstream=nodes.choose, stock=stock.url, restart=lambda: restart(stock, nodes))
        terminal.step("Two nodes start on it, behind a balancer that knows nothing of sessions")
        terminal.line(f"perdure serve examples/hello.py:server --store {without_password(address)}")
        try:
            nodes.start()
            front.start()
            terminal.line(f"ready on {front.mcp}")
            lost = play_nodes(nodes, front.mcp, terminal) if scenes else []
            if not once and not lost:
                nodes.start_again()
                stock.start()
                invite(front, terminal)
                nodes.wait()
        finally:
            front.stop()
            nodes.stop()
            stock.stop()
    return 1 if lost else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Calls that survive a cut connection and a killed server.")
    parser.add_argument("--port", type=int, default=8000, help="port to serve on (8000); 0 picks a free one")
    parser.add_argument("--once", action="store_true", help="end after the scene")
    parser.add_argument("--page", action="store_true", help="serve only the page, without the scenes in the terminal")
    parser.add_argument("--store", default="sqlite", help="sqlite (a file), postgres (two nodes), or postgresql://…")
    given = parser.parse_args()
    if given.store != "sqlite" and not is_postgres(given.store):
        print("demo: STORE is sqlite, postgres or postgresql://USER@HOST/DATABASE", file=sys.stderr)
        return 2
    if given.page and not has_page():
        print("demo: the page is not built; make page builds it, or says why it cannot", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="perdure-demo-") as folder:
            if is_postgres(given.store):
                return run_nodes(given.port, given.store, once=given.once, scenes=not given.page, folder=folder)
            return run(given.port, once=given.once, scenes=not given.page, folder=folder)
    except NoServer as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except Misuse:
        print(f"demo: port {given.port} is in use; choose another: make demo PORT=8001", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 0


if __name__ == "__main__":
    sys.exit(main())
