"""Sends the host's requests without a session (2026-07-28), and those of the bridge about them, to the server."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from perdure._core import splice
from perdure._core.envelope import envelope_in, headers_of, param_headers, with_tasks
from perdure._core.jsonrpc import JsonObject, Request
from perdure._core.polling import HEADER_MISMATCH
from perdure._core.reconnect import Patience
from perdure._core.settling import may_run_again
from perdure.remote.exchange import Exchange
from perdure.remote.exchange import Request as Sent
from perdure.remote.link import Link
from perdure.remote.message import Message, encode
from perdure.remote.task_progress import PROGRESS, TaskProgress
from perdure.stdio.call_ledger import Entry
from perdure.stdio.pipes import Output

#: Pages of `tools/list` that are read to find out what a tool says of itself.
TOOL_PAGES = 100


@dataclass(kw_only=True)
class HostCall:
    """A request of the host, and what became of it."""

    request: Request
    text: str
    host_id: str
    """As the host wrote it, as JSON."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    entry: Entry | None = None
    task: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """That repeat its arguments, where its tool wants that."""
    answered: set[str] = field(default_factory=set)
    """Questions of the task that have their answers."""
    progress: TaskProgress = field(default_factory=TaskProgress)

    @property
    def params(self) -> Mapping[str, Any]:
        return self.request.params or {}

    @property
    def tool(self) -> str:
        return str(self.params.get("name", ""))


class Exchanges:
    """Takes requests to their answers. `output` writes the notifications that come before them to the host."""

    def __init__(self, link: Link, output: Output) -> None:
        self._link = link
        self._limits = link.limits
        self._output = output

    def make(
        self, request: Sent, take: Callable[[Message], Awaitable[None]], patience: Patience | None = None
    ) -> Exchange:
        return Exchange(
            self._link.endpoint,
            self._limits,
            request,
            new_id=self._link.new_id,
            take=take,
            complain=self._link.program.complain,
            patience=patience,
        )

    async def send(self, call: HostCall, patience: Patience | None = None, *, with_own: bool = False) -> Message:
        """The answer to a request as the host sent it; `with_own`: it declares what the bridge takes as well."""
        meta = dict(call.params["_meta"])
        sent = self._sent(call, with_tasks(meta) if with_own else meta)
        return await self.make(sent, partial(self._tell, call), patience).answer()

    def _sent(self, call: HostCall, meta: JsonObject, **about: Any) -> Sent:
        method = call.request.method

        def body(wire_id: str) -> bytes:
            own = {**meta, "progressToken": wire_id} if "progressToken" in meta else meta
            text = splice.replaced(call.text, encode(own), "params", "_meta")
            return splice.replaced(text, encode(wire_id), "id").encode()

        headers = {**call.headers, **headers_of(method, {**call.params, "_meta": meta})}
        return Sent(method=method, name=call.tool, body=body, headers=headers, **about)

    async def ask(self, method: str, params: Mapping[str, Any], call: HostCall) -> Message:
        """The answer to a request of the bridge's own, in the host's name."""
        whole = {**params, "_meta": with_tasks(envelope_in(call.params) or {})}

        def body(wire_id: str) -> bytes:
            return encode({"jsonrpc": "2.0", "id": wire_id, "method": method, "params": whole}).encode()

        return await self.make(Sent(method=method, body=body, headers=headers_of(method, whole)), _ignore).answer()

    async def _tell(self, call: HostCall, message: Message) -> None:
        """Give the host a notification of its request. Servers send no requests in this revision."""
        if message.is_request or message.method is None:
            return
        text = message.text
        if message.method == PROGRESS:
            token = splice.cut(call.text, "params", "_meta", "progressToken")
            if token is None or "progressToken" not in message.params:
                return
            text = splice.replaced(text, token, "params", "progressToken")
            call.progress.heard(message)
        await self._output.deliver(text)

    async def send_call(self, call: HostCall, meta: JsonObject, *, is_keyed: bool) -> Message:
        may_run_again = partial(self._may_run_again, call)
        sent = self._sent(call, meta, is_keyed=is_keyed, may_run_again=may_run_again)
        answer = await self.make(sent, partial(self._tell, call)).answer()
        if not answer.is_error or answer.body["error"].get("code") != HEADER_MISMATCH or call.headers:
            return answer
        # A pipe has no headers, and a host does not know that this tool wants some.
        call.headers = param_headers((await self._tool(call)).get("inputSchema"), call.params.get("arguments"))
        return await self.send_call(call, meta, is_keyed=is_keyed) if call.headers else answer

    async def _may_run_again(self, call: HostCall) -> bool:
        return may_run_again(await self._tool(call))

    async def _tool(self, call: HostCall) -> Mapping[str, Any]:
        """What the server says of the tool that is called; nothing if it does not show it."""
        cursor: object = None
        for _ in range(TOOL_PAGES):
            found = await self.ask("tools/list", {"cursor": cursor} if cursor else {}, call)
            page = {} if found.is_error else found.result
            for tool in page.get("tools") or ():
                if isinstance(tool, Mapping) and tool.get("name") == call.tool:
                    return tool
            if not (cursor := page.get("nextCursor")):
                break
        return {}


async def _ignore(_: object) -> None:
    """For requests whose messages have no reader."""
