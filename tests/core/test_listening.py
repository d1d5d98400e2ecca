"""Listening: what is due to a listener; what a client hands on, by vectors that the browser's client runs too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure._core import mail
from perdure._core.ids import NodeId
from perdure._core.listening import (
    ALL_RESOURCES,
    MAX_URI,
    MAX_URIS,
    UPDATED,
    BadFilter,
    Change,
    ChangeFilter,
    DueChanges,
    Subscription,
    change_of,
    read_filter,
)

TOOLS = Change("notifications/tools/list_changed")
PROMPTS = Change("notifications/prompts/list_changed")
A, B = Change(UPDATED, "note://a"), Change(UPDATED, "note://b")


def test_a_filter_admits_what_it_names_and_nothing_else() -> None:
    wanted = read_filter({"toolsListChanged": True, "promptsListChanged": False, "resourceSubscriptions": ["note://a"]})
    assert [change for change in (TOOLS, PROMPTS, A, B) if wanted.admits(change)] == [TOOLS, A]
    assert wanted.wire == {"toolsListChanged": True, "resourceSubscriptions": ["note://a"]}


def test_a_resource_stands_for_those_below_it() -> None:
    """The revision lets a server name a part of what was subscribed to."""
    wanted = read_filter({"resourceSubscriptions": ["file:///shop", "file:///attic/"]})
    told = ["file:///shop/bread", "file:///shop/bread/dark", "file:///attic/box", "file:///shopping", "file:///attics"]
    assert [uri for uri in told if wanted.admits(Change(UPDATED, uri))] == told[:3]


def test_a_filter_names_no_more_and_no_longer_resources_than_it_may() -> None:
    most = [f"note://{n}" for n in range(MAX_URIS)]
    assert len(read_filter({"resourceSubscriptions": most}).uris) == MAX_URIS
    with pytest.raises(BadFilter, match="names 1001 resources; a listener may name 1000"):
        read_filter({"resourceSubscriptions": [*most, "note://more"]})
    assert read_filter({"resourceSubscriptions": ["b" * MAX_URI] * 2}).uris == {"b" * MAX_URI: None}
    with pytest.raises(BadFilter, match="a URI of 2049 characters; 2048 are allowed"):
        read_filter({"resourceSubscriptions": ["b" * (MAX_URI + 1)]})


@pytest.mark.parametrize(
    ("method", "params", "change"),
    [
        (TOOLS.method, None, TOOLS),
        (UPDATED, {"uri": "note://a"}, A),
        (UPDATED, {"uri": 1}, None),
        (UPDATED, {"uri": ""}, None),
        (UPDATED, None, None),
        ("notifications/message", {"level": "info"}, None),
    ],
)
def test_a_notification_reports_a_change_or_none(
    method: str, params: dict[str, object] | None, change: Change | None
) -> None:
    assert change_of(method, params) == change


def test_changes_read_from_mail_as_they_were_written() -> None:
    sent: list[mail.Message] = [
        mail.Changed(changes=[list(TOOLS), list(A)]),
        mail.Announced(node=NodeId("n"), number=3, uris=["note://a"], adds=True, has_more=False),
        mail.Unheard(),
    ]
    assert [mail.decode(mail.encode(message)) for message in sent] == sent


def due(*items: Change) -> DueChanges:
    uris = dict.fromkeys(item.uri for item in items if item.uri)
    methods = frozenset(item.method for item in items if not item.uri)
    return DueChanges(ChangeFilter(methods=methods, uris=uris))


def test_each_item_is_due_once_however_often_it_changed() -> None:
    one = due(TOOLS, A)
    assert [one.add(change) for change in (A, TOOLS, A, B, A)] == [True, True, True, False, True]
    assert list(one.take()) == [(UPDATED, {"uri": A.uri}), (TOOLS.method, {})]
    assert list(one.take()) == []


def test_where_any_resource_may_have_changed_every_one_is_due() -> None:
    one = due(TOOLS, A, B)
    assert one.add(ALL_RESOURCES)
    assert [told.params.get("uri") for told in one.take()] == [A.uri, B.uri]
    assert not due(TOOLS).add(ALL_RESOURCES)


def test_what_is_due_does_not_grow_beyond_the_filter() -> None:
    """A server may name any number of resources below the one that was named."""
    one = due(TOOLS, A)
    one.add(TOOLS)
    for n in range(3 * MAX_URIS):
        one.add(Change(UPDATED, f"note://a/{n}"))
    told = one.take()
    assert len(told) <= MAX_URIS + 3
    assert told[0].method == TOOLS.method


VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "listening.json").read_text())["stories"]


@pytest.mark.parametrize("story", VECTORS, ids=lambda story: story["name"])
def test_story(story: dict[str, Any]) -> None:
    subscription: Subscription | None = Subscription()
    for step in story["steps"]:
        assert subscription is not None, "it has ended"
        if "hear" in step:
            subscription, hands_on, cues = subscription.heard(step["hear"], step["params"])
            assert (hands_on, [list(cue) for cue in cues]) == (step["hand_on"], step["cues"])
        else:
            subscription = subscription.ended(is_error=step["end"] == "error")
            assert (None if subscription is None else subscription.barren) == step.get("listens_again")
