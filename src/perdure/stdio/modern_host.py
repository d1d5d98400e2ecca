"""Handles the requests of a host without sessions (2026-07-28): each request stands alone.

**What the host sees** is a plain server at the other end of a pipe. The bridge sends requests again while their
connection breaks, declares tasks to the server on its own, and polls a call that becomes one: the host waits for an
ordinary call, which outlives the server. What a task asks goes to the host as a round of that call, with a state of the
bridge's own, and comes back with the host's next request. The state holds the task's handle, so any later bridge can
bring the answer to the task.

**What the host never got** the next bridge finds: each call has a key on disk (`state_files`), and a request for the
same joins it.

A host that takes tasks itself is left to drive them, and one that brings a key keeps it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from perdure._core import splice
from perdure._core.codes import NO_SERVER, UNREACHABLE, UNSUPPORTED_VERSION
from perdure._core.envelope import (
    CAPABILITIES,
    DISCOVER,
    HOST,
    KEY,
    LISTEN,
    TASKS,
    VERSION,
    declares,
    headers_of,
    with_tasks,
)
from perdure._core.jsonrpc import JsonObject, Request
from perdure._core.reconnect import Patience
from perdure._core.revisions import REVISIONS
from perdure.remote.call import Call, OutgoingRequest, text_body
from perdure.remote.durable_calls import (
    PROGRESS,
    CallHandlers,
    DurableCall,
    DurableCalls,
    is_round,
    new_key,
    offers_in,
)
from perdure.remote.link import Link
from perdure.remote.message import Message, error, message_of
from perdure.stdio.pipes import Output
from perdure.stdio.state_files import BEAT_SECONDS, KeptKey, KeysFile, digest_of

#: Begins the state of a call whose task has asked something, before the task's handle; the host brings it back with the
#: answers.
STATE = "perdure-stdio."
#: Tasks whose question the host has not answered. Beyond, the oldest is given up: a repeat of its call begins again.
MAX_ASKING = 1_000


def unsupported(host_id: str, params: Mapping[str, Any], sentence: str) -> Message:
    """Return the answer that has the host fall back to a revision with sessions."""
    meta = params.get("_meta")
    asked = meta.get(VERSION) if isinstance(meta, Mapping) else None
    data = {"supported": sorted(REVISIONS, reverse=True), "requested": asked}
    return error(host_id, UNSUPPORTED_VERSION, sentence, data)


@dataclass(kw_only=True, eq=False)
class ModernHostRequest:
    """A request of the host that runs, or whose task waits for the host's answer."""

    request: Request
    text: str
    host_id: str
    """As the host wrote it, as JSON."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    call: DurableCall | None = None
    """Of a tool, once the bridge knows what the server offers."""
    kept_key: KeptKey | None = None

    @property
    def params(self) -> Mapping[str, Any]:
        return self.request.params or {}

    def as_sent(self, meta: JsonObject) -> OutgoingRequest:
        method = self.request.method
        headers = headers_of(method, {**self.params, "_meta": meta})
        return OutgoingRequest(method=method, body=text_body(self.text, meta), headers=headers)


class ModernHost:
    """`output` writes to the host."""

    def __init__(self, link: Link, output: Output, keys: KeysFile) -> None:
        self._link = link
        self._output = output
        self._keys = keys
        self._calls = DurableCalls(link.route, link.start)
        self.running: dict[str, ModernHostRequest] = {}
        """Requests of the host, by the id that the host gave, as JSON."""
        self._asking: dict[str, ModernHostRequest] = {}
        """Calls whose task waits for the host's answer, by its handle."""

    def begin(self, message: Request, host_id: str, text: str) -> None:
        request = ModernHostRequest(request=message, text=text, host_id=host_id)
        self.running[host_id] = request
        self._link.start(self._follow, request)

    def cancel(self, host_id: str) -> None:
        if (request := self.running.pop(host_id, None)) is not None:
            request.scope.cancel()
            self._forget(request)
            if request.call is not None:
                self._calls.send_cancel(request.call)

    def stop(self) -> None:
        """Stop all requests: the host does not read any more. The keys of its calls stay on disk."""
        for request in self.running.values():
            request.scope.cancel()

    async def flush(self) -> None:
        """Wait until the calls that the host cancelled are cancelled."""
        await self._calls.flush()

    async def beat(self) -> None:
        while True:
            await anyio.sleep(BEAT_SECONDS)
            self._keys.beat()

    async def _follow(self, request: ModernHostRequest) -> None:
        with request.scope:
            match request.request.method:
                case "tools/call":
                    answer = await self._call(request)
                case method if method == LISTEN:
                    sent = request.as_sent(dict(request.params["_meta"]))
                    answer = await self._calls.listen(sent, request.host_id, self._deliver)
                case method if method == DISCOVER:
                    answer = await self._send(request, self._link.route.limits.handshake, with_own=True)
                    if not answer.is_error:
                        self._calls.offers = offers_in(answer.result)
                    elif answer.body["error"].get("code") not in (UNREACHABLE, NO_SERVER):
                        sentence = "The server speaks the revisions that have sessions"
                        answer = unsupported(request.host_id, request.params, sentence)
                case _:
                    answer = await self._send(request)
            if self.running.get(request.host_id) is request:
                del self.running[request.host_id]  # a host may use an id again as soon as it has the answer
            await self._output.deliver(answer.answering(request.host_id))
            if request not in self._asking.values():
                self._forget(request)

    async def _send(
        self, request: ModernHostRequest, patience: Patience | None = None, *, with_own: bool = False
    ) -> Message:
        """Return the answer to a request as the host sent it. `with_own`: it declares the bridge's own extensions
        too."""
        meta = dict(request.params["_meta"])
        sent = request.as_sent(with_tasks(meta) if with_own else meta)
        return await Call(self._calls.route, sent, take=partial(self._tell, request), patience=patience).answer()

    # Calls of tools

    async def _call(self, request: ModernHostRequest) -> Message:
        state, meta = request.params.get("requestState"), dict(request.params["_meta"])
        if isinstance(state, str) and state.startswith(STATE):
            return await self._next_round(request, state.removeprefix(STATE))
        offers = await self._calls.known_offers(request.params)
        drives = offers.tasks and not declares(meta.get(CAPABILITIES), TASKS)
        if offers.keys and not isinstance(meta.get(KEY), str):
            if not declares(meta.get(CAPABILITIES), TASKS):
                meta[HOST] = True
            if state is not None:  # a round of the tool's own; the host does not retry it after a restart
                meta[KEY] = new_key()
            else:
                request.kept_key = self._keys.begin(digest_of(request.params))
                meta[KEY] = request.kept_key.key
        call = self._made(request, with_tasks(meta) if drives else meta)
        call.key = meta[KEY] if offers.keys else None
        if request.kept_key is not None and drives:
            call.task = request.kept_key.task or None
        return await self._answer(request, call, drives=drives)

    def _made(self, request: ModernHostRequest, meta: JsonObject) -> DurableCall:
        params = {**request.params, "_meta": meta}
        call = DurableCall(id=request.host_id, params=params, headers=headers_of("tools/call", params))
        request.call = call
        return call

    async def _next_round(self, request: ModernHostRequest, task: str) -> Message:
        """Pass on the host's answers to a task's questions."""
        earlier = self._asking.pop(task, None)
        request.kept_key = self._keys.resume(task) if earlier is None else earlier.kept_key
        call = self._made(request, with_tasks(request.params["_meta"]))
        call.task = task
        if earlier is not None and earlier.call is not None:
            call.answered = earlier.call.answered
        answers = request.params.get("inputResponses")
        if isinstance(answers, Mapping):  # if the server does not take them, the host is asked again
            await self._calls.update_task(call, task, answers)
        return await self._answer(request, call)

    async def _answer(self, request: ModernHostRequest, call: DurableCall, *, drives: bool = True) -> Message:
        def on_changed() -> None:
            if request.kept_key is not None and call.task:
                self._keys.note_task(request.kept_key, call.task)

        async def on_progress(params: JsonObject) -> None:
            await self._tell(request, message_of(method=PROGRESS, params={"progressToken": None, **params}))

        caller = CallHandlers(take=partial(self._tell, request), on_progress=on_progress, on_changed=on_changed)
        found = await self._calls.answer(call, caller, text=request.text, drives=drives)
        if not call.task or not is_round(found):
            return found
        self._asking[call.task] = request
        if len(self._asking) > MAX_ASKING:
            self._forget(self._asking.pop(next(iter(self._asking))))
        return message_of(id=None, result={**found.result, "requestState": STATE + call.task})

    async def _tell(self, request: ModernHostRequest, message: Message) -> None:
        """Give the host a notification of its request. Servers send no requests in this revision."""
        if message.is_request or message.method is None:
            return
        if message.method == PROGRESS:
            token = splice.cut(request.text, "params", "_meta", "progressToken")
            if token is None or "progressToken" not in message.params:
                return
            message = message.with_token(token)
        await self._deliver(message)

    async def _deliver(self, message: Message) -> None:
        await self._output.deliver(message.text)

    def _forget(self, request: ModernHostRequest) -> None:
        if request.kept_key is not None:
            self._keys.end(request.kept_key)
