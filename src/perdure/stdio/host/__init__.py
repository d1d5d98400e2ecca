"""Finds out which host started the bridge. Uses `telemetry.events` and `_core`."""
