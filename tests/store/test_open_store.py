"""The store that an address names."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.errors import BadSetting
from perdure.store import MemoryStore, SqliteStore, open_store, own_store
from perdure.store.postgres.address import parse_address
from perdure.store.steps import PutSession
from perdure.testing._values import NODE, SESSION, a_session, put

pytestmark = pytest.mark.anyio


def test_memory_is_a_store_in_memory() -> None:
    assert isinstance(open_store("memory:"), MemoryStore)


@pytest.mark.parametrize("option", ["", "?sync=normal", "?sync=full"])
async def test_sqlite_names_a_file(tmp_path: Path, option: str) -> None:
    path = tmp_path / "a b.db"
    store = open_store(f"sqlite:{path}{option}")
    assert isinstance(store, SqliteStore)
    async with store:
        await put(store, PutSession(record=a_session()))
    async with open_store(f"sqlite:{path}") as store:
        assert await store.session(SESSION) == a_session()


async def test_with_full_sync_nothing_is_committed_in_the_event_loop(tmp_path: Path) -> None:
    for sync, inline in (("normal", True), ("full", False)):
        async with open_store(f"sqlite:{tmp_path / sync}?sync={sync}") as store:
            await store.join(NODE)
            assert (store.commit_now([PutSession(record=a_session())]) is not None) == inline


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("", "allowed: memory:"),
        ("memory", "allowed: memory:"),
        ("mysql://here", "allowed: memory:"),
        ("log.db", "allowed: memory:"),
        ("memory:x", "nothing may follow the colon"),
        ("sqlite:", "without the path of a file"),
        ("sqlite:?sync=full", "without the path of a file"),
        ("sqlite::memory:", "say memory:"),
        ("sqlite:a\0b", "without the path of a file"),
        ("sqlite:log.db?sync=off", "allowed: normal or full"),
        ("sqlite:log.db?sync=", "allowed: normal or full"),
        ("sqlite:log.db?mode=ro", "unknown option 'mode'"),
    ],
)
def test_an_address_that_names_no_store_is_refused_in_one_sentence(url: str, hint: str) -> None:
    with pytest.raises(BadSetting) as caught:
        open_store(url)
    assert hint in str(caught.value)
    assert repr(url) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("memory:", "memory:"),
        ("sqlite:perdure.db", "sqlite:perdure.files.db"),
        ("sqlite:/var/lib/a.b/log?sync=full", "sqlite:/var/lib/a.b/log.files?sync=full"),
        ("postgresql://u:p%40@h/d", "postgresql://u:p%40@h/d?schema=perdure_files"),
        ("postgresql://u@h/d?schema=shop&sslmode=require", "postgresql://u@h/d?sslmode=require&schema=shop_files"),
    ],
)
def test_one_of_several_servers_has_a_store_of_its_own(url: str, own: str) -> None:
    assert own_store(url, "files") == own


def test_schemas_of_different_names_differ_and_are_allowed() -> None:
    names = ("git-hub", "git_hub", "Git_hub", "git.hub", "x" * 64, "x" * 63 + "y")
    schemas = [parse_address(own_store("postgresql://h/d", name)).schema for name in names]
    assert len(set(schemas)) == len(names)
    assert schemas[1] == "perdure_git_hub"
    assert schemas[0].startswith("perdure_git_hub_")


def test_a_bad_address_is_refused_before_it_is_changed() -> None:
    for url in ("log.db", "sqlite:", "sqlite::memory:", "memory:x"):
        with pytest.raises(BadSetting):
            own_store(url, "files")
