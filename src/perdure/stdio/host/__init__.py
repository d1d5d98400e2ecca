"""Finds out which host started the bridge; uses `telemetry.events` and `_core`."""
