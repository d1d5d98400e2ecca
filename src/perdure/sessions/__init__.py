"""One session and all of them: record, ledger, asks, home, runtime, retention.

Uses `log`, `runtime` and what is below.
"""
