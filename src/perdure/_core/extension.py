"""Names that the tasks extension and Perdure itself add to messages of revision 2026-07-28."""

from typing import Final

TASKS: Final = "io.modelcontextprotocol/tasks"
"""The extension for tasks; a client declares it in its capabilities, a server names it in `server/discover`."""

PREFIX: Final = "dev.perdure"
"""The prefix of every name that is Perdure's own."""

CALLS: Final = f"{PREFIX}/calls"
"""Perdure's extension: a call may bring a key, and is run once for it; a listener may bring a position. A client that
declares it repeats requests whose connection broke."""

KEPT: Final = "keptMs"
"""Beside `CALLS` in `server/discover`: how long the server keeps a key, from the first request that brought it."""

KEY: Final = f"{PREFIX}/key"
"""The key of a call, in `_meta`: requests with equal keys are one call."""

KEY_HEADER: Final = "Idempotency-Key"
"""The same key as an HTTP header, for gateways."""

CANCEL: Final = f"{PREFIX}/cancel"
"""The method that cancels a call by its key."""

POSITION: Final = f"{PREFIX}/position"
"""How far a listener has heard, in `_meta` of notifications and of a new `subscriptions/listen`."""
