"""What a subscription hands on and when it listens again, by vectors that the browser's client is tested with too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure._core.listening import Subscription

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
