"""`GET /metrics`, beside the endpoint: the numbers of all nodes of the store."""

from collections.abc import Mapping

from perdure._core.states import LogState, SessionState
from perdure.assembly import ServerProcess
from perdure.errors import StoreError
from perdure.http.refusals import Answer
from perdure.store.base import NodeRecord
from perdure.telemetry import prometheus as metrics

SCRAPE = "perdure.scrape"
"""In the scope of a request for the metrics that passed the endpoint's authentication."""


async def scrape(method: str, process: ServerProcess | None) -> Answer:
    """Give this node's numbers in any case; those of other nodes, and how many sessions are stored, while the store
    answers."""
    if method not in ("GET", "HEAD"):
        return Answer(status=405, headers=((b"allow", b"GET, HEAD"),))
    if process is None:
        return Answer(status=503, body=b'{"status":"starting"}')
    others: tuple[NodeRecord, ...] = ()
    stored: Mapping[SessionState, int] | None = None
    journal, store = process.context.journal, process.context.store
    if journal.state is LogState.HEALTHY:
        try:
            others = tuple(await store.nodes())
            stored = await store.count_states()
        except StoreError:
            pass  # a scrape is not what finds out that the store fails, and must not fail with it
    text = metrics.render(process.sessions.numbers(), others, process.liveness.ages(), stored=stored)
    return Answer(status=200, body=text.encode(), content_type=metrics.CONTENT_TYPE)
