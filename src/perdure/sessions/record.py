"""Keeps a session's record as this process has it: what was read, and its own changes until they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from perdure._core import sticky
from perdure._core.revisions import REVISIONS, Revision
from perdure._core.states import LogState, SessionState
from perdure.errors import PerdureError
from perdure.sessions.context import ServerContext
from perdure.store.base import ChangeSession, SessionRecord, Step, Stick


class RecordKeeper:
    """Keeps the record of one session."""

    __slots__ = ("_context", "_pending", "_written_active", "active", "changes", "record", "stamp")

    def __init__(self, context: ServerContext, record: SessionRecord, stamp: object) -> None:
        self.record = record
        self.active = self._written_active = record.active
        """When the client, or a call, last used the session."""
        self.stamp = stamp
        """The store's stamp from before the record was last read; `None`: it has to be read again."""
        self.changes = 0
        """How many of this process's changes have been written."""
        self._context = context
        self._pending: tuple[ChangeSession | Stick, ...] = ()

    @property
    def revision(self) -> Revision:
        return REVISIONS[self.record.version]

    def touch(self) -> None:
        """The session is in use."""
        self.active = self._context.clock()

    def end(self, reason: str) -> None:
        """The session has ended; the caller writes that, or another process has."""
        self.record = replace(self.record, state=SessionState.ENDED, ended=reason)

    def update(self, **changes: Any) -> None:
        """Change the record, and write it."""
        step = self.change(ChangeSession(session=self.record.id, active=self.active, **changes))
        self._written_active = self.active
        self._context.journal.put(_Change(self, step))

    def change(self, step: ChangeSession | Stick) -> ChangeSession | Stick:
        """Change the record with a step that the caller writes."""
        self.record = _changed(self.record, step)
        self._pending += (step,)
        return step

    def on_written(self, step: Step) -> None:
        """A change need not be remembered any more: it is stored, or never will be."""
        self.changes += 1
        self._pending = tuple(pending for pending in self._pending if pending is not step)

    def take_in(self, stored: SessionRecord) -> None:
        """Take over what is stored, with the changes on top that are not written yet."""
        for step in self._pending:
            stored = _changed(stored, step)
        self.record = stored
        self.active = max(self.active, stored.active)

    def keep_fresh(self, *, busy: bool) -> None:
        """Write the time of the last activity if it has moved; retention goes by it."""
        if busy:
            self.touch()
        # Of a session in use it is enough to know the time roughly; the last one is written when it is left.
        settings = self._context.settings
        slack = min(settings.replay_window / 8, settings.session_grace / 2) if busy else 0.0
        # While the store fails this would only add to what is held, round after round.
        if self.active - self._written_active > slack and self._context.journal.state is LogState.HEALTHY:
            self.update()


class _Change:
    """A source for a change of a session's record."""

    __slots__ = ("_keeper", "_step")

    def __init__(self, keeper: RecordKeeper, step: ChangeSession | Stick) -> None:
        self._keeper = keeper
        self._step = step

    def take(self) -> Sequence[Step]:
        return (self._step,)

    def accepted(self, steps: Sequence[Step]) -> None:
        pass

    def written(self, steps: Sequence[Step]) -> None:
        self._keeper.on_written(self._step)

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        self._keeper.on_written(self._step)


def _changed(record: SessionRecord, step: ChangeSession | Stick) -> SessionRecord:
    """The record after a change."""
    if isinstance(step, Stick):
        return replace(record, sticky=sticky.after(record.sticky, step.request))
    given = {
        name: value
        for name in ("state", "version", "result", "initialized")
        if (value := getattr(step, name)) is not None
    }
    return replace(record, active=max(record.active, step.active or 0.0), **given)
