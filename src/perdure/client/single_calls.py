"""Takes calls of tools without a session (2026-07-28) to their answers, in this process and in the next.

**What is on disk.** A call, with its key, before it is sent; the handle of its task before it is waited for. So the
next process finds every call that may run, by handle or by key.

**Which keys are sent again.** The server runs a call with a key once, for as long as it keeps the key. A call that an
earlier process has sent longer ago than that is not sent again, because it would run a second time. A handle has no
such limit: to ask for a task runs nothing.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio
import mcp_types as types
from mcp_types import JSONRPCRequest, RequestId

from perdure._core.extension import CANCEL, KEPT, KEY
from perdure._core.polling import LEAST_POLL
from perdure._core.settling import may_run_again
from perdure.client.incoming import encoded
from perdure.client.memory import Memory, SingleCall
from perdure.client.requests import Requests, Take
from perdure.client.task import Asked, Task, put_question, refused
from perdure.remote.call import unknown
from perdure.remote.message import Message, encode, messages_in
from perdure.remote.task_progress import PROGRESS, TaskProgress
from perdure.telemetry.events import log_event

#: Pages of `tools/list` that are read to find out what a tool says of itself.
TOOL_PAGES = 100
#: Of chance in a key: no two calls have the same.
KEY_BYTES = 24
#: Rounds in which a call of an earlier process may ask: as many as the SDK's client allows a call by default.
MOST_ROUNDS = 10
#: Seconds for which a server keeps a key, where it does not say (`keptMs`): Perdure's keep theirs for a day.
KEPT_SECONDS = 3_600.0


class DurableCalls:
    """`asked` puts a question to the client's callbacks.

    `reruns`: calls without a key are sent again where their tool says that it may run twice.
    """

    def __init__(self, memory: Memory, requests: Requests, asked: Asked, *, reruns: bool) -> None:
        self.extension: Mapping[str, Any] | None = None
        """What the server says of keys (`dev.perdure/calls`); None if it does not know them."""
        self._memory = memory
        self._requests = requests
        self._asked = asked
        self._reruns = reruns

    @property
    def has_keys(self) -> bool:
        return self.extension is not None

    def remember(self, message: JSONRPCRequest, headers: Mapping[str, str]) -> tuple[SingleCall, bool]:
        """Write a call down before it is sent; with it, whether its caller chose its key, and so that of its rounds."""
        params = encoded(message).get("params") or {}
        meta = dict(params.get("_meta") or {})
        key = meta.get(KEY) if self.has_keys and isinstance(meta.get(KEY), str) else None
        is_chosen = key is not None
        if self.has_keys and key is None and "requestState" not in params:
            meta[KEY] = key = new_key()
        call = SingleCall(
            id=key or self._requests.new_id(),
            params={**params, "_meta": meta},
            headers=dict(headers),
            key=key,
            began=time.time(),
        )
        self._memory.state.single_calls[call.id] = call
        self._memory.changed()
        return call, is_chosen

    async def answer(
        self, call: SingleCall, take: Take, *, local_id: RequestId | None = None, may_have_arrived: bool = False
    ) -> Message:
        """The answer to a call: by its request, and by its task, if it becomes one."""
        progress = TaskProgress()

        async def take_first(message: Message) -> None:
            progress.heard(message)
            await take(message)

        async def tell(said: object) -> None:
            if "progressToken" in call.params["_meta"] and (params := progress.further(said)) is not None:
                # A call of an earlier process has a name that no request of this one has.
                token = call.id if local_id is None else local_id
                whole = {"jsonrpc": "2.0", "method": PROGRESS, "params": {"progressToken": token, **params}}
                await take(messages_in(encode(whole))[0])

        if call.task is None:
            found = await self._requests.send(
                {"jsonrpc": "2.0", "method": "tools/call", "params": call.params},
                take_first,
                local_id=local_id,
                may_have_arrived=may_have_arrived,
                name=call.tool,
                headers=call.headers,
                is_keyed=call.key is not None and self.has_keys,
                may_run_again=partial(self._may_run_again, call) if self._reruns else None,
            )
            handle = found.result.get("taskId") if found.result.get("resultType") == "task" else None
            if not isinstance(handle, str):
                return found
            call.task = handle
            self._memory.changed()
        return await self._task(call).answer(tell)

    async def answer_earlier(self, call: SingleCall, take: Take) -> Message:
        """The answer to a call of an earlier process, with its rounds."""
        age = time.time() - call.began
        if call.task is None and call.key is not None and self.has_keys and age > self._kept_seconds:
            return _unknown(call, f"it was sent {age / 3600:.1f} hours ago, and the server may have forgotten its key")
        for number in range(MOST_ROUNDS + 1):
            found = await self.answer(call, take, may_have_arrived=True)
            if not is_round(found):
                return found
            if number == MOST_ROUNDS:
                break
            if (refusal := await self._answer_round(call, found.result)) is not None:
                await self.cancel(call)
                return refusal
        await self.cancel(call)
        return _unknown(call, f"it has asked in more than {MOST_ROUNDS} rounds")

    async def cancel(self, call: SingleCall) -> None:
        """Tell the server that the result is not wanted. Without key and handle, the end of the connection has."""
        if call.task is not None:
            await self._task(call).cancel()
        elif call.key is not None and self.has_keys:
            found = await self._requests.ask(CANCEL, {"key": call.key}, call.params)
            if found.is_error:
                log_event(logging.INFO, "client.not_cancelled", f"a call could not be cancelled: {found.why}")

    def _task(self, call: SingleCall) -> Task:
        return Task(call, self._memory, self._requests, self._asked)

    @property
    def _kept_seconds(self) -> float:
        said = (self.extension or {}).get(KEPT)
        return said / 1000 if isinstance(said, int) and said >= 0 else KEPT_SECONDS

    async def _may_run_again(self, call: SingleCall) -> bool:
        cursor: object = None
        for _ in range(TOOL_PAGES):
            found = await self._requests.ask("tools/list", {"cursor": cursor} if cursor else {}, call.params)
            page = {} if found.is_error else found.result
            tools = page.get("tools")
            for tool in tools if isinstance(tools, list) else ():
                if isinstance(tool, Mapping) and tool.get("name") == call.tool:
                    if may := may_run_again(tool):
                        sentence = "a tool that may run twice is called again"
                        log_event(logging.INFO, "client.call_again", sentence, tool=call.tool)
                    return may
            if not (cursor := page.get("nextCursor")):
                break
        return False

    async def _answer_round(self, call: SingleCall, round_: Mapping[str, Any]) -> Message | None:
        """Have a round's questions answered, for the next one; or the answer to the call, if one of them is not."""
        questions, answers = round_.get("inputRequests"), {}
        for key, question in questions.items() if isinstance(questions, Mapping) else ():
            found = await put_question(self._asked, key, question)
            if isinstance(found, types.ErrorData):
                return refused(call.id, found)
            answers[key] = found
        if not answers:
            await anyio.sleep(LEAST_POLL)
        params = {name: value for name, value in call.params.items() if name not in ("inputResponses", "requestState")}
        state = {"requestState": round_["requestState"]} if "requestState" in round_ else {}
        call.params = {**params, **({"inputResponses": answers} if answers else {}), **state}
        self._memory.changed()
        return None


def new_key() -> str:
    return secrets.token_urlsafe(KEY_BYTES)


def is_round(found: Message) -> bool:
    """Whether a call's answer asks for input, and for the call once more."""
    return not found.is_error and found.result.get("resultType") == "input_required"


def _unknown(call: SingleCall, reason: str) -> Message:
    return unknown(call.id, "tools/call", call.tool, reason)
