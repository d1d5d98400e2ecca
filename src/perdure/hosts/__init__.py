"""Writes `perdure stdio` into the configuration files of desktop hosts, and takes it out; uses `errors` and `_core`."""
