"""Real hosts against a real server (`make hosts`): hosts at pinned versions, with a faked model.

`run` plays the `scenarios` with each of the `hosts`, and writes what was seen to `results`, from which
`scripts/make_docs.py` makes the table in `docs/clients.md`. Only `test_parts` belongs to `make test`, because the hosts
take hundreds of megabytes and many minutes.
"""
