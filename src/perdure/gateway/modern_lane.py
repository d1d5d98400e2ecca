"""A lane to an upstream of 2026-07-28.

That revision has no sessions: each request stands alone and describes its client. For a session in front of it the lane
keeps what a session's server would keep, and translates (`_core/eras.py`):

| in the session | at the upstream |
|---|---|
| `initialize` | `server/discover` |
| `logging/setLevel` | the log level in `_meta` of later requests |
| `resources/subscribe`, changes of lists | `subscriptions/listen` (`modern_listening.py`) |
| a request of the server | input that a result requires: a *round*, or a task's question |
| `notifications/cancelled` | the end of the response; `tasks/cancel`; the cancel of a key |

Requests of clients of the same revision pass (`passes_round`), and so do their results: also those that require input,
unless the client has a task, which asks for it.

A `tools/call` that becomes a task is polled to its end. At an upstream with keys (`dev.perdure/calls`) each call has
one. Either leads a later process to the call (`follow`): a task by `tasks/get`, a key by the same request once more.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from perdure._core.codes import INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND, UNSUPPORTED_VERSION
from perdure._core.envelope import CANCEL, CANCEL_TASK, GET_TASK, KEY, with_tasks
from perdure._core.eras import (
    ADDED_REQUESTS,
    LEVELS,
    REMOVED_NOTIFICATIONS,
    BadQuestions,
    Question,
    envelope,
    initialize_result,
    modern_version,
    next_round,
    questions_in,
    request_down,
    request_through,
    result_down,
    round_through,
)
from perdure._core.jsonrpc import JsonObject
from perdure._core.polling import LEAST_POLL, Next
from perdure._core.reconnect import Patience
from perdure.gateway.lane import AskKey, Lost, Opened, Reason, Receiver, RequestKey, UpstreamUnavailable
from perdure.gateway.modern_listening import Listening, lists_in
from perdure.gateway.modern_wire import Wire, WireRequest, other_version
from perdure.gateway.web import lost_by
from perdure.remote.call import Ended
from perdure.remote.durable_calls import MOST_ROUNDS, PROGRESS, Offers, new_key, offers_in
from perdure.remote.message import Message, encode
from perdure.remote.task_follower import QuestionRefused, TaskFollower
from perdure.runtime.base import Flow
from perdure.telemetry.log_records import log_event

PassesRound = Callable[[RequestKey], bool]
"""Says whether a result that requires input is the answer to a request."""

ALL_LEVELS = LEVELS[0]
"""The log level of a session that has set none: a server with sessions sends all its messages then."""

RUNNING = Patience()
"""For the polls of a task, which runs whether it is polled or not: a deploy of the upstream takes minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to a request: its result or its error, as JSON."""

    body: str
    failed: bool = False


@dataclass(kw_only=True, eq=False)
class _Request:
    """A request that has no answer yet."""

    key: RequestKey
    method: str
    params: JsonObject
    state: JsonObject = field(default_factory=dict)
    """How a later process can follow it (`Receiver.on_position`)."""
    is_followed: bool = False
    """An earlier process has sent it."""
    told: float = -math.inf
    """The progress that was reported last."""
    task: asyncio.Task[None] | None = None

    @property
    def meta(self) -> Mapping[str, Any]:
        found = self.params.get("_meta")
        return found if isinstance(found, Mapping) else {}


@dataclass(eq=False)
class ModernLane:
    """Implements `Lane`."""

    _wire: Wire
    _receiver: Receiver
    _passes_round: PassesRound | None = None
    """Clients of the same revision: says of a request whether a result that requires input is its answer. Otherwise,
    and in a session, the client is asked."""
    _mask: Callable[[str], str] = str
    """Hides secrets in texts for the log."""
    _listening: Listening | None = None
    _client_params: JsonObject = field(default_factory=dict)
    _level: str = ALL_LEVELS
    _offers: Offers = field(default_factory=Offers)
    _requests: dict[RequestKey, _Request] = field(default_factory=dict)
    _asks: dict[AskKey, asyncio.Future[JsonObject]] = field(default_factory=dict)
    _ask_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _is_closed: bool = False
    """Nothing is reported any more."""
    _end_reason: UpstreamUnavailable | None = None
    """Why the lane is over, if not by `aclose`."""

    @property
    def state(self) -> JsonObject:
        return {}  # there are no sessions

    def listen(self, wanted: bool) -> None:
        """Listen to the upstream's lists. (Resources are subscribed to by requests.)"""
        if self._listening is not None:
            self._listening.hear_lists(wanted)

    async def open(self, client_params: JsonObject, state: JsonObject | None = None) -> Opened:
        self._client_params = client_params
        discovered = await self._wire.open({"_meta": self._meta()}, self._deliver, self._end)
        if (version := modern_version(discovered)) is None:
            raise other_version(discovered.get("supportedVersions"))
        self._offers = offers_in(discovered)
        result = initialize_result(discovered, client_params.get("protocolVersion"))
        lists = lists_in(result["capabilities"])
        self._listening = Listening(self._wire, self._listen_params, self._deliver, self._start, lists)
        return Opened(version=version, result=result, passes=self._passes_round is not None)

    def request(self, key: RequestKey, method: str, params: JsonObject | None) -> None:
        self._begin(_Request(key=key, method=method, params=params or {}))

    def follow(self, key: RequestKey, method: str, params: JsonObject | None, state: JsonObject) -> None:
        self._begin(_Request(key=key, method=method, params=params or {}, state=state, is_followed=True))

    def cancel(self, key: RequestKey, params: JsonObject | None) -> None:
        if (request := self._requests.pop(key, None)) is not None and request.task is not None:
            request.task.cancel()
            self._start(self._cancel_upstream(request))

    def notify(self, method: str, params: JsonObject | None) -> None:
        if method not in REMOVED_NOTIFICATIONS:
            self._start(self._wire.notify(method, params))

    def reply(self, ask: AskKey, response: JsonObject) -> None:
        if (waiting := self._asks.get(ask)) is not None and not waiting.done():
            waiting.set_result(response)

    async def aclose(self, *, ended: bool) -> None:
        self._is_closed = True
        await _stop(self._tasks)
        await self._wire.aclose()

    # Requests

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin(self, request: _Request) -> None:
        if self._end_reason is not None:
            lost = Lost(ran=False, why=str(self._end_reason), unavailable=self._end_reason)
            asyncio.get_running_loop().call_soon(self._receiver.on_lost, request.key, lost)
            return
        self._requests[request.key] = request
        request.task = self._start(self._run(request))

    async def _run(self, request: _Request) -> None:
        try:
            found = await self._outcome(request)
        except QuestionRefused as refused:
            await self._cancel_upstream(request)
            found = Answer(body=encode(refused.error), failed=True)
        except BadQuestions as bad:
            await self._cancel_upstream(request)
            found = _error(INTERNAL_ERROR, f"The server's result cannot be used: {bad}")
        except Exception as failure:  # it costs this request alone
            said = f"{type(failure).__name__}: {failure}"
            log_event(logging.ERROR, "gateway.request_failed", f"a request failed within the gateway: {said}")
            found = Lost(ran=True, why="the gateway failed at it")
        if self._is_closed or self._requests.get(request.key) is not request:
            return
        del self._requests[request.key]
        if isinstance(found, Lost):
            self._receiver.on_lost(request.key, found)
        else:
            self._receiver.on_answer(request.key, found.body.encode(), failed=found.failed)

    async def _outcome(self, request: _Request) -> Answer | Lost:
        match request.method:
            case "ping":
                return Answer(body="{}")
            case "logging/setLevel":
                level = request.params.get("level")
                if level not in LEVELS:
                    return _error(INVALID_PARAMS, f"level is {level!r:.60}; it must be one of {', '.join(LEVELS)}")
                self._level = level
                return Answer(body="{}")
            case "resources/subscribe" | "resources/unsubscribe":
                return await self._subscribe(request)
            case method if method == "initialize" or method in ADDED_REQUESTS:
                return _error(METHOD_NOT_FOUND, f"Method not found: {method} is not a method of a session")
        return await self._exchange(request)

    async def _exchange(self, request: _Request) -> Answer | Lost:
        """Send a request, and again for each round in which the upstream requires input."""
        if isinstance(handle := request.state.get("task"), str):
            return await self._follow_task(request, handle)
        is_call = request.method == "tools/call"
        if self._passes_round is None:
            params = request_down(request.params, self._meta(level=self._level))
        else:
            params = request_through(request.params, self._meta())
            params["_meta"] = with_tasks(params["_meta"])
        if is_call and self._offers.keys:
            if not request.is_followed:
                self._move(request, {"key": new_key(), "until": time.time() + self._offers.kept_seconds})
            params["_meta"][KEY] = request.state.get("key")
        if request.is_followed and not (self._offers.keys and time.time() < request.state.get("until", 0.0)):
            return Lost(ran=True, why="the server does not know the call by a key, or not any more")
        may_have_arrived = request.is_followed
        for _ in range(MOST_ROUNDS + 1):
            sent = WireRequest(
                method=request.method,
                params=params,
                take=lambda method, params: self._take(request, method, params),
                is_keyed=is_call and self._offers.keys,
                may_have_arrived=may_have_arrived,
            )
            found = await self._wire.send(sent)
            if isinstance(found, Ended):
                return lost_by(found)
            if found.is_error:
                return self._refused(found)
            match found.body["result"].get("resultType", "complete"):
                case "complete":
                    return self._result(request, found.payload)
                case "task" if is_call and isinstance(handle := found.result.get("taskId"), str):
                    return await self._follow_task(request, handle)
                case "input_required" if self._passes_round is not None and self._passes_round(request.key):
                    return Answer(body=round_through(found.payload))
                case "input_required":
                    answers = await self._ask_all(request, questions_in(found.result))
                    if not answers:
                        await asyncio.sleep(LEAST_POLL)  # the server wants the request once more
                    params, may_have_arrived = next_round(params, found.result, answers), False
                case kind:
                    return _error(INTERNAL_ERROR, f"The server's result has the unknown type {kind!r:.60}")
        await self._cancel_upstream(request)
        return _error(INTERNAL_ERROR, f"The server asked for input in more than {MOST_ROUNDS} rounds")

    def _result(self, request: _Request, text: str) -> Answer:
        return Answer(body=text if self._passes_round is not None else result_down(request.method, text))

    def _refused(self, found: Message) -> Answer | Lost:
        """The upstream's own error. One about the version concerns the lane: the upstream was replaced."""
        if found.body["error"].get("code") == UNSUPPORTED_VERSION:
            unavailable = other_version(None, found.why)
            asyncio.get_running_loop().call_soon(self._end, str(unavailable), unavailable.reason)
            return Lost(ran=False, why=str(unavailable), unavailable=unavailable)
        return Answer(body=found.payload, failed=True)

    def _meta(self, *, level: str | None = None) -> JsonObject:
        return with_tasks(envelope(self._client_params, level=level))

    async def _ask_upstream(
        self, method: str, params: Mapping[str, Any], patience: Patience | None = None
    ) -> Message | Ended:
        """The answer to a request of the lane's own."""
        request = WireRequest(method=method, params={**params, "_meta": self._meta()}, patience=patience)
        return await self._wire.send(request)

    def _move(self, request: _Request, state: JsonObject) -> None:
        request.state = state
        self._receiver.on_position(request.key, state)

    async def _cancel_upstream(self, request: _Request) -> None:
        """Cancel a call that the end of its response does not cancel."""
        if "task" in request.state:
            found = await self._ask_upstream(CANCEL_TASK, {"taskId": request.state["task"]})
        elif "key" in request.state:
            found = await self._ask_upstream(CANCEL, {"key": request.state["key"]})
        else:
            return
        if isinstance(found, Ended) or found.is_error:
            log_event(logging.INFO, "gateway.not_cancelled", f"a call could not be cancelled: {self._mask(found.why)}")

    def _end(self, why: str, reason: Reason = Reason.DIED) -> None:
        """End the lane: the upstream is gone."""
        if self._is_closed:
            return
        self._is_closed, self._end_reason = True, UpstreamUnavailable(reason, f"The lane has ended: {why}")
        for key in list(self._requests):
            self._receiver.on_lost(key, Lost(ran=True, why=why))
        self._requests.clear()
        for task in self._tasks:
            task.cancel()
        self._receiver.on_closed(why)

    # Messages of the upstream

    def _take(self, request: _Request, method: str, params: JsonObject | None) -> Flow | None:
        if method == PROGRESS:
            if params is None or "progressToken" not in request.meta:
                return None
            params = {**params, "progressToken": request.meta["progressToken"]}
            if isinstance(done := params.get("progress"), int | float):
                request.told = max(request.told, done)
        if self._requests.get(request.key) is not request:
            return None
        return self._deliver(method, params, request.key)

    def _deliver(self, method: str, params: JsonObject | None, key: RequestKey | None = None) -> Flow | None:
        return None if self._is_closed else self._receiver.on_notification(method, params, key=key)

    # Asks

    async def _ask_all(self, request: _Request, questions: Mapping[str, Question]) -> JsonObject:
        """The client's results by the questions' keys. Raises `QuestionRefused`."""
        asking = [asyncio.create_task(self._ask(request, question)) for question in questions.values()]
        try:
            return dict(zip(questions, await asyncio.gather(*asking), strict=True))
        finally:
            await _stop(asking)

    async def _ask(self, request: _Request, question: Question) -> JsonObject:
        ask = next(self._ask_numbers)
        waiting = self._asks[ask] = asyncio.get_running_loop().create_future()
        try:
            if (flow := self._receiver.on_ask(ask, question.method, question.params, key=request.key)) is not None:
                await flow.wait_for_room()
            response = await waiting
        except asyncio.CancelledError:
            # Not for a request that its client has cancelled: its asks are over with it.
            if not self._is_closed and self._requests.get(request.key) is request:
                self._receiver.on_ask_withdrawn(ask, "the server does not wait for it any more")
            raise
        finally:
            del self._asks[ask]
        if (error := response.get("error")) is not None:
            raise QuestionRefused(error)
        result: JsonObject = response["result"]
        return result

    # Tasks

    async def _follow_task(self, request: _Request, handle: str) -> Answer | Lost:
        """Poll a task to its end, and have its questions answered, each once."""
        if request.state != (state := {"task": handle}):
            self._move(request, state)

        async def on_progress(params: JsonObject) -> None:
            self._take(request, PROGRESS, params)

        async def put_question(key: str, question: object) -> JsonObject:
            return await self._ask(request, questions_in({"inputRequests": {key: question}})[key])

        async def ask(method: str, params: Mapping[str, Any]) -> Message | Ended:
            return await self._ask_upstream(method, params, RUNNING if method == GET_TASK else None)

        follower = TaskFollower(
            handle=handle,
            ask=ask,
            patience=RUNNING,
            on_progress=on_progress,
            told=request.told,
            put_question=put_question,
        )
        end = await follower.end()
        match end.next:
            case Next.RESULT:
                return self._result(request, end.body)
            case Next.ERROR:
                return Answer(body=end.body, failed=True)
            case _:
                return Lost(ran=True, why=end.reason)

    # Subscriptions

    def _listen_params(self, wanted: Mapping[str, Any]) -> JsonObject:
        return {"notifications": dict(wanted), "_meta": self._meta()}

    async def _subscribe(self, request: _Request) -> Answer | Lost:
        uri = request.params.get("uri")
        if not isinstance(uri, str):
            return _error(INVALID_PARAMS, f"uri is {uri!r:.60}; it must be a string")
        assert self._listening is not None
        if request.method == "resources/unsubscribe":
            self._listening.forget(uri)
            return Answer(body="{}")
        found = await self._listening.want(uri)
        if isinstance(found, Ended):
            return lost_by(found)
        if isinstance(found, Message):
            return self._refused(found)
        if uri not in found.uris:
            return _error(INVALID_PARAMS, f"The server does not report changes of {uri!r:.200}")
        return Answer(body="{}")


def _error(code: int, message: str) -> Answer:
    return Answer(body=encode({"code": code, "message": message}), failed=True)


async def _stop(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for their ends."""
    stopped = list(tasks)
    for task in stopped:
        task.cancel()
    await asyncio.gather(*stopped, return_exceptions=True)
