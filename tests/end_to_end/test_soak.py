"""A quarter of a minute of `tests/soak.py`: two servers, kills, cuts and moves (promises 1, 2, 3; H1, R4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import FAULTS, Soak, tell

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

SECONDS = 15.0
#: Seconds from one kill to the next: as many deaths as in two thirds of a minute at the pace of the long soak.
BETWEEN_KILLS = (0.2, 1.4)
SEED = 20_251_125


async def test_servers_that_die_under_load_lose_nothing(tmp_path: Path) -> None:
    report = await Soak(tmp_path, seconds=SECONDS, seed=SEED, clients=10, between=BETWEEN_KILLS).run()
    print(tell(report, SEED))
    assert report.faults == [], tell(report, SEED)
    assert {name: report.counts[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
    # A soak in which nothing happened would prove nothing.
    for name in ("calls accepted", "kills", "resumes", "asks answered", "runs again", "unknown outcomes told"):
        assert report.counts[name] > 0, name
