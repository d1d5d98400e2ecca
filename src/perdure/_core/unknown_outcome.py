"""The error of a call that was interrupted, in the same words from servers and from clients.

Hosts show the model the message word for word and the data not at all. So the message says what the model should do,
and the data has the hint for the tool's author. The browser client has the same words
(`tests/vectors/unknown_outcome.json`).
"""

from collections.abc import Mapping, Sequence

from perdure._core.jsonrpc import JsonObject
from perdure._core.text import address

NAME_SHOWN = 100
"""Characters of a name in the message: names are a few words, and a peer may send one that hides the rest."""

HINT = (
    "After a crash Perdure runs a tool again only with the hint readOnlyHint or idempotentHint,"
    " or the meta dev.perdure/resumable."
)
SEE = address("errors", "interrupted-outcome-unknown")


Outline = Mapping[str, Sequence[str]]
"""The names of a tool's steps that have `finished`, and of those that are `open`: begun, and nobody knows the rest."""


def unknown_message(name: str, steps: Outline | None = None) -> str:
    """`name`: of the tool, or whatever else names the request."""
    parts = (
        {} if steps is None else {"Finished": steps["finished"], "Begun, but not known to have finished": steps["open"]}
    )
    known = "".join(f" {what}: {', '.join(names)}." for what, names in parts.items() if names)
    return (
        f'Interrupted, outcome unknown: the answer to "{name[:NAME_SHOWN]}" is lost, and nobody knows whether it took'
        f" effect.{known} Do not call it again before you have checked what happened;"
        " if you cannot check, ask the user."
    )


def unknown_error(method: str, name: str | None, reason: str, steps: Outline | None = None) -> tuple[str, JsonObject]:
    """The message and the data. `name`: of the tool or prompt, or the URI of the resource; `None` if the request has
    none. `reason`: part of a sentence. `steps`: of a tool that has done some."""
    named = {} if name is None else {"name": name}
    stepped = {} if steps is None else {"steps": steps}
    data = {"outcome": "unknown", "reason": reason, "method": method, **named, **stepped, "hint": HINT, "see": SEE}
    return unknown_message(method if name is None else name, steps), data
