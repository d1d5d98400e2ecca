"""Keeps sessions: record, ledger, asks, home, the way to the runtime, retention, resume broker; uses `log`, `runtime`
and the rooms below them."""
