"""JSON-RPC error codes of Perdure's own that both sides of a connection know."""

OUTCOME_UNKNOWN = -31001
"""The request was interrupted and nobody can tell how far it got."""

POSITION_LOST = -31002
"""What the position, or the request, asks for is no longer retained."""

UNREACHABLE = -31020
"""The request did not reach a server within the client's limits. Made by the client, never by a server."""

NO_SERVER = -31021
"""The server, or the way to it, refuses: address, credentials, certificate, or it fails at a read. `data.reason` says
which; trying again at once does not help. Made by the client, never by a server."""

TOO_MANY_AT_ONCE = -31022
"""More requests run at once than `perdure stdio` follows. Made there."""
