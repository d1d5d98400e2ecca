"""Locks files and keeps files private to one user; uses `errors` and `_core`."""
