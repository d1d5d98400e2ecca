"""The ASGI application: routes requests, and starts and stops what answers them.

Both eras are served on one path. Auth, custom routes and OAuth routes of the served server keep working: only its
endpoint is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure._core.ids import RecordKind
from perdure._core.revisions import REVISIONS, is_sessionless
from perdure._core.states import SessionState
from perdure.assembly import ServerProcess, doing, running
from perdure.errors import Misuse, NodeBuried, StoreError, StoreLost, StoreReplaced
from perdure.http import BESIDE, HEALTH, METRICS
from perdure.http.access import FAILURES, refusal_of
from perdure.http.credentials import SHOWN, OpenRequests, client_without_subject, principal_of, shown_token
from perdure.http.durable_calls import CANCEL_METHOD, TASK_METHODS
from perdure.http.endpoint import ALLOW, READ_AFTER_ANSWER, McpEndpoint
from perdure.http.event_stream import EventStreamResponse
from perdure.http.refusals import HttpRefusal, Refusal, json_answer
from perdure.http.request import REQUEST_ID, ClientGone, Headers, HostAndOrigin
from perdure.http.resume_tokens import ALLOW_POST, resume_paths
from perdure.http.sdk_passthrough import SdkPassthrough
from perdure.runtime.health import Health
from perdure.runtime.hosted import Hosted, authenticates, endpoint_of, is_bare
from perdure.runtime.token_check import TOKEN_CHECK, TokenCheck
from perdure.sessions.ledger import name_of
from perdure.sessions.registry import SessionInfo, busy_calls, has_tasks, numbers
from perdure.settings import Settings
from perdure.store import open_store, without_password
from perdure.store.interface import Store, survey_of
from perdure.store.owner import Owner, claim_for
from perdure.store.records import NodeRecord, Survey
from perdure.telemetry import prometheus as metrics
from perdure.telemetry import tracing as spans
from perdure.telemetry.counters import Counters
from perdure.telemetry.log_records import log_event

if TYPE_CHECKING:
    from mcp.server.auth.provider import TokenVerifier
    from mcp.server.auth.settings import AuthSettings

    from perdure.http.authentication import Authentication

_BLANKS = frozenset({b" ", b"\t"})

_ENTERED = "perdure.entered"
"""In the scope of a request that needs the endpoint's authentication: the path that it was sent to."""


class App:
    """Serves one MCP server. Run it with any ASGI server, or mount it and hand its `lifespan` to the outer app."""

    def __init__(
        self,
        server: object,
        *,
        store: Store | str,
        settings: Settings,
        auth: TokenVerifier | AuthSettings | None,
        path: str,
        owner: Owner | None = None,
        token_verifier: TokenVerifier | None = None,
    ) -> None:
        """`token_verifier`: what checks the tokens that `auth` describes, in place of the keys of its issuer. `owner`:
        where the server comes from, if that is known."""
        self.path = "/" + path.strip("/")
        if self.path in BESIDE:
            raise Misuse(f"path is {path!r}, where {BESIDE[self.path]}")
        self._settings = settings
        self._resume_actions = resume_paths(self.path) if settings.broker else {}
        self._paths = {self.path, *self._resume_actions, *([METRICS] if settings.metrics else [])}
        """The endpoint's path, and the paths beside it that need its authentication."""
        self._store = open_store(store, busy_timeout=settings.store_timeout) if isinstance(store, str) else store
        self._store_address = without_password(store) if isinstance(store, str) else "ADDRESS"
        if isinstance(server, Hosted):
            self._hosted = server
        else:
            from perdure.runtime.server import host  # the SDK, which a gateway does without

            self._hosted = host(server, settings, path=self.path)
        health = self._hosted.health
        self.counters = Counters(upstream=None if health is None else health.numbers)
        owner = owner or Owner(name="")
        self._owner = replace(owner, name=self._hosted.name or owner.name)
        self._host_and_origin = HostAndOrigin(settings)
        self._shell = Starlette(lifespan=self.lifespan)
        self._process: ServerProcess | None = None
        self._endpoint: McpEndpoint | None = None
        self._has_logged_no_subject = False
        self._stopping = False
        self._draining = False
        self._ending: asyncio.Future[None] | None = None
        self._lost: StoreLost | None = None
        self._on_lost: Callable[[StoreLost], None] | None = None
        self._open_requests = OpenRequests()
        self._auth: Authentication | None = None
        if auth is not None:
            from perdure.http.authentication import Authentication  # the SDK

            self._auth = Authentication(auth, token_verifier, self.counters)
        entry: ASGIApp = self._serve if self._hosted.web is None or is_bare(self._hosted.web) else self._hosted.web
        if self._auth is not None and self._hosted.web is not None and authenticates(self._hosted.web):
            raise Misuse("this server brings its own authentication; `auth`, --tokens and --issuer cannot replace it")
        self._entry = guarded(entry, settings, self._auth)
        # With `auth` the served server's own routes need a token as the endpoint does: an operator who asks for tokens
        # does not expect a way in without one.
        web: ASGIApp = self._hosted.web or not_found
        self._beside = web if self._auth is None or web is not_found else self._auth.protect(web)

    # Starting and stopping

    @asynccontextmanager
    async def lifespan(self, _: object = None) -> AsyncIterator[None]:
        """Open the store, enter the server's own lifespan once, and run until the end."""
        self._stopping = self._draining = False
        self._ending = None
        self._lost = None
        async with AsyncExitStack() as stack:
            await self._store.open()
            stack.push_async_callback(self._store.aclose)
            await claim_for(self._owner, self._store, address=self._store_address)
            started = await stack.enter_async_context(self._hosted.start())
            settings = self._settings
            process = await stack.enter_async_context(
                running(
                    started.runtimes,
                    store=self._store,
                    settings=settings,
                    counters=self.counters,
                    on_buried=self._buried,
                    on_lost=self._lose,
                    server_changes=started.changes,
                )
            )
            if self._hosted.web is not None:
                own = endpoint_of(self._hosted.web)
                # FastMCP reads its own manager once more when it stops.
                stack.callback(setattr, own, "session_manager", own.session_manager)
                # The SDK calls `asgi_app`, FastMCP `handle_request`.
                own.session_manager = SimpleNamespace(asgi_app=self._serve, handle_request=self._serve)
            if started.sessionless is not None:
                await stack.enter_async_context(started.sessionless.run())
            if (keys := started.state_keys) is not None:
                store, clock = process.context.store, process.context.clock
                await keys.load(store, clock)
                await stack.enter_async_context(doing(partial(keys.renew, store, clock)))
            self._process = process
            self._endpoint = McpEndpoint(process, started, is_draining=lambda: self._draining)
            try:
                yield
            finally:
                await asyncio.shield(self._stop())

    async def drain(self) -> None:
        """Take no new work, send idle clients elsewhere, give handles to clients that take them, and wait for running
        calls, for `drain_timeout` at most, or `task_drain`."""
        self._draining = True
        if self._process is not None:
            self.end_idle_readers()
            self._process.context.waiters.wake_all()
            for handler in self._sessionless:
                handler.give_handles()
            await self._process.drain(is_busy=lambda: self.is_busy, end_others=self._end_sessionless)

    async def learn_tools(self) -> None:
        """Learn which of the running calls another process may go on with."""
        if self._process is not None:
            await self._process.learn_tools()

    def leave_at_steps(self) -> None:
        """Let resumable tools stand still at their next step. Nothing is refused."""
        if self._process is not None:
            self._process.leave_at_steps()

    @property
    def node(self) -> str:
        """The id of this process as a node of the store; empty until it has started."""
        return "" if self._process is None else self._process.context.node

    @property
    def is_busy(self) -> bool:
        """Whether a call runs, or its answer waits for the store."""
        if self._process is None:
            return False
        runs = bool(busy_calls(self._process.sessions)) or any(handler.is_busy for handler in self._sessionless)
        return runs or self._process.context.hub.unwritten > 0

    @property
    def running(self) -> list[str]:
        """The tools that run, the methods of other requests, and answers that wait for the store."""
        if self._process is None:
            return []
        found = busy_calls(self._process.sessions)
        names = [name_of(call.request.params) or call.request.method for _, call in found]
        names += ["its answer is not written"] * self._process.context.hub.unwritten
        return names + ["2026-07-28"] * sum(handler.count for handler in self._sessionless)

    @property
    def has_tasks(self) -> bool:
        """Whether a call runs that its client can ask for again."""
        return self._process is not None and has_tasks(self._process.sessions)

    @property
    def _sessionless(self) -> Sequence[SdkPassthrough]:
        handler = None if self._endpoint is None else self._endpoint.sessionless
        return () if handler is None else (handler,)

    def end_idle_readers(self) -> None:
        """Send clients that only listen elsewhere. Nothing is refused."""
        if self._process is not None:
            self._process.context.hub.end_idle()
        for handler in self._sessionless:
            handler.end_listening()

    def begin_stop(self) -> None:
        """Stop now: refuse new requests, end what runs. May be called from a signal handler."""
        if self._process is not None:
            self._process.loop.call_soon_threadsafe(self._stop)

    async def check_tokens(self) -> int:
        """Verify the tokens of event streams and held polls again, and end those whose token is no longer good, or is
        another principal's now. Returns how many there were. Running calls go on, as they do when a token expires."""
        return 0 if self._auth is None else await self._open_requests.check(self._auth.verifier)

    def when_lost(self, on_lost: Callable[[StoreLost], None]) -> None:
        """Call `on_lost` if this process loses its store: from then on every request is refused."""
        self._on_lost = on_lost

    def _lose(self, failure: StoreLost) -> None:
        if self._lost is not None:
            return
        self._lost = failure
        log_event(logging.ERROR, "store.lost", f"this process can serve nothing more: {failure}", state=failure.state)
        if self._process is not None and isinstance(failure, StoreReplaced):
            self._process.context.journal.lose()
            self.end_idle_readers()  # running calls finish from memory, because no other process knows of them
        elif self._process is not None:
            self._process.context.hub.end_all()  # clients may find another process
        if self._on_lost is not None:
            self._on_lost(failure)

    def _stop(self) -> asyncio.Future[None]:
        """Refuse new requests from now on. Running calls end as soon as it is known which of them the next process may
        run again; the end of the lifespan waits for that."""
        process = self._process
        assert process is not None

        async def end() -> None:
            await process.stop()
            self._end_sessionless()

        self._stopping = True
        if self._ending is None:
            self._ending = process.loop.create_task(end())
        return self._ending

    def _end_sessionless(self) -> None:
        for handler in self._sessionless:
            handler.end_all()

    def _buried(self) -> None:
        """Other nodes have settled the calls of this node: end at once."""
        self._stopping = True
        if self._ending is None and self._process is not None:
            self._ending = self._process.loop.create_future()
            self._ending.set_result(None)
            self._process.end()
            self._end_sessionless()
        if self._on_lost is not None:
            self._on_lost(NodeBuried())

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._shell(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/") or "/"
        if path == HEALTH:
            await health_answer(*self.health())(scope, receive, send)
        elif self._auth is not None and self._auth.metadata is not None and path == self._auth.metadata_path:
            await self._serve_beside(self._auth.metadata, scope, receive, send)
        elif path in self._paths:
            scope[_ENTERED] = path
            if path != self.path:  # so that the server's own router finds its way to the endpoint
                inside = scope["path"].rstrip("/").removesuffix(path) + self.path
                scope = {**scope, "path": inside, "raw_path": inside.encode()}
            await self._entry(scope, receive, send)
        else:
            await self._serve_beside(self._beside, scope, receive, send)

    async def _serve_beside(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request beside the endpoint, if it comes from no other site."""
        try:
            self._host_and_origin.check(scope["headers"], dict(scope["headers"]), beside=True)
        except HttpRefusal as refused:
            app = refusal_of(refused, None, self.counters).answer
        await app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that passed the authentication. Nothing of it is kept while its stream is served."""
        entered = scope.get(_ENTERED)
        if entered is None:  # the server's own router has found its way here by another spelling of the path
            await not_found(scope, receive, send)
            return
        if entered == METRICS:
            await self._serve_beside(self._metrics, scope, receive, send)
            return
        response: Response | EventStreamResponse | None
        scope[SHOWN] = shown_token(scope, self._open_requests) if "user" in scope else None
        if self._hosted.passes_tokens and self._auth is not None and scope["method"] == "POST":
            scope[TOKEN_CHECK] = check = TokenCheck()
            send = self._auth.challenging(check, send)
        with spans.request(scope["method"], scope["headers"]) as span:
            try:
                response = await self._respond(scope, receive, send)
                if isinstance(response, EventStreamResponse):
                    reader, session = response.reader, response.session.name
                    resumes = scope["method"] == "GET"
                    replay = span.reads(reader, session=session, resumes=resumes, counters=self.counters)
                    if replay is not None:
                        reader.watch(replay)
            except FAILURES as failure:
                refused = refusal_of(failure, scope.get(REQUEST_ID), self.counters)
                span.refused(refused.refusal.name.lower(), refused.refusal.status, refused.sentence)
                response = refused.answer
            except ClientGone:
                return
            if response is not None:
                await response(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> Response | EventStreamResponse | None:
        # Blanks around a header's value are no part of it (RFC 9110, 5.5); httptools leaves those at its end.
        if not _BLANKS.isdisjoint([value[-1:] for _, value in scope["headers"]]):
            scope["headers"] = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        headers: Headers = dict(scope["headers"])
        # Lines of a list are one list (RFC 9110, 5.3); the only list that matters here is Accept.
        accept = [value for name, value in scope["headers"] if name == b"accept"]
        if len(accept) > 1:
            headers[b"accept"] = b", ".join(accept)
        self._host_and_origin.check(scope["headers"], headers)
        if "user" in scope and not self._has_logged_no_subject and (client := client_without_subject(scope)):
            self._has_logged_no_subject = True
            why = "each of them owns its sessions, tasks and keys alone, and a renewed one begins again"
            log_event(logging.WARNING, "auth.no_subject", f"tokens of client {client} have no subject: {why}")
        resume = self._resume_actions.get(scope[_ENTERED])
        if scope["method"] == "OPTIONS":
            return Response(status_code=204, headers=ALLOW if resume is None else ALLOW_POST)
        # The header tells the era, before the body is read.
        version = headers.get(b"mcp-protocol-version")
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            if resume is None and version is not None and version.decode("latin-1") not in REVISIONS:
                await self._passthrough(version.decode("latin-1"), headers)(scope, receive, noting, headers)
                return None
            endpoint = self._started()
            if self._process is not None and not self._process.context.journal.may_show:
                raise HttpRefusal(Refusal.FROZEN)
            return await endpoint(scope, receive, headers, principal_of(scope), resume=resume)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._stopping or has_begun or task is None:
                raise
            # The ASGI server stops, gives up a request that waits for a failing store, and would answer 500.
            task.uncancel()
            raise HttpRefusal(Refusal.STOPPING) from None

    def _started(self) -> McpEndpoint:
        if self._endpoint is None:
            raise Misuse("Perdure was not started: hand `app.lifespan` to the application that it is mounted in")
        if self._stopping:
            raise HttpRefusal(Refusal.STOPPING)
        if self._lost is not None:
            raise HttpRefusal(Refusal.STORE_LOST, state=self._lost.state)
        return self._endpoint

    def _passthrough(self, version: str, headers: Headers) -> SdkPassthrough:
        # An unknown version without a session: the SDK's answer names what it supports, era and all.
        if self._settings.eras != "session" and (is_sessionless(version) or b"mcp-session-id" not in headers):
            handler = self._started().sessionless
            taken = (*TASK_METHODS, CANCEL_METHOD, READ_AFTER_ANSWER.encode())
            if self._draining and headers.get(b"mcp-method") not in taken:
                raise HttpRefusal(Refusal.STOPPING)
            if handler is not None:
                return handler
        raise HttpRefusal(Refusal.BAD_VERSION, seen=version, data={"supported": list(REVISIONS), "requested": version})

    @property
    def upstream(self) -> Health | None:
        """The health of the server, if it is not in this process."""
        return self._hosted.health

    def health(self) -> tuple[int, str]:
        """`ok`, `degraded`, `stopping` or how the store was lost; 503 whenever new work should go elsewhere."""
        journal = None if self._process is None else self._process.context.journal
        stopping = self._stopping or self._draining
        if self._lost is not None:
            return 503, self._lost.state
        if stopping or journal is None:
            return 503, "stopping" if stopping else "starting"
        if journal.refuses or journal.is_degraded:
            return 503 if journal.refuses else 200, "degraded"
        return 200, "ok"

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = await self.metrics_page()
        name = "" if self.upstream is None else self._hosted.name
        answer = health_answer(*self.health()) if page is None else metrics_answer(scope, {name: page})
        await answer(scope, receive, send)

    async def metrics_page(self) -> metrics.Page | None:
        """The metrics: this node's numbers in any case; those of other nodes and of the store itself while it answers.
        `None` if it was not started."""
        process = self._process
        if process is None:
            return None
        others: tuple[NodeRecord, ...] = ()
        stored: Mapping[SessionState, int] | None = None
        stored_calls: Mapping[SessionState, int] | None = None
        survey: Survey | None = None
        store = process.context.store
        if not process.context.journal.is_degraded:
            # A scrape is not what finds out that the store fails, and must not fail with it.
            with contextlib.suppress(StoreError):
                others = tuple(await store.nodes())
                stored = await store.count_states()
                stored_calls = await store.count_states(RecordKind.CALL)
                survey = await survey_of(store)
        return metrics.page_of(
            numbers(process.context, process.sessions),
            others,
            process.liveness.ages(),
            stored=stored,
            stored_calls=stored_calls,
            survey=survey,
        )

    # Questions

    def session_info(self, session_id: str) -> SessionInfo | None:
        """Describe a session that this process holds (S6)."""
        return None if self._process is None else self._process.sessions.info(session_id)

    def session_ids(self) -> list[str]:
        """List the sessions that this process holds; others may rest in the store."""
        return [] if self._process is None else list(self._process.sessions.ids())

    def other_nodes(self) -> list[str]:
        """List the nodes that share the store with this one, as far as it knows."""
        return [] if self._process is None else list(self._process.context.nodes.others)


def health_answer(status: int, word: str) -> Response:
    return json_answer(json.dumps({"status": word}).encode(), status=status)


def metrics_answer(scope: Scope, pages: Mapping[str, metrics.Page]) -> Response:
    if scope["method"] not in ("GET", "HEAD"):
        return Response(status_code=405, headers={"allow": "GET, HEAD"})
    return Response(metrics.render(pages), headers={"content-type": metrics.CONTENT_TYPE})


def guarded(entry: ASGIApp, settings: Settings, auth: Authentication | None) -> ASGIApp:
    """The entry for callers that `auth` lets in, and for pages of the origins that the settings allow."""
    if auth is not None:
        entry = auth.protect(entry)
    if settings.cors_origins:
        entry = CORSMiddleware(
            entry,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Mcp-Session-Id", "WWW-Authenticate", "Retry-After"],
        )
    return entry


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await json_answer(b'{"error":"not found"}', status=404)(scope, receive, send)
