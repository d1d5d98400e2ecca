"""The mail of this node: what others have posted is dealt with in order, one message at a time.

Apart from following streams: a message may take its time (a session ends, a home is looked for), and readers must not
wait for that. A message that cannot be dealt with must not stand in the way of those behind it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from perdure._core import mail
from perdure._core.ids import NodeId
from perdure.errors import StoreError, StoreUnavailable
from perdure.log.journal import Journal, Steps
from perdure.store.base import MailReceived, Store
from perdure.telemetry.events import log_event


class Addressee(Protocol):
    """Who acts on mail."""

    async def deal(self, message: mail.Message, received: MailReceived) -> None:
        """Deal with a message, and have it received."""
        ...


class Mailbox:
    def __init__(self, *, node: NodeId, store: Store, journal: Journal) -> None:
        self.addressee: Addressee | None = None
        self._node = node
        self._store = store
        self._journal = journal
        self._again = False
        self._dealt = 0
        self._failing = False
        """Mail could not be read the last time; that is told once."""
        self._task: asyncio.Task[None] | None = None

    def look(self) -> None:
        self._again = True
        if self._task is None and self.addressee is not None:
            self._task = asyncio.create_task(self._run(self.addressee), name="perdure-mail")

    def look_if_owing(self) -> None:
        """Look again, if the store failed the last time."""
        if self._again:
            self.look()

    async def aclose(self) -> None:
        self.addressee = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, addressee: Addressee) -> None:
        try:
            while self._again:
                self._again = False
                await self._collect(addressee)
        except StoreError as failure:
            self._again = True
            log_event(logging.DEBUG, "mail.unread", f"mail waits, the store fails: {failure}")
        except Exception as failure:
            self._again = True
            level = logging.DEBUG if self._failing else logging.ERROR
            log_event(level, "mail.unread", f"mail waits, it cannot be read: {failure!r}")
            self._failing = True
        else:
            self._failing = False
        finally:
            self._task = None

    async def _collect(self, addressee: Addressee) -> None:
        while page := await self._store.mail(self._node, after=self._dealt):
            for key, raw in page:
                await self._deal(addressee, raw, MailReceived(node=self._node, through=key))
                self._dealt = key

    async def _deal(self, addressee: Addressee, raw: bytes, received: MailReceived) -> None:
        try:
            if (message := mail.decode(raw)) is not None:
                await addressee.deal(message, received)
                return
            log_event(
                logging.WARNING, "mail.unknown", "a newer release sent mail of a kind that this one does not know"
            )
        except StoreUnavailable:
            raise
        except Exception as failure:
            log_event(logging.ERROR, "mail.failed", f"mail could not be dealt with: {failure!r}")
        self._journal.put(Steps((received,)))
