"""The ASGI endpoint: routes, methods, refusals and event-stream responses. Uses `assembly` and what is below."""
