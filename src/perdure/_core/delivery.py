"""Delivery: a table of what a response, or a failure, means for the request that a client has sent.

A client sends six kinds of things. A *call* is a request that waits for an answer, sent by POST until the server has
taken it, then read by GET from its last position. A *listener* reads a session's standalone stream by GET. A
*notification* and a *reply* (to a request from the server) have no answer. A *handshake* is `initialize`. A *keyed
call* is a tool's call without a session (2026-07-28) that may be sent again: by its key the server knows it for the
same call, or the tool says of itself that it may run twice.

**May it be sent again?** What the server has not taken may: nothing was sent, or the server said so (429, or 503 with
`Retry-After`), or the session was gone (404). What the server may have taken may not, because a tool would run twice
(H8), unless the request is one that the specification makes a read, or whose second run changes nothing (`REPEATABLE`).
Then it starts over under a new id, because the first one may still run there. What has no answer may arrive twice:
servers drop a reply that no tool waits for. So may a handshake: at worst a session that no client uses remains. A
keyed call is sent again for as long as patience lasts. If no answer has come by then, its outcome is unknown, but only
if it may have arrived.

**What is an answer?** A result counts under the request's own id and with a success only, whatever type the body claims
to be. An error counts there too, and without an id: the server could not read one. With 3xx or 4xx an error under any
id counts, because servers give such refusals an id of their own ("server-error"), and nothing ran. With 5xx only an
error under the request's own id counts, because then the server has said what became of this request. One without an id
has not: the official Python SDK answers 500 with id null when a session ends in the middle of a call, and the tool has
run by then.

**A call that runs is not given up early.** Once it has a position its answer will be in the server's log. What keeps a
client from reading it (no token to be had, 401, 403, a page of a hotel's network in place of the server) may pass. Only
the server's own word that it cannot go on from that position (400, 405, 404) ends it before patience does. Patience is
the caller's (`_core/reconnect.py`); when it ends, that is `Failure.PATIENCE_ENDED` here.

The table has a row for each thing that can be seen and a column for each thing that was sent. The same table is in the
browser's client (`clients/browser/src/delivery.ts`), and both are tested by `tests/vectors/delivery.json`.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from perdure._core.codes import INVALID_REQUEST, UNSUPPORTED_VERSION
from perdure._core.envelope import CANCEL, CANCEL_TASK, DISCOVER, GET_TASK, LISTEN, UPDATE_TASK
from perdure._core.settling import READS
from perdure._core.sticky import METHODS as STICKY

EVENTS = "text/event-stream"

REPEATABLE = READS | STICKY
"""Methods of requests that may be sent again when they may have run: reads by the specification, and requests whose
second run changes nothing. A list, because names of other servers' methods promise nothing."""

SESSIONLESS = READS | {DISCOVER, LISTEN, GET_TASK, UPDATE_TASK, CANCEL_TASK, CANCEL}
"""The same for requests without a session (2026-07-28). A task is read by `tasks/get`; its other requests are
acknowledged however often they are sent."""

_UNAUTHORIZED = frozenset({401, 403})
_NO_READING = frozenset({400, 404, 405})
_AWAY = frozenset({502, 503, 504})
#: JSON-RPC's "invalid request", and the two that SDKs use for whatever goes wrong with a session.
_SESSION_CODES = frozenset({INVALID_REQUEST, -32000, -32001})
_SESSION_WORDS = re.compile("session|initiali[sz]|protocol version", re.IGNORECASE)


class Meaning(enum.Enum):
    """The next step of a client."""

    FOLLOW = "read the answer from this response's event stream"
    ANSWER = "finished: the body is the answer, or a message without an answer was accepted"
    AGAIN = (
        "send the same again after a pause: by POST a message that was not accepted, by GET a request with a position"
    )
    RESTART = "start over after a pause: a request under a new id, a stream without its position"
    RENEW = "begin another session, then look up `Failure.SESSION_REPLACED`"
    UNKNOWN = "report to the caller: interrupted, outcome unknown"
    UNREACHABLE = "report to the caller: no server accepted it within the limits"
    REFUSED = "report to the caller: it cannot work, and was not accepted or did no harm"


class Purpose(enum.Enum):
    """The kind of message that a client has sent."""

    CALL = "call"
    LISTENER = "listener"
    NOTIFICATION = "notification"
    REPLY = "reply"
    HANDSHAKE = "handshake"
    KEYED = "keyed"


class Body(enum.Enum):
    """The JSON-RPC response in a body that is no event stream, as the request's sender sees it."""

    NONE = "none"
    """No response, or another request's result, or a result without an id."""
    RESULT = "result"
    ERROR = "error"
    ERROR_WITHOUT_ID = "error without id"
    ERROR_OF_ANOTHER = "error of another"


class Failure(enum.Enum):
    """A failure in place of a response, or after it, with the reason for its row."""

    NOT_SENT = "no connection could be made", "nothing was sent"
    UNTRUSTED = "TLS fails: certificate or version", "waiting does not mend it; a call that runs is not given up for it"
    NO_CREDENTIALS = "the provider of credentials fails", "nothing was sent; a call that runs is not given up for it"
    LOST = "the connection is lost, or ends without the answer", "the server may have taken it"
    TOO_LARGE = "a message is larger than the limit", "it would come again and again"
    SESSION_REPLACED = "another session was begun", "what was refused with 404 did not run; what ran is out of reach"
    PATIENCE_ENDED = "patience has ended", "only a call with a position, or one that may have arrived, may have run"


class ResponseKind(enum.Enum):
    """The meaning of a response, with the reason for its row."""

    STREAM = "200 with an event stream", "the answer will be on it"
    ANSWERED = "another success, with the answer", "the server's answer"
    TAKEN = "another success", "the server has taken it, and does not say what became of it"
    NOT_NOW = "429, or 503 with `Retry-After`", "the server says that it has not taken it"
    SESSION_GONE = "404, and the session may be renewed", "the server refused it because it does not know the session"
    SAID_NO = "3xx or 4xx, with a JSON-RPC error", "the server's own words; it did not run"
    SAID_WHO = "401 or 403, with a JSON-RPC error", "as above; before a handshake can succeed, the user must act"
    NO = "3xx or 4xx", "it did not run"
    SAID_FAILED = "5xx, with an error under the request's id", "the server says what became of this request"
    AWAY = "502, 503 or 504", "a gateway's word that the server did not answer: it may have arrived there"
    FAILED = "another 5xx", "it may have run; a read that made the server fail would do so again"
    BAD_POSITION = "400, 404 or 405 to a position", "the server cannot go on from there"
    NO_STREAM = "404 or 405 to a listener, or 400 without a position", "the server has no such stream"
    UNREADABLE = "anything else in place of a stream", "it may pass, and what was to be read is still there"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One HTTP request of a client's."""

    purpose: Purpose
    is_repeatable: bool = False
    """Its method is in `REPEATABLE`. Of calls only."""
    has_position: bool = False
    """A call with a position is read by GET; without one it is sent by POST."""
    may_renew: bool = False
    """404 means that the session has ended; except without a session, where the request was sent again in a new one
    already (H6), or where a listener's stream has never existed: many servers answer 404 to every GET."""
    may_have_arrived: bool = False
    """An earlier attempt may have reached the server. Of keyed calls only."""


class Column(enum.Enum):
    """The kind of message, as the table distinguishes it: five by POST and three by GET with a session, two without."""

    CALL = "a call"
    READ = "a call that may be repeated"
    NOTIFICATION = "a notification"
    REPLY = "a reply"
    HANDSHAKE = "a handshake"
    CALL_RESUMED = "a call with a position"
    READ_RESUMED = "the same, and it may be repeated"
    LISTENER = "a listener"
    KEYED = "a keyed call"
    KEYED_AGAIN = "the same, and it may have arrived"


def _row(*cells: Meaning) -> Mapping[Column, Meaning]:
    """The cells of a row in the order of the columns with a session: those by POST, those by GET, or all."""
    columns = list(Column)[:8]
    return dict(zip(columns[5:] if len(cells) == 3 else columns[: len(cells)], cells, strict=True))


_FOLLOW, _ANSWER, _AGAIN, _RESTART = Meaning.FOLLOW, Meaning.ANSWER, Meaning.AGAIN, Meaning.RESTART
_RENEW, _UNKNOWN, _UNREACH, _REFUSED = Meaning.RENEW, Meaning.UNKNOWN, Meaning.UNREACHABLE, Meaning.REFUSED

# fmt: off
_WITH_SESSION: Mapping[ResponseKind, Mapping[Column, Meaning]] = {
    #                       by POST                                                   by GET
    #                       call      read      notification reply  handshake   call      read      listener
    ResponseKind.STREAM:       _row(_FOLLOW,  _FOLLOW,  _ANSWER,  _ANSWER,  _FOLLOW,    _FOLLOW,  _FOLLOW,  _FOLLOW),
    ResponseKind.ANSWERED:     _row(_ANSWER,  _ANSWER,  _ANSWER,  _ANSWER,  _ANSWER),
    ResponseKind.TAKEN:        _row(_UNKNOWN, _REFUSED, _ANSWER,  _ANSWER,  _REFUSED),
    ResponseKind.NOT_NOW:      _row(_AGAIN,   _AGAIN,   _AGAIN,   _AGAIN,   _AGAIN),
    ResponseKind.SESSION_GONE: _row(_RENEW,   _RENEW,   _RENEW,   _RENEW,   _REFUSED,   _RENEW,   _RENEW,   _RENEW),
    ResponseKind.SAID_NO:      _row(_ANSWER,  _ANSWER,  _REFUSED, _REFUSED, _ANSWER),
    ResponseKind.SAID_WHO:     _row(_ANSWER,  _ANSWER,  _REFUSED, _REFUSED, _REFUSED),
    ResponseKind.NO:           _row(_REFUSED, _REFUSED, _REFUSED, _REFUSED, _REFUSED),
    ResponseKind.SAID_FAILED:  _row(_ANSWER,  _ANSWER,  _AGAIN,   _AGAIN,   _ANSWER),
    ResponseKind.AWAY:         _row(_UNKNOWN, _RESTART, _AGAIN,   _AGAIN,   _AGAIN),
    ResponseKind.FAILED:       _row(_UNKNOWN, _REFUSED, _AGAIN,   _AGAIN,   _REFUSED),
    ResponseKind.BAD_POSITION: _row(_UNKNOWN, _RESTART, _RESTART),
    ResponseKind.NO_STREAM:    {Column.LISTENER: _REFUSED},
    ResponseKind.UNREADABLE:   _row(_AGAIN,   _AGAIN,   _AGAIN),
}

_FAILED_WITH_SESSION: Mapping[Failure, Mapping[Column, Meaning]] = {
    #                              by POST                                                  by GET
    #                              call      read      notification reply  handshake  call      read      listener
    Failure.NOT_SENT:         _row(_AGAIN,   _AGAIN,   _AGAIN,   _AGAIN,   _AGAIN,    _AGAIN,   _AGAIN,   _AGAIN),
    Failure.UNTRUSTED:        _row(_REFUSED, _REFUSED, _REFUSED, _REFUSED, _REFUSED,  _AGAIN,   _AGAIN,   _AGAIN),
    Failure.NO_CREDENTIALS:   _row(_REFUSED, _REFUSED, _REFUSED, _REFUSED, _REFUSED,  _AGAIN,   _AGAIN,   _AGAIN),
    Failure.LOST:             _row(_UNKNOWN, _RESTART, _AGAIN,   _AGAIN,   _AGAIN,    _AGAIN,   _AGAIN,   _AGAIN),
    Failure.TOO_LARGE:        _row(_UNKNOWN, _REFUSED, _ANSWER,  _ANSWER,  _REFUSED,  _UNKNOWN, _REFUSED, _REFUSED),
    Failure.SESSION_REPLACED: _row(_AGAIN,   _AGAIN,   _AGAIN,   _REFUSED, _AGAIN,    _UNKNOWN, _RESTART, _RESTART),
    Failure.PATIENCE_ENDED:   _row(_UNREACH, _UNREACH, _UNREACH, _UNREACH, _UNREACH,  _UNKNOWN, _UNREACH, _UNREACH),
}

KEYED: Mapping[ResponseKind | Failure, tuple[Meaning, Meaning]] = {
    #                        at first  where it may have arrived
    ResponseKind.STREAM:             (_FOLLOW,  _FOLLOW),
    ResponseKind.ANSWERED:           (_ANSWER,  _ANSWER),
    ResponseKind.TAKEN:              (_RESTART, _RESTART),
    ResponseKind.NOT_NOW:            (_AGAIN,   _AGAIN),
    ResponseKind.SAID_NO:            (_ANSWER,  _ANSWER),
    ResponseKind.SAID_WHO:           (_ANSWER,  _AGAIN),
    ResponseKind.NO:                 (_REFUSED, _AGAIN),
    ResponseKind.SAID_FAILED:        (_ANSWER,  _ANSWER),
    ResponseKind.AWAY:               (_RESTART, _RESTART),
    ResponseKind.FAILED:             (_RESTART, _RESTART),
    Failure.NOT_SENT:        (_AGAIN,   _AGAIN),
    Failure.UNTRUSTED:       (_REFUSED, _AGAIN),
    Failure.NO_CREDENTIALS:  (_REFUSED, _AGAIN),
    Failure.LOST:            (_RESTART, _RESTART),
    Failure.TOO_LARGE:       (_UNKNOWN, _UNKNOWN),
    Failure.PATIENCE_ENDED:  (_UNREACH, _UNKNOWN),
}
# fmt: on


def _with_keyed(cells: Mapping[Column, Meaning], row: ResponseKind | Failure) -> Mapping[Column, Meaning]:
    return {**cells, **dict(zip((Column.KEYED, Column.KEYED_AGAIN), KEYED.get(row, ()), strict=False))}


RESPONDED: Mapping[ResponseKind, Mapping[Column, Meaning]] = {
    row: _with_keyed(cells, row) for row, cells in _WITH_SESSION.items()
}
FAILED: Mapping[Failure, Mapping[Column, Meaning]] = {
    row: _with_keyed(cells, row) for row, cells in _FAILED_WITH_SESSION.items()
}


def of_response(
    attempt: Attempt, *, status: int, media: str = "", body: Body = Body.NONE, says_when: bool = False
) -> Meaning:
    """Decide what a response means. `media` is its type without parameters; `says_when`: it has a `Retry-After`."""
    return RESPONDED[seen(attempt, status=status, media=media, body=body, says_when=says_when)][column_of(attempt)]


def of_failure(attempt: Attempt, failure: Failure) -> Meaning:
    """Decide what a failure means: there is no response, or it broke off."""
    return FAILED[failure][column_of(attempt)]


def is_read(attempt: Attempt) -> bool:
    """Whether it is a GET; else it is a POST."""
    return attempt.purpose is Purpose.LISTENER or (attempt.purpose is Purpose.CALL and attempt.has_position)


def body_of(message: object, request_id: int | str) -> Body:
    """Classify a parsed message of a body, or of an event, for the request with this id."""
    if not isinstance(message, Mapping):
        return Body.NONE
    named, error = message.get("id"), message.get("error")
    is_own = named == request_id and type(named) is type(request_id)
    if isinstance(error, Mapping) and error.get("code") is not None:
        return Body.ERROR if is_own else Body.ERROR_WITHOUT_ID if named is None else Body.ERROR_OF_ANOTHER
    return Body.RESULT if is_own and isinstance(message.get("result"), Mapping) else Body.NONE


def is_answer(body: Body) -> bool:
    """Whether a message that came with a success, or on the request's own stream, is its answer."""
    return body in (Body.RESULT, Body.ERROR, Body.ERROR_WITHOUT_ID)


def doubts_session(*, status: int, code: int | None, sentence: str) -> bool:
    """Whether a refusal reads as if the server did not know the session, though it does not say so with 404, or as if
    it had been replaced by one of the other era.

    Servers answer 400 with "Session not found" or "Server not initialized", 200 with such an error, or 503. `code` and
    `sentence` are those of a JSON-RPC error, else None and the body. It is no proof: a `ping` in the same session is,
    or, without sessions, `server/discover`.
    """
    if code == UNSUPPORTED_VERSION:
        return True
    refuses = (400 <= status < 500 and status not in _UNAUTHORIZED) or status == 503
    return (refuses or (status < 300 and code in _SESSION_CODES)) and _SESSION_WORDS.search(sentence) is not None


def column_of(attempt: Attempt) -> Column:
    if attempt.purpose is Purpose.KEYED:
        return Column.KEYED_AGAIN if attempt.may_have_arrived else Column.KEYED
    if attempt.purpose is not Purpose.CALL:
        return Column[attempt.purpose.name]
    called = (Column.READ, Column.READ_RESUMED) if attempt.is_repeatable else (Column.CALL, Column.CALL_RESUMED)
    return called[attempt.has_position]


def seen(attempt: Attempt, *, status: int, media: str, body: Body, says_when: bool) -> ResponseKind:
    """The row of the table for a response."""
    if status == 200 and media == EVENTS:
        return ResponseKind.STREAM
    if status == 404 and attempt.may_renew and attempt.purpose is not Purpose.KEYED:
        return ResponseKind.SESSION_GONE
    if is_read(attempt):
        if status not in _NO_READING:
            return ResponseKind.UNREADABLE
        is_listener = attempt.purpose is Purpose.LISTENER
        return (
            ResponseKind.NO_STREAM
            if is_listener and (status != 400 or not attempt.has_position)
            else ResponseKind.BAD_POSITION
        )
    if status == 429 or (status == 503 and says_when):
        return ResponseKind.NOT_NOW
    if status < 300:
        return ResponseKind.ANSWERED if is_answer(body) else ResponseKind.TAKEN
    if status < 500:
        if body in (Body.NONE, Body.RESULT):
            return ResponseKind.NO
        return ResponseKind.SAID_WHO if status in _UNAUTHORIZED else ResponseKind.SAID_NO
    if body is Body.ERROR:
        return ResponseKind.SAID_FAILED
    return ResponseKind.AWAY if status in _AWAY else ResponseKind.FAILED
