"""Serves upstreams: each by an `App` of its own, at a path and on a store of its own.

A session cannot be found under another upstream's path, because it is in another store. One upstream alone is served at
the endpoint's path as well, and its failures are the process's. Of several, one that does not start, or loses its
store, is started again by itself, and the others go on.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

from mcp.server.auth.provider import TokenVerifier
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure._core.backoff import Pauses
from perdure._core.jsonrpc import JsonObject
from perdure._core.text import printable
from perdure.errors import PerdureError, StoreLost, StoreReplaced, StoreTooNew
from perdure.http import HEALTH, METRICS, UPSTREAMS
from perdure.http.app import App, guarded, health_answer, metrics_answer, not_found
from perdure.http.authentication import Authentication
from perdure.http.refusals import HttpRefusal, Refusal, json_answer
from perdure.http.request import HostAndOrigin
from perdure.http.resume_tokens import REJECTED, resume_paths
from perdure.runtime.health import Health, UpstreamState
from perdure.settings import Settings
from perdure.telemetry.counters import Counters
from perdure.telemetry.log_records import log_event

START_SECONDS = 10.0
"""How long a start waits for the last of several upstreams: longer than a store on a server takes to be reached."""
PAUSES = Pauses(first=1.0, longest=30.0)
"""Seconds until an upstream that did not start is started again, doubled with each failure in a row. What is wrong, a
locked file or a server that restarts, mends itself or is mended by an operator who waits for it."""
MAX_REASON = 300
"""Characters of a reason in an answer."""

MakeApp = Callable[[str], App]
"""Makes the app of an upstream for a path."""


class _Place:
    """One upstream: its app while it runs, and why it does not run otherwise."""

    def __init__(self, name: str, make: MakeApp, path: str) -> None:
        self.name = name
        self.path = path
        self.app: App | None = None
        self.is_tried = False
        """It has started, or failed to start, at least once."""
        self.error: Exception | None = None
        self._make = make
        self._health = Health()

    @property
    def health(self) -> Health:
        return (self.app and self.app.upstream) or self._health

    async def run(self, stopping: asyncio.Event, on_tried: Callable[[], None]) -> None:
        """Run the app until the end, and start it again when it fails."""
        failures = 0
        while not stopping.is_set():
            try:
                async with self.running() as (app, lost):
                    failures = 0
                    on_tried()
                    await self._serve(app, stopping, lost)
            except Exception as error:
                if stopping.is_set():
                    raise
                failures += 1
                pause = PAUSES.after(failures)
                # The error of a library may hold anything; its type says enough to find its traceback in the log.
                reason = str(error) if isinstance(error, PerdureError) else type(error).__name__
                self.error, self.is_tried = error, True
                self._health.report(UpstreamState.DOWN, printable(reason, MAX_REASON), next_try=time.time() + pause)
                sentence = f"the upstream {self.name} failed, and is started again in {pause:g} s: {reason}"
                log_event(logging.ERROR, "upstream.failed", sentence, upstream=self.name)
                on_tried()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), pause)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[App, "asyncio.Future[StoreLost]"]]:
        """Run the app once. The future is done when it has lost its store."""
        lost: asyncio.Future[StoreLost] = asyncio.get_running_loop().create_future()

        def lose(failure: StoreLost) -> None:
            if not lost.done():
                lost.set_result(failure)

        app = self._make(self.path)
        app.when_lost(lose)
        async with app.lifespan():
            self.app, self.is_tried = app, True
            self._health.report(UpstreamState.UP)
            try:
                yield app, lost
            finally:
                self.app = None

    async def _serve(self, app: App, stopping: asyncio.Event, lost: "asyncio.Future[StoreLost]") -> None:
        """Wait until the app has to end: for good, or because another one may find its store."""
        stop = asyncio.ensure_future(stopping.wait())
        ends: list[asyncio.Future[Any]] = [stop, lost]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if lost.done() and isinstance(lost.result(), StoreTooNew):  # as it would be for another app
                await stop
        finally:
            stop.cancel()
        if lost.done() and isinstance(lost.result(), StoreReplaced):
            await app.drain()  # its calls are known to no other process


class Router:
    """Serves upstreams by their names. To a server it looks like an `App`."""

    def __init__(
        self,
        upstreams: Mapping[str, MakeApp],
        *,
        settings: Settings,
        auth: TokenVerifier | None,
        path: str,
    ) -> None:
        self._prefix = "/" + path.strip("/") if path.strip("/") else ""
        is_alone = len(upstreams) == 1
        self._places = [
            _Place(name, make, self._prefix or "/" if is_alone else f"{self._prefix}/{name}")
            for name, make in upstreams.items()
        ]
        self._alone = self._places[0] if is_alone else None
        self._settings = settings
        self._is_open = auth is None
        self._host_and_origin = HostAndOrigin(settings)
        self._shell = Starlette(lifespan=self.lifespan)
        self._resume_paths = resume_paths(f"{self._prefix}/NAME") if settings.broker else {}
        self._auth = None if auth is None else Authentication(auth, None, Counters())
        self._metrics = guarded(self._serve_metrics, settings, self._auth)
        self._refusing = {place.name: guarded(self._refuse(place), settings, self._auth) for place in self._places}
        self._on_lost: Callable[[StoreLost], None] | None = None
        self._stopping = False
        self._changed = asyncio.Event()
        """An upstream has started, or failed to start."""

    # Starting and stopping

    @asynccontextmanager
    async def lifespan(self, _: object = None) -> AsyncIterator[None]:
        """Start all upstreams, and run until the end. Fails if none of them starts."""
        self._stopping = False
        if self._alone is not None:

            def lose(lost: asyncio.Future[StoreLost]) -> None:
                if self._on_lost is not None and not lost.cancelled():
                    self._on_lost(lost.result())

            async with self._alone.running() as (_, lost):
                lost.add_done_callback(lose)
                yield
            return
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for place in self._places:
                group.create_task(place.run(stopping, self._changed.set))
            try:
                async with asyncio.timeout(START_SECONDS):
                    await self._until(lambda: all(place.is_tried for place in self._places))
            except TimeoutError:
                await self._until(lambda: bool(self._apps) or all(place.is_tried for place in self._places))
            if not self._apps and (error := self._places[0].error) is not None:
                raise error
            try:
                yield
            finally:
                stopping.set()

    async def _until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            self._changed.clear()
            await self._changed.wait()

    @property
    def _apps(self) -> Sequence[App]:
        return [place.app for place in self._places if place.app is not None]

    async def drain(self) -> None:
        """Take no new work, and wait for the running calls of all upstreams."""
        self._stopping = True
        await asyncio.gather(*(app.drain() for app in self._apps))

    @property
    def node(self) -> str:
        """The id of this process as a node of the store; empty where there are several."""
        return self._apps[0].node if self._alone is not None and self._apps else ""

    @property
    def is_busy(self) -> bool:
        return any(app.is_busy for app in self._apps)

    @property
    def running(self) -> list[str]:
        return [name for app in self._apps for name in app.running]

    @property
    def has_tasks(self) -> bool:
        return any(app.has_tasks for app in self._apps)

    def end_idle_readers(self) -> None:
        for app in self._apps:
            app.end_idle_readers()

    async def learn_tools(self) -> None:
        await asyncio.gather(*(app.learn_tools() for app in self._apps))

    def leave_at_steps(self) -> None:
        for app in self._apps:
            app.leave_at_steps()

    def begin_stop(self) -> None:
        self._stopping = True
        for app in self._apps:
            app.begin_stop()

    async def check_tokens(self) -> int:
        """End what was opened with a token that is no longer good, at all upstreams. Returns how much there was."""
        return sum([await app.check_tokens() for app in self._apps])

    def when_lost(self, on_lost: Callable[[StoreLost], None]) -> None:
        """Call `on_lost` if this process serves one upstream alone, and loses its store."""
        self._on_lost = on_lost

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._shell(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
        else:
            await self._route(scope, scope["path"].rstrip("/"))(scope, receive, send)

    def _route(self, scope: Scope, path: str) -> ASGIApp:
        if path == UPSTREAMS:
            return self._serve_upstreams
        if self._alone is not None:
            # The only upstream stands at the endpoint's path, and is reached by its name as well.
            own, inside = f"{self._prefix}/{self._alone.name}", path
            if f"{path}/".startswith(f"{own}/"):
                inside = self._prefix + path.removeprefix(own)
            elif (action := self._resume_paths.get(path)) is not None:
                inside = f"{self._prefix.rpartition('/')[0]}/resume/{action}"
            if inside != path:
                scope.update(path=inside or "/", raw_path=inside.encode())
            return self._alone.app or self._refusing[self._alone.name]
        if path == HEALTH:
            return health_answer(*self._health())
        if path == METRICS and self._settings.metrics:
            return self._metrics
        if path in self._resume_paths:
            return self._serve_broker
        if self._auth is not None and self._auth.metadata is not None and path == self._auth.metadata_path:
            # Of all upstreams: tokens are for the endpoint's address, and good below it.
            return partial(self._beside, self._auth.metadata)
        for place in self._places:
            # Below its own path, or where a description of the resource at that path is looked for (RFC 8615).
            if f"{path}/".startswith(f"{place.path}/") or (
                path.startswith("/.well-known/") and path.endswith(place.path)
            ):
                return place.app or self._refusing[place.name]
        if path == self._prefix:
            hint = {"error": f"several servers are served here: each is at {self._prefix}/NAME"}
            return json_answer(json.dumps(hint).encode(), status=404)
        return not_found

    def _refuse(self, place: _Place) -> ASGIApp:
        """An app that refuses every request to an upstream which is not started."""

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            data = {"upstream": place.name, "reason": "not_started", "ran": False}
            why = place.health.reason or "it is starting"
            refused = HttpRefusal(Refusal.UPSTREAM_UNAVAILABLE, upstream=place.name, why=why, data=data)
            await (HttpRefusal(Refusal.STOPPING) if self._stopping else refused).answer(scope, receive, send)

        return refuse

    def _health(self) -> tuple[int, str]:
        """The health of the process: new work should go elsewhere only if no upstream takes any."""
        if self._stopping:
            return 503, "stopping"
        found = [app.health() for app in self._apps] or [(503, "starting")]
        return found[0] if len(set(found)) == 1 else (min(status for status, _ in found), "degraded")

    async def _serve_upstreams(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The state of each upstream; 503 if one is down. The rest is for operators: with tokens, which this path does
        not ask for, reasons are in the log only, and processes in the metrics."""
        found: dict[str, JsonObject] = {}
        for place in self._places:
            health = place.health
            shown: JsonObject = {"state": health.state.value, "since": _time(health.since)}
            found[place.name] = shown
            if health.next_try is not None:
                shown["nextTry"] = _time(health.next_try)
            if not self._is_open:
                continue
            shown["processes"] = health.numbers.upstream_children
            if health.reason:
                shown["reason"] = health.reason
            elif (failure := health.last_failure) is not None:
                shown["lastFailure"] = {"at": _time(failure.at), "reason": failure.reason}
        is_down = any(place.health.state is UpstreamState.DOWN for place in self._places)
        body = {"status": "down" if is_down else "ok", "upstreams": found}
        answer = json_answer(json.dumps(body).encode(), status=503 if is_down else 200)
        await self._beside(answer, scope, receive, send)

    async def _serve_broker(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask the resume broker of each upstream, because a token does not say whose it is: one store knows it, and the
        others reject it without a change. Where the one that knows it may not have started, nothing is rejected: the
        client would throw its token away."""
        received: list[Message] = []
        answers: list[list[Message]] = []

        async def read() -> Message:
            received.append(await receive())
            return received[-1]

        for app in self._apps:
            again, sent = list(received), list[Message]()

            async def replay(again: list[Message] = again) -> Message:
                return again.pop(0) if again else await read()

            async def keep(message: Message, sent: list[Message] = sent) -> None:
                sent.append(message)

            await app(dict(scope), replay, keep)
            answers.append(sent)
            # Nobody learns whether there was a token to revoke, so all are asked.
            if not _is_rejection(sent) and not scope["path"].endswith("/revoke"):
                break
        missing = next((place for place in self._places if place.app is None), None)
        if missing is not None and all(map(_is_rejection, answers)):
            await self._refusing[missing.name](scope, receive, send)
            return
        for message in max(answers, key=lambda sent: (not _is_rejection(sent), sent[0]["status"] if sent else 0)):
            await send(message)

    async def _serve_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = {place.name: await place.app.metrics_page() for place in self._places if place.app is not None}
        pages = {name: page for name, page in found.items() if page is not None}
        await self._beside(metrics_answer(scope, pages), scope, receive, send)

    async def _beside(self, answer: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request beside the endpoints, if it comes from no other site."""
        try:
            self._host_and_origin.check(scope["headers"], dict(scope["headers"]), beside=True)
        except HttpRefusal as refused:
            answer = refused.answer
        await answer(scope, receive, send)


def _is_rejection(sent: Sequence[Message]) -> bool:
    # A client that has left gets nothing.
    return bool(sent) and sent[0]["status"] == REJECTED.status_code and sent[-1].get("body") == REJECTED.body


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
