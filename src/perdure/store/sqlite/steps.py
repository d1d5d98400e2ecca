"""Applies steps to the writing connection, within a transaction that the caller holds."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from perdure._core import retention
from perdure._core.chains import Chain
from perdure._core.ids import SessionId
from perdure.errors import MailFull, NodeGone, TooManySessions
from perdure.store import rows
from perdure.store.base import (
    MAX_MAIL,
    RECORD_VERSION,
    Append,
    ChangeSession,
    CloseAsk,
    DropStream,
    EndSession,
    Forward,
    LeaveReader,
    MailReceived,
    MoveReader,
    OpenAsk,
    OpenStream,
    PutCall,
    PutReader,
    PutSession,
    Reached,
    Refusals,
    Release,
    SendMail,
    SessionRecord,
    Step,
    StepRefusal,
    Stick,
    Trim,
)
from perdure.store.codec import Payloads
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.stream_steps import StreamSteps

_SQL = _sql.queries()

_STATEMENTS: Mapping[type[Any], tuple[str, Callable[[Any], rows.Row | dict[str, object]]]] = {
    ChangeSession: ("change_session", rows.change_values),
    Trim: ("trim", lambda step: (step.stream, step.through)),
    OpenAsk: ("open_ask", lambda step: rows.ask_row(step.record)),
    CloseAsk: ("close_ask", lambda step: (step.session, step.id)),
    PutReader: ("put_reader", lambda step: rows.reader_row(step.record)),
    MoveReader: ("move_reader", lambda step: (step.seq, step.stream, step.reader)),
    LeaveReader: ("leave_reader", lambda step: (step.stream, step.reader)),
    Reached: (
        "reach",
        lambda step: {
            "stream": step.stream,
            "generation": step.generation,
            "through": step.through,
            "unread": step.unread,
        },
    ),
    MailReceived: ("take_mail", lambda step: (step.node, step.through)),
}
"""The steps that are one statement and are never refused."""


class StepWriter:
    """Applies steps of all kinds; `StreamSteps` has those of streams. All payloads are encoded here, at the edge."""

    def __init__(self, connection: sqlite3.Connection, payloads: Payloads) -> None:
        self._cursor = connection.cursor()
        self._payloads = payloads
        self.streams = StreamSteps(self._cursor, payloads)
        self._apply: dict[type[Any], Callable[[Any], StepRefusal | None]] = {
            Append: self.streams.append,
            OpenStream: self.streams.open_stream,
            Forward: self.streams.forward,
            PutCall: self.streams.put_call,
            Release: self.streams.release,
            DropStream: self.streams.drop,
            PutSession: self._put_session,
            Stick: self._stick,
            EndSession: self._end_session,
            SendMail: self._send_mail,
        }
        for kind, (query, values) in _STATEMENTS.items():
            self._apply[kind] = partial(self._execute, _SQL[query], values)

    def apply(self, steps: Sequence[Step]) -> Refusals:
        apply = self._apply
        return [apply[type(step)](step) for step in self._payloads.encode_steps(steps)]

    def _execute(self, query: str, values: Callable[[Step], rows.Row | dict[str, object]], step: Step) -> None:
        self._cursor.execute(query, values(step))

    def _put_session(self, step: PutSession) -> TooManySessions | None:
        """Put the session first, and take it away again if it was one too many."""
        cursor, record = self._cursor, step.record
        cursor.execute(_SQL["put_session"], rows.session_row(record))
        if cursor.rowcount != 1 or step.limits is None:
            return None
        refusal: TooManySessions | None = None
        caller = rows.loose(record.owner), record.address
        (of_caller,) = cursor.execute(_SQL["count_sessions_at"], caller).fetchone() if any(caller) else (0,)
        (total,) = cursor.execute(_SQL["count_sessions"]).fetchone()
        if of_caller > step.limits.caller:
            refusal = TooManySessions(f"the caller has {of_caller - 1} sessions", of_caller=True)
        elif total > step.limits.total:
            refusal = TooManySessions(f"there are {total - 1} sessions", of_caller=False)
        if refusal is not None:
            cursor.execute(_SQL["unput_session"], (record.id,))
        return refusal

    def _stick(self, step: Stick) -> None:
        row = self._cursor.execute(_SQL["read_sticky"], (step.session,)).fetchone()
        if row is not None:
            requests = self._payloads.stick(rows.sticky_requests(row[0]), step.request)
            self._cursor.execute(_SQL["set_sticky"], (RECORD_VERSION, rows.sticky_text(requests), step.session))

    def _end_session(self, step: EndSession) -> None:
        cursor = self._cursor
        if step.unused_since is not None:
            unused = cursor.execute(_SQL["is_unused"], (step.session, step.unused_since)).fetchone()
            if unused is None:
                return
        self.streams.forget()
        cursor.execute(_SQL["drop_streams"], (step.session,))
        row = cursor.execute(_SQL["params_of"], (self._payloads.overhead, step.session)).fetchone()
        if row is None:
            return
        keeps = retention.keeps_params(step.reason, row[0])
        values = {"session": step.session, "time": step.time, "reason": step.reason, "keeps": keeps}
        cursor.execute(_SQL["end_session"], values)
        of_caller = {"session": step.session, "most": retention.MAX_ENDED_OF_CALLER}
        cursor.execute(_SQL["forget_ended_of"], of_caller)
        cursor.execute(_SQL["forget_ended"], {"most": retention.MAX_ENDED})

    def _send_mail(self, step: SendMail) -> NodeGone | MailFull | None:
        # With few messages there this look is short; with many the node does not deal with its mail.
        if self._cursor.execute(_SQL["much_mail"], (step.node, MAX_MAIL - 1)).fetchone() is not None:
            return MailFull(f"{MAX_MAIL} messages wait for node {step.node}")
        self._cursor.execute(_SQL["post_mail"], (step.message, step.node))
        return None if self._cursor.rowcount == 1 else NodeGone(f"there is no node {step.node}")

    # Changes that are not steps

    def reattach(self, session: SessionId) -> SessionRecord | None:
        self._cursor.execute(_SQL["next_incarnation"], (session,))
        if self._cursor.rowcount != 1:
            return None
        row = self._cursor.execute(_SQL["session_by_id"], (session,)).fetchone()
        return self._payloads.decode(rows.session_record(row))

    def put_chain(self, chain: Chain) -> bool:
        self._cursor.execute(_SQL["put_chain"], rows.chain_row(chain))
        return self._cursor.rowcount == 1

    def change_chain(self, seen: Chain, chain: Chain | None) -> bool:
        where = seen.name, seen.current, seen.next
        if chain is None:
            self._cursor.execute(_SQL["drop_chain"], where)
        else:
            self._cursor.execute(_SQL["change_chain"], (RECORD_VERSION, chain.current, chain.next, *where))
        return self._cursor.rowcount == 1
