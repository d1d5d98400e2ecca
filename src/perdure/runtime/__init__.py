"""Answers the requests of a session: the interface, and the SDK's server in this process; uses `telemetry` and the
rooms below it."""
