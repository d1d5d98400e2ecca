"""Log records with an action, counters, Prometheus metrics and spans.

Uses `store`, `settings`, `errors` and `_core`.
"""
