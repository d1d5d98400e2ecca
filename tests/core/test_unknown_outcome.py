"""The error of an interrupted call: the words that the browser client has as well."""

import json
from pathlib import Path

import pytest

from perdure._core.unknown_outcome import NAME_SHOWN, unknown_error, unknown_message

VECTORS = json.loads((Path(__file__).parents[1] / "vectors/unknown_outcome.json").read_text())


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["is"])
def test_the_error_has_the_shared_words(vector: dict[str, object]) -> None:
    error = {"message": vector["message"], "data": vector["data"]}
    params = vector["params"]
    assert isinstance(params, dict)
    message, data = unknown_error(str(vector["method"]), params.get("name", params.get("uri")), str(vector["reason"]))
    assert {"message": message, "data": data} == error


def test_a_name_is_shown_up_to_its_limit() -> None:
    assert f'"{"x" * NAME_SHOWN}" is lost' in unknown_message("x" * NAME_SHOWN)
    assert unknown_message("x" * NAME_SHOWN) == unknown_message("x" * (NAME_SHOWN + 1))


def test_the_steps_of_a_tool_are_in_the_message_and_in_the_data() -> None:
    steps = {"finished": ["price", "mail"], "open": ["charge"]}
    message, data = unknown_error("tools/call", "order", "its process died", steps)
    assert "effect. Finished: price, mail. Begun, but not known to have finished: charge. Do not call it" in message
    assert data["steps"] == steps
    assert "finished" not in unknown_message("order", {"finished": [], "open": []}).lower()
