"""Owns the record of one session: what was read from the store, and this process's changes until they are written."""

import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from perdure._core.ids import RecordKind
from perdure._core.revisions import DURABLE_CALL, REVISIONS, Revision
from perdure._core.states import SessionState
from perdure.log.journal import Steps
from perdure.sessions.context import ServerContext, Stamp
from perdure.store.records import SessionRecord
from perdure.store.steps import ChangeSession, Step, changed

SHARED_BYTES = 4_096
"""Bytes of a handshake that sessions share. A client decides on the size of its handshake, and must not fill the cache.
"""


def share(handshake: bytes) -> bytes:
    """Return one object for equal bytes: clients of one kind send the same handshake, and get the same result."""
    return _shared(handshake) if len(handshake) <= SHARED_BYTES else handshake


_shared = lru_cache(maxsize=64)(bytes)


@dataclass(slots=True, eq=False)
class RecordKeeper:
    _context: ServerContext
    record: SessionRecord
    stamp: Stamp | None
    """From before the record was last read; `None`: it has to be read again."""
    is_durable_call: bool = field(init=False)
    name: str = field(init=False)
    """The beginning of the session's id, for logs. The whole id is a secret."""
    active: float = field(init=False)
    """When the client, or a call, last used the session."""
    changes: int = 0
    """How many changes of this process have been written."""
    _written_active: float = field(init=False)
    _pending: tuple[ChangeSession, ...] = ()

    def __post_init__(self) -> None:
        self.is_durable_call = self.record.kind is RecordKind.CALL
        self.name = self.record.id[:8]
        self.active = self._written_active = self.record.active

    @property
    def revision(self) -> Revision:
        return DURABLE_CALL if self.is_durable_call else REVISIONS[self.record.version]

    @property
    def tells_by_log(self) -> bool:
        """Whether the server declared logging, so that a log message may report a gap."""
        return bool(self.record.result) and "logging" in json.loads(self.record.result).get("capabilities", {})

    def end(self, reason: str) -> None:
        """Mark the session as ended; the caller writes that, or another process has."""
        self.record = replace(self.record, state=SessionState.ENDED, ended=reason)

    def update(self, **changes: Any) -> None:
        step = self.change(ChangeSession(session=self.record.id, active=self.active, **changes))
        self._written_active = self.active
        self._context.journal.put(Steps((step,), on_end=lambda _: self.on_written(step)))

    def change(self, step: ChangeSession) -> ChangeSession:
        """Change the record with a step that the caller writes."""
        self.record = changed(self.record, step)
        self._pending += (step,)
        return step

    def on_written(self, step: Step) -> None:
        """Forget a change that is stored, or never will be."""
        self.changes += 1
        self._pending = tuple(pending for pending in self._pending if pending is not step)

    def take_in(self, stored: SessionRecord) -> None:
        """Take over the stored record, with the unwritten changes on top."""
        for step in self._pending:
            stored = changed(stored, step)
        self.record = stored
        self.active = max(self.active, stored.active)

    def keep_fresh(self, *, busy: bool) -> None:
        """Write the time of the last activity if it has moved; retention goes by it."""
        if busy:
            self.active = self._context.clock()
        # Of a session in use it is enough to know the time roughly; the last one is written when it is left.
        settings = self._context.settings
        slack = min(settings.replay_window / 8, settings.session_grace / 2) if busy else 0.0
        # While the store fails this would only add to what is held, round after round.
        if self.active - self._written_active > slack and not self._context.journal.is_degraded:
            self.update()
