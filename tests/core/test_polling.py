"""What a client does after each poll of a task, by vectors that the browser's client is tested with as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure._core.polling import GONE, Next, after_poll, pause

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "polling.json").read_text())["polls"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_poll(vector: dict[str, Any]) -> None:
    found = after_poll(vector["answer"], answered=vector.get("answered", ()), took=vector.get("took", 0.0))
    assert (found.next.name.lower(), found.value, found.progress) == (
        vector["next"],
        vector.get("value"),
        vector.get("progress"),
    )
    assert found.pause == pytest.approx(vector.get("pause", 0.0))
    assert bool(found.reason) == (found.next in (Next.RETRY, Next.UNKNOWN))


def test_the_vectors_have_every_step_and_every_code_after_which_a_task_is_gone() -> None:
    assert {vector["next"] for vector in VECTORS} == {step.name.lower() for step in Next}
    codes = {vector["answer"]["error"]["code"] for vector in VECTORS if "error" in vector["answer"]}
    assert codes >= GONE


def test_a_pause_that_json_cannot_say_is_the_usual_one() -> None:
    assert pause(float("nan"), took=0.0) == 1.0
