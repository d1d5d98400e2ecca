"""Which requests may be sent twice: one list for the server, the Python clients and the browser's (H8)."""

from __future__ import annotations

import json
from pathlib import Path

from perdure._core.settling import READS
from perdure._core.sticky import METHODS as STICKY

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "methods.json").read_text())


def test_requests_that_may_be_sent_twice_are_those_of_the_shared_list() -> None:
    assert sorted(READS | STICKY) == VECTORS["repeatable"]
    assert not set(VECTORS["once"]) & (READS | STICKY)
