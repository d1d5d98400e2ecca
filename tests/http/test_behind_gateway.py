"""The test server behind a gateway over stdio: some stories of other files, which must not notice.

PERDURE_TEST_SERVER=stdio tells them all there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.http import only_in_process
from tests.http.test_asks import test_an_ask_is_replayed_to_a_client_that_comes_back
from tests.http.test_calls import test_errors_come_over_the_stream_too
from tests.http.test_cancel import test_a_call_that_waits_for_its_client_is_cancelled_too
from tests.http.test_ids import test_what_is_no_token_brings_no_progress_and_no_harm
from tests.http.test_resume import test_three_seen_three_while_away_one_live
from tests.http.test_sessions import test_delete_ends_readers_and_answers_running_calls
from tests.support.servers.behind_gateway import IS_EVERYWHERE
from tests.support.servers.in_process import Site, serve
from tests.support.servers.tool_server import ToolServer

__all__ = [
    "test_a_call_that_waits_for_its_client_is_cancelled_too",
    "test_an_ask_is_replayed_to_a_client_that_comes_back",
    "test_delete_ends_readers_and_answers_running_calls",
    "test_errors_come_over_the_stream_too",
    "test_three_seen_three_while_away_one_live",
    "test_what_is_no_token_brings_no_progress_and_no_harm",
]

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(IS_EVERYWHERE, reason="all stories are told there anyway")]


@pytest.fixture
async def site(shop: ToolServer) -> AsyncIterator[Site]:
    async with serve(shop.server, behind_gateway=True) as site:
        yield site


def test_each_story_that_is_left_out_exists() -> None:
    told = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in only_in_process.ONLY_IN_PROCESS if f"def {name}(" not in told] == []
