"""Reading a request: its body within limits, and what its headers say about media types."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from perdure.http.answers import Refusal, Refused
from perdure.settings import Settings


class ClientGone(Exception):
    """The client left before its request was there."""


async def read_body(receive: Receive, headers: dict[bytes, bytes], settings: Settings) -> bytes:
    """The whole body, or `Refused` as soon as it is known to be too large or too slow."""
    limit = settings.max_body
    if _exceeds(headers.get(b"content-length", b""), limit):
        raise Refused(Refusal.BODY_TOO_LARGE, limit=limit)
    try:
        async with asyncio.timeout(settings.stream_timeout):
            return await _collect(receive, limit)
    except TimeoutError:
        raise Refused(Refusal.BODY_TOO_SLOW, limit=f"{settings.stream_timeout:g}") from None


def _exceeds(declared: bytes, limit: int) -> bool:
    """Whether a Content-Length is above a limit. Python refuses to read a number of more than 4,300 digits, so one that
    has more digits than the limit is not read at all."""
    digits = declared.lstrip(b"0")
    return declared.isdigit() and (len(digits) > len(str(limit)) or int(digits or b"0") > limit)


async def _collect(receive: Receive, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise Refused(Refusal.BODY_TOO_LARGE, limit=limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def replayed(body: bytes) -> Receive:
    """A `receive` that gives the body again, for tools that look at the HTTP request."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def accepts(headers: dict[bytes, bytes]) -> tuple[bool, bool]:
    """Whether the client takes JSON, and whether it takes event streams."""
    accept = headers.get(b"accept", b"").lower()
    kinds = {kind.partition(b";")[0].strip() for kind in accept.split(b",")}
    everything = b"*/*" in kinds
    return (
        everything or bool(kinds & {b"application/json", b"application/*"}),
        everything or bool(kinds & {b"text/event-stream", b"text/*"}),
    )
