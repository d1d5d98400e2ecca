"""Where servers die: functions of the product and edges of them, as data (`crash_child` says how they are met).

A function that waits is left each time it does, and entered each time it goes on. The driver of PostgreSQL waits twice
for a statement that it sends for the first time on a connection: to prepare it, and for its rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a process kills itself."""

    module: str
    qualname: str
    edge: str
    nth: int = 1
    armed: bool = False
    """From the start. Otherwise it counts from `Served.arm` on."""


STEPS = "perdure.store.sqlite.steps"
WRITER = "perdure.store.sqlite.writer"
FILE = "perdure.store.sqlite.file"
NODES = "perdure.store.sqlite.nodes"

POSTGRES = "perdure.store.postgres.store"
POSTGRES_WRITER = "perdure.store.postgres.commits"
POSTGRES_NODES = "perdure.store.postgres.nodes"


def at(module: str, qualname: str, edge: str, nth: int = 1, *, armed: bool = False) -> Point:
    return Point(module=module, qualname=qualname, edge=edge, nth=nth, armed=armed)


#: Met while calls run, whatever the store. The name says where the process dies.
POINTS = {
    "before the row of a call": at("perdure.sessions.session", "Intake.accept", "enter"),
    "before the row of the second call": at("perdure.sessions.session", "Intake.accept", "enter", 2),
    "between the row and the runtime": at("perdure.sessions.runtime_link", "RuntimeLink.start", "enter"),
    "between the second row and the runtime": at("perdure.sessions.runtime_link", "RuntimeLink.start", "enter", 2),
    "before the first append": at("perdure.log.stream", "Stream.append", "enter"),
    "between an append and its send": at("perdure.log.stream", "Stream.written", "enter"),
    "between a later append and its send": at("perdure.log.stream", "Stream.written", "enter", 4),
    "before anything is sent": at("perdure.log.reader", "Reader._send", "enter"),
    "after something was sent": at("perdure.log.reader", "Reader._send", "enter", 4),
}

#: Met while calls run, in the store.
SQLITE_POINTS = {
    "in the transaction of the row": at(STEPS, "StreamSteps.open_stream", "leave"),
    "in the transaction of the first events": at(STEPS, "StreamSteps.append", "leave"),
    # The next one is reached with the answer's event written and the stream sealed: the row's end comes after it.
    "between the answer and the end of its row": at(STEPS, "StreamSteps.append", "within"),
    "behind the last statement, before the commit": at(STEPS, "StepWriter.apply", "leave", 5),
}

#: The same on PostgreSQL, where the server does all of a commit or nothing.
POSTGRES_POINTS = {
    "before the first commit is sent": at(POSTGRES_WRITER, "lock_order", "enter"),
    "when the first commit is on its way": at(POSTGRES_WRITER, "Committer._commit", "leave", 2),
    "when the first commit is made and the process does not know": at(POSTGRES_WRITER, "_refusals", "enter"),
    "before a later commit is sent": at(POSTGRES_WRITER, "lock_order", "enter", 6),
    "when a later commit is on its way": at(POSTGRES_WRITER, "Committer._commit", "leave", 10),
    "when a later commit is made and the process does not know": at(POSTGRES_WRITER, "_refusals", "enter", 6),
}

#: Met in the thread that groups commits, which does all of them where each waits for the disk (`sync=full`).
GROUP_POINTS = {
    "at the beginning of a group": at(WRITER, "WritingConnection.transact", "enter"),
    "in the middle of a group": at(STEPS, "StepWriter.apply", "leave", 3),
    "just before a group is committed": at(WRITER, "WritingConnection.transact", "within", 2),
    "when a group is committed and nobody knows": at(WRITER, "WritingConnection.transact", "leave", 4),
}

#: Met by a server that starts on the store of one that was killed while calls ran.
SECOND_POINTS = {
    "before a stream is claimed": at("perdure.cluster.settler", "Settler._settle", "enter"),
    "before a session is loaded": at("perdure.sessions.registry", "SessionRegistry._build", "enter"),
    "before a session's runtime is loaded": at("perdure.sessions.runtime_link", "RuntimeSlot._load", "enter"),
    "before it is noted that a call runs again": at("perdure.cluster.settler", "Settler._run", "enter"),
    "between that note and the runtime": at("perdure.sessions.runtime_link", "RuntimeLink.start", "enter"),
    "before an unknown outcome is told": at("perdure.cluster.settler", "Settler._answer_unknown", "enter"),
}

SQLITE_SECOND_POINTS = {
    "before the second stream is claimed": at(STEPS, "StreamSteps.claim", "enter", 2),
    "in the transaction of a claim": at(STEPS, "StreamSteps.claim", "leave"),
    "in the transaction of a settled answer": at(STEPS, "StreamSteps.append", "within"),
    "before the dead are buried": at(NODES, "bury", "enter"),
    "in the middle of a burial": at(NODES, "bury", "within", 3),
}

POSTGRES_SECOND_POINTS = {
    "when a claim is on its way": at(POSTGRES, "PostgresStore.claim", "leave", 2),
    "when a stream is claimed and the process does not know": at(POSTGRES, "PostgresStore.claim", "enter", 3),
    "before the second stream is claimed": at(POSTGRES, "PostgresStore.claim", "enter", 4),
    "when a settled answer is on its way": at(POSTGRES_WRITER, "Committer._commit", "leave", 3),
    "when an answer is settled and the process does not know": at(POSTGRES_WRITER, "_refusals", "enter", 2),
    "before the dead are buried": at(POSTGRES, "PostgresStore.bury", "enter"),
    "when a burial is on its way": at(POSTGRES, "PostgresStore.bury", "leave", 2),
    "when the dead are buried and the process does not know": at(POSTGRES_NODES, "Holding.bury", "enter"),
}

#: Met by a server that brings a file of the first layout up to date.
MIGRATION_POINTS = {
    "before the first statement": at(FILE, "bring_up_to_date", "enter"),
    "between two statements": at(FILE, "bring_up_to_date", "within", 12),
    "before the commit": at(FILE, "bring_up_to_date", "leave"),
    "after the commit": at(FILE, "open_writer", "leave"),
}
