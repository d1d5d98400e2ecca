"""Encodes and decodes server-sent events by the rules of WHATWG HTML section 9.2 ("Server-sent events").

Encoding takes bytes that are UTF-8 already and returns one whole frame. A `Decoder` belongs to one HTTP response and is
fed whatever the socket gives, cut anywhere. An event that is unfinished when the response ends was never sent, by the
rules.

- `feed` returns the events that the rules dispatch. A `data` field without a value counts, so a priming event (an id
  and empty data) comes out as an event with `data == ""`; receivers remember its id and hand nothing on (B8).
- A block without any `data` field is not dispatched. Its fields still count: its id is in `last_event_id` once its
  blank line was read, its `retry` is in `Decoder.retry` at once. An event's own `retry` is the one of its block.
"""

import re
from dataclasses import dataclass

#: One JSON-RPC message is one event, and a tool result may hold a file in base64: 16 MiB carry a file of 12 MB.
MAX_EVENT_BYTES = 16 * 1024 * 1024

#: Milliseconds with more digits are 31,000 years, and no longer exact in a JavaScript number: ignored.
MAX_RETRY_DIGITS = 15

_BOM = b"\xef\xbb\xbf"
# Asked for as integers: `10 in data` is one memchr, about ten times as fast as `b"\n" in data`.
_NUL, _LF, _CR = b"\0\n\r"


def encode_event(position: bytes, payload: bytes) -> bytes:
    """One message with its id. Newlines in the payload arrive as LF, whichever kind they were."""
    if _LF in position or _CR in position or _NUL in position:
        raise _unfit_id(position)
    if _LF in payload or _CR in payload:
        payload = _continued(payload, b"\ndata: ")
    return b"id: %b\nevent: message\ndata: %b\n\n" % (position, payload)


def encode_message(payload: bytes) -> bytes:
    """One message without an id: a client cannot resume from it."""
    if _LF in payload or _CR in payload:
        payload = _continued(payload, b"\ndata: ")
    return b"event: message\ndata: %b\n\n" % payload


def encode_priming(position: bytes, retry_ms: int | None) -> bytes:
    """An id with empty data: nothing to handle, a position to resume from (SEP-1699)."""
    if _LF in position or _CR in position or _NUL in position:
        raise _unfit_id(position)
    retry = b"" if retry_ms is None else retry_field(retry_ms)
    return b"id: %b\n%bdata: \n\n" % (position, retry)


def encode_retry(ms: int) -> bytes:
    """How long the client waits before it connects again, in a block of its own."""
    return retry_field(ms) + b"\n"


def retry_field(ms: int) -> bytes:
    """The same, as the first line of an event."""
    if not 0 <= ms < 10**MAX_RETRY_DIGITS:
        raise ValueError(f"retry must be 0 or more milliseconds of at most {MAX_RETRY_DIGITS} digits, not {ms}")
    return b"retry: %d\n" % ms


def encode_comment(text: str) -> bytes:
    """A line that receivers skip: keep-alive, or a note for a person who reads the wire."""
    return b": %b\n\n" % _continued(text.encode("utf-8", "replace"), b"\n: ")


KEEP_ALIVE = b": keep-alive\n\n"
"""Keeps a silent connection open."""


def _continued(text: bytes, line_start: bytes) -> bytes:
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", line_start)


def _unfit_id(position: bytes) -> ValueError:
    return ValueError(f"an event id cannot hold NUL, CR or LF: {position!r}")


_USUAL = re.compile(rb"(?:id: ([^\0\r\n]*+)\r?\n|event: message\r?\n)*+data: ([^\r\n]*+)\r?\n\r?\n")


class EventTooLarge(ValueError):
    """The peer sent an event larger than the decoder may keep."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"an event exceeds the limit of {limit} bytes")
        self.limit = limit


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSentEvent:
    """One dispatched event."""

    event: str = "message"
    data: str
    id: str = ""  #: the last event id when it was dispatched; it may be that of an earlier block
    retry: int | None = None  #: from the same block


class Decoder:
    """Turns the bytes of one response into events.

    `last_event_id` and `retry` are what a client needs to connect again: the id as of the last finished block, and
    the last reconnection time in milliseconds, or None.

    Of each event at most `max_event_bytes` are kept, the line being read included. Beyond that `feed` raises
    `EventTooLarge`, now and ever after; events that were complete before it in the same chunk are returned first, and
    the next `feed` raises. So the chunking decides nothing.
    """

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.last_event_id = ""
        self.retry: int | None = None
        self._max = max_event_bytes
        self._overflown = False
        self._at_start = True
        self._after_cr = False
        self._line = bytearray()
        self._data = bytearray()  # one buffer, not a list of lines: tiny lines would cost many times their bytes
        self._event = b""
        self._id = b""
        self._block_retry: int | None = None

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Take the next bytes, as many as there are; return the events they complete."""
        events: list[ServerSentEvent] = []
        if not (self._line or self._data or self._at_start or self._after_cr or self._event or self._overflown):
            chunk = self._usual(chunk, events)
        if not self._overflown:
            for line in self._lines(chunk):
                if len(self._data) + len(line) > self._max:
                    self._overflown = True
                    break
                if self._at_start:
                    line, self._at_start = line.removeprefix(_BOM), False
                if line:
                    self._take(line)
                elif (event := self._dispatch()) is not None:
                    events.append(event)
            else:
                self._overflown = len(self._data) + len(self._line) > self._max
        if self._overflown and not events:
            raise EventTooLarge(self._max)
        return events

    def _usual(self, chunk: bytes, events: list[ServerSentEvent]) -> bytes:
        """Take whole events that are written as usual, several times as fast; the rest of the chunk is returned."""
        at = 0
        while (block := _USUAL.match(chunk, at)) is not None and self._block_retry is None:
            if block.end() - at > self._max:
                break  # which may be too large
            found, data = block.groups()
            if found is not None:
                self._id = found
            self.last_event_id = self._id.decode("utf-8", "replace")  # its line may have come with the chunk before
            events.append(ServerSentEvent(data=data.decode("utf-8", "replace"), id=self.last_event_id))
            at = block.end()
        return chunk[at:] if at else chunk

    def _lines(self, chunk: bytes) -> list[bytes]:
        """The lines that this chunk ends; what follows the last line end waits in `_line`."""
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if not chunk:
            return []
        # bytes.splitlines knows CRLF, LF and CR and, unlike str.splitlines, nothing else.
        lines = chunk.splitlines()
        self._after_cr = chunk[-1] == _CR
        rest = b"" if chunk[-1] in b"\r\n" else lines.pop()
        if lines:
            lines[0] = bytes(self._line) + lines[0]
            self._line.clear()
        self._line += rest
        return lines

    def _take(self, line: bytes) -> None:
        # Fields are told apart as bytes and decoded late: ASCII never stands inside a longer UTF-8 sequence,
        # so a line end also ends a broken one, and the replacement characters come out the same.
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data += value + b"\n"
            case b"event":
                self._event = value
            case b"id" if _NUL not in value:
                self._id = value
            case b"retry" if value.isdigit() and len(value) <= MAX_RETRY_DIGITS:
                self.retry = self._block_retry = int(value)

    def _dispatch(self) -> ServerSentEvent | None:
        self.last_event_id = self._id.decode("utf-8", "replace")
        event = None
        if self._data:
            event = ServerSentEvent(
                event=self._event.decode("utf-8", "replace") or "message",
                data=self._data[:-1].decode("utf-8", "replace"),
                id=self.last_event_id,
                retry=self._block_retry,
            )
        self._data.clear()
        self._event = b""
        self._block_retry = None
        return event
