"""The HTTP lane: a session at an upstream of a revision with sessions, on the engine of the clients (`remote`).

**Renewal.** When the upstream has lost the session, the lane begins one new session for all requests that noticed, and
its receiver brings it up (`Receiver.on_renewed`); then the refused requests, which did not run, are sent again, once.
A call of the old session whose connection still stands is read to its end, because another machine of the upstream may
still run it. An HTTP lane closes by itself only where a renewal ends with `Reason.VERSION`: the upstream was replaced
by one that has no such sessions.

**Following.** A call whose events have ids is read on after a lost connection, in this process and, by the state that
`Receiver.on_position` got, in the next one. The reported position never passes an open ask: then the upstream repeats
the ask to the next process.

**Order.** HTTP has none between requests. A message waits until the upstream has taken the notifications before it;
requests and replies wait for nothing else.
"""

import asyncio
import contextlib
import logging
import math
import re
import secrets
import sys
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Self

import anyio

from perdure._core.codes import LIMIT_REACHED, REQUEST_CANCELLED
from perdure._core.delivery import Meaning
from perdure._core.early_answers import as_resuming
from perdure._core.handshakes import OTHER_ERA
from perdure._core.jsonrpc import JsonObject
from perdure._core.reconnect import Patience
from perdure._core.revisions import REVISIONS
from perdure.gateway.lane import (
    REFUSED_SECONDS,
    AskKey,
    Lost,
    Opened,
    Reason,
    RequestKey,
    SessionReceiver,
    UpstreamUnavailable,
    swap_token,
)
from perdure.gateway.upstream import MASK, masked
from perdure.remote.call import DEPARTURE, Call, Ended, OutgoingRequest, Sender
from perdure.remote.endpoint import (
    Endpoint,
    Handshake,
    Refused,
    Unavailable,
    can_be_sent,
    checked_transport,
    shown,
)
from perdure.remote.http11 import Times
from perdure.remote.link import Link, Task
from perdure.remote.message import Message, encode
from perdure.remote.route import ClientLimits, ConnectionLog, Notice, Report, Route
from perdure.remote.stream import StrayAnswer
from perdure.runtime.base import Flow
from perdure.telemetry.log_records import log_event

#: Seconds for a handshake that the upstream has taken: the slowest servers load their models first.
HANDSHAKE_SECONDS = 60.0
#: A call that runs is looked for longer: giving it up costs its outcome, and a deploy takes minutes.
FOLLOWING = Patience()
#: Seconds between two attempts: at first, at most, and at most for the standalone stream, which no request waits for.
FIRST_DELAY, MAX_DELAY, MAX_LISTEN_DELAY = 0.1, 2.0, 30.0
#: Seconds that the first requests of a session wait for its standalone stream: what an upstream without a log says
#: before is lost. Some answer a GET only with their first event.
LISTENING_SECONDS = 0.5
#: Seconds for connecting and writing. None between two bytes of an answer: a call may be silent for an hour, and TCP
#: finds peers that have vanished (`http11`).
TIMES = Times(connect=10.0, write=30.0, read=None)
#: Bytes of one message of an upstream, as on a pipe.
MAX_MESSAGE_BYTES = 64 << 20
#: Seconds between two reported positions of one call: each is a write of the log, and a crash repeats what follows it.
POSITION_PAUSE = 0.25
#: Asks of one lane that wait for their answers. Each is kept in the log; an upstream that asks more waits for none.
MAX_ASKS = 1_000
#: Asks of the standalone stream that are remembered, so that a replay does not repeat them.
MAX_SEEN = 1_000
#: Seconds for telling the upstream that the session has ended, and for what is on its way when the lane rests.
LEAVING_SECONDS, FLUSH_SECONDS = 5.0, 0.5

#: Tokens of an upstream that are masked: the one before is in what the upstream says a moment after it was renewed.
SENT_TOKENS = 2

INITIALIZED = "notifications/initialized"
_REASONS = {
    "unauthorized": Reason.UNAUTHORIZED,
    "no_credentials": Reason.UNAUTHORIZED,
    "forbidden": Reason.FORBIDDEN,
    "not_found": Reason.NOT_FOUND,
    "moved": Reason.NOT_FOUND,
    "tls": Reason.UNREACHABLE,
    "server_error": Reason.SERVER_ERROR,
    "too_large": Reason.SERVER_ERROR,
    "session_gone": Reason.SERVER_ERROR,
    "failed_here": Reason.SERVER_ERROR,
}
"""The reasons of the engine's refusals; those of a lane go by their own words, and all others are `NOT_MCP`."""

_SECRET = re.compile("auth|key|token|secret|cookie|credential", re.IGNORECASE)


class WebUpstream:
    """Holds what all lanes to one HTTP upstream share: connections, credentials, and the log of how it does.

    `headers` and the bearer `token` go along with every request; of a client's request only what `for_caller` is given
    does. The configuration has checked them. `mask` hides secrets in texts that are shown. Raises `Refused` for proxies
    and certificates of the environment that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        token: Callable[[], str] | None,
        patience: float,
        mask: Callable[[str], str],
    ) -> None:
        self._sent: deque[str] = deque(maxlen=SENT_TOKENS)
        self._given_mask = mask
        mask = self.mask
        token = token and self._noting(token)
        client, direct = checked_transport(url, token, headers=headers, times=TIMES)
        has_secrets = token is not None or any(map(_SECRET.search, headers))
        on_401 = "does not accept the given credentials" if has_secrets else "wants a token"
        self._client = client
        self.endpoint = Endpoint(client, url, on_401=on_401, direct=direct, times=TIMES, mask=mask)
        self.limits = ClientLimits(
            patience=Patience(max_time=patience, max_tries=sys.maxsize, first_delay=FIRST_DELAY, max_delay=MAX_DELAY),
            listening=Patience(
                max_time=math.inf, max_tries=sys.maxsize, first_delay=FIRST_DELAY, max_delay=MAX_LISTEN_DELAY
            ),
            handshake=Patience(max_time=patience, max_tries=sys.maxsize, first_delay=FIRST_DELAY, max_delay=MAX_DELAY),
            handshake_seconds=max(HANDSHAKE_SECONDS, patience),
            message_bytes=MAX_MESSAGE_BYTES,
            following=FOLLOWING,
            counts_from_request=True,
        )
        log = ConnectionLog(url, level=logging.WARNING, first_wait=patience, mask=mask)
        self.report: Report = partial(_report_but_era, log)

    def for_caller(
        self, headers: Mapping[str, str], token: Callable[[], str] | None, mask: Callable[[str], str]
    ) -> Self:
        """The same upstream over the same connections, with what a caller brings. `token` is asked for each request;
        `mask` hides the caller's secrets as well."""
        made = copy(self)
        made._sent = deque(maxlen=SENT_TOKENS)
        made._given_mask = mask
        made.report = partial(_report_of_caller, self.report, made.mask)
        token = token and made._noting(token)
        made.endpoint = self.endpoint.carrying(headers, token, on_401="does not accept what its caller has sent")
        return made

    def _noting(self, provider: Callable[[], str]) -> Callable[[], str]:
        def note() -> str:
            token = provider()
            if token not in self._sent:
                self._sent.append(token)
            return token

        return note

    def mask(self, text: str) -> str:
        """Hide secrets in a text that is logged or shown, and the tokens of the last requests: the upstream knows them,
        and may repeat them."""
        return masked(self._sent).sub(MASK, self._given_mask(text))

    def route(self) -> Route:
        # Random, so that no id of an earlier process is used again.
        prefix = secrets.token_urlsafe(9)
        return Route(
            endpoint=self.endpoint, limits=self.limits, complain=self._complain, report=self.report, prefix=prefix
        )

    async def _complain(self, error: Exception) -> None:
        level = logging.DEBUG if isinstance(error, StrayAnswer) else logging.WARNING
        sentence = f"{shown(self.endpoint.url)} sent something that is not a message for this lane: {error}"
        log_event(level, "gateway.misheard", self.mask(sentence))

    async def aclose(self) -> None:
        await self._client.aclose()


def _report_but_era(report: Report, notice: Notice, why: str = "", *, reason: str = "") -> None:
    """What is refused because of its era is no error: a lane of the other era may take it."""
    if notice is not Notice.REFUSED or reason != Reason.VERSION.value:
        report(notice, why, reason=reason)


def _report_of_caller(
    report: Report, mask: Callable[[str], str], notice: Notice, why: str = "", *, reason: str = ""
) -> None:
    """Log refused credentials of a caller as information: the caller gets the refusal, and can correct it."""
    why = mask(why)
    if notice is Notice.REFUSED and reason in ("unauthorized", "forbidden"):
        log_event(logging.INFO, "upstream.refuses_caller", why, reason=reason)
    else:
        report(notice, why, reason=reason)


class _PositionReport:
    """Reports how far a call was read: at once, then at most four times a second, and not past an open ask."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._latest: str | None = None
        self._allowed: str | None = None
        self._reported: str | None = None
        self._is_held = False
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def move(self, position: str | None) -> None:
        self._latest = position
        if not self._is_held:
            self._allowed = position
            if self._timer is None:
                self._offer()

    def hold(self) -> None:
        """Stay where it is: an ask follows."""
        self._is_held = True

    def release(self) -> None:
        self._is_held = False
        self.move(self._latest)

    def close(self) -> None:
        self._allowed = None
        if self._timer is not None:
            self._timer.cancel()

    def _offer(self) -> None:
        self._timer = None
        if self._allowed is None or self._allowed == self._reported:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now < self._next_at:
            self._timer = loop.call_at(self._next_at, self._offer)
            return
        self._reported, self._next_at = self._allowed, now + POSITION_PAUSE
        self._report(self._allowed)


@dataclass(kw_only=True, eq=False)
class _WebRequest:
    """A request that was sent, or is about to be, and was not reported yet."""

    key: RequestKey
    wire_id: str
    token: object
    """The progress token that the receiver knows; None if it gave none."""
    call: Call = field(init=False)
    task: asyncio.Task[object] | None = None
    """Brings the answer."""
    position: _PositionReport = field(init=False)
    asks: set[int] = field(default_factory=set)
    """The open ones."""
    seen: set[str] = field(default_factory=set)
    """The ids of its asks, as JSON."""
    is_over: bool = False


@dataclass(frozen=True, kw_only=True)
class _WebAsk:
    id: object
    """On the wire."""
    handshake: Handshake | None
    """The session that it belongs to."""
    running: _WebRequest | None


class WebLane:
    """One session at an HTTP upstream. It is the link's program."""

    def __init__(self, upstream: WebUpstream, receiver: SessionReceiver) -> None:
        self._receiver = receiver
        self._route = upstream.route()
        self._link = Link(
            self._route,
            self,
            listening_seconds=LISTENING_SECONDS,
            checks=True,
            listens=False,
            start_soon=self._start_soon,
        )
        self._sender = Sender(self._link)
        self._running: dict[RequestKey, _WebRequest] = {}
        self._tokens: dict[str, _WebRequest] = {}
        """The requests that may have progress, by their tokens on the wire."""
        self._asks: dict[AskKey, _WebAsk] = {}
        self._ask_keys = count(1)
        self._seen: dict[str, None] = {}
        """The ids of the asks of the standalone stream, as JSON, the newest at the end."""
        self._position: str | None = None
        """Of the standalone stream."""
        self._before: asyncio.Event | None = None
        """Set when the upstream has taken the last notification."""
        self._bringing: Handshake | None = None
        """The session that the receiver brings up."""
        self._opening: anyio.CancelScope | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_closed = False

    # Opening and closing

    @property
    def state(self) -> JsonObject:
        """The session, for `adopt` in a later process or at another node."""
        handshake = self._bringing or self._link.handshake
        if handshake is None:
            return {}
        state = {"session": handshake.session, "result": handshake.result, "initialized": handshake.initialized}
        return state if self._position is None else {**state, "position": self._position}

    async def open(self, client_params: JsonObject, state: JsonObject | None = None) -> Opened:
        if state:
            with contextlib.suppress(ValueError):  # of a release that recorded something else: another session is begun
                return self._adopt(client_params, state)
        with anyio.CancelScope() as self._opening:
            made = await self._begin(client_params)
            self._link.handshake, self._opening = made, None
            return _opened(made)
        raise UpstreamUnavailable(Reason.NO_HANDSHAKE, "the lane was closed before the handshake was answered")

    def _adopt(self, client_params: JsonObject, state: JsonObject) -> Opened:
        """Go on in the session of a recorded state, without a handshake. Raises `ValueError`."""
        made = _recorded(state, client_params)
        position = state.get("position")
        self._position = position if isinstance(position, str) and can_be_sent(position) else None
        self._link.handshake = made
        if self._link.listens and made.initialized:
            self._link.start(self._listen)
        return replace(_opened(made), is_new=False)

    def _start_soon(self, task: Task) -> None:
        # Not a group's: the task that opens a lane may end before the lane does.
        self._tasks.add(started := asyncio.create_task(task()))
        started.add_done_callback(self._tasks.discard)

    async def aclose(self, *, ended: bool) -> None:
        if self._opening is not None:
            self._opening.cancel()
        self._is_closed = True
        self._link.stop_listening()
        for running in list(self._running.values()):
            self._forget(running)
        self._asks.clear()
        if not ended:
            with anyio.move_on_after(FLUSH_SECONDS):
                await self._sender.idle()
        # Not the task that closes the lane from within `on_renewed`.
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        handshake = self._link.handshake
        if ended and handshake is not None and handshake.session:
            await self._delete(handshake)

    async def _delete(self, handshake: Handshake) -> None:
        """End a session at the upstream, which forgets it by itself if that fails."""
        with anyio.move_on_after(LEAVING_SECONDS), contextlib.suppress(Exception):
            await self._route.endpoint.delete(handshake)

    def _end(self, why: str) -> None:
        """End the lane: the upstream has no such sessions any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._link.stop_listening()
        lost = Ended(meaning=Meaning.UNKNOWN, why=why, refusal=Refused(Reason.VERSION.value, why))
        for running in list(self._running.values()):
            self._report(running, lost)
        self._asks.clear()
        for task in self._tasks:
            task.cancel()
        self._receiver.on_closed(why)

    # Handshakes

    async def _begin(self, client_params: JsonObject) -> Handshake:
        # Its calls are waited for, whatever rules the upstream has.
        text = encode({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": as_resuming(client_params)})
        try:
            begun = await self._link.begin(text, self._route.new_id())
        except Unavailable as away:
            sentence = f"the server does not answer: {away}"
            raise UpstreamUnavailable(Reason.UNREACHABLE, sentence, retry_after=away.at_least or MAX_DELAY) from away
        except Refused as refused:
            raise _unavailable(refused, is_handshake=True) from refused
        if begun.answer.is_error:
            code, sentence = begun.answer.body["error"].get("code"), f"it refuses the handshake: {begun.answer.why}"
            is_other = code in OTHER_ERA or begun.status == 400
            raise UpstreamUnavailable(Reason.VERSION if is_other else Reason.NO_HANDSHAKE, sentence, code=code)
        made = Handshake(session=begun.session, request=client_params, result=begun.answer.result)
        if made.version not in REVISIONS:
            await self._delete(made)
            raise UpstreamUnavailable(Reason.VERSION, f"it speaks the revision {encode(made.version)}")
        return made

    async def replace(self, gone: Handshake) -> Handshake:
        self._position = None
        self._seen.clear()
        for key, ask in list(self._asks.items()):
            if ask.running is None:
                self._withdraw(key, "its session is gone")
        made: Handshake | None = None
        try:
            state = await self._receiver.on_gone()
            if state is not None and state.get("session") != gone.session:
                return _recorded(state, gone.request)
            made = await self._begin(gone.request)
            # What waits for the renewal must not keep back what brings the session up.
            self._bringing, self._before = made, None
            await self._receiver.on_renewed(_opened(made))
            return made
        except UpstreamUnavailable as unavailable:
            if unavailable.reason is Reason.VERSION:
                asyncio.get_running_loop().call_later(REFUSED_SECONDS, self._end, str(unavailable))
            if made is not None:
                await self._delete(made)
            if unavailable.retry_after is not None:
                raise Unavailable(str(unavailable), at_least=unavailable.retry_after) from unavailable
            raise Refused(unavailable.reason.value, str(unavailable), challenge=unavailable.challenge) from unavailable
        except ValueError as error:
            raise Refused(Reason.NO_HANDSHAKE.value, str(error)) from error
        finally:
            self._bringing = None

    async def on_replaced(self, handshake: Handshake) -> None:
        return None  # `on_renewed` of the receiver runs before any request goes to it

    # The standalone stream

    def listen(self, wanted: bool) -> None:
        if wanted == self._link.listens:
            return
        self._link.listens = wanted
        if not wanted:
            self._link.stop_listening()
        elif self._link.handshake is not None and self._link.handshake.initialized:
            self._link.start(self._listen)

    async def _listen(self) -> None:
        # As if the session were new: that it is gone is only believed if a `ping` says the same.
        await self._link.listen(position=self._position, is_new=True)

    def move(self, position: str | None, retry: int | None) -> None:
        self._position = position

    async def lose_position(self) -> None:
        return None  # the connection log reports it

    # Requests

    def request(self, key: RequestKey, method: str, params: JsonObject | None) -> None:
        wire_id = self._route.new_id()
        params, token = swap_token(params, wire_id)
        body = _encoded(method, params, id=wire_id)
        name = str((params or {}).get("name", ""))
        sent = OutgoingRequest(method=method, name=name, body=lambda _: body, restarts=False)
        self._run(_WebRequest(key=key, wire_id=wire_id, token=token), sent, handshake=self._bringing)

    def follow(self, key: RequestKey, method: str, params: JsonObject | None, state: JsonObject) -> None:
        session, wire_id, position = (state.get(name) for name in ("session", "id", "position"))
        if not (isinstance(session, str) and isinstance(wire_id, str) and isinstance(position, str)) or (
            not can_be_sent(position) or self._link.handshake is None
        ):
            lost = Lost(ran=True, why="it is not recorded how far its events were read")
            asyncio.get_running_loop().call_soon(self._receiver.on_lost, key, lost)
            return
        current, elsewhere = self._link.handshake, None
        if session != current.session:
            elsewhere = Handshake(session=session, request={}, result=current.result)
        sent = OutgoingRequest(method=method, body=None, restarts=False)
        running = _WebRequest(key=key, wire_id=wire_id, token=swap_token(params, wire_id)[1])
        self._run(running, sent, handshake=elsewhere, position=position)

    def _run(self, running: _WebRequest, sent: OutgoingRequest, **options: Any) -> None:
        call = running.call = Call(
            self._route,
            sent,
            link=self._link,
            request_id=running.wire_id,
            take=partial(self._take, running=running),
            move=lambda position, retry: running.position.move(position),
            asks_again=True,
            **options,
        )
        if running.token is not None:
            self._tokens[running.wire_id] = running

        def report(position: str) -> None:
            session = "" if call.handshake is None else call.handshake.session
            self._receiver.on_position(running.key, {"session": session, "position": position, "id": running.wire_id})

        running.position = _PositionReport(report)
        self._running[running.key] = running
        self._link.start(self._bring_answer, running, self._before)

    async def _bring_answer(self, running: _WebRequest, before: asyncio.Event | None) -> None:
        running.task = asyncio.current_task()
        if before is not None:
            await before.wait()
        found = await outcome_of(running.call)
        if not running.is_over:
            self._report(running, found)

    def _report(self, running: _WebRequest, found: Message | Ended) -> None:
        self._forget(running)
        if isinstance(found, Message):
            for ask in list(running.asks):
                self._withdraw(ask, "its call has its answer")
            self._receiver.on_answer(running.key, found.payload.encode(), failed=found.is_error)
            return
        lost = lost_by(found)
        for ask in list(running.asks):
            self._withdraw(ask, lost.why)
        self._receiver.on_lost(running.key, lost)

    def _forget(self, running: _WebRequest) -> None:
        running.is_over = True
        running.position.close()
        self._tokens.pop(running.wire_id, None)
        if self._running.get(running.key) is running:
            del self._running[running.key]

    def cancel(self, key: RequestKey, params: JsonObject | None) -> None:
        running = self._running.get(key)
        if running is not None:
            self._forget(running)
            self._link.start(self._cancel, running, {**(params or {}), "requestId": running.wire_id})

    async def _cancel(self, running: _WebRequest, params: JsonObject) -> None:
        call = running.call
        if call.is_begun:
            # Before the upstream has the request it would not know what to cancel.
            with anyio.move_on_after(DEPARTURE):
                await call.departed.wait()
            body = _encoded("notifications/cancelled", params)
            await self._sender.send(body, may_renew=False, handshake=call.handshake)
        if running.task is not None:
            running.task.cancel()

    # Notifications and replies

    def notify(self, method: str, params: JsonObject | None) -> None:
        before, self._before = self._before, asyncio.Event()
        self._link.start(self._notify, method, params, before, self._before, self._bringing)

    async def _notify(
        self,
        method: str,
        params: JsonObject | None,
        before: asyncio.Event | None,
        departed: asyncio.Event,
        bringing: Handshake | None,
    ) -> None:
        attempts = self._sender.attempts()
        try:
            if before is not None:
                await before.wait()
            if bringing is None:
                await self._link.settled()
            is_second_half = method == INITIALIZED
            taken = await self._sender.send(
                _encoded(method, params),
                departed=None if is_second_half else departed,
                attempts=attempts,
                handshake=bringing,
                may_renew=bringing is None and not is_second_half,
            )
            handshake = bringing or self._link.handshake
            if is_second_half and handshake is not None:
                handshake.initialized = taken
                if bringing is None and self._link.listens:
                    await self._listen()
        finally:
            departed.set()
            if self._before is departed:
                self._before = None

    def reply(self, ask: AskKey, response: JsonObject) -> None:
        if (found := self._asks.pop(ask, None)) is not None:
            self._link.start(self._reply, ask, found, response)

    async def _reply(self, key: AskKey, ask: _WebAsk, response: JsonObject) -> None:
        answer = {name: response[name] for name in ("result", "error") if name in response}
        body = encode({"jsonrpc": "2.0", "id": ask.id, **answer}).encode()
        await self._sender.send(body, is_reply=True, handshake=ask.handshake)
        self._close(key, ask)

    # What the upstream says

    async def take(self, message: Message) -> None:
        await self._take(message, running=None)

    async def _take(self, message: Message, running: _WebRequest | None) -> None:
        method, params = message.body.get("method"), message.body.get("params")
        is_over = self._is_closed or (running is not None and running.is_over)
        if not isinstance(method, str) or (is_over and (self._is_closed or "id" not in message.body)):
            return
        params = params if isinstance(params, dict) else None
        flow: Flow | None = None
        if "id" in message.body:
            flow = self._ask(message.body["id"], method, params, running)
        elif method == "notifications/progress":
            token = None if params is None else params.get("progressToken")
            owner = self._tokens.get(token) if isinstance(token, str) else None
            if params is not None and owner is not None:
                params["progressToken"] = owner.token
                flow = self._receiver.on_notification(method, params, key=owner.key)
        elif method == "notifications/cancelled":
            self._take_withdrawal(params or {}, running)
        else:
            flow = self._receiver.on_notification(method, params, key=None if running is None else running.key)
        if flow is not None:
            await flow.wait_for_room()

    def _ask(self, ask_id: object, method: str, params: JsonObject | None, running: _WebRequest | None) -> Flow | None:
        handshake = self._link.handshake if running is None else running.call.handshake
        ask = _WebAsk(id=ask_id, handshake=handshake, running=running)
        key, name = next(self._ask_keys), encode(ask_id)
        if method == "ping":
            self._link.start(self._reply, key, ask, {"result": {}})
            return None
        seen = self._seen if running is None else running.seen
        if name in seen:
            return None  # replayed
        if len(self._asks) >= MAX_ASKS or (running is not None and running.is_over):
            error = {"code": REQUEST_CANCELLED, "message": "the call was cancelled"}
            if running is None or not running.is_over:
                sentence = f"{MAX_ASKS} questions wait for their answers, as many as may"
                error = {"code": LIMIT_REACHED, "message": sentence}
            self._link.start(self._reply, key, ask, {"error": error})
            return None
        if running is None:
            self._seen[name] = None
            if len(self._seen) > MAX_SEEN:
                del self._seen[next(iter(self._seen))]
        else:
            running.seen.add(name)
            running.asks.add(key)
            running.position.hold()
        self._asks[key] = ask
        return self._receiver.on_ask(key, method, params, key=None if running is None else running.key)

    def _take_withdrawal(self, params: JsonObject, running: _WebRequest | None) -> None:
        wanted, reason = encode(params.get("requestId")), params.get("reason")
        found = [key for key, ask in self._asks.items() if encode(ask.id) == wanted]
        own = [key for key in found if self._asks[key].running is running]
        for key in (own or found)[:1]:
            self._withdraw(key, reason if isinstance(reason, str) else "the server does not wait for it any more")

    def _withdraw(self, key: AskKey, reason: str) -> None:
        if (ask := self._asks.pop(key, None)) is not None:
            self._close(key, ask)
            self._receiver.on_ask_withdrawn(key, reason)

    def _close(self, key: AskKey, ask: _WebAsk) -> None:
        if ask.running is not None:
            ask.running.asks.discard(key)
            if not ask.running.asks and not ask.running.is_over:
                ask.running.position.release()

    def fail(self, error: Exception) -> None:
        """Log what a task has raised; the other tasks continue."""
        log_event(logging.ERROR, "gateway.lane_failed", f"something unforeseen: {type(error).__name__}: {error}")


def _encoded(method: str, params: JsonObject | None, **members: str) -> bytes:
    message = {"jsonrpc": "2.0", **members, "method": method}
    return encode(message if params is None else {**message, "params": params}).encode()


def _opened(handshake: Handshake) -> Opened:
    return Opened(version=handshake.version, result=handshake.result)


def _recorded(state: JsonObject, client_params: JsonObject) -> Handshake:
    """The session of a recorded state. Raises `ValueError`."""
    session, result, initialized = (state.get(name) for name in ("session", "result", "initialized"))
    if not isinstance(session, str) or not isinstance(result, dict) or not isinstance(initialized, bool):
        raise ValueError("the upstream's session is not recorded: session, result and initialized are expected")
    made = Handshake(session=session, request=client_params, result=result, initialized=initialized, is_adopted=True)
    if made.version not in REVISIONS:
        raise ValueError(f"the recorded session is of the revision {encode(made.version)}")
    return made


async def outcome_of(call: Call) -> Message | Ended:
    """The upstream's answer for its client, or how the request ended without one. An error that asks the gateway for
    its credentials is no answer."""
    found, refusal = await call.outcome(), call.refusal
    if isinstance(found, Message) and refusal is not None and refusal.reason in ("unauthorized", "forbidden"):
        return Ended(meaning=Meaning.REFUSED, why=str(refusal), refusal=refusal)
    return found


def lost_by(ended: Ended) -> Lost:
    """What a request without an answer is to the lane's user."""
    if ended.meaning is Meaning.UNKNOWN:
        return Lost(ran=True, why=ended.why)
    unavailable = _unavailable(ended.refusal)
    if ended.meaning is Meaning.UNREACHABLE:
        unavailable = UpstreamUnavailable(Reason.UNREACHABLE, ended.why, retry_after=MAX_DELAY)
    return Lost(ran=False, why=str(unavailable), unavailable=unavailable)


def _unavailable(refused: Refused, *, is_handshake: bool = False) -> UpstreamUnavailable:
    reason = _REASONS.get(refused.reason)
    if reason is None and is_handshake and refused.status == 400:
        reason = Reason.VERSION
    if reason is None:
        own = {reason.value: reason for reason in Reason}
        reason = own.get(refused.reason, Reason.NOT_MCP)
    return UpstreamUnavailable(reason, str(refused), challenge=refused.challenge)
