"""Connects `remote` with the pipes of a desktop host (`perdure stdio`); uses `remote` and the rooms below it."""
