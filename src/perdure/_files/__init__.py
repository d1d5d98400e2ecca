"""Locks files, and keeps files that are private to one user. Uses `_core` and `errors`."""
