"""Answers the requests of a session: the interface (`base`), and the SDK's server in this process (`sdk`).

Uses `telemetry` and what is below.
"""
