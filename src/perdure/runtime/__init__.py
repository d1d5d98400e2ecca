"""What answers the requests of a session: the interface, and the SDK's server in this process.

Uses `telemetry` and what is below.
"""
