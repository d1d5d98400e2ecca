"""Ids and positions: what they look like, how they are read, where a reader goes on."""

import secrets
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure._core.ids import (
    Generation,
    Kind,
    NodeId,
    Position,
    StreamId,
    is_only_listed,
    new_fence,
    new_node_id,
    new_session_id,
    new_stream_id,
    parse_position,
    parse_session_id,
    place,
    reader_name,
    reader_since,
)

streams = st.binary(min_size=16, max_size=16).map(lambda raw: new_stream_id(lambda _: raw))
positions = st.builds(
    Position,
    stream=streams,
    generation=st.integers(0, 999_999),
    seq=st.integers(0, 9_999_999_999),
    kind=st.sampled_from(Kind),
    progress=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)


@given(positions)
def test_a_position_reads_back_as_it_was_written(position: Position) -> None:
    """R6: whatever characters stand in the stream's id."""
    found = parse_position(str(position))
    assert found == position
    assert found is not None
    assert found.progress == position.progress


@given(positions)
def test_a_priming_id_means_its_position_and_is_never_the_same_twice(position: Position) -> None:
    first, second = position.priming(secrets.token_bytes), position.priming(secrets.token_bytes)
    assert first != second
    assert parse_position(first) == parse_position(second) == position


@given(streams, st.integers(0, 9_999_999_998), st.integers(1, 1_000))
def test_positions_of_a_stream_rise_also_as_plain_strings(stream: StreamId, seq: int, more: int) -> None:
    """S1"""
    later = min(seq + more, 9_999_999_999)
    one, two = (Position(kind=Kind.CALL, stream=stream, generation=1, seq=number) for number in (seq, later))
    assert one < two
    assert str(one) < str(two)


@given(st.text(max_size=80))
def test_any_other_text_is_no_position(text: str) -> None:
    position = parse_position(text)
    assert position is None or text.startswith(str(replace(position, progress=None)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "c",
        "cAAAAAAAAAAAAAAAAAAAAAA.000001.000000000",  # a digit short
        "cAAAAAAAAAAAAAAAAAAAAAA.000001.00000000010",  # a digit too many
        "xAAAAAAAAAAAAAAAAAAAAAA.000001.0000000001",  # no such kind
        "cAAAAAAAAAAAAAAAAAAAAAA.00001x.0000000001",
        "cAAAAAAAAAAAAAAAAAAAAAA.٠٠٠٠٠١.0000000001",  # digits, but not ours
        "cAAAAAAAAAAAAAAAAAAAAAA.000001.0000000001~",
        "cAAAAAAAAAAAAAAAAAAAAAA.000001.0000000001\n",
        "cAAAAAAAAAAAAAAAAAAAAAA.000001.0000000001+",
        "cAAAAAAAAAAAAAAAAAAAAAA.000001.0000000001+1.2.3",
        "cAAAAAAAAAAAAAAAAAAAAAA.000001.0000000001+nan",
        " cAAAAAAAAAAAAAAAAAAAAAA.000001.0000000001",
    ],
)
def test_what_is_nearly_a_position_is_none(text: str) -> None:
    assert parse_position(text) is None


def test_ids_are_random_and_long_enough() -> None:
    """S11, A22: visible ASCII, and 256 bits for what is a secret."""
    asked: list[int] = []

    def random(count: int) -> bytes:
        asked.append(count)
        return secrets.token_bytes(count)

    session, stream, node = new_session_id(random), new_stream_id(random), new_node_id(random)
    assert asked == [32, 16, 16]
    assert parse_session_id(session) == session
    assert all(0x21 <= ord(character) <= 0x7E for character in session + stream + node)


@pytest.mark.parametrize("text", ["", "x", "a" * 42, "a" * 44, "a" * 42 + "/", "a" * 42 + "\n"])
def test_what_cannot_be_a_session_id_is_none(text: str) -> None:
    assert parse_session_id(text) is None


ENDED = (Generation(generation=1, end=10), Generation(generation=2, end=14))
LATER = (Generation(generation=2, end=10), Generation(generation=5, end=14))


@pytest.mark.parametrize(
    ("generation", "seq", "goes_on_after"),
    [
        (3, 12, 12),  # the writer of today
        (3, 20, 20),
        (3, 25, 20),  # beyond its end: the tail was lost
        (1, 7, 7),  # an earlier writer, before its end
        (1, 12, 10),  # beyond it: 11 and 12 were lost, and new events have their numbers now
        (2, 14, 14),
        (9, 5, 0),  # a writer that nobody knows
    ],
)
def test_a_lost_tail_never_lets_an_old_position_name_a_new_event(generation: int, seq: int, goes_on_after: int) -> None:
    position = Position(kind=Kind.CALL, stream=StreamId("s" * 22), generation=generation, seq=seq)
    assert place(position, generation=3, last=20, ended=ENDED) == goes_on_after


@pytest.mark.parametrize(
    ("generation", "seq", "goes_on_after"),
    [
        (3, 9, 9),  # a claim that was lost: it went on behind the second generation
        (4, 12, 10),  # what it wrote is gone, and new events have the numbers
        (5, 12, 12),
        (1, 7, 0),  # older than all that are known
        (7, 5, 0),  # lost, and nobody has claimed it since
    ],
)
def test_a_position_of_a_lost_claim_goes_on_where_that_began(generation: int, seq: int, goes_on_after: int) -> None:
    position = Position(kind=Kind.CALL, stream=StreamId("s" * 22), generation=generation, seq=seq)
    assert place(position, generation=6, last=20, ended=LATER) == goes_on_after


@given(st.integers(1, 999_999), st.binary(min_size=5, max_size=5))
def test_a_fence_fits_a_signed_integer_of_64_bits_in_every_generation_of_a_position(
    generation: int, raw: bytes
) -> None:
    fence = new_fence(generation, lambda _: raw)
    assert 1 << 40 <= fence < 1 << 60, "above whatever a counter gave, and within 64 bits"


def test_two_claims_of_the_same_generation_have_different_fences() -> None:
    """A store that lost a claim makes it again: the writer that was there before is refused all the same."""
    fences = {new_fence(2, secrets.token_bytes) for _ in range(1_000)}
    assert len(fences) == 1_000
    assert {fence >> 40 for fence in fences} == {2}


def test_the_name_of_a_reader_tells_when_it_came_and_other_names_do_not() -> None:
    for only_listed in (False, True):
        name = reader_name(NodeId("n-_1"), 7, 1_794_843_521.3320005, only_listed=only_listed)
        assert (reader_since(name), is_only_listed(name)) == (1_794_843_521.332, only_listed)
    assert [reader_since(name) for name in ("", "n.7", "n.7.1e9", "n.7.nan", "n.7.1.000.1")] == [None] * 5
