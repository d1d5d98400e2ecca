"""Names the keys of a ring by the time in which each seals.

All processes that share a store, and so its clock and its secrets, have the same keys without a word to each other. A
key is made one life before it seals, so every process that reads the secrets now and then has it when it meets it.
"""

from typing import NamedTuple

LIFE = 30 * 86_400.0
"""Seconds for which a key seals: it is in few hands and seals little, and a ring of three is all that is kept in
memory. What was sealed lives for minutes (the SDK's default is ten)."""


class Ring(NamedTuple):
    """The names of the keys that count at a moment."""

    present: str
    previous: str
    next: str


def ring(name: str, *, now: float) -> Ring:
    """The keys of a ring, at a time in seconds since 1970."""
    number = int(now // LIFE)
    return Ring(f"{name}-{number}", f"{name}-{number - 1}", f"{name}-{number + 1}")
