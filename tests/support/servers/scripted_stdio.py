"""A session-era MCP server over stdio, without an SDK, that follows orders. Standard library only.

    python scripted_stdio.py [SETTING=VALUE ...]          the same settings are read from SCRIPTED_SETTING

Settings, for what it does before and around calls:

    more=FILE          more settings, one in a line, if the file exists
    name=TEXT          its name in `serverInfo` ("scripted")
    starts=FILE        append its pid and a line end at each start
    runs=FILE          append the tool's name and a line end at each run of a tool
    exit=N             exit with that status at its start;  after=N: only from the N-th start on, by `starts`
    kill=1             kill itself (SIGKILL) at its start
    stderr=TEXT        write that to stderr at its start
    banner=TEXT        write that to stdout at its start, as it is, and a line end
    sleep=SECONDS      sleep before it reads anything
    wait=FILE          wait until that file exists before it reads anything
    version=V          answer `initialize` with that version; by default with the client's
    refuse=CODE        answer `initialize` with that error;  silent=1: with nothing;  die=1: by a SIGKILL to itself
    leaves=1           exit after the answer to `initialize`
    strict=1           exit at a first request that is neither `initialize` nor `ping`, as the Rust SDK does
    deny=METHOD        answer requests of that method with an error
    because=TEXT       say that in these errors
    without=NAME       leave a capability out
    raw=TEXT           answer `initialize` with that line
    form=ts            write results before ids, as the TypeScript SDK does
    pages=N            list N items on a page
    tools=A,B          list these tools besides the usual ones, without hints
    listed=TEXT        answer `tools/list` with that text as the result
    roots=1            ask `roots/list` once it is initialized
    hold=METHOD,FILE   answer requests of that method once the file exists; until then FILE.held exists
    one=1              do one thing at a time: a call that waits keeps everything waiting, `ping` too
    eof=ignore         continue after the end of its input
    term=ignore        ignore SIGTERM
    tree=SECONDS       start a process that sleeps for so long, as a launcher does

Tools: `plain` (no hints), `idempotent` (`idempotentHint`), `read_only` (`readOnlyHint`), and those of `tools`. All take
{"do": [STEP, ...]} and do the steps in their order. The answer is the text of the last step that has one, else "done".
In texts `$ID` stands for the call's id, `$TOKEN` for its progress token. A cancelled call ends without an answer at its
next step, unless it is stubborn.

    {"progress": N, "every": S, "size": B}   N notifications, S seconds and B bytes of message each
    {"sleep": S}  {"wait": FILE}             {"hang": true}: for ever  {"freeze": true}: the whole process, for ever
    {"say": TEXT}  {"result": {…}}           what is answered;  {"tool_error": TEXT}, {"error": {"code", "message"}}
    {"answer": TEXT}                         answer now, and continue with the other steps
    {"stubborn": true}                       answer even if it is cancelled
    {"exit": N}  {"kill": true}              end the process
    {"print": TEXT}  {"half": TEXT}          write to stdout, with and without a line end
    {"giant": BYTES}                         answer with a result of that size
    {"stderr": TEXT, "times": N}             write N lines to stderr
    {"close": "stdout" or "stdin"}
    {"ask": METHOD, "params": {…}}           a request to the client; the text is its answer as JSON
    {"begin_ask": METHOD, "params": {…}}     the same without waiting;  {"withdraw": true}: the newest one
    {"log": TEXT, "level": L}                a log message, if the level is high enough
    {"notify": METHOD, "params": {…}}        any notification
    {"update": URI}                          `resources/updated`, if it is subscribed
    {"tools": [NAME, …]}                     list these besides the usual ones from now on, and say so
    {"environment": true}                    the text is its environment as JSON
    {"note": FILE}                           write the text so far to a file
    {"diary": FILE, "key": KEY}              add the line `<key> <pid>` to a file
    {"pid": true}  {"heard": true}           the text is its pid; all messages that it has received, as JSON
    {"spawn": S, "memory": B}                start a process that sleeps for so long, with B bytes; the text is its pid
    {"memory": B}                            take B bytes, and keep them

Methods besides: `ping`, `logging/setLevel`, `resources/list`, `/read`, `/templates/list`, `/subscribe`,
`/unsubscribe`, `prompts/list`, `/get`, `completion/complete`, and `scripted/echo`, which answers {"params": …}.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

Json = dict[str, Any]
Outcome = tuple[str, Any]

VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
HINTS = {"plain": None, "idempotent": {"idempotentHint": True}, "read_only": {"readOnlyHint": True}}
LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
RESOURCES = [{"uri": f"note://{name}", "name": name} for name in "abcde"]
PROMPTS = [{"name": f"prompt-{name}"} for name in "abcde"]
LOOK = 0.005

_prefix = "SCRIPTED_"
settings = {name[len(_prefix) :].lower(): value for name, value in os.environ.items() if name.startswith(_prefix)}
settings |= {name: value for name, _, value in (word.partition("=") for word in sys.argv[1:])}
if os.path.exists(settings.get("more", "")):
    with open(settings["more"]) as _more:
        settings |= {name: value for name, _, value in (line.partition("=") for line in _more.read().splitlines())}

held = settings.get("hold", ",").split(",")

_writing = threading.Lock()


def append(setting: str, text: object) -> None:
    if setting in settings:
        with open(settings[setting], "a") as file:
            file.write(f"{text}\n")


def put(text: str) -> None:
    data = memoryview(text.encode())
    with _writing:
        while data:
            data = data[os.write(1, data) :]


def send(message: Json) -> None:
    put(json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")) + "\n")


def respond(request_id: object, outcome: str, value: Any) -> None:
    if settings.get("form") == "ts":
        put(json.dumps({outcome: value, "jsonrpc": "2.0", "id": request_id}, separators=(",", ":")) + "\n")
    else:
        send({"id": request_id, outcome: value})


def sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(3600)


def wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(LOOK)


def spawn(seconds: object, memory: int = 0) -> int:
    take = f"taken = b'x' * {memory}"
    code = f"import signal, time; signal.signal(signal.SIGHUP, signal.SIG_IGN); {take}; time.sleep({seconds})"
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code]).pid


def text_result(text: str, **more: object) -> Json:
    return {"content": [{"type": "text", "text": text}], **more}


class NoSuchMethod(Exception):
    pass


class Cancelled(Exception):
    pass


class Server:
    def __init__(self) -> None:
        self.heard: list[Json] = []
        self.level = "debug"
        self.subscribed: set[str] = set()
        self.cancelled: set[object] = set()
        self.more_tools = [name for name in settings.get("tools", "").split(",") if name]
        self.asks: dict[str, threading.Event] = {}
        self.answers: dict[str, Json] = {}
        self.asked = 0
        self.taken = b""

    def run(self) -> None:
        for line in sys.stdin.buffer:
            message = json.loads(line)
            if "strict" in settings and not self.heard and message["method"] not in ("initialize", "ping"):
                os._exit(1)
            self.heard.append(message)
            if "method" not in message:
                self.answers[message["id"]] = message
                if message["id"] in self.asks:
                    self.asks[message["id"]].set()
            elif "id" not in message:
                self.take_notification(message["method"], message.get("params") or {})
            elif message["method"] in ("tools/call", held[0]) and "one" not in settings:
                threading.Thread(target=self.handle, args=(message,), daemon=True).start()
            else:
                self.handle(message)
        if settings.get("eof") == "ignore":
            sleep_for_ever()
        os._exit(0)

    def take_notification(self, method: str, params: Json) -> None:
        if method == "notifications/cancelled":
            self.cancelled.add(params["requestId"])
        elif method == "notifications/initialized" and "roots" in settings:
            self.begin_ask("roots/list", None)

    def handle(self, message: Json) -> None:
        request_id, params = message["id"], message.get("params") or {}
        if message["method"] == held[0]:
            with open(f"{held[1]}.held", "w"):
                wait_for(held[1])
        try:
            result = self.result_of(message["method"], params, request_id)
        except NoSuchMethod:
            error = {"code": -32601, "message": f"there is no method {message['method']}"}
            respond(request_id, "error", error)
        except Cancelled:
            return
        else:
            if result is not None:
                respond(request_id, *result)
            if message["method"] == "initialize" and "leaves" in settings:
                os._exit(1)

    def result_of(self, method: str, params: Json, request_id: object) -> Outcome | None:
        if method == "initialize":
            return self.initialize(params, request_id)
        if method == settings.get("deny"):
            return "error", {"code": -32602, "message": settings.get("because", "denied, as it was told")}
        if method == "tools/call":
            return Call(self, params, request_id).run()
        if method == "tools/list" and "listed" in settings:
            put(f'{{"jsonrpc":"2.0","id":{request_id},"result":{settings["listed"]}}}\n')
            return None
        if method == "logging/setLevel":
            self.level = params["level"]
        elif method == "resources/subscribe":
            self.subscribed.add(params["uri"])
        elif method == "resources/unsubscribe":
            self.subscribed.discard(params["uri"])
        elif method in self.lists():
            return "result", self.page(method, params)
        elif method == "resources/read":
            return "result", {"contents": [{"uri": params["uri"], "text": f"this is {params['uri']}"}]}
        elif method == "prompts/get":
            content = {"type": "text", "text": f"this is {params['name']}"}
            return "result", {"messages": [{"role": "user", "content": content}]}
        elif method == "completion/complete":
            return "result", {"completion": {"values": [params["argument"]["value"] + "…"]}}
        elif method == "scripted/echo":
            return "result", {"params": params}
        elif method != "ping":
            raise NoSuchMethod
        return "result", {}

    def initialize(self, params: Json, request_id: object) -> Outcome | None:
        if "die" in settings:
            os.kill(os.getpid(), signal.SIGKILL)
        if "raw" in settings:
            put(settings["raw"].replace("$ID", str(request_id)) + "\n")
            return None
        if "silent" in settings:
            return None
        if "refuse" in settings:
            return "error", {
                "code": int(settings["refuse"]),
                "message": settings.get("because", "refused, as it was told"),
            }
        asked = params.get("protocolVersion")
        lists = {"listChanged": True}
        capabilities = {
            "tools": lists,
            "resources": {"subscribe": True, **lists},
            "prompts": lists,
            "logging": {},
            "completions": {},
        }
        capabilities.pop(settings.get("without", ""), None)
        return "result", {
            "protocolVersion": settings.get("version", asked if asked in VERSIONS else VERSIONS[-1]),
            "capabilities": capabilities,
            "serverInfo": {"name": settings.get("name", "scripted"), "version": "1"},
        }

    def lists(self) -> dict[str, tuple[str, list[Json]]]:
        schema = {"type": "object", "properties": {"do": {"type": "array", "items": {"type": "object"}}}}
        tools: list[Json] = []
        for name in [*HINTS, *self.more_tools]:
            hints = HINTS.get(name)
            tools.append({"name": name, "inputSchema": schema, **({"annotations": hints} if hints else {})})
        return {
            "tools/list": ("tools", tools),
            "resources/list": ("resources", RESOURCES),
            "resources/templates/list": ("resourceTemplates", [{"uriTemplate": "note://{name}", "name": "note"}]),
            "prompts/list": ("prompts", PROMPTS),
        }

    def page(self, method: str, params: Json) -> Json:
        name, items = self.lists()[method]
        size = int(settings.get("pages", len(items)))
        begin = int(params.get("cursor", "0"))
        following = {"nextCursor": str(begin + size)} if begin + size < len(items) else {}
        return {name: items[begin : begin + size], **following}

    def begin_ask(self, method: str, params: Json | None) -> str:
        self.asked += 1
        ask_id = f"ask-{self.asked}"
        self.asks[ask_id] = threading.Event()
        send({"id": ask_id, "method": method, **({} if params is None else {"params": params})})
        return ask_id


class Call:
    """One run of a tool."""

    def __init__(self, server: Server, params: Json, request_id: object) -> None:
        self.server = server
        self.id = request_id
        self.tool = params["name"]
        self.steps = (params.get("arguments") or {}).get("do") or []
        self.token = (params.get("_meta") or {}).get("progressToken")
        self.outcome: Outcome | None = ("result", text_result("done"))
        self.is_stubborn = False

    def run(self) -> Outcome | None:
        append("runs", self.tool)
        if self.tool not in {*HINTS, *self.server.more_tools}:
            return "error", {"code": -32602, "message": f"there is no tool {self.tool}"}
        for step in self.steps:
            verb = next(iter(step))
            getattr(self, f"do_{verb}")(step[verb], step)
            self.check()
        return self.outcome

    def check(self) -> None:
        if self.id in self.server.cancelled and not self.is_stubborn:
            raise Cancelled

    def text(self, text: str) -> str:
        return text.replace("$ID", json.dumps(self.id)).replace("$TOKEN", json.dumps(self.token))

    def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, LOOK))

    def do_progress(self, count: int, step: Json) -> None:
        if self.token is None:
            return
        more = {"message": "x" * step["size"]} if "size" in step else {}
        for number in range(1, count + 1):
            params = {"progressToken": self.token, "progress": number, "total": count, **more}
            send({"method": "notifications/progress", "params": params})
            if "every" in step:
                self.sleep(step["every"])

    def do_sleep(self, seconds: float, step: Json) -> None:
        self.sleep(seconds)

    def do_wait(self, path: str, step: Json) -> None:
        while not os.path.exists(path):
            self.sleep(LOOK)

    def do_hang(self, value: object, step: Json) -> None:
        sleep_for_ever()

    def do_freeze(self, value: object, step: Json) -> None:
        with _writing:
            sleep_for_ever()

    def do_say(self, text: str, step: Json) -> None:
        self.outcome = ("result", text_result(self.text(text)))

    def do_result(self, result: Json, step: Json) -> None:
        self.outcome = ("result", result)

    def do_tool_error(self, text: str, step: Json) -> None:
        self.outcome = ("result", text_result(self.text(text), isError=True))

    def do_error(self, error: Json, step: Json) -> None:
        self.outcome = ("error", error)

    def do_answer(self, text: str, step: Json) -> None:
        respond(self.id, "result", text_result(self.text(text)))
        self.outcome = None

    def do_stubborn(self, value: object, step: Json) -> None:
        self.is_stubborn = bool(value)

    def do_exit(self, status: int, step: Json) -> None:
        os._exit(status)

    def do_kill(self, value: object, step: Json) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_print(self, text: str, step: Json) -> None:
        put(self.text(text) + "\n")

    def do_half(self, text: str, step: Json) -> None:
        put(self.text(text))

    def do_giant(self, size: int, step: Json) -> None:
        self.outcome = ("result", text_result("x" * size))

    def do_stderr(self, text: str, step: Json) -> None:
        sys.stderr.write((text + "\n") * step.get("times", 1))
        sys.stderr.flush()

    def do_close(self, which: str, step: Json) -> None:
        os.close({"stdin": 0, "stdout": 1}[which])

    def do_ask(self, method: str, step: Json) -> None:
        ask_id = self.server.begin_ask(method, step.get("params"))
        while not self.server.asks[ask_id].wait(LOOK):
            self.check()
        answer = self.server.answers[ask_id]
        self.do_say(json.dumps(answer.get("result", answer.get("error"))), step)

    def do_begin_ask(self, method: str, step: Json) -> None:
        self.server.begin_ask(method, step.get("params"))

    def do_withdraw(self, value: object, step: Json) -> None:
        params = {"requestId": f"ask-{self.server.asked}", "reason": "not needed any more"}
        send({"method": "notifications/cancelled", "params": params})

    def do_log(self, text: str, step: Json) -> None:
        level = step.get("level", "info")
        if LEVELS.index(level) >= LEVELS.index(self.server.level):
            send({"method": "notifications/message", "params": {"level": level, "data": text}})

    def do_notify(self, method: str, step: Json) -> None:
        send({"method": method, **({"params": step["params"]} if "params" in step else {})})

    def do_update(self, uri: str, step: Json) -> None:
        if uri in self.server.subscribed:
            send({"method": "notifications/resources/updated", "params": {"uri": uri}})

    def do_tools(self, names: list[str], step: Json) -> None:
        self.server.more_tools = names
        send({"method": "notifications/tools/list_changed"})

    def do_environment(self, value: object, step: Json) -> None:
        self.do_say(json.dumps(dict(os.environ)), step)

    def do_pid(self, value: object, step: Json) -> None:
        self.do_say(str(os.getpid()), step)

    def do_note(self, path: str, step: Json) -> None:
        with open(f"{path}.new", "w") as file:
            file.write(json.dumps(self.outcome))
        os.rename(f"{path}.new", path)

    def do_diary(self, path: str, step: Json) -> None:
        with open(path, "a") as file:
            file.write(f"{step['key']} {os.getpid()}\n")

    def do_heard(self, value: object, step: Json) -> None:
        self.do_say(json.dumps(self.server.heard), step)

    def do_spawn(self, seconds: float, step: Json) -> None:
        self.do_say(str(spawn(seconds, step.get("memory", 0))), step)

    def do_memory(self, size: int, step: Json) -> None:
        self.server.taken = b"x" * size


def main() -> None:
    append("starts", os.getpid())
    if settings.get("term") == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "stderr" in settings:
        sys.stderr.write(settings["stderr"] + "\n")
        sys.stderr.flush()
    if "banner" in settings:
        put(settings["banner"] + "\n")
    if "exit" in settings:
        with open(settings.get("starts", os.devnull)) as file:
            if len(file.readlines()) >= int(settings.get("after", "0")):
                os._exit(int(settings["exit"]))
    if "kill" in settings:
        os.kill(os.getpid(), signal.SIGKILL)
    if "tree" in settings:
        spawn(settings["tree"])
    time.sleep(float(settings.get("sleep", "0")))
    if "wait" in settings:
        wait_for(settings["wait"])
    Server().run()


if __name__ == "__main__":
    main()
