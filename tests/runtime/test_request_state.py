"""Request state is sealed with keys that all processes share, and with the key of the time."""

from __future__ import annotations

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.server.request_state import InvalidRequestState

from perdure.errors import Misuse, StoreError
from perdure.runtime.request_state import KEYS, LIFE, SharedKeys, given_keys, ring, share_request_state
from perdure.store.memory import MemoryStore
from tests.support.stores.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.anyio


async def loaded(store: MemoryStore, now: float) -> SharedKeys:
    keys = SharedKeys()
    await keys.load(store, lambda: now)
    return keys


async def test_what_one_process_seals_another_one_reads() -> None:
    store = MemoryStore()
    first, second = await loaded(store, 0.0), await loaded(store, 0.0)
    assert second.unseal(first.seal(b"state")) == b"state"


async def test_a_process_that_has_not_looked_since_the_key_changed_reads_what_the_new_one_sealed() -> None:
    store, turn = MemoryStore(), 1_000 * LIFE
    late = await loaded(store, turn - 60)
    assert late.unseal((await loaded(store, turn)).seal(b"state")) == b"state"


async def test_what_was_sealed_before_a_change_of_keys_is_read_after_it_and_not_for_ever() -> None:
    store, turn = MemoryStore(), 1_000 * LIFE
    token = (await loaded(store, turn - 1)).seal(b"state")
    assert (await loaded(store, turn + LIFE - 1)).unseal(token) == b"state"
    with pytest.raises(InvalidRequestState):
        (await loaded(store, turn + LIFE)).unseal(token)


async def test_keys_of_another_store_do_not_read_it() -> None:
    token = (await loaded(MemoryStore(), 0.0)).seal(b"state")
    with pytest.raises(InvalidRequestState):
        (await loaded(MemoryStore(), 0.0)).unseal(token)


def test_keys_of_the_operator_are_used_in_place_of_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS, f"{'n' * 32}, {'o' * 32}")
    assert given_keys() == ["n" * 32, "o" * 32]
    server = MCPServer("bakery")
    server.streamable_http_app()
    assert share_request_state(server.session_manager.app) is None


@pytest.mark.parametrize(("keys", "why"), [("short", "at least 32 bytes"), (f"{'k' * 32},{'k' * 32}", "duplicates")])
def test_keys_that_cannot_be_used_are_refused_with_the_reason(
    keys: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS, keys)
    with pytest.raises(Misuse, match=f"{KEYS} cannot be used: .*{why}"):
        given_keys()


async def test_a_store_that_fails_leaves_the_keys_as_they_are() -> None:
    store = FaultyStore(MemoryStore())
    keys = SharedKeys()
    await keys.load(store, lambda: 0.0)
    token = keys.seal(b"state")
    store.reads = Fault.RAISES
    with pytest.raises(StoreError):
        await keys.load(store, lambda: 0.0)
    assert keys.unseal(token) == b"state"


def test_the_next_key_is_known_for_a_whole_life_before_it_seals() -> None:
    now = 1_000 * LIFE
    assert ring(now - 1)[2] == ring(now)[0] == ring(now + LIFE)[1]


def test_a_key_seals_from_its_first_moment_to_its_last() -> None:
    assert len({ring(1_000 * LIFE + second)[0] for second in (0.0, 1.0, LIFE - 1)}) == 1
    assert ring(1_001 * LIFE)[0] != ring(1_001 * LIFE - 1)[0]
