"""The host's side without sessions (2026-07-28): each request of the host is an exchange with the server.

**What the host sees** is a plain server at the other end of a pipe. The bridge sends requests again while their
connection breaks, declares tasks to the server on its own, and polls a call that becomes one: the host waits for an
ordinary call, which outlives the server. What a task asks goes to the host as a round of that call, with a state of the
bridge's own, and comes back with the host's next request. The state holds the task's handle, so any later bridge can
bring the answer to the task.

**What the host never got** the next bridge finds: each call has a key on disk (`call_ledger`), and a request for the
same joins it.

A host that takes tasks itself is left to drive them, and one that brings a key keeps it.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import anyio

from perdure._core import splice
from perdure._core.codes import INVALID_REQUEST, NO_SERVER, TOO_MANY_AT_ONCE, UNREACHABLE, UNSUPPORTED_VERSION
from perdure._core.delivery import CANCEL_TASK, DISCOVER, GET_TASK, LISTEN, UPDATE_TASK
from perdure._core.envelope import declares_tasks, envelope_in, with_tasks
from perdure._core.extension import CALLS, CANCEL, KEY, TASKS
from perdure._core.jsonrpc import JsonObject, Notification, Request
from perdure._core.polling import GONE, Next, next_of, pause
from perdure._core.revisions import REVISIONS
from perdure.remote.call import unknown
from perdure.remote.link import Link
from perdure.remote.message import Message, encode, error, messages_in
from perdure.remote.stream import Attempts
from perdure.remote.task_progress import PROGRESS
from perdure.stdio.call_ledger import BEAT_SECONDS, KEY_BYTES, CallLedger, digest_of
from perdure.stdio.exchanges import Exchanges, HostCall
from perdure.stdio.listening import Listening
from perdure.stdio.pipes import Output
from perdure.telemetry.events import log_event

#: Requests of the host that run at once, as in a session.
MAX_RUNNING = 256
#: Seconds for what the host cancelled last before it closed the pipe.
FLUSH_SECONDS = 0.5
#: Begins the state of a call whose task has asked something, before the task's handle; the host brings it back with the
#: answers.
STATE = "perdure-stdio."
#: Tasks whose question the host has not answered. Beyond, the oldest is given up: a repeat of its call begins again.
MAX_ASKING = 1_000
REQUEST_CANCELLED = -32800


@dataclass(frozen=True, kw_only=True)
class Offers:
    """Extensions that a server announces."""

    tasks: bool = False
    keys: bool = False


class SessionlessSide:
    """`output` writes what the host gets."""

    def __init__(self, link: Link, output: Output, ledger: CallLedger) -> None:
        self._link = link
        self._limits = link.limits
        self._output = output
        self._ledger = ledger
        self._exchanges = Exchanges(link, output)
        self._running: dict[str, HostCall] = {}
        self._asking: dict[str, HostCall] = {}
        """Calls whose task waits for the host's answer, by its handle."""
        self._offers: Offers | None = None
        self._farewells: set[anyio.Event] = set()
        """Cancellations that are on their way."""
        self._is_beating = False

    @staticmethod
    def takes(message: object) -> bool:
        """Whether a message is of the revision without sessions."""
        return isinstance(message, Request | Notification) and envelope_in(message.params) is not None

    async def take(self, message: Request | Notification, text: str) -> None:
        if not self._is_beating:
            self._is_beating = True
            self._link.start(self._beat)
        if isinstance(message, Request):
            await self._begin(message, text)
            return
        call = self._running.get(splice.cut(text, "params", "requestId") or "")
        if call is not None and message.method == "notifications/cancelled":
            self._drop(call)

    def stop(self) -> None:
        """The host does not listen any more. Its calls stay in the ledger."""
        for call in self._running.values():
            call.scope.cancel()

    async def flush(self) -> None:
        """Wait until what the host has cancelled is cancelled, or `FLUSH_SECONDS` are over."""
        with anyio.move_on_after(FLUSH_SECONDS):
            while self._farewells:
                await next(iter(self._farewells)).wait()

    async def _beat(self) -> None:
        while True:
            await anyio.sleep(BEAT_SECONDS)
            self._ledger.beat()

    async def _begin(self, message: Request, text: str) -> None:
        host_id = splice.cut(text, "id") or "null"
        refusal = None
        if host_id in self._running:
            refusal = INVALID_REQUEST, f"Request id {host_id} is still in use by a running request"
        elif len(self._running) >= MAX_RUNNING:
            refusal = TOO_MANY_AT_ONCE, f"{MAX_RUNNING} requests run already, as many as may"
        if refusal is not None:
            await self._output.write(error(host_id, *refusal).text)
            return
        call = HostCall(request=message, text=text, host_id=host_id)
        state = call.params.get("requestState")
        if message.method == "tools/call" and isinstance(state, str) and state.startswith(STATE):
            task = state.removeprefix(STATE)
            if (asked := self._asking.pop(task, None)) is not None:
                call = replace(call, entry=asked.entry, task=task, answered=asked.answered, progress=asked.progress)
            else:
                call = replace(call, entry=self._ledger.resume(task), task=task)
        self._running[host_id] = call
        self._link.start(self._follow, call)

    async def _follow(self, call: HostCall) -> None:
        with call.scope:
            match call.request.method:
                case "tools/call":
                    answer = await self._call(call)
                case method if method == LISTEN:
                    listening = Listening(call.request, call.text, call.host_id, self._output.deliver)
                    answer = await listening.end(self._exchanges.make, self._limits.listening)
                case method if method == DISCOVER:
                    found = await self._exchanges.send(call, self._limits.handshake, with_own=True)
                    answer = self._discovered(call, found)
                case _:
                    answer = await self._exchanges.send(call)
            if self._running.get(call.host_id) is call:
                del self._running[call.host_id]  # a host may use an id again as soon as it has the answer
            await self._output.deliver(answer.answering(call.host_id))
            if call.entry is not None and self._asking.get(call.task) is not call:
                self._ledger.end(call.entry)

    # What the server is

    def _discovered(self, call: HostCall, answer: Message) -> Message:
        """The answer to `server/discover`; a server without this revision has the host fall back to a session."""
        if not answer.is_error:
            self._offers = _offers_in(answer.result)
            return answer
        code = answer.body["error"].get("code")
        if code in (UNREACHABLE, NO_SERVER):
            return answer
        meta = envelope_in(call.params) or {}
        data = {"supported": sorted(REVISIONS, reverse=True), "requested": next(iter(meta.values()), None)}
        sentence = "The server speaks the revisions that have sessions"
        return error(encode(answer.body.get("id")), UNSUPPORTED_VERSION, sentence, data)

    async def _known_offers(self, call: HostCall) -> Offers:
        """What the server offers. A host may know the server, and not ask."""
        if self._offers is None:
            found = await self._exchanges.ask(DISCOVER, {}, call)
            if found.is_error:
                return Offers()
            self._offers = _offers_in(found.result)
        return self._offers

    # Calls of tools

    async def _call(self, call: HostCall) -> Message:
        if call.task:
            await self._bring_answers(call)
            return await self._task(call)
        meta: JsonObject = dict(call.params["_meta"])
        offers = await self._known_offers(call)
        is_driven = offers.tasks and not declares_tasks(meta)
        if offers.keys and not isinstance(meta.get(KEY), str):
            if "requestState" in call.params:  # a round of the tool's own; no retry of it comes after a restart
                meta[KEY] = secrets.token_urlsafe(KEY_BYTES)
            else:
                call.entry = self._ledger.begin(digest_of(call.params))
                meta[KEY], call.task = call.entry.key, call.entry.task if is_driven else ""
        if not call.task:
            answer = await self._exchanges.send_call(
                call, with_tasks(meta) if is_driven else meta, is_keyed=offers.keys
            )
            handle = answer.result.get("taskId") if answer.result.get("resultType") == "task" else None
            if not is_driven or not isinstance(handle, str):
                return answer
            call.task = handle
            if call.entry is not None:
                self._ledger.note_task(call.entry, handle)
        return await self._task(call)

    async def _task(self, call: HostCall) -> Message:
        """The answer to the call that became a task; or its questions, as a round."""
        attempts = Attempts(self._limits.patience)
        while True:
            began = time.monotonic()
            found = await self._exchanges.ask(GET_TASK, {"taskId": call.task}, call)
            if found.is_error:
                attempts.failed(found.why)
                if found.body["error"].get("code") in GONE or not await attempts.wait():
                    return self._unknown(call, f"the server does not say what became of the task: {found.why}")
                continue
            attempts, task = Attempts(self._limits.patience), found.result
            if (answer := self._answer_in(call, task)) is not None:
                return answer
            await self._tell_progress(call, task.get("statusMessage"))
            await anyio.sleep(pause(task.get("pollIntervalMs"), took=time.monotonic() - began))

    def _answer_in(self, call: HostCall, task: Mapping[str, Any]) -> Message | None:
        status, said = task.get("status"), task.get("statusMessage")
        match next_of(status):
            case Next.POLL:
                return None
            case Next.ANSWER:
                found = task.get("inputRequests")
                asked = {key: ask for key, ask in (found or {}).items() if key not in call.answered}
                return self._round(call, asked) if asked else None
            case Next.RESULT if isinstance(task.get("result"), Mapping):
                return _message({"result": {"resultType": "complete", **task["result"]}})
            case Next.ERROR if isinstance(task.get("error"), Mapping):
                return _message({"error": task["error"]})
            case Next.CANCELLED:
                return error("null", REQUEST_CANCELLED, said if isinstance(said, str) else "Request cancelled")
        return self._unknown(call, f"the task is {status!r}, and has no answer")

    def _round(self, call: HostCall, asked: Mapping[str, Any]) -> Message:
        """Ask the host; its next request with this state brings the answers."""
        self._asking[call.task] = call
        if len(self._asking) > MAX_ASKING:
            oldest = self._asking.pop(next(iter(self._asking)))
            if oldest.entry is not None:
                self._ledger.end(oldest.entry)
        state = STATE + call.task
        return _message({"result": {"resultType": "input_required", "inputRequests": asked, "requestState": state}})

    async def _bring_answers(self, call: HostCall) -> None:
        answers = call.params.get("inputResponses")
        if isinstance(answers, Mapping):
            found = await self._exchanges.ask(UPDATE_TASK, {"taskId": call.task, "inputResponses": answers}, call)
            if not found.is_error:  # otherwise the host is asked again, while the task shows the question
                call.answered |= set(answers)

    async def _tell_progress(self, call: HostCall, said: object) -> None:
        token = splice.cut(call.text, "params", "_meta", "progressToken")
        if token is not None and (params := call.progress.further(said)) is not None:
            text = encode({"jsonrpc": "2.0", "method": PROGRESS, "params": {"progressToken": None, **params}})
            await self._output.deliver(splice.replaced(text, token, "params", "progressToken"))

    def _drop(self, call: HostCall) -> None:
        """The host does not want the answer any more."""
        call.scope.cancel()
        del self._running[call.host_id]
        if call.entry is not None:
            self._ledger.end(call.entry)
        if call.task or call.entry is not None:
            self._farewells.add(over := anyio.Event())
            self._link.start(self._goodbye, call, over)

    async def _goodbye(self, call: HostCall, over: anyio.Event) -> None:
        """Cancel a call at the server: by its handle, or by its key where it has none."""
        by_key = {"key": "" if call.entry is None else call.entry.key}
        method, params = (CANCEL_TASK, {"taskId": call.task}) if call.task else (CANCEL, by_key)
        try:
            found = await self._exchanges.ask(method, params, call)
            if found.is_error:
                log_event(logging.INFO, "stdio.not_cancelled", f"a call could not be cancelled: {found.why}")
        finally:
            self._farewells.discard(over)
            over.set()

    def _unknown(self, call: HostCall, reason: str) -> Message:
        return unknown("null", "tools/call", call.tool, reason)


def _offers_in(result: Mapping[str, Any]) -> Offers:
    capabilities = result.get("capabilities")
    found = capabilities.get("extensions") if isinstance(capabilities, Mapping) else None
    extensions = found if isinstance(found, Mapping) else {}
    return Offers(tasks=TASKS in extensions, keys=CALLS in extensions)


def _message(answer: Mapping[str, Any]) -> Message:
    return messages_in(encode({"jsonrpc": "2.0", "id": None, **answer}))[0]
