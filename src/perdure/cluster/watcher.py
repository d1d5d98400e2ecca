"""Looks at what other nodes wrote, when the store hints at it and in each round.

Streams, homes and mail are looked at apart from each other: a message may take its time (a session ends, a home is
looked for), and readers must not wait for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from perdure._core.ids import StreamId
from perdure.cluster.mail_handler import MailHandler
from perdure.cluster.on_demand import OnDemand
from perdure.cluster.remote_readers import RemoteReaders
from perdure.errors import SessionEnded, StoreError, StoreLost, StoreUnavailable
from perdure.sessions.context import ServerContext
from perdure.sessions.registry import SessionRegistry
from perdure.store.base import StreamRecord
from perdure.telemetry.events import log_event


class Watcher:
    """Follows the other nodes through the store."""

    def __init__(
        self, context: ServerContext, sessions: SessionRegistry, readers: RemoteReaders, mail_handler: MailHandler
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._readers = readers
        self._named: set[StreamId] = set()
        self._all = False
        self._looked: object = None
        """The store's stamp from before everything was last looked at."""
        self._homeless: dict[StreamId, StreamRecord] = {}
        self._streams = OnDemand(self._look_at_streams, name="perdure-look", on_failure=self._not_looked)
        self._homes = OnDemand(self._look_at_homes, name="perdure-homes", on_failure=self._not_looked)
        self._mail = OnDemand(mail_handler.handle_all, name="perdure-mail", on_failure=self._mail_waits)

    def subscribe(self) -> Callable[[], None]:
        """Look whenever the store hints; gives the way to stop."""
        return self._context.store.subscribe(self._context.node, self._on_hint)

    async def aclose(self) -> None:
        await asyncio.gather(self._streams.aclose(), self._homes.aclose(), self._mail.aclose())

    def go_round(self) -> None:
        """Look at everything, if there may be something to see."""
        self._homes.want()  # also what this node itself has forwarded to one that died
        if self._context.store.stamp() != self._looked or self._readers.has_readers_beyond:
            self._on_hint(())

    def _on_hint(self, streams: Sequence[StreamId]) -> None:
        """`streams` may have changed; without any, others may have written anything."""
        if streams:
            self._named.update(streams)
        else:
            self._all = True
            self._mail.want()
        self._streams.want()

    async def _look_at_streams(self) -> None:
        everything, self._all = self._all, False
        named, self._named = self._named, set()
        stamp = self._context.store.stamp()
        unknown = everything or not all(map(self._readers.follows, named))
        found = await self._readers.look(named, everything=everything)
        self._homeless |= {record.id: record for record in found}
        if unknown or found:
            self._homes.want()
        if everything:
            self._looked = stamp

    async def _look_at_homes(self) -> None:
        """Become the home of sessions whose standalone stream is read here and has no writer, and of those for which
        messages wait that were forwarded to this node or to one that is gone; append these."""
        homeless, self._homeless = self._homeless, {}
        for record in (*homeless.values(), *await self._context.store.forwarded_to(self._context.node)):
            try:
                session = await self._sessions.load(record.session)
                if session is not None and session.standalone.id == record.id:
                    session.standalone.follow(record)
                    with session.in_use():
                        if await session.home.claim():
                            await session.home.caught_up()
            except SessionEnded:
                await self._sessions.load(record.session)  # which lets go of it
            except (StoreUnavailable, StoreLost):
                raise
            except Exception as failure:  # it must not stand in the way of other streams
                log_event(logging.ERROR, "forward.failed", f"what was forwarded could not be appended: {failure!r}")

    # Whatever fails is looked at again in the next round, with everything else. The journal logs a store that fails;
    # anything else is logged once.

    def _not_looked(self, failure: Exception, again: bool) -> None:
        self._looked = None
        level = logging.DEBUG if again or isinstance(failure, StoreError) else logging.ERROR
        log_event(level, "neighbours.look", f"what other nodes wrote could not be read: {failure!r}")

    def _mail_waits(self, failure: Exception, again: bool) -> None:
        self._looked = None
        level = logging.DEBUG if again or isinstance(failure, StoreError) else logging.ERROR
        log_event(level, "mail.unread", f"mail waits, it cannot be read: {failure!r}")
