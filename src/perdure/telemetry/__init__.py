"""Reports to operators by log records, counters, Prometheus metrics and spans; uses `store`, `settings`, `errors` and
`_core`."""
