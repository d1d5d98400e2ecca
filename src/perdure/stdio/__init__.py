"""The bridge between a host that speaks MCP over a pipe and a session on a server."""
