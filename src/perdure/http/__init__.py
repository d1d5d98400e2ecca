"""Answers HTTP requests as an ASGI application: routes, methods, refusals, event streams, tokens; uses `assembly`,
`cluster`, `sessions`, `remote` and the rooms below them."""

HEALTH = "/healthz"
UPSTREAMS = "/healthz/upstreams"
METRICS = "/metrics"
BESIDE = {
    HEALTH: "the health check stands",
    UPSTREAMS: "the health of upstreams stands",
    METRICS: "the metrics stand",
}
"""Paths beside the MCP endpoint."""
