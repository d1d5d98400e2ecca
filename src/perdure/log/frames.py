"""Frames that the server itself writes between a stream's events: warnings and gaps."""

from __future__ import annotations

import json

from perdure._core import sse
from perdure._core.ids import Position, RandomBytes
from perdure._core.losses import gap_notification


def gap_frames(behind: Position, first: int, last: int, *, reason: str, random: RandomBytes, log: bool) -> bytes:
    """A gap on the wire. `behind` is the position after which the stream goes on."""
    message = gap_notification(behind.stream, first, last, reason=reason)
    sentence = f"gap: events {first} to {last} are no longer retained ({reason})"
    return warning_frames(behind, sentence, message, random=random, log=log)


def warning_frames(behind: Position, sentence: str, *messages: bytes, random: RandomBytes, log: bool) -> bytes:
    """A warning on the wire: a comment for people, messages for programs, a log message where that is declared."""
    if log:
        params = {"level": "warning", "logger": "perdure", "data": sentence}
        message = {"jsonrpc": "2.0", "method": "notifications/message", "params": params}
        messages += (json.dumps(message).encode(),)
    frames = [sse.encode_comment(sentence)]
    frames += [sse.encode_event(behind.priming(random).encode(), message) for message in messages]
    return b"".join(frames)
