"""Runs servers that are not in this process behind the runtime's interface; uses `remote`, `runtime` and the rooms
below them."""
