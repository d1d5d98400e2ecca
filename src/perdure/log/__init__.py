"""Appends events to streams and delivers them to readers; uses `telemetry`, `store` and the rooms below them."""
