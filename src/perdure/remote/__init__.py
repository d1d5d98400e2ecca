"""One session on a server, seen from a client: send, follow, resume, renew, remember.

Uses `telemetry.events`, `_files`, `errors` and `_core`; no SDK.
"""
