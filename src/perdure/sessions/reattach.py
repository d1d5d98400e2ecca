"""A client that begins anew on its session, and what the nodes tell each other of its coming and its absence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._core import mail
from perdure.log.stream import Stream
from perdure.store.base import LeaveReader, SendMail

if TYPE_CHECKING:
    from perdure.sessions.session import Session


def begin_incarnation(session: Session, *, here: bool) -> None:
    """The client began anew: its readers of before are ended, and what still waits for it is asked again."""
    for stream in (session.standalone, *session.streams.values()):
        if not stream.is_sealed:  # what is over ends by itself, with its answer
            _end_reader(session, stream)
            if here:  # otherwise one elsewhere may be of this incarnation already
                _end_elsewhere(session, stream)
    session.orphans.begun()  # after its readers have left, so that they count as lost before
    if here:
        session.orphans.give_time()
    session.exchange.asks.repeat()


def _end_reader(session: Session, stream: Stream) -> None:
    """End whoever reads a stream here, as if it had left in this moment."""
    if (reader := stream.reader) is not None:
        reader.end()
        session.context.hub.detach(reader)


def _end_elsewhere(session: Session, stream: Stream) -> None:
    """The same for whoever reads it at another node."""
    if stream.writer is not None and (elsewhere := stream.readers.remote) is not None:
        stream.set_remote_reader(None, arrival=session.context.hub.arrive())
        told = mail.encode(mail.Reading(session=session.id, stream=stream.id))
        leave = LeaveReader(stream=stream.id, reader=elsewhere.reader)
        session.put(leave, SendMail(node=elsewhere.node, message=told))


def tell_attached(session: Session) -> None:
    """Let the other nodes know of it: they may run such calls."""
    message = mail.encode(mail.Attached(session=session.id, incarnation=session.record.incarnation))
    if posts := [SendMail(node=node, message=message) for node in session.context.nodes.others]:
        session.put(*posts)


def tell_missed(session: Session) -> None:
    """Somebody waits for the client's answer: the node that it is attached to shall say so."""
    message = mail.encode(mail.Missed(session=session.id, node=session.context.node))
    if posts := [SendMail(node=node, message=message) for node in session.context.nodes.others]:
        session.put(*posts)
