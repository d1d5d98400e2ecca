"""An operator migrates a schema, and sees which nodes live."""

from __future__ import annotations

import pytest

from perdure._core.ids import NodeId
from perdure.errors import StoreError
from perdure.store import existing_store, maintenance_of, open_store
from perdure.store.postgres import layout
from perdure.store.postgres.maintenance import RECENTLY
from perdure.store.postgres.wakeups import MANY_NODES
from perdure.testing._values import NODE, OTHER
from tests.support.stores.postgres import connection, new_schema, store_url

pytestmark = pytest.mark.anyio


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release with one more migration."""
    migration = layout.migration

    def with_another(version: int, schema: str) -> str:
        if version < layout.VERSION:
            return migration(version, schema)
        return f"CREATE TABLE {schema}.more (a int); UPDATE {schema}.version SET version = {version};"

    monkeypatch.setattr(layout, "migration", with_another)
    monkeypatch.setattr(layout, "VERSION", layout.VERSION + 1)


OLD = layout.VERSION


async def test_an_older_schema_is_told_printed_and_migrated(request: pytest.FixtureRequest) -> None:
    schema = new_schema()
    url = store_url(schema)
    await maintenance_of(url).make(grant=None)
    request.getfixturevalue("next_release")
    maintenance = maintenance_of(url)
    assert (await maintenance.version(), maintenance.latest) == (OLD, OLD + 1)
    [problem] = [fact.problem for fact in await maintenance.check() if fact.problem]
    assert problem == f"it is older: `perdure store migrate` brings it to version {OLD + 1}"
    with pytest.raises(StoreError, match=f"has version {OLD}, written by an older release.*`perdure store migrate`"):
        await existing_store(url, writes=False).open()
    script = maintenance.script(OLD, grant=None)
    assert f"CREATE TABLE {schema}.more" in script
    assert f"CREATE TABLE {schema}.session" not in script
    await maintenance.make(grant=None)
    assert await maintenance.version() == OLD + 1
    assert not any(fact.problem for fact in await maintenance.check())


async def test_a_role_that_may_not_migrate_is_told_the_command(request: pytest.FixtureRequest) -> None:
    schema = new_schema()
    url, role = store_url(schema), f"r_{schema}"
    with connection(url) as run:
        run(f"CREATE ROLE {role} LOGIN")
    await maintenance_of(url).make(grant=role)
    request.getfixturevalue("next_release")
    of_role = f"postgresql://{role}@{url.partition('@')[2]}"
    with pytest.raises(StoreError, match=f"may not migrate the schema {schema}.*run `perdure store migrate`"):
        await open_store(of_role).open()
    assert await maintenance_of(of_role).version() == OLD


async def test_a_node_lives_while_its_lock_is_held(request: pytest.FixtureRequest) -> None:
    url = store_url()
    maintenance = maintenance_of(url)
    async with open_store(url) as store:
        await store.join(NODE)
        await store.join(OTHER)
        await store.leave(OTHER)
        assert list(await maintenance.living()) == [NODE]
    assert list(await maintenance.living()) == []


@pytest.mark.parametrize(("seconds", "lives"), [(RECENTLY - 20, True), (RECENTLY + 1, False)])
async def test_a_node_without_a_lock_lives_if_it_showed_a_beat_lately(seconds: float, lives: bool) -> None:
    schema = new_schema()
    url = store_url(schema)
    async with open_store(url) as store:
        await store.join(NODE)
        with connection(url) as run:
            run(f"UPDATE {schema}.node SET lock = NULL, seen = clock_timestamp() - make_interval(secs => $1)", seconds)
        assert list(await maintenance_of(url).living()) == ([NODE] if lives else [])


@pytest.mark.parametrize(("count", "wakeups"), [(MANY_NODES, "notifications"), (MANY_NODES + 1, "polling")])
async def test_servers_poll_where_there_are_many_nodes(count: int, wakeups: str) -> None:
    url = store_url()
    async with open_store(url) as store:
        for number in range(count):
            await store.join(NodeId(f"node-{number}"))
        facts = {fact.name: fact for fact in await maintenance_of(url).check()}
        assert facts["wakeups"].value == wakeups
        assert facts["nodes"].says == f"{count} live, 0 dead"
