"""Cuts the bytes of a pipe into lines, each of one JSON-RPC message."""

from dataclasses import dataclass

#: Of one line. A message holds a file at most, in base64; servers take less (`max_body`) and say so.
MAX_LINE_BYTES = 64 * 1024 * 1024

#: Bytes that are kept of the beginning and of the end of a longer line: an answer's id stands there, before its result
#: or after it, with members of a few bytes beside it.
EDGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class TooLong:
    """Stands for a line that was longer than the limit, and was thrown away as it came."""

    head: bytes
    tail: bytes


Line = bytes | TooLong


class Cutter:
    """Cuts bytes into lines. Empty ones are left out."""

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        """Of the line that has begun; once it is too long, its head and its tail."""
        self._size = 0

    def feed(self, chunk: bytes) -> list[Line]:
        *ended, rest = chunk.split(b"\n")
        lines: list[Line] = []
        for part in ended:
            line: Line
            if self._size or len(part) > self._limit:
                self._keep(part)
                parts, size = self._parts, self._size
                self._parts, self._size = [], 0
                is_too_long = size > self._limit
                line = TooLong(head=parts[0], tail=parts[1]) if is_too_long else b"".join(parts).strip(b" \t\r")
            else:
                line = part.strip(b" \t\r")
            if line:
                lines.append(line)
        if rest:
            self._keep(rest)
        return lines

    def _keep(self, part: bytes) -> None:
        was_too_long = self._size > self._limit
        self._size += len(part)
        self._parts.append(part)
        if was_too_long:
            head, tail = self._parts[0], b"".join(self._parts[1:])
            self._parts = [head, tail[-EDGE_BYTES:]]
        elif self._size > self._limit:
            line = b"".join(self._parts)
            self._parts = [line[:EDGE_BYTES], line[-EDGE_BYTES:]]
