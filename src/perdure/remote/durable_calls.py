"""Takes requests and tools' calls without a session (2026-07-28) to their answers, in this process and in the next.

**On disk** (`CallHandlers.on_changed`) is a call with its key before it is sent, and the handle of its task before the
task is followed. So the next process finds every call that may run, by its handle or by its key.

**Keys.** A server that offers keys (`dev.perdure/calls`) runs a call with a key once, for as long as it keeps the key.
A call that an earlier process has sent longer ago than that is not sent again, because it would run a second time. A
handle has no such limit: to ask for a task runs nothing.

**Tasks.** A call that becomes a task (`io.modelcontextprotocol/tasks`) is followed by polling (`_core/polling.py`), and
its program waits for an ordinary call. The task's questions are put to the program, each once, also over a crash of
this process: an answer is on disk before it is sent. For a program that takes questions only as the answer to its
request, they are that answer, and its next request brings the answers.
"""

import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import anyio

from perdure._core import splice
from perdure._core.codes import HEADER_MISMATCH, NO_SERVER, UNREACHABLE
from perdure._core.envelope import (
    CALLS,
    CANCEL,
    CANCEL_TASK,
    DISCOVER,
    KEPT,
    SUBSCRIPTION,
    TASKS,
    envelope_in,
    headers_of,
    param_headers,
    with_tasks,
)
from perdure._core.eras import next_round
from perdure._core.jsonrpc import JsonObject
from perdure._core.pages import Cursors
from perdure._core.polling import LEAST_POLL, Next
from perdure._core.settling import may_run_again
from perdure.remote.call import Call, OutgoingRequest, ToolCall, params_body, text_body, unknown
from perdure.remote.listener import Listener
from perdure.remote.message import Message, encode, message_of, messages_in
from perdure.remote.route import Route
from perdure.remote.stream import Take
from perdure.remote.task_follower import QuestionRefused, TaskFollower, update_task
from perdure.telemetry.log_records import log_event

ToolPage = Callable[[str | None], Awaitable[Mapping[str, Any]]]
"""Returns the page of `tools/list` at a cursor."""


async def find_tool(name: str, page: ToolPage) -> Mapping[str, Any]:
    """The tool as `tools/list` shows it; empty if the server does not show it."""
    cursors = Cursors()
    cursor: str | None = ""
    while cursor is not None:
        found = await page(cursor or None)
        tools = found.get("tools")
        for tool in tools if isinstance(tools, list) else ():
            if isinstance(tool, Mapping) and tool.get("name") == name:
                return tool
        cursor = cursors.after(found)
    return {}


async def may_run_twice(name: str, page: ToolPage) -> bool:
    """Whether a tool says that a second run does no harm. `page` reads one page of `tools/list`."""
    return may_run_again(await find_tool(name, page))


PROGRESS = "notifications/progress"
#: Of chance in a key: no two calls have the same.
KEY_BYTES = 24
#: Rounds in which a call of an earlier process may ask: as many as the SDK's client allows a call by default.
MOST_ROUNDS = 10
#: Seconds for which a server keeps a key, where it does not say (`keptMs`): Perdure's keep theirs for a day.
KEPT_SECONDS = 3_600.0


@dataclass(kw_only=True)
class DurableCall(ToolCall):
    """A tool's call, with its params and headers as they are sent, to send them again."""

    headers: dict[str, str]
    key: str | None = None
    """The key by which the server recognizes the call if it is sent again."""
    task: str | None = None
    """The handle of the task that the call became."""
    began: float = 0.0
    """When the call was first sent, by this machine's clock."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The user's answers to the task's questions that the server has not acknowledged, by the questions' keys."""
    answered: list[str] = field(default_factory=list)
    """The keys of questions whose answers the server has."""
    is_given_up: bool = False
    """The program does not want the result, and the server may not know that yet."""


@dataclass(frozen=True, kw_only=True)
class Offers:
    """The extensions that a server announces."""

    tasks: bool = False
    keys: bool = False
    kept_seconds: float = KEPT_SECONDS
    """How long the server keeps a key."""


def offers_in(discovered: Mapping[str, Any], member: str = "extensions") -> Offers:
    """What the result of `server/discover` announces; or that of `initialize`, among its `experimental`
    capabilities."""
    capabilities = discovered.get("capabilities")
    found = capabilities.get(member) if isinstance(capabilities, Mapping) else None
    extensions: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    keys = extensions.get(CALLS)
    kept = keys.get(KEPT) if isinstance(keys, Mapping) else None
    seconds = kept / 1000 if isinstance(kept, int) and kept >= 0 else KEPT_SECONDS
    return Offers(tasks=TASKS in extensions, keys=isinstance(keys, Mapping), kept_seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class CallHandlers:
    """Callbacks of the program that waits for one call."""

    take: Take
    """Takes a notification before the answer."""
    on_progress: Callable[[JsonObject], Awaitable[None]]
    """Takes the params of the progress that a task reports, without a token."""
    on_changed: Callable[[], None]
    """Persists the call."""
    put_question: Callable[[str, object], Awaitable[dict[str, Any]]] | None = None
    """Returns the user's answer to a question, or raises `QuestionRefused`. None: the program takes a task's questions
    as the answer to its request."""


def new_key() -> str:
    return secrets.token_urlsafe(KEY_BYTES)


def is_round(answer: Message) -> bool:
    """Whether a call's answer asks for input, and for the call once more."""
    return not answer.is_error and answer.result.get("resultType") == "input_required"


@dataclass(eq=False)
class DurableCalls:
    """Sends requests and calls to one server."""

    route: Route
    _start: Callable[..., None]
    """Runs a task in the background."""
    _: KW_ONLY
    reruns: bool = True
    """Calls without a key are sent again where their tool says that it may run twice."""
    offers: Offers | None = None
    """None until the server was asked."""
    _cancels: set[anyio.Event] = field(default_factory=set)
    """Cancels that are on their way."""

    @property
    def has_keys(self) -> bool:
        return self.offers is not None and self.offers.keys

    # Requests

    async def ask(self, method: str, params: Mapping[str, Any], of: Mapping[str, Any]) -> Message:
        """The answer to a request of the client's own that may be repeated, with the envelope of a program's params."""
        whole = {**params, "_meta": with_tasks(envelope_in(of) or {})}
        body = params_body(method, whole)
        request = OutgoingRequest(method=method, body=body, headers=headers_of(method, whole))
        return await Call(self.route, request).answer()

    async def tool(self, name: str, of: Mapping[str, Any]) -> Mapping[str, Any]:
        async def page(cursor: str | None) -> Mapping[str, Any]:
            found = await self.ask("tools/list", {"cursor": cursor} if cursor else {}, of)
            return {} if found.is_error else found.result

        return await find_tool(name, page)

    async def listen(self, request: OutgoingRequest, subscriber_id: str, deliver: Take) -> Message:
        """Keep one `subscriptions/listen` open; returns the answer that ends it.

        `deliver` hands notifications on, under the id by which the subscriber knows the subscription, given as JSON.
        """
        patience = self.route.limits.listening

        async def take(message: Message) -> None:
            if message.method is None or message.is_request:
                return
            hands_on, cues = listener.hear(message.method, message.params)
            texts = [message.text] if hands_on else []
            for method, params in cues:
                texts.append(
                    encode({"jsonrpc": "2.0", "method": method, "params": {**params, "_meta": {SUBSCRIPTION: 0}}})
                )
            for text in texts:
                await deliver(messages_in(splice.replaced(text, subscriber_id, "params", "_meta", SUBSCRIPTION))[0])

        async def send() -> Message:
            return await Call(self.route, request, take=take, patience=patience).answer()

        listener = Listener(send, patience)
        return await listener.end()

    # Calls of tools

    async def known_offers(self, of: Mapping[str, Any]) -> Offers:
        """What the server offers: a program may know the server, and not send `server/discover`."""
        if self.offers is None:
            found = await self.ask(DISCOVER, {}, of)
            if found.is_error:
                return Offers()
            self.offers = offers_in(found.result)
        return self.offers

    async def answer(
        self,
        call: DurableCall,
        caller: CallHandlers,
        *,
        text: str | None = None,
        drives: bool = True,
        may_have_arrived: bool = False,
    ) -> Message:
        """The answer to a call: by its request, and by its task, if it becomes one.

        `text`: the request as it came, in place of the call's params. Without `drives` a task is the program's own.
        """
        told = -math.inf

        async def take(message: Message) -> None:
            nonlocal told
            done = message.params.get("progress")
            if message.method == PROGRESS and isinstance(done, int | float):
                told = max(told, done)
            await caller.take(message)

        if not call.task:
            found = await self._send(call, take, text, may_have_arrived=may_have_arrived)
            handle = found.result.get("taskId") if found.result.get("resultType") == "task" else None
            if not drives or not isinstance(handle, str):
                return found
            call.task = handle
            caller.on_changed()
        try:
            return await self._follow(call, call.task, caller, told)
        except QuestionRefused as refused:
            await self.cancel(call)
            return message_of(id=call.id, error=refused.error)
        except Exception as failure:
            return unknown_outcome(call, f"{type(failure).__name__}: {failure}")

    async def _follow(self, call: DurableCall, handle: str, caller: CallHandlers, told: float) -> Message:
        """The answer to a call by its task, whose handle is on disk."""

        async def on_progress(params: JsonObject) -> None:
            if "progressToken" in call.params["_meta"]:
                await caller.on_progress(params)

        follower = TaskFollower(
            handle=handle,
            ask=partial(self.ask, of=call.params),
            patience=self.route.limits.patience,
            on_progress=on_progress,
            told=told,
            put_question=caller.put_question,
            answers=call.answers,
            answered=call.answered,
            on_changed=caller.on_changed,
        )
        end = await follower.end()
        match end.next:
            case Next.UNKNOWN:
                return unknown_outcome(call, end.reason)
            case Next.ANSWER:
                member = f'"result":{{"resultType":"input_required","inputRequests":{end.body}}}'
            case _:
                member = f'"{"error" if end.next is Next.ERROR else "result"}":{end.body}'
        return messages_in(f'{{"jsonrpc":"2.0","id":{encode(call.id)},{member}}}')[0]

    async def _send(self, call: DurableCall, take: Take, text: str | None, *, may_have_arrived: bool) -> Message:
        params = call.params

        async def may_run_twice() -> bool:
            return may_run_again(await self.tool(call.tool, params))

        request = OutgoingRequest(
            method="tools/call",
            name=call.tool,
            body=params_body("tools/call", params) if text is None else text_body(text, params["_meta"]),
            headers=call.headers,
            is_keyed=call.key is not None and self.has_keys,
            may_run_again=may_run_twice if self.reruns else None,
        )
        found = await Call(self.route, request, take=take, may_have_arrived=may_have_arrived).answer()
        if not found.is_error or found.body["error"].get("code") != HEADER_MISMATCH:
            return found
        # The tool wants arguments in headers, which a program does not know that has not read the tool's schema.
        tool = await self.tool(call.tool, call.params)
        headers = {**call.headers, **param_headers(tool.get("inputSchema"), call.arguments)}
        if headers == call.headers:
            return found
        call.headers = headers
        return await self._send(call, take, text, may_have_arrived=may_have_arrived)

    async def answer_earlier(self, call: DurableCall, caller: CallHandlers) -> Message:
        """The answer to a call of an earlier process, with its rounds."""
        age, offers = time.time() - call.began, self.offers or Offers()
        if not call.task and call.key is not None and offers.keys and age > offers.kept_seconds:
            reason = f"it was sent {age / 3600:.1f} hours ago, and the server may have forgotten its key"
            return unknown_outcome(call, reason)
        for number in range(MOST_ROUNDS + 1):
            found = await self.answer(call, caller, may_have_arrived=True)
            if not is_round(found):
                return found
            if number == MOST_ROUNDS:
                break
            try:
                await self._answer_round(call, caller, found.result)
            except QuestionRefused as refused:
                await self.cancel(call)
                return message_of(id=call.id, error=refused.error)
        await self.cancel(call)
        return unknown_outcome(call, f"it has asked in more than {MOST_ROUNDS} rounds")

    async def _answer_round(self, call: DurableCall, caller: CallHandlers, round_: Mapping[str, Any]) -> None:
        """Have a round's questions answered, for the next one."""
        questions, answers = round_.get("inputRequests"), {}
        assert caller.put_question is not None
        for key, question in questions.items() if isinstance(questions, Mapping) else ():
            answers[key] = await caller.put_question(key, question)
        if not answers:
            await anyio.sleep(LEAST_POLL)
        call.params = next_round(call.params, round_, answers)
        caller.on_changed()

    async def update_task(self, call: DurableCall, handle: str, answers: Mapping[str, Any]) -> None:
        """Bring answers to the questions of a call's task. If the server does not take them, it asks again."""
        await update_task(handle, answers, call.answered, partial(self.ask, of=call.params))

    # Cancels

    async def cancel(self, call: DurableCall) -> bool:
        """Cancel a call at the server, by its handle or its key. False if no server took the cancel.

        Without a handle and a key the end of the connection has cancelled the call.
        """
        if call.task:
            found = await self.ask(CANCEL_TASK, {"taskId": call.task}, call.params)
        elif call.key is not None and self.has_keys:
            found = await self.ask(CANCEL, {"key": call.key}, call.params)
        else:
            return True
        if found.is_error:
            log_event(logging.INFO, "remote.not_cancelled", f"a call could not be cancelled: {found.why}")
        return not found.is_error or found.body["error"].get("code") not in (UNREACHABLE, NO_SERVER)

    def send_cancel(self, call: DurableCall, on_cancelled: Callable[[], None] = lambda: None) -> None:
        """Cancel a call in the background. `on_cancelled` is called when a server has taken the cancel."""

        async def run(over: anyio.Event) -> None:
            try:
                if await self.cancel(call):
                    on_cancelled()
            finally:
                self._cancels.discard(over)
                over.set()

        self._cancels.add(over := anyio.Event())
        self._start(run, over)

    async def flush(self) -> None:
        """Wait for the cancels that are on their way."""
        while self._cancels:
            await next(iter(self._cancels)).wait()


def unknown_outcome(call: DurableCall, reason: str) -> Message:
    return unknown(call.id, "tools/call", call.tool, reason)
