"""Runs the serving processes: uvicorn, the listening socket, workers, the target and the token file; uses `http` and
the rooms below it."""
