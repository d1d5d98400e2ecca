"""JSON-RPC error codes of Perdure's own that both sides of a connection know."""

OUTCOME_UNKNOWN = -31001
"""The request was interrupted and nobody can tell how far it got."""

POSITION_LOST = -31002
"""What the position, or the request, asks for is no longer retained."""

UNREACHABLE = -31020
"""The request did not reach a server within the client's limits. Made by the client, never by a server."""

NO_SERVER = -31021
"""The address, the credentials or the certificate is wrong: trying again does not help. Made by `perdure stdio`."""

TOO_MANY_AT_ONCE = -31022
"""More requests run at once than `perdure stdio` follows. Made there."""
