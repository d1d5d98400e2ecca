"""`perdure.connect`: puts `remote` below the SDK's client. Uses `remote` and what `remote` uses."""
