"""Acts on a client that reattaches to its session, and lets the other nodes know that it came, or is missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._core import mail
from perdure.store.base import LeaveReader, SendMail

if TYPE_CHECKING:
    from perdure.sessions.session import Session


def begin_incarnation(session: Session, *, here: bool) -> None:
    """The client has reattached: end the readers that it left behind, and ask it again what still waits for it."""
    hub = session.context.hub
    for stream in (session.standalone, *session.streams.values()):
        if stream.is_sealed:
            continue  # what is over ends by itself, with its answer
        if (reader := stream.reader) is not None:
            reader.end()
            hub.detach(reader)  # at once, as if it had left in this moment
        # A reader at another node may be of this incarnation already, unless the client came here.
        if here and stream.writer is not None and (remote := stream.readers.remote) is not None:
            stream.set_remote_reader(None, arrival=hub.arrive())
            told = mail.encode(mail.Reading(session=session.id, stream=stream.id))
            leave = LeaveReader(stream=stream.id, reader=remote.reader)
            session.put(leave, SendMail(node=remote.node, message=told))
    session.orphans.begun()  # after its readers have left, so that they count as lost before
    if here:
        session.orphans.give_time()
    session.exchange.asks.repeat()


def tell_attached(session: Session) -> None:
    """Let the other nodes know that the client came without positions: they may run calls that it lost."""
    _tell_others(session, mail.Attached(session=session.id, incarnation=session.record.incarnation))


def tell_missed(session: Session) -> None:
    """Ask the other nodes whether the client is attached there: an ask waits here for its answer."""
    _tell_others(session, mail.Missed(session=session.id, node=session.context.node))


def _tell_others(session: Session, message: mail.Message) -> None:
    encoded = mail.encode(message)
    if posts := [SendMail(node=node, message=encoded) for node in session.context.nodes.others]:
        session.put(*posts)
