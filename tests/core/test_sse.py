"""Server-sent events against vectors of the rules, and against a second, naive reading of them."""

import base64
import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure._core.sse import (
    MAX_RETRY_DIGITS,
    Decoder,
    EventTooLarge,
    ServerSentEvent,
    encode_comment,
    encode_event,
    encode_priming,
    encode_retry,
)

FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS = json.loads((FOLDER / "sse_rules.json").read_text("utf-8"))
SHARED = json.loads((FOLDER / "sse.json").read_text("utf-8"))
"""The TypeScript decoder is tested with them, too."""


def by_name(kind: str) -> Any:
    return [pytest.param(case, id=case["name"]) for case in VECTORS[kind]]


def as_bytes(chunk: str | dict[str, str]) -> bytes:
    return chunk.encode() if isinstance(chunk, str) else base64.b64decode(chunk["base64"])


def decoded(chunks: Iterable[bytes]) -> dict[str, Any]:
    """All that a decoder says about these chunks, in the vectors' words."""
    decoder = Decoder()
    events = [event for chunk in chunks for event in decoder.feed(chunk)]
    return {"events": events, "last_event_id": decoder.last_event_id, "retry": decoder.retry}


def expected(case: dict[str, Any]) -> dict[str, Any]:
    events = [ServerSentEvent(**event) for event in case["events"]]
    return {"events": events, "last_event_id": case["last_event_id"], "retry": case["retry"]}


def single_bytes(wire: bytes) -> list[bytes]:
    return [wire[at : at + 1] for at in range(len(wire))]


# --- vectors


@pytest.mark.parametrize("case", by_name("decode"))
def test_the_decoder_reads_the_vector_however_it_is_cut(case: dict[str, Any]) -> None:
    chunks = [as_bytes(chunk) for chunk in case["chunks"]]
    wire = b"".join(chunks)
    assert decoded(chunks) == expected(case)
    assert decoded([wire]) == expected(case)
    assert decoded(single_bytes(wire)) == expected(case)


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case["name"])
def test_the_decoder_reads_what_the_browsers_reads(case: dict[str, Any]) -> None:
    wire = [chunk.encode() for chunk in case["chunks"]]
    for chunks in (wire, single_bytes(b"".join(wire))):
        found = decoded(chunks)
        seen = [{"id": event.id, "event": event.event, "data": event.data} for event in found["events"]]
        assert (seen, found["retry"]) == (case["events"], case["retry"])


@pytest.mark.parametrize("case", by_name("decode"))
def test_the_naive_reading_agrees_with_the_vector(case: dict[str, Any]) -> None:
    assert naively_decoded(b"".join(as_bytes(chunk) for chunk in case["chunks"])) == expected(case)


ENCODERS: dict[str, Callable[..., bytes]] = {
    "event": lambda position, payload: encode_event(position.encode(), payload.encode()),
    "priming": lambda position, retry_ms: encode_priming(position.encode(), retry_ms),
    "retry": encode_retry,
    "comment": encode_comment,
}


@pytest.mark.parametrize("case", by_name("encode"))
def test_the_encoder_writes_the_vector_and_the_decoder_reads_it(case: dict[str, Any]) -> None:
    wire = ENCODERS[case["call"]](*case["args"])
    assert wire == case["wire"].encode()
    assert decoded([wire]) == expected(case)


# --- refusals


@pytest.mark.parametrize("position", [b"a\nb", b"a\rb", b"a\0b", b"\n", b"a\r\n"])
def test_an_id_that_would_break_the_frame_is_refused_and_shown(position: bytes) -> None:
    message = re.escape(f"an event id cannot hold NUL, CR or LF: {position!r}")
    with pytest.raises(ValueError, match=message):
        encode_event(position, b"{}")
    with pytest.raises(ValueError, match=message):
        encode_priming(position, None)


@pytest.mark.parametrize("ms", [-1, 10**MAX_RETRY_DIGITS])
def test_a_retry_that_receivers_would_ignore_is_refused(ms: int) -> None:
    with pytest.raises(ValueError, match=f"not {ms}"):
        encode_retry(ms)
    with pytest.raises(ValueError, match=f"not {ms}"):
        encode_priming(b"p", ms)


def test_the_largest_retry_arrives() -> None:
    largest = 10**MAX_RETRY_DIGITS - 1
    assert decoded([encode_retry(largest)])["retry"] == largest


def test_a_comment_takes_text_that_is_not_unicode() -> None:
    assert encode_comment("half \ud83d") == b": half ?\n\n"


# --- the bound


def test_an_event_at_the_limit_arrives_and_one_byte_more_is_refused() -> None:
    line = b"data: 1234"
    assert Decoder(max_event_bytes=len(line)).feed(line + b"\n\n") == [ServerSentEvent(data="1234")]
    with pytest.raises(EventTooLarge, match="limit of 9 bytes") as refusal:
        Decoder(max_event_bytes=len(line) - 1).feed(line)
    assert refusal.value.limit == 9


def test_many_short_data_lines_count_together() -> None:
    decoder = Decoder(max_event_bytes=20)
    assert decoder.feed(b"data\n" * 17) == []
    with pytest.raises(EventTooLarge):
        decoder.feed(b"data\n")


def test_a_line_that_never_ends_is_refused_before_it_ends() -> None:
    decoder = Decoder(max_event_bytes=100)
    for _ in range(10):
        assert decoder.feed(b":ten bytes") == []
    with pytest.raises(EventTooLarge):
        decoder.feed(b"x")


def test_keep_alive_lines_for_ever_cost_nothing() -> None:
    decoder = Decoder(max_event_bytes=30)
    for _ in range(100):
        assert decoder.feed(b": keep-alive\n") == []
    assert decoder.feed(b"data: a\n\n") == [ServerSentEvent(data="a")]


def test_events_complete_before_the_large_one_are_handed_over_first() -> None:
    decoder = Decoder(max_event_bytes=10)
    assert decoder.feed(b"id: 1\ndata: a\n\ndata: much too long\n\ndata: b\n\n") == [ServerSentEvent(data="a", id="1")]
    for chunk in (b"", b"data: c\n\n"):
        with pytest.raises(EventTooLarge):
            decoder.feed(chunk)
    assert decoder.last_event_id == "1"


# --- properties


def naively_decoded(wire: bytes) -> dict[str, Any]:
    """The whole stream at once, rule by rule as WHATWG HTML 9.2.6 has them."""
    text = wire.decode("utf-8", "replace").removeprefix("\ufeff")
    events: list[ServerSentEvent] = []
    data, event_type, id_buffer, last_event_id = "", "", "", ""
    retry = block_retry = None
    for line in re.split("\r\n|\n|\r", text)[:-1]:  # behind the last line end is no line
        if line == "":
            last_event_id = id_buffer
            if data != "":
                events.append(
                    ServerSentEvent(event=event_type or "message", data=data[:-1], id=last_event_id, retry=block_retry)
                )
            data, event_type, block_retry = "", "", None
            continue
        if line[0] == ":":
            continue
        field, value = line, ""
        if ":" in line:
            field, value = line.split(":", 1)
            if value[:1] == " ":
                value = value[1:]
        if field == "event":
            event_type = value
        elif field == "data":
            data += value + "\n"
        elif field == "id" and "\0" not in value:
            id_buffer = value
        elif field == "retry" and re.fullmatch("[0-9]{1,15}", value):
            retry = block_retry = int(value)
    return {"events": events, "last_event_id": last_event_id, "retry": retry}


def cut(wire: bytes, places: Sequence[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(wire) + 1) for place in places), len(wire)]
    return [wire[start:end] for start, end in pairwise(borders)]


PIECES = [b"data", b"event", b"id", b"retry", b":", b": ", b" ", b"\n", b"\r", b"\r\n", b"\n\n", b"\0", b"7", b"x"]
BROKEN = [b"\xef\xbb\xbf", b"\xef", b"\xbb", b"\xbf", b"\xf0\x9f", b"\x98\x80", b"\xed\xa0\x80", b"\xff", b"\xc2\x85"]
wires = st.lists(st.sampled_from(PIECES) | st.sampled_from(BROKEN) | st.binary(max_size=4), max_size=60).map(b"".join)
places = st.lists(st.integers(min_value=0, max_value=10_000), max_size=12)
# CR and LF are often in the text: they are what can go wrong.
texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\r\n "))
ids = texts.map(lambda text: re.sub("[\0\r\n]", "", text))


@given(wire=wires, places=places)
def test_any_bytes_in_any_chunks_read_as_the_rules_say(wire: bytes, places: list[int]) -> None:
    assert decoded(cut(wire, places)) == naively_decoded(wire)


@given(messages=st.lists(st.tuples(ids, texts), max_size=5), places=places)
def test_what_was_encoded_is_decoded_in_any_chunks(messages: list[tuple[str, str]], places: list[int]) -> None:
    """S1; newlines arrive as LF."""
    wire = b"".join(encode_event(position.encode(), payload.encode()) for position, payload in messages)
    sent = [ServerSentEvent(data=re.sub("\r\n|\r", "\n", payload), id=position) for position, payload in messages]
    assert decoded(cut(wire, places))["events"] == sent


@pytest.mark.parametrize("cut_at", range(len(b"id: 2\nevent: message\ndata: y\n\n")))
def test_an_event_whose_lines_come_in_two_chunks_has_its_own_id(cut_at: int) -> None:
    decoder, second = Decoder(), b"id: 2\nevent: message\ndata: y\n\n"
    first = decoder.feed(b": begin\n\nid: 1\nevent: message\ndata: x\n\n" + second[:cut_at])
    events = [*first, *decoder.feed(second[cut_at:])]
    assert [(event.id, event.data) for event in events] == [("1", "x"), ("2", "y")]
    assert decoder.last_event_id == "2"


@given(text=texts, places=places)
def test_a_comment_never_becomes_anything_else(text: str, places: list[int]) -> None:
    wire = b"data: a\n\n" + encode_comment(text) + b"data: b\n\n"
    assert decoded(cut(wire, places))["events"] == [ServerSentEvent(data="a"), ServerSentEvent(data="b")]


def until_refused(chunks: Iterable[bytes], limit: int) -> tuple[list[ServerSentEvent], bool]:
    decoder, events = Decoder(max_event_bytes=limit), []
    try:
        for chunk in [*chunks, b""]:
            events += decoder.feed(chunk)
    except EventTooLarge:
        return events, True
    return events, False


@given(wire=wires, places=places, limit=st.integers(min_value=1, max_value=40))
def test_the_bound_does_not_depend_on_the_chunking(wire: bytes, places: list[int], limit: int) -> None:
    assert until_refused(cut(wire, places), limit) == until_refused([wire], limit)
