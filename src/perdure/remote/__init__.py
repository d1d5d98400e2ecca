"""Talks to one session on a server as its client: send, follow, resume, renew, remember; uses `telemetry.log_records`,
`_files`, `errors` and `_core`, and no SDK."""
