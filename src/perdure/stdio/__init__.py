"""`perdure stdio`: puts `remote` behind the pipes of a desktop host. Uses `remote` and what `remote` uses."""
