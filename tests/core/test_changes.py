"""Changes as values: filters, positions, what is due to a listener, and what is kept of nodes that are gone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure._core import changes
from perdure._core.changes import (
    EVERYTHING,
    KEPT_STREAMS,
    MAX_NAMED,
    MAX_URI,
    MAX_URIS,
    UPDATED,
    BadFilter,
    BadPosition,
    Change,
    ChangeFilter,
    ChangesPosition,
    DueChanges,
    EndedStream,
    WantedUris,
    decode_event,
    decode_wanted,
    encode_change,
    encode_state,
    heard_since,
    is_end,
    read_filter,
    read_position,
    streams_to_drop,
)
from perdure._core.extension import POSITION
from perdure._core.ids import StreamId

TOOLS = Change("notifications/tools/list_changed")
PROMPTS = Change("notifications/prompts/list_changed")
A, B = Change(UPDATED, "board://a"), Change(UPDATED, "board://b")
ONE, TWO = StreamId("1" * 22), StreamId("2" * 22)


def test_a_filter_admits_what_it_names_and_nothing_else() -> None:
    wanted = read_filter(
        {"toolsListChanged": True, "promptsListChanged": False, "resourceSubscriptions": ["board://a"]}
    )
    assert [change for change in (TOOLS, PROMPTS, A, B) if wanted.admits(change)] == [TOOLS, A]
    assert wanted.items() == [TOOLS, A]
    assert wanted.wire == {"toolsListChanged": True, "resourceSubscriptions": ["board://a"]}


def test_a_resource_stands_for_those_below_it() -> None:
    """The revision lets a server name a part of what was subscribed to."""
    wanted = read_filter({"resourceSubscriptions": ["file:///shop", "file:///attic/"]})
    told = ["file:///shop/bread", "file:///shop/bread/dark", "file:///attic/box", "file:///shopping", "file:///attics"]
    assert [uri for uri in told if wanted.admits(Change(UPDATED, uri))] == told[:3]


def test_a_filter_names_no_more_and_no_longer_resources_than_it_may() -> None:
    most = [f"board://{n}" for n in range(MAX_URIS)]
    assert len(read_filter({"resourceSubscriptions": most}).uris) == MAX_URIS
    with pytest.raises(BadFilter, match="names 1001 resources; a listener may name 1000"):
        read_filter({"resourceSubscriptions": [*most, "board://more"]})
    assert read_filter({"resourceSubscriptions": ["b" * MAX_URI] * 2}).uris == {"b" * MAX_URI: None}
    with pytest.raises(BadFilter, match="a URI of 2049 characters; 2048 are allowed"):
        read_filter({"resourceSubscriptions": ["b" * (MAX_URI + 1)]})


def test_a_position_reads_as_it_was_written() -> None:
    position = ChangesPosition(time=1794830400.25, seqs={ONE: 12, TWO: 0})
    assert read_position(json.loads(json.dumps(position.wire))) == position


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("1", "an object with `time` and `nodes`"),
        ({"time": 1.0}, "an object with `time` and `nodes`"),
        ({"time": 1.0, "nodes": {}, "more": 1}, "an object with `time` and `nodes`"),
        ({"time": "1", "nodes": {}}, "`time` must be a number"),
        ({"time": True, "nodes": {}}, "`time` must be a number"),
        ({"time": float("nan"), "nodes": {}}, "`time` must be a number"),
        ({"time": 10**400, "nodes": {}}, "`time` must be a number"),
        ({"time": 1.0, "nodes": []}, "`nodes` must be an object"),
        ({"time": 1.0, "nodes": {"short": 1}}, "a name that is not one of Perdure's"),
        ({"time": 1.0, "nodes": {ONE: -1}}, "not a number of an event"),
        ({"time": 1.0, "nodes": {ONE: 1.5}}, "not a number of an event"),
        ({"time": 1.0, "nodes": {ONE: True}}, "not a number of an event"),
        ({"time": 1.0, "nodes": {ONE: 1 << 60}}, "not a number of an event"),
        ({"time": 1.0, "nodes": {f"{n:022d}": 1 for n in range(MAX_NAMED + 1)}}, "1001 streams; 1000 are allowed"),
    ],
)
def test_what_is_no_position_is_refused_with_the_reason(raw: Any, reason: str) -> None:
    with pytest.raises(BadPosition, match=reason):
        read_position(raw)


def test_a_position_names_as_many_streams_as_it_may() -> None:
    nodes = {f"{n:022d}": 1 for n in range(MAX_NAMED)}
    assert len(read_position({"time": 0, "nodes": nodes}).seqs) == MAX_NAMED


def test_changes_read_from_the_log_as_they_were_written() -> None:
    assert [decode_event(encode_change(change)) for change in (TOOLS, A, EVERYTHING)] == [TOOLS, A, EVERYTHING]
    assert [decode_event(encode_state(state)) for state in ("left", "died", "unsure")] == [None, EVERYTHING, EVERYTHING]
    assert [is_end(encode_state(state)) for state in ("left", "died", "unsure")] == [True, True, False]
    assert not is_end(encode_change(A))
    assert decode_event(b'{"jsonrpc":"2.0","method":"notifications/of/tomorrow"}') is None


def due(*items: Change) -> DueChanges:
    uris = dict.fromkeys(item.uri for item in items if item.uri)
    methods = frozenset(item.method for item in items if not item.uri)
    return DueChanges(ChangeFilter(methods=methods, uris=uris), ChangesPosition(time=1.0, seqs={ONE: 1}))


def test_each_item_is_due_once_however_often_it_changed() -> None:
    one = due(TOOLS, A)
    assert [one.add(change) for change in (A, TOOLS, A, B, A)] == [True, True, True, False, True]
    now = ChangesPosition(time=2.0, seqs={ONE: 6})
    assert [(told.method, told.params) for told in one.take(now)] == [(UPDATED, {"uri": A.uri}), (TOOLS.method, {})]
    assert one.is_empty


def test_of_cues_that_are_sent_together_only_the_last_carries_the_new_position() -> None:
    """A client that was cut off among them asks for the others again."""
    one, now = due(TOOLS, A, B), ChangesPosition(time=2.0, seqs={ONE: 6})
    for change in (A, B, TOOLS):
        one.add(change)
    before = ChangesPosition(time=1.0, seqs={ONE: 1}).wire
    assert [told.meta[POSITION] for told in one.take(now)] == [before, before, now.wire]
    one.add(A)
    assert [told.meta[POSITION] for told in one.take(ChangesPosition(time=3.0))] == [{"time": 3.0, "nodes": {}}]


def test_where_anything_may_have_changed_every_item_is_due() -> None:
    one = due(TOOLS, A, B)
    assert one.add(EVERYTHING)
    assert [told.params.get("uri") for told in one.take(one.sent)] == [None, A.uri, B.uri]
    assert not due().add(EVERYTHING)


def test_a_gap_is_told_in_front_of_a_cue_for_every_item() -> None:
    one = due(TOOLS)
    one.add_gap("it is too old")
    gap, cue = one.take(ChangesPosition(time=2.0))
    assert (gap.method, gap.params) == ("notifications/perdure/gap", {"stream": "changes", "reason": "it is too old"})
    assert cue.method == TOOLS.method
    assert one.is_empty


def test_what_is_due_does_not_grow_beyond_the_filter() -> None:
    """A server may name any number of resources below the one that was named."""
    one = due(Change(UPDATED, "board://a"))
    for n in range(3 * MAX_URIS):
        one.add(Change(UPDATED, f"board://a/{n}"))
    assert len(one.take(one.sent)) <= MAX_URIS + 3


def test_streams_of_nodes_that_are_gone_are_kept_for_their_time_and_up_to_a_number() -> None:
    def ended(count: int, since: float) -> list[EndedStream]:
        return [EndedStream(StreamId(f"{since}-{n}"), since + n) for n in range(count)]

    assert streams_to_drop(ended(KEPT_STREAMS, 900.0), now=1000.0, ttl=100.0)[0] == []
    dropped, floor = streams_to_drop(ended(KEPT_STREAMS, 890.0), now=1000.0, ttl=100.0)
    assert (len(dropped), floor) == (10, 899.0 + changes.CLOCK_SLACK)
    dropped, floor = streams_to_drop(ended(KEPT_STREAMS + 2, 950.0), now=1000.0, ttl=100.0)
    assert (dropped, floor) == (["950.0-0", "950.0-1"], 951.0 + changes.CLOCK_SLACK)


def test_a_resource_is_heard_of_since_the_first_node_that_wants_it_does() -> None:
    rows = [WantedUris(uris=("a", "b"), since=3.0), WantedUris(uris=("b", "c"), since=2.0)]
    assert heard_since(decode_wanted(row.encode()) for row in rows) == {"a": 3.0, "b": 2.0, "c": 2.0}
