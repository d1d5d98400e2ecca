"""Answers a durable call of 2026-07-28 by an upstream of either era, on a lane of the pool."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from perdure._core.codes import MISSING_CAPABILITY
from perdure._core.durable_calls import CallClient
from perdure._core.eras import log_level_in, passes_up, request_up, result_up
from perdure._core.jsonrpc import Envelope, JsonObject, Notification, Request, Response
from perdure._core.limits import Caller
from perdure._core.settling import UpstreamCall
from perdure.gateway.lane import AskKey, Lost, RequestKey, Retries, UpstreamUnavailable, unavailable_error
from perdure.gateway.pool import LanePool, LaneUser, PooledLane
from perdure.runtime.base import CallEnded, Flow, Outlet, Runtime
from perdure.runtime.token_check import end_check
from perdure.store.records import SessionRecord


@dataclass(slots=True, eq=False)
class UpstreamCallRuntime(LaneUser, Runtime):
    _pool: LanePool
    _record: SessionRecord
    _outlet: Outlet
    _client: CallClient = field(init=False)
    begun: asyncio.Future[None] = field(init=False)
    _request: Request | None = None
    """The call while it runs."""
    _origin: object = None
    _may_run_again: bool | None = None
    """Whether its tool says so, as it was listed when the call began; `None` if that is not known."""
    _lane: PooledLane | None = None
    _key: RequestKey | None = None
    _task: asyncio.Task[None] | None = None
    _asks: dict[str, AskKey] = field(default_factory=dict)
    _can_be_followed: bool = False
    _retries: Retries = field(default_factory=Retries)
    _had_key: bool = False
    """Its client could ask for it when it began."""

    def __post_init__(self) -> None:
        self.begun = asyncio.get_running_loop().create_future()
        self._client = CallClient.from_params(json.loads(self._record.client_params), version=self._record.version)

    def send(self, message: Envelope, *, origin: object, size: int = 0) -> None:
        match message:
            case Request():
                self._origin = origin
                self._begin(message)
            case Response():
                ask = self._asks.pop(str(message.id), None)
                if ask is not None and self._lane is not None:
                    kind = "error" if message.raw.get("error") is not None else "result"
                    self._lane.reply(ask, {kind: message.raw.get(kind)})
            case Notification(method="notifications/cancelled", params=params):
                if self._request is not None and (params or {}).get("requestId") == self._request.id:
                    number = int(self._request.id)
                    self._release({"reason": (params or {}).get("reason", "cancelled")})
                    self._outlet.interrupted(number)

    def follow(self, call: Request, state: JsonObject, *, origin: object) -> None:
        self._origin = origin
        self._begin(call, state)

    def _begin(self, request: Request, follow: JsonObject | None = None) -> None:
        self._request, self._had_key = request, self._outlet.is_task
        self._task = asyncio.create_task(self._run(request, follow), name="perdure-call")

    async def _run(self, request: Request, follow: JsonObject | None) -> None:
        number = int(request.id)
        try:
            lane = await self._pool.take(Caller(self._record.owner, self._record.address), self._client, self._origin)
        except UpstreamUnavailable as failure:
            self._request = None
            failure.report_to(self._origin)
            self._outlet.answer(number, unavailable_error(self._pool.upstream.name, failure), failed=True)
            return
        self._lane = lane
        if not self.begun.done():
            self.begun.set_result(None)
        params = request.params if lane.passes else request_up(request.params)
        if follow is not None:
            self._key = lane.follow(self, request.method, params, follow)
            return
        self._may_run_again = self._pool.tools.may_run_again(_tool(request))
        if self._may_run_again is not None:  # it may not have been known when the call was accepted
            self._outlet.keep_call(number, UpstreamCall(may_run_again=self._may_run_again))
        self._key = lane.request(self, request.method, params)

    def _release(self, cancelled: JsonObject | None = None) -> None:
        """Let go of the lane. `cancelled`: the params of the cancellation, for a request that still runs."""
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        lane, self._lane = self._lane, None
        for name, ask in list(self._asks.items()):
            self._withdraw(name, "the request has ended")
            if lane is not None:
                lane.refuse(ask)
        self._request = None
        if lane is not None:
            was_running = lane.cancel(self._key, cancelled)
            self._pool.give_back(lane, may_ask=was_running)

    # What the lane reports

    @property
    def passes_round(self) -> bool:
        """A client that may have a handle, or has had an early answer, is asked as by the call itself."""
        return not (self._outlet.is_task and (self._client.takes_tasks or not self._had_key))

    def on_notification(self, method: str, params: JsonObject | None) -> Flow | None:
        request = self._request
        if request is None or not passes_up(method, params, level=log_level_in(request.params)):
            return None
        return self._outlet.notify(method, params, call=int(request.id))

    def on_ask(self, ask: AskKey, method: str, params: JsonObject | None) -> Flow | None:
        request, lane = self._request, self._lane
        if request is None or lane is None:
            return None  # it is over: the lane's end, or its own, was reported to the upstream
        if (needed := self._client.lacks(method, params)) is not None:
            message = f"The client cannot be asked {method}: it does not declare {', '.join(needed)}"
            error = {"code": MISSING_CAPABILITY, "message": message, "data": {"requiredCapabilities": needed}}
            lane.reply(ask, {"error": error})
            return None
        name = self._outlet.new_ask_id()
        self._asks[name] = ask
        try:
            return self._outlet.ask(name, method, params, call=int(request.id))
        except CallEnded:
            del self._asks[name]
            lane.refuse(ask)
            return None

    def on_ask_withdrawn(self, ask: AskKey, reason: str) -> None:
        for name, known in list(self._asks.items()):
            if known == ask:
                self._withdraw(name, reason)

    def _withdraw(self, name: str, reason: str) -> None:
        del self._asks[name]
        call = None if self._request is None else int(self._request.id)
        self._outlet.notify("notifications/cancelled", {"requestId": name, "reason": reason}, call=call)

    def on_answer(self, body: bytes, *, failed: bool) -> None:
        request, lane = self._request, self._lane
        self._release()
        if request is not None:
            end_check(self._origin)
            if not failed and lane is not None and not lane.passes:
                body = result_up(request.method, body.decode(), self._pool.server_info).encode()
            self._outlet.answer(int(request.id), body, failed=failed)

    def on_lost(self, lost: Lost) -> None:
        request = self._request
        for name in list(self._asks):
            self._withdraw(name, lost.why)
        self._release()
        if request is None:
            return
        number = int(request.id)
        if lost.is_final:
            self._outlet.interrupted(number, lost.why)
        elif lost.ran:
            self._outlet.crashed(number, lost.why, may_run_again=self._hint(request))
        elif self._retries.take(lost, self._pool.upstream.patience):
            self._begin(request)
        elif lost.unavailable is not None:
            lost.unavailable.report_to(self._origin)
            self._outlet.answer(number, unavailable_error(self._pool.upstream.name, lost.unavailable), failed=True)

    def on_position(self, state: JsonObject) -> None:
        if (request := self._request) is not None:
            self._can_be_followed = True
            end_check(self._origin)
            self._outlet.keep_call(int(request.id), UpstreamCall(may_run_again=self._hint(request), follow=state))

    def _hint(self, request: Request) -> bool | None:
        return self._pool.tools.may_still_run_again(_tool(request), self._may_run_again)

    async def aclose(self, *, ended: bool) -> None:
        if not ended and self._can_be_followed and self._lane is not None:
            self._lane.has_left = True
            self._lane.forget(self._key)
        self._release({"reason": "the call has ended"})


def _tool(request: Request) -> str:
    return str((request.params or {}).get("name"))
