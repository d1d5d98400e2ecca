"""The decoder by the vectors that the TypeScript decoder is tested with as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure._core.sse import Decoder

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "sse.json").read_text())


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
@pytest.mark.parametrize("whole", [True, False], ids=["as cut", "byte by byte"])
def test_vector(vector: dict[str, Any], whole: bool) -> None:
    chunks = [chunk.encode() for chunk in vector["chunks"]]
    if not whole:
        chunks = [bytes([byte]) for byte in b"".join(chunks)]
    decoder = Decoder()
    events = [event for chunk in chunks for event in decoder.feed(chunk)]
    seen = [{"id": event.id, "event": event.event, "data": event.data} for event in events]
    assert (seen, decoder.retry) == (vector["events"], vector["retry"])
