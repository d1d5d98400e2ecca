"""JSON-RPC error codes: JSON-RPC's, MCP's and Perdure's own, which are between -31001 and -31099.

The sentence below each code is its description in the documentation.
"""

PARSE_ERROR = -32700
"""JSON-RPC: the body is not JSON, or exceeds a limit on JSON text, such as its nesting."""

INVALID_REQUEST = -32600
"""JSON-RPC: the request cannot be served as it is; the message says why."""

METHOD_NOT_FOUND = -32601
"""JSON-RPC: there is no such method here; of a tool's call, the tool runs only as a task, or never."""

INVALID_PARAMS = -32602
"""JSON-RPC: the request's params are wrong."""

INTERNAL_ERROR = -32603
"""JSON-RPC: the request failed."""

HEADER_MISMATCH = -32020
"""MCP: a header says something else than the body."""

MISSING_CAPABILITY = -32021
"""MCP: the client does not declare a capability that the request needs; `data.requiredCapabilities` names it."""

UNSUPPORTED_VERSION = -32022
"""MCP: the protocol version is not served; `data.supported` names those that are."""

REQUEST_CANCELLED = -32800
"""The client cancelled the request. The 2025 revisions end a request's stream only with a response, so a cancelled
request gets this one, as from the SDK."""

OUTCOME_UNKNOWN = -31001
"""The request was interrupted, and the server does not know how far it got."""

POSITION_LOST = -31002
"""The server cannot read on from the position, or no longer has the request's answer."""

SESSION_NOT_FOUND = -31003
"""The caller has no such session; `data.recovery` says what to do."""

LIMIT_REACHED = -31004
"""A limit was reached; the message names it."""

STORE_UNAVAILABLE = -31005
"""The log fails at the moment; try again later."""

STOPPING = -31006
"""This process is stopping; try again, and another process or the next one answers."""

CLIENT_AWAY = -31007
"""The server gave up an ask because its client had been away for too long."""

REISSUE_FAILED = -31008
"""The session has ended, and the server's own part of a new handshake failed (`recover=reissue`)."""

KEY_TAKEN = -31009
"""The key of this call belongs to another one, which has other arguments."""

UPSTREAM_UNAVAILABLE = -31010
"""The request did not run, because the server behind the gateway is not available; `data.reason` says why."""

ANSWER_GIVEN_UP = -31011
"""The call with this key, or of this task, has ended, and its answer is not kept any more. It does not run again."""

ISSUER_UNAVAILABLE = -31012
"""The request did not run, because the keys of the authorization server cannot be read; try again later."""

UNREACHABLE = -31020
"""The request did not reach a server within the client's limits. The client makes this error, never a server."""

NO_SERVER = -31021
"""The server, or a proxy before it, refuses the request: the address, the credentials or the certificate is wrong, or
the server failed at a read. `data.reason` says which; trying again at once does not help. The client makes this error,
never a server."""

TOO_MANY_AT_ONCE = -31022
"""More requests run at once than `perdure stdio` follows. `perdure stdio` makes it."""
