"""Streams of events, and the readers that deliver them. Uses `telemetry`, `store` and what is below."""
