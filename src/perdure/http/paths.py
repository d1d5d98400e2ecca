"""Paths served beside the MCP endpoint."""

from __future__ import annotations

HEALTH = "/healthz"
"""For balancers and people."""

METRICS = "/metrics"

BESIDE = {HEALTH: "the health check stands", METRICS: "the metrics stand"}
