"""Appends events to streams and delivers them to readers at any node; uses `telemetry`, `store` and the rooms below
them."""
