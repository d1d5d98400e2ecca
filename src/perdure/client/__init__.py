"""Puts `remote` below the SDK's client (`perdure.connect`); uses `remote` and the rooms below it."""
