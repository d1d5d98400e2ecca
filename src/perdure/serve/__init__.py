"""The serving processes: uvicorn, the listening socket, workers, the target and the token file.

Uses `http` and what is below.
"""
