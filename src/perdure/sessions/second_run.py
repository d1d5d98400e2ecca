"""Finds what a call had sent before it was interrupted, so that a second run repeats nothing."""

from collections import Counter
from collections.abc import AsyncIterator

from perdure._core import session_tasks, settling
from perdure._core.ids import StreamId
from perdure._core.jsonrpc import Request
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext
from perdure.sessions.ledger import logged_in, progress_token
from perdure.store.interface import paged
from perdure.store.records import Event, SessionRecord


async def said_before(
    context: ServerContext,
    request: Request,
    stream: StreamId | Stream,
    *,
    incarnation: int,
    sent: float | None,
    session: SessionRecord,
) -> tuple[float | None, Counter[bytes]]:
    """Return the highest progress and the log messages of a call. `stream`: that of the call; the object where it is
    written here, because the store may not have all of it. `sent`: the progress that its row has.

    Progress is on the call's own stream or, of an orphan or a task, on the standalone one, and may still wait for the
    home of the session. Log messages are searched on its own stream, and those of a task by its name; where several
    calls share a stream, it is not known whose they are.
    """
    token, standalone = progress_token(request), session.standalone
    stream_id = stream.id if isinstance(stream, Stream) else stream
    task = stream_id if session_tasks.wants_task(request.params) and session_tasks.is_ours(session.result) else None
    progress = [] if token is None or sent is None else [sent]
    logged: Counter[bytes] = Counter()
    # What waits is read first: the home may append it meanwhile.
    waiting = paged(lambda after: context.store.forwarded(standalone, after=after))
    elsewhere = () if token is None and task is None else (waiting, _events(context, standalone))
    for messages in (*elsewhere, own := _events(context, stream)):
        async for message in messages:
            if token is not None:
                found = settling.progress_in(message.payload, (token, f"{incarnation}:{token}"))
                progress += () if found is None else (found,)
            if (messages is own or task) and (key := logged_in(message.payload, task)) is not None:
                logged[key] += 1
    if logged and len(await context.store.calls(session.id, stream=stream_id)) > 1:
        logged.clear()
    return max(progress, default=None), logged


def _events(context: ServerContext, stream: StreamId | Stream) -> AsyncIterator[Event]:
    if isinstance(stream, Stream):
        return paged(lambda after: stream.read(after=after, limit=1_000))
    return paged(lambda after: context.store.read(stream, after=after, limit=1_000))
