"""What all sessions of one process share."""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mcp.server.lowlevel.server import Server

from perdure._core.ids import Fence, NodeId, RandomBytes
from perdure._core.retention import Limits
from perdure.hub import Hub
from perdure.journal import Journal
from perdure.observe import Counters
from perdure.settings import Settings
from perdure.store.base import Store, StreamRecord
from perdure.streams import Stream


@dataclass(frozen=True, kw_only=True)
class House:
    """The parts of a running server."""

    server: Server[Any]
    lifespan_state: object
    store: Store
    journal: Journal
    hub: Hub
    settings: Settings
    counters: Counters
    node: NodeId
    fence: Fence
    clock: Callable[[], float]
    random: RandomBytes
    ask_ids: itertools.count[int]
    context: contextvars.Context
    """The context of the start, in which runtimes run: not that of whichever request loads them."""
    limits: Limits

    def stream(self, record: StreamRecord, *, owed: int = 0) -> Stream:
        return Stream(record, self.journal, clock=self.clock, limit=self.settings.max_stream_events, owed=owed)
