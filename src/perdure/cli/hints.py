"""Hints at names that the user may have meant."""

import difflib
from collections.abc import Iterable

#: How much two names must have in common: `loavse` is `loaves`, and not `oven`.
ALIKE = 0.7


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint at names that look alike, each with the prefix; "" if there are none."""
    close = difflib.get_close_matches(name, list(known), cutoff=ALIKE)
    return f"; did you mean {' or '.join(repr(prefix + one) for one in close)}?" if close else ""
