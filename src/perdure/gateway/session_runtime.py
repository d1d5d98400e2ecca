"""Answers the requests of one session by a server outside this process, over a lane of the session's own.

Messages wait in their order until the lane has had its handshake. When the lane is lost, the session goes on: the next
lane gets the handshake, the log level and the subscriptions again, and the client learns what may have changed. A
request that the upstream may have run is settled by the session (`Outlet.crashed`); any other waits for the next lane,
for `patience`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perdure._core import session_tasks, splice, sticky
from perdure._core.eras import LEVELS, request_along
from perdure._core.handshakes import LISTS, capabilities_in, front_result, front_version, lost_capabilities
from perdure._core.jsonrpc import Envelope, JsonObject, Notification, Request, Response
from perdure._core.revisions import is_sessionless
from perdure._core.settling import UpstreamCall
from perdure.errors import PerdureError
from perdure.gateway.lane import (
    LOG_MESSAGE,
    OWN_SECONDS,
    REQUEST_ENDED,
    AskKey,
    Lane,
    Lost,
    Opened,
    Reason,
    RequestKey,
    Retries,
    Rising,
    SessionReceiver,
    UpstreamUnavailable,
    open_lane,
    swap_token,
    unavailable_error,
)
from perdure.gateway.tool_list import RELIST_SECONDS, ToolList, ToolPages
from perdure.gateway.upstream import Upstream
from perdure.runtime.base import CallEnded, Flow, Outlet, Runtime
from perdure.runtime.token_check import end_check
from perdure.store.records import SessionRecord
from perdure.telemetry.counters import UpstreamNumbers
from perdure.telemetry.log_records import log_event

RESTARTED = "The server was restarted. What it kept in memory is gone."
"""Logged to the client, where the server declares logging."""

ENDED = "The server's process ended, and this session with it: what it kept in memory was the session (on_restart)."

_MOST_STARTS = 2
"""Handshakes that are tried for a client's `initialize`: a server that ends twice in it will do so again."""

RETRY_SECONDS = 30.0
"""Until a lane is tried again that subscriptions alone need: their client sends nothing that would try it."""

_WARNING = {"level": "warning", "logger": "perdure", "data": RESTARTED}


_HOME_SECONDS = 0.1
"""Until the session's home is looked for again: the node that is it has begun a session at the server by then."""

_STICKY_SECONDS = 10.0
"""How long requests wait for the log level and the subscriptions in a new session of a server that does not answer."""


class _Waiting(NamedTuple):
    """A message that waits for a lane."""

    message: Request | Notification
    size: int = 0
    """Of a notification: its bytes, for `Outlet.handled`."""


@dataclass(slots=True, eq=False)
class _ClientRequest:
    """A request that the runtime has not answered."""

    request: Request
    origin: object = None
    """The HTTP request that brought it."""
    is_sent: bool = False
    follow: JsonObject | None = None
    may_run_again: bool | None = None
    """Whether its tool says so, as it was listed when the request was sent; `None` if that is not known."""
    progress: Rising = field(default_factory=Rising)
    retries: Retries = field(default_factory=Retries)


@dataclass(slots=True, eq=False)
class _OpenAsk:
    key: AskKey
    call: int | None
    token: object = None
    """The upstream's progress token of it."""


@dataclass(frozen=True, kw_only=True)
class LaneMaker:
    """What the runtimes of one upstream share."""

    upstream: Upstream
    make: Callable[[SessionReceiver, SessionRecord, object], Lane]
    """Makes a lane for a session. The last argument is the HTTP request that it is made for, or `None`."""
    tools: ToolList
    numbers: UpstreamNumbers
    closing: set[asyncio.Task[None]] = field(default_factory=set)
    """Lanes that are being closed: a server may take seconds to end, for which no client has to wait."""

    @property
    def name(self) -> str:
        return self.upstream.name

    @property
    def ends_sessions(self) -> bool:
        """Whether a session ends with its lane."""
        return self.upstream.on_restart == "end"

    def close(self, lane: Lane, *, ended: bool) -> asyncio.Task[None]:
        task = asyncio.create_task(lane.aclose(ended=ended), name="perdure-lane-end")
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)
        return task


@dataclass(slots=True, eq=False)
class SessionRuntime(SessionReceiver, Runtime):
    _lanes: LaneMaker
    _record: SessionRecord
    _outlet: Outlet
    _lane: Lane | None = None
    """The lane that messages go to; `None` before its handshake, and when it is lost."""
    _opening: asyncio.Task[None] | None = None
    _closing: asyncio.Task[None] | None = None
    """Closes a lane that had nothing to do."""
    _queue: list[_Waiting] = field(default_factory=list)
    """Messages that wait for the lane, in their order."""
    _calls: dict[int, _ClientRequest] = field(default_factory=dict)
    _is_cancelled: bool = False
    """All requests that were sent are cancelled: what the upstream asks now is for one of them, perhaps."""
    _asks: dict[str, _OpenAsk] = field(default_factory=dict)
    _own: dict[RequestKey, tuple[str, _TakeOwn]] = field(default_factory=dict)
    """The runtime's own requests to the upstream: their methods, and what takes their results."""
    _own_count: int = 0
    _client_params: JsonObject = field(default_factory=dict)
    _capabilities: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    _initialized: bool = False
    _is_restarting: bool = False
    """The next lane is opened as soon as this one is over."""
    _mask: Callable[[str], str] = str
    """Hides the secrets of the lane's upstream."""
    _is_listing: bool = False
    """Tools are being listed, or were a moment ago."""
    _lists_again: bool = False
    _used: float = 0.0
    """When the lane last carried a message, by the event loop's clock."""
    _timer: asyncio.TimerHandle | None = None
    _origin: object = None
    """The newest HTTP request of the session, if lanes are made from it: with its headers it takes 4 KiB."""
    _is_closed: bool = False

    def __post_init__(self) -> None:
        record = self._record
        if record.version:
            self._client_params = json.loads(record.client_params)
            self._capabilities = capabilities_in(session_tasks.as_declared(record.result))
            self._initialized = record.initialized
            if self._is_subscribed or (self._outlet.is_home and self._state is not None):
                self._open()

    @property
    def _is_subscribed(self) -> bool:
        return self._outlet.is_home and bool(sticky.subscriptions(tuple(self._outlet.sticky)))

    # What the session sends

    @property
    def keeps_state(self) -> bool:
        return self._lane is not None or self._opening is not None

    def send(self, message: Envelope, *, origin: object, size: int = 0) -> None:
        self._note(origin)
        match message:
            case Response():
                self._reply(message)
            case Request(method="ping"):
                self._outlet.answer(int(message.id), b"{}", failed=False)
            case Request():
                self._calls[int(message.id)] = _ClientRequest(message, origin)
                self._put(_Waiting(message))
            case Notification(method="notifications/cancelled", params=params):
                self._cancel(params or {})
                self._report_handled(size)
            case Notification(method="notifications/initialized"):
                self.mark_initialized()
                self._report_handled(size)
            case Notification():
                self._put(_Waiting(message, size))

    def follow(self, call: Request, state: JsonObject, *, origin: object) -> None:
        self._note(origin)
        self._calls[int(call.id)] = _ClientRequest(call, origin, follow=state)
        self._put(_Waiting(call))

    def _note(self, origin: object) -> None:
        if self._lanes.upstream.needs_caller and origin is not None:
            self._origin = origin

    def mark_initialized(self) -> None:
        if not self._initialized:
            self._initialized = True
            if self._lane is not None:
                self._lane.notify("notifications/initialized", None)
                self._list_tools(self._lane)

    def _report_handled(self, size: int) -> None:
        if size:
            self._outlet.handled(size)

    def _put(self, waiting: _Waiting) -> None:
        if self._lane is not None and self._opening is None:
            self._lane.listen(self._outlet.is_home)
            self._pass_on(self._lane, waiting)
            return
        self._queue.append(waiting)
        self._open()

    def _pass_on(self, lane: Lane, waiting: _Waiting) -> None:
        message = waiting.message
        self._used = asyncio.get_running_loop().time()
        if isinstance(message, Notification):
            lane.notify(message.method, self._for_upstream(message))
            self._report_handled(waiting.size)
            return
        number = int(message.id)
        if (running := self._calls.get(number)) is None:
            return  # cancelled while it waited
        running.is_sent, self._is_cancelled = True, False
        if running.follow is not None:
            lane.follow(number, message.method, request_along(message.params), running.follow)
            return
        if message.method == "tools/call":
            running.may_run_again = self._lanes.tools.may_run_again(str((message.params or {}).get("name")))
            if running.may_run_again is not None:  # it may not have been known when the call was accepted
                self._outlet.keep_call(number, UpstreamCall(may_run_again=running.may_run_again))
        lane.request(number, message.method, request_along(message.params))

    def _may_run_again(self, running: _ClientRequest) -> bool | None:
        if running.request.method != "tools/call":
            return None
        name = str((running.request.params or {}).get("name"))
        return self._lanes.tools.may_still_run_again(name, running.may_run_again)

    def _for_upstream(self, message: Notification) -> JsonObject | None:
        """The client's progress with an ask, under the upstream's token."""
        params = message.params
        if message.method != "notifications/progress" or params is None:
            return params
        ask = self._asks.get(str(params.get("progressToken")))
        return params if ask is None else {**params, "progressToken": ask.token}

    def _cancel(self, params: JsonObject) -> None:
        number = params.get("requestId")
        if not isinstance(number, int) or (running := self._calls.pop(number, None)) is None:
            return
        if running.is_sent and self._lane is not None:
            self._lane.cancel(number, {name: value for name, value in params.items() if name != "requestId"})
            self._is_cancelled = not any(other.is_sent for other in self._calls.values())
        self._close_asks(number, "the request was cancelled", refuses=True)
        self._outlet.interrupted(number)

    def _reply(self, response: Response) -> None:
        ask = self._asks.pop(str(response.id), None)
        if ask is not None and self._lane is not None:
            self._used = asyncio.get_running_loop().time()
            kind = "result" if response.raw.get("error") is None else "error"
            self._lane.reply(ask.key, {kind: response.raw.get(kind)})

    def _close_asks(self, call: int, why: str, *, refuses: bool) -> None:
        """Withdraw what is asked for a call that is over; `refuses`: the upstream still waits for answers."""
        for name, ask in list(self._asks.items()):
            if ask.call == call:
                self._withdraw(name, why)
                if refuses:
                    self._refuse(ask.key)

    def _refuse(self, ask: AskKey) -> None:
        if self._lane is not None:
            self._lane.reply(ask, REQUEST_ENDED)

    # The lane

    def _open(self) -> None:
        if self._opening is None and not self._is_closed:
            self._opening = asyncio.create_task(self._bring_up(), name="perdure-lane")

    async def _bring_up(self) -> None:
        """Open a lane, and send it what waits. Fails what waits if there is none within `patience`."""
        if self._closing is not None:
            await asyncio.wait({self._closing})  # or there might be no room for the next process
            self._closing = None
        waiting = (waiting.message for waiting in self._queue)
        handshake = next((message for message in waiting if message.method == "initialize"), None)
        if isinstance(handshake, Request):
            self._client_params = handshake.params or {}
        try:
            lane, opened = await open_lane(
                lambda: self._lanes.make(self, self._record, self._origin),
                self._client_params,
                self._state if handshake is None else None,
                patience=self._lanes.upstream.patience,
                most_starts=None if handshake is None else _MOST_STARTS,
            )
        except UpstreamUnavailable as failure:
            self._opening = None
            self._fail_waiting(failure)
            return
        self._opening, self._is_cancelled, self._mask = None, False, opened.mask
        answered = list[asyncio.Future[None]]()
        if isinstance(handshake, Request):
            self._lane = lane
            self._answer_handshake(handshake, opened)
        elif not opened.is_new:
            self._lane, self._capabilities = lane, capabilities_in(opened.result)
            if self._outlet.is_home:
                self._report_changes(lane)
        elif (why := self._why_over(opened)) is not None:
            self._lanes.close(lane, ended=True)
            self._outlet.end(why)
            return
        else:
            self._lane = lane
            answered = self._go_on(lane, opened)
        lane.listen(self._outlet.is_home)
        self._keep_state(lane)
        if opened.process:
            self._keep(process=opened.process)
        if answered and not self._lanes.upstream.is_program:  # a pipe keeps the order
            self._opening = asyncio.current_task()  # what comes meanwhile waits as well
            await asyncio.wait(answered, timeout=_STICKY_SECONDS)
            self._opening = None
            if self._lane is None:  # it was lost again
                if self._queue or self._is_subscribed:
                    self._open()
                return
        queue, self._queue = self._queue, []
        for one in queue:
            if one.message is not handshake:
                self._pass_on(lane, one)
        self._used = asyncio.get_running_loop().time()
        self._look_for_idleness()

    def _fail_waiting(self, failure: UpstreamUnavailable) -> None:
        log_event(
            logging.WARNING,
            "upstream.unavailable",
            f"{self._lanes.name} is not available: {failure}",
            upstream=self._lanes.name,
            reason=failure.reason.value,
        )
        queue, self._queue = self._queue, []
        for message, size in queue:
            if isinstance(message, Request):
                self._answer_unavailable(int(message.id), failure)
            self._report_handled(size)
        if self._is_subscribed and (self._timer is None or self._timer.when() <= asyncio.get_running_loop().time()):
            self._timer = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._try_again)

    def _try_again(self) -> None:
        if self._lane is None and self._is_subscribed:
            self._open()

    def _answer_unavailable(self, number: int, failure: UpstreamUnavailable) -> None:
        if (running := self._calls.pop(number, None)) is not None:
            failure.report_to(running.origin)
            self._outlet.answer(number, unavailable_error(self._lanes.name, failure), failed=True)

    def _answer_handshake(self, request: Request, opened: Opened) -> None:
        self._capabilities = capabilities_in(opened.result)
        if self._calls.pop(int(request.id), None) is not None:
            self._outlet.answer(int(request.id), self._front_result(opened), failed=False)

    def _front_result(self, opened: Opened) -> bytes:
        version = front_version(self._client_params.get("protocolVersion"))
        return json.dumps(front_result(opened.result, version), separators=(",", ":")).encode()

    def _why_over(self, opened: Opened) -> str | None:
        """Why the session cannot go on with this lane, a new one."""
        if self._lanes.ends_sessions:
            return ENDED
        if lost := lost_capabilities(self._capabilities, capabilities_in(opened.result)):
            return f"The server was restarted, and does not declare {', '.join(lost)} any more."
        return None

    def _go_on(self, lane: Lane, opened: Opened) -> list[asyncio.Future[None]]:
        """Bring a new lane to where the session is, and tell the client what may have changed. Returns what is done
        when the sticky requests are answered."""
        self._lanes.numbers.upstream_handshakes_repeated += 1
        self._capabilities = capabilities_in(opened.result)
        self._outlet.replace_result(self._front_result(opened))
        if self._initialized:
            lane.notify("notifications/initialized", None)
        level: object = None
        answered = []
        for request in self._outlet.sticky:
            body = json.loads(request)
            if body["method"] == "logging/setLevel":
                level = (body.get("params") or {}).get("level")
            elif not self._outlet.is_home:
                continue
            answered.append(self._request_sticky(lane, request))
        self._report_changes(lane)
        is_wanted = level not in LEVELS[LEVELS.index("warning") + 1 :]
        is_lost = not opened.process or opened.process != self._kept.get("process")
        # A server without sessions keeps nothing.
        if "logging" in self._capabilities and is_wanted and is_lost and not is_sessionless(opened.version):
            self._outlet.notify(LOG_MESSAGE, dict(_WARNING), call=None)
        return answered

    def _report_changes(self, lane: Lane) -> None:
        """Notify the client of what may have changed while no changes of the upstream arrived."""
        if self._initialized:
            self._list_tools(lane, reports=True)
        for name in ("prompts", "resources"):
            if name in self._capabilities:  # whether they have changed is not known
                self._outlet.notify(LISTS[name], None, call=None)
        if self._outlet.is_home:
            for request in sticky.subscriptions(tuple(self._outlet.sticky)):
                uri = (json.loads(request).get("params") or {}).get("uri")
                self._outlet.notify("notifications/resources/updated", {"uri": uri}, call=None)

    def on_home_moved(self) -> None:
        lane, is_home = self._lane, self._outlet.is_home
        if lane is None:
            if self._is_subscribed:
                self._open()
            return
        lane.listen(is_home)
        if not lane.state:  # otherwise the lanes of all nodes share a session of the upstream, and its subscriptions
            for request in sticky.subscriptions(tuple(self._outlet.sticky)):
                self._request_sticky(lane, request if is_home else sticky.unsubscribe(request))
        if is_home:
            self._report_changes(lane)

    def _look_for_idleness(self) -> None:
        """Close a lane that has had nothing to do for `idle` seconds, and look again later otherwise."""
        program, lane, loop = self._lanes.upstream.program, self._lane, asyncio.get_running_loop()
        idle = None if program is None else program.process_idle
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if idle is None or lane is None:
            return
        if self._calls or self._asks or self._own or self._is_subscribed:
            self._used = loop.time()
        if (left := self._used + idle - loop.time()) > 0:
            self._timer = loop.call_later(left, self._look_for_idleness)
            return
        self._lane = None
        self._closing = self._lanes.close(lane, ended=False)
        sentence = f"{self._lanes.name}: a process with nothing to do for {idle:g} s is ended (process_idle)"
        log_event(logging.INFO, "upstream.idle", sentence, upstream=self._lanes.name)

    def restart(self) -> None:
        """Go on with another lane, because the upstream's code has changed: the client learns what is new. A lane that
        is open ends by itself."""
        if self._opening is not None:  # it may wait for code that failed
            self._opening.cancel()
            self._opening = None
        if self._lane is not None:
            self._is_restarting = True
        elif self._queue or self._initialized:
            self._open()

    # Its own requests

    def _request_own(self, lane: Lane, method: str, params: JsonObject | None, take: _TakeOwn) -> None:
        self._own_count += 1
        key = f"own-{self._own_count}"
        self._own[key] = method, take
        lane.request(key, method, params)
        asyncio.get_running_loop().call_later(OWN_SECONDS, self._give_up_own, lane, key)

    def _give_up_own(self, lane: Lane, key: RequestKey) -> None:
        if self._lane is lane and key in self._own:
            lane.cancel(key, None)
            self._own.pop(key)[1](None, False)

    def _take_own(self, key: RequestKey, body: bytes, *, failed: bool) -> None:
        method, take = self._own.pop(key)
        if failed:
            said = self._mask(body.decode(errors="replace"))
            log_event(
                logging.WARNING,
                "upstream.refused",
                f"{self._lanes.name} refuses {method}: {said}",
                upstream=self._lanes.name,
            )
        take(None if failed else splice.decode(body.decode()), failed)

    def _request_sticky(self, lane: Lane, request: bytes) -> asyncio.Future[None]:
        """Repeat a sticky request. Returns what is done when it is answered, or lost with the lane."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(result: JsonObject | None, refused: bool) -> None:
            if refused and sticky.subscriptions((request,)):
                self._outlet.unsubscribe(request)
            answered.set_result(None)

        body = json.loads(request)
        self._request_own(lane, body["method"], body.get("params") or {}, take)
        return answered

    def _list_tools(self, lane: Lane, *, reports: bool = False) -> None:
        """Read the upstream's tools, because only they say whether they may run again. `reports`: notify the client if
        they differ from those that it may have read, or if that is not known."""
        if "tools" not in self._capabilities:
            return
        if self._is_listing and not reports:
            self._lists_again = True
            return
        self._is_listing = True
        pages = ToolPages()

        def take(page: JsonObject | None, refused: bool) -> None:
            following = pages.add(page)
            if following is not None:
                self._request_own(lane, "tools/list", {"cursor": following}, take)
                return
            asyncio.get_running_loop().call_later(RELIST_SECONDS, self._list_again)
            if page is None and not refused:
                return  # the lane is lost, and the next one is asked
            digest = None if refused else pages.digest
            if reports and (digest is None or digest != self._kept.get("tools")):
                self._outlet.notify(LISTS["tools"], None, call=None)
            if digest is not None:
                self._lanes.tools.learn(pages.tools)
                self._keep(tools=digest)

        self._request_own(lane, "tools/list", None, take)

    def _list_again(self) -> None:
        is_wanted, self._is_listing, self._lists_again = self._lists_again, False, False
        if is_wanted and self._lane is not None:
            self._list_tools(self._lane)

    # What the lane reports

    def on_notification(self, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        self._used = asyncio.get_running_loop().time()
        call = key if isinstance(key, int) else None
        if method == "notifications/progress":
            running = None if call is None else self._calls.get(call)
            if running is None or params is None or not running.progress.takes(params.get("progress")):
                return None
            end_check(running.origin)
        elif method in LISTS.values() or method == "notifications/resources/updated":
            call = None
            if method == LISTS["tools"] and self._lane is not None:
                self._list_tools(self._lane)
        elif call is None:
            call = self._call_of_unnamed(params)
        return self._outlet.notify(method, params, call=call)

    def _call_of_unnamed(self, params: JsonObject | None) -> int | None:
        """The call that a message without a name is shown with, because a pipe does not say. `None`: with none."""
        meta = (params or {}).get("_meta")
        if isinstance(meta, dict) and "io.modelcontextprotocol/related-task" in meta:
            return None
        sent = [number for number, running in self._calls.items() if running.is_sent]
        if len(sent) == 1:
            return sent[0]
        if self._outlet.is_listening:
            return None
        return next((number for number in sent if self._calls[number].request.method == "tools/call"), None)

    def on_ask(self, ask: AskKey, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        self._used = asyncio.get_running_loop().time()
        call = key if isinstance(key, int) else self._call_of_unnamed(params)
        if call is None and key is None and self._is_cancelled and method != "roots/list":
            # A server asks for roots by itself; for anything else only in a call.
            self._refuse(ask)
            return None
        name = self._outlet.new_ask_id()
        params, token = swap_token(params, name)
        self._asks[name] = _OpenAsk(ask, call, token)
        try:
            return self._outlet.ask(name, method, params, call=call)
        except CallEnded:
            del self._asks[name]
            self._refuse(ask)
            return None

    def on_ask_withdrawn(self, ask: AskKey, reason: str) -> None:
        for name, waiting in list(self._asks.items()):
            if waiting.key == ask:
                self._withdraw(name, reason)

    def _withdraw(self, name: str, reason: str) -> None:
        ask = self._asks.pop(name)
        self._outlet.notify("notifications/cancelled", {"requestId": name, "reason": reason}, call=ask.call)

    def on_answer(self, key: RequestKey, body: bytes, *, failed: bool) -> None:
        self._used = asyncio.get_running_loop().time()
        if not isinstance(key, int):
            self._take_own(key, body, failed=failed)
        elif (running := self._calls.pop(key, None)) is not None:
            end_check(running.origin)
            if running.request.method == "tools/list" and not failed:
                self._lanes.tools.learn_page(running.request.params, splice.decode(body.decode()))
            self._outlet.answer(key, body, failed=failed)

    def on_lost(self, key: RequestKey, lost: Lost) -> None:
        if not isinstance(key, int):
            self._own.pop(key)[1](None, False)
            return
        if (running := self._calls.get(key)) is None:
            return
        self._close_asks(key, lost.why, refuses=lost.is_final)
        if running.retries.take(lost, self._lanes.upstream.patience):
            running.is_sent = False
            self._queue.append(_Waiting(running.request))
            if self._lane is None:
                self._open()
        elif not lost.ran and lost.unavailable is not None:
            self._answer_unavailable(key, lost.unavailable)
        else:
            del self._calls[key]
            if lost.is_final or self._lanes.ends_sessions:
                self._outlet.interrupted(key, lost.why)
            else:
                self._outlet.crashed(key, lost.why, may_run_again=self._may_run_again(running))

    def on_position(self, key: RequestKey, state: JsonObject) -> None:
        if isinstance(key, int) and (running := self._calls.get(key)) is not None:
            end_check(running.origin)
            self._outlet.keep_call(key, UpstreamCall(may_run_again=self._may_run_again(running), follow=state))

    @property
    def _kept(self) -> JsonObject:
        """What the session's record keeps for its runtimes, at any node."""
        kept: JsonObject = json.loads(self._outlet.kept) if self._outlet.kept else {}
        return kept

    def _keep(self, **values: object) -> None:
        if self._outlet.is_home:  # another node may know of a later session
            self._outlet.keep(self._encode(**values))

    def _encode(self, **values: object) -> bytes:
        return json.dumps({**self._kept, **values}, separators=(",", ":")).encode()

    @property
    def _state(self) -> JsonObject | None:
        """The upstream's session: another node may have begun it."""
        state = self._kept.get("lane")
        return None if state is None else {**state, "initialized": self._initialized}

    def _keep_state(self, lane: Lane) -> None:
        if (state := lane.state) or self._state is not None:
            self._keep(lane=state or None)

    async def on_gone(self) -> JsonObject | None:
        gone = None if self._lane is None else self._lane.state.get("session")
        if (known := self._state) is not None and known.get("session") != gone:
            return known
        try:
            await self._outlet.take_home()
        except PerdureError as failure:
            raise UpstreamUnavailable(Reason.BACKING_OFF, str(failure), retry_after=_HOME_SECONDS) from failure
        return self._state

    async def on_renewed(self, opened: Opened) -> None:
        if (why := self._why_over(opened)) is not None:
            self._outlet.end(why)
            raise UpstreamUnavailable(Reason.SERVER_ERROR, why)
        if (lane := self._lane) is None:
            return
        if answered := self._go_on(lane, opened):
            await asyncio.wait(answered, timeout=_STICKY_SECONDS)
        try:
            is_home = await self._outlet.keep_as_home(self._encode(lane=lane.state))
        except PerdureError as failure:
            raise UpstreamUnavailable(Reason.BACKING_OFF, str(failure), retry_after=_HOME_SECONDS) from failure
        if not is_home:
            sentence = "another node has become the session's home, and begins a session at the server"
            raise UpstreamUnavailable(Reason.BACKING_OFF, sentence, retry_after=_HOME_SECONDS)

    def on_closed(self, why: str) -> None:
        self._lane = None
        self._look_for_idleness()
        sentence = f"a session of {self._lanes.name} has lost its server: {why}"
        log_event(logging.WARNING, "upstream.lost", sentence, upstream=self._lanes.name)
        for name in list(self._asks):
            self._withdraw(name, why)
        is_restarting, self._is_restarting = self._is_restarting, False
        if self._lanes.ends_sessions and not is_restarting:
            self._outlet.end(ENDED)
        elif is_restarting or self._queue or self._is_subscribed:
            self._open()

    async def aclose(self, *, ended: bool) -> None:
        self._is_closed = True
        lane, self._lane = self._lane, None
        self._look_for_idleness()
        if (opening := self._opening) is not None:
            opening.cancel()
            await asyncio.wait({opening})
        if lane is None and ended and (state := self._state) is not None:
            with contextlib.suppress(UpstreamUnavailable):  # the upstream forgets the session by itself
                lane = self._lanes.make(self, self._record, self._origin)
                await lane.open(self._client_params, state)
        if lane is not None:
            if not ended:
                self._keep_state(lane)
            self._lanes.close(lane, ended=ended)


_TakeOwn = Callable[[JsonObject | None, bool], None]
"""Takes the result of a request of the runtime's own; `None` without one. The flag: the upstream refused it."""
