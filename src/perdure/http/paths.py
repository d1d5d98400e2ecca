"""Paths served beside the MCP endpoint."""

HEALTH = "/healthz"
"""For balancers and people."""

METRICS = "/metrics"

BESIDE = {HEALTH: "the health check stands", METRICS: "the metrics stand"}
