"""Reads a request: its body within limits, and the media types in its headers."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from perdure.http.refusals import Refusal, Refused
from perdure.settings import Settings

PACE_SECONDS = 20.0
PACE_BYTES = 10_000
"""A body must bring so many bytes in so much time, as long as it is not complete: what Apache asks for by default
(`RequestReadTimeout body=20,MinRate=500`), and less than the slowest telephone line brings."""


class ClientGone(Exception):
    """The client left before its request was there."""


class Bodies:
    """Reads bodies, of all requests together no more at once than memory should carry."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.max_body
        self._timeout = settings.stream_timeout
        self._most = max(settings.max_bodies, settings.max_body)
        self._held = 0
        """Bytes of bodies that are not complete yet. One that arrives in one piece is never counted, so ordinary
        messages get through while others fill this up."""

    async def read(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        """The whole body, or `Refused` as soon as it is known to be too large, too slow or too much."""
        if _exceeds(headers.get(b"content-length", b""), self._limit):
            raise Refused(Refusal.BODY_TOO_LARGE, limit=self._limit)
        now = asyncio.get_running_loop().time
        end = now() + self._timeout
        try:
            async with asyncio.timeout_at(min(end, now() + PACE_SECONDS)) as pace:
                return await self._collect(receive, pace, end)
        except TimeoutError:
            if now() < end:
                refusal = Refusal.BODY_STALLED
                raise Refused(refusal, least=PACE_BYTES, seconds=f"{PACE_SECONDS:g}") from None
            raise Refused(Refusal.BODY_TOO_SLOW, limit=f"{self._timeout:g}") from None

    async def _collect(self, receive: Receive, pace: asyncio.Timeout, end: float) -> bytes:
        now = asyncio.get_running_loop().time
        chunks: list[bytes] = []
        size = lately = 0
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                chunk: bytes = message.get("body", b"")
                chunks.append(chunk)
                if size + len(chunk) > self._limit:
                    raise Refused(Refusal.BODY_TOO_LARGE, limit=self._limit)
                if not message.get("more_body", False):
                    return b"".join(chunks)
                if self._held + len(chunk) > self._most:
                    raise Refused(Refusal.TOO_MANY_BODIES, limit=self._most)
                size += len(chunk)
                self._held += len(chunk)
                lately += len(chunk)
                if lately >= PACE_BYTES:
                    lately = 0
                    pace.reschedule(min(end, now() + PACE_SECONDS))
        finally:
            self._held -= size


def _exceeds(declared: bytes, limit: int) -> bool:
    """Whether a Content-Length is above a limit. Python refuses to read a number of more than 4,300 digits, so one that
    has more digits than the limit is not read at all."""
    digits = declared.lstrip(b"0")
    return declared.isdigit() and (len(digits) > len(str(limit)) or int(digits or b"0") > limit)


def replayed(body: bytes) -> Receive:
    """A `receive` that gives the body again, for tools that look at the HTTP request."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def replayed_first(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read already, once, and then whatever comes."""
    waiting = [body]

    async def receive_again() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return receive_again


def accepts(headers: dict[bytes, bytes]) -> tuple[bool, bool]:
    """Whether the client takes JSON, and whether it takes event streams."""
    accept = headers.get(b"accept", b"").lower()
    kinds = {kind.partition(b";")[0].strip() for kind in accept.split(b",")}
    everything = b"*/*" in kinds
    return (
        everything or bool(kinds & {b"application/json", b"application/*"}),
        everything or bool(kinds & {b"text/event-stream", b"text/*"}),
    )
