"""Answers HTTP requests as an ASGI application: routes, methods, refusals, event streams; uses `assembly`, `cluster`,
`sessions` and the rooms below them."""

HEALTH = "/healthz"
METRICS = "/metrics"
BESIDE = {HEALTH: "the health check stands", METRICS: "the metrics stand"}
"""Paths beside the MCP endpoint."""
