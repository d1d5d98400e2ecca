"""Answers HTTP requests as an ASGI application: routes, methods, refusals, event streams; uses `assembly`, `cluster`,
`sessions` and the rooms below them."""
