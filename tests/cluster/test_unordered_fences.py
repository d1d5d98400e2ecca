"""Two nodes on a store whose fences have no order: the stories of other files, told again (promise 6 of a store)."""

# ruff: noqa: F401

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from perdure._core.ids import NodeId
from perdure.store.steps import OpenStream, PutSession
from perdure.testing._values import a_session, a_stream
from tests.cluster.conftest import Start
from tests.cluster.scrambled_fences import ScrambledFences
from tests.cluster.test_order import test_a_home_that_moves_while_tools_speak_changes_nothing_in_their_order
from tests.cluster.test_reattach_elsewhere import (
    test_a_session_at_rest_is_loaded_elsewhere_with_its_sticky_requests_once,
    test_an_ask_of_one_node_is_asked_again_and_answered_through_the_other,
)
from tests.cluster.test_two_nodes import (
    test_a_call_is_resumed_live_through_the_other_node,
    test_the_newest_reader_wins_wherever_it_is,
    test_what_a_call_sends_to_the_standalone_stream_reaches_it_from_any_node,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:
        yield Start(stack, tmp_path, ScrambledFences)


async def test_the_fences_of_this_store_have_no_order(tmp_path: Path) -> None:
    """Otherwise the stories above would prove nothing."""
    node = NodeId("node")
    async with ScrambledFences(str(tmp_path / "log.db")) as store:
        fences = [await store.join(node)]
        record = a_stream(fences[0])
        await store.commit([PutSession(record=a_session()), OpenStream(record=record)])
        for _ in range(30):
            claimed = await store.claim(record.id, node=node, held=fences[-1])
            assert claimed is not None
            fences.append(claimed.fence)
        assert fences != sorted(fences)
        await store.leave(node)
