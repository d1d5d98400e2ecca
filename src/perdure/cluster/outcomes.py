"""What becomes of calls that a dead node left behind, one at a time: answered, run again, or kept waiting."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from perdure._core import settling
from perdure._core.ids import StreamId
from perdure._core.jsonrpc import InvalidMessage, Request, parse_body
from perdure._core.states import CALL, CallState, CallStep, advance
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext
from perdure.sessions.ledger import REQUEST_CANCELLED, error_payload, logged_in, progress_token, unknown_outcome
from perdure.sessions.session import Session
from perdure.store.base import CallEnd, CallRecord, PutCall
from perdure.telemetry import tracing as spans
from perdure.telemetry.events import log_event

DIED = "its process died"


@dataclass(frozen=True, kw_only=True)
class Left:
    """A call that was left behind."""

    row: CallRecord
    request: Request | None


class Outcomes:
    """Gives calls that were left behind what becomes of them."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def unknown(self, call: Left, stream: Stream, reason: str = DIED) -> None:
        row = call.row
        params = None if call.request is None else call.request.params
        payload = unknown_outcome(row.request_id, method=row.method, reason=reason, params=params)
        with spans.settle(row.session[:8], row.stream, outcome="unknown"):
            stream.append(payload, end=end_of(row, CallStep.SETTLE))
        self._context.counters.calls_settled += 1
        self._context.peers.log_event(
            logging.WARNING, "call.unknown", f"a request was interrupted ({row.method}): {reason}", stream=row.stream
        )

    def cancelled(self, call: Left, stream: Stream) -> None:
        row = call.row
        payload = error_payload(row.request_id, REQUEST_CANCELLED, "Request cancelled")
        with spans.settle(row.session[:8], row.stream, outcome="cancelled"):
            stream.append(payload, end=end_of(row, CallStep.CANCEL))
        self._context.counters.calls_cancelled += 1
        self._context.counters.settles_cancelled += 1

    async def run_again(self, session: Session, call: Left, stream: Stream, origin: object) -> None:
        row = call.row
        assert call.request is not None
        await session.home.caught_up()  # what the call said before it was left behind comes first
        progress = await self._progress(session, row, call.request)
        logged = await self._logged(row)
        again = PutCall(
            stream=stream.id,
            fence=stream.fence,
            incarnation=row.incarnation,
            request_id=row.request_id,
            state=advance(CALL, row.state, CallStep.RUN_AGAIN),
            attempt=row.attempt + 1,
            progress=progress,
        )
        with spans.settle(session.name, stream.id, outcome="rerun"):
            await self._context.journal.write(again)
            [running] = session.exchange.calls.open([call.request], incarnation=row.incarnation, stream=stream)
            running.progress, running.logged, running.attempt = progress, logged, row.attempt + 1
            try:
                session.exchange.start(running, origin)
            except BaseException:
                session.exchange.calls.release((call.request,), incarnation=row.incarnation)
                session.exchange.calls.runtime_done(running.number)
                raise
        self._context.counters.calls_rerun += 1
        log_event(logging.INFO, "call.rerun", f"a request of a dead node runs again ({row.method})", stream=row.stream)

    async def _progress(self, session: Session, row: CallRecord, request: Request) -> float | None:
        """The highest progress that was sent for a call, on its own stream or, as an orphan's, on the standalone; also
        where that still waits for the session's home."""
        token = progress_token(request)
        if token is None:
            return None
        tokens = (token, f"{row.incarnation}:{token}")
        highest = row.progress
        # What waits is read first: the home may append it meanwhile.
        for payloads in (
            self._forwarded(session.record.standalone),
            self._payloads(row.stream),
            self._payloads(session.record.standalone),
        ):
            async for payload in payloads:
                if (sent := settling.progress_in(payload, tokens)) is not None:
                    highest = sent if highest is None else max(highest, sent)
        return highest

    async def _logged(self, row: CallRecord) -> Counter[bytes]:
        """The log messages on a call's own stream. Where several calls share it, it is not known whose they are."""
        logged: Counter[bytes] = Counter()
        async for payload in self._payloads(row.stream):
            if (key := logged_in(payload)) is not None:
                logged[key] += 1
        if logged and len(await self._context.store.calls_on(row.stream)) > 1:
            logged.clear()
        return logged

    async def _payloads(self, stream: StreamId) -> AsyncIterator[bytes]:
        after = 0
        while events := await self._context.journal.read(stream, after=after, limit=1_000):
            for event in events:
                yield event.payload
            after = events[-1].seq

    async def _forwarded(self, stream: StreamId) -> AsyncIterator[bytes]:
        after = 0
        while page := await self._context.store.forwarded(stream, after=after):
            for message in page:
                yield message.payload
            after = page[-1].key

    async def have_wait(self, call: Left, stream: Stream) -> None:
        row = call.row
        waits = PutCall(
            stream=stream.id,
            fence=stream.fence,
            incarnation=row.incarnation,
            request_id=row.request_id,
            state=advance(CALL, row.state, CallStep.LOSE_NODE),
            attempt=row.attempt,
            progress=row.progress,
        )
        await self._context.journal.write(waits)
        log_event(logging.INFO, "call.waits", f"a request waits for its principal ({row.method})", stream=row.stream)


def has_ended(row: CallRecord) -> bool:
    return row.state not in (CallState.RUNNING, CallState.WAITING)


def left(row: CallRecord) -> Left:
    try:
        parsed = parse_body(row.request)
    except InvalidMessage:
        parsed = None
    return Left(row=row, request=parsed if isinstance(parsed, Request) else None)


def end_of(row: CallRecord, step: CallStep) -> CallEnd:
    # A row that was RUNNING when its node died is lost first: both ends are in the table from there.
    state = advance(CALL, row.state, step)
    return CallEnd(incarnation=row.incarnation, request_id=row.request_id, state=state)
