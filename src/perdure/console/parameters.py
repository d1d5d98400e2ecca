"""Reads the parameters of the console's requests; a bad one is refused with a sentence that says what is allowed."""

import math
from collections.abc import Mapping

from perdure._core.states import CallState, SessionState
from perdure._core.text import printable
from perdure.admin.queries import EntryKind
from perdure.console.session_index import DEFAULT_PAGE, MAX_PAGE, Wanted
from perdure.errors import Misuse

MAX_TEXT = 200
"""Characters of a value: names of owners and tools are shorter, and so are ids."""

_STATES: dict[str, SessionState | CallState] = {state.value: state for state in (*SessionState, *CallState)}
_KINDS = {kind.value: kind for kind in EntryKind}
_LIST = frozenset({"kind", "state", "owner", "tool", "active_after", "active_before", "cursor", "limit", "q"})


def refuse_unknown(query: Mapping[str, str], known: frozenset[str]) -> None:
    for name, value in query.items():
        if name not in known:
            raise Misuse(f"{printable(name, 40)!r} is not a parameter; known are {', '.join(sorted(known))}")
        if len(value) > MAX_TEXT:
            raise Misuse(f"{name} has {len(value)} characters; allowed are {MAX_TEXT}")


def number(query: Mapping[str, str], name: str, *, default: int, low: int, high: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18 or not low <= int(text) <= high:
        raise Misuse(f"{name} is {printable(text, 40)!r}; allowed is a whole number from {low} to {high}")
    return int(text)


def moment(query: Mapping[str, str], name: str, *, default: float) -> float:
    text = query.get(name, "")
    if not text:
        return default
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise Misuse(f"{name} is {printable(text, 40)!r}; allowed are seconds since 1970")
    return found


def wanted(query: Mapping[str, str]) -> Wanted:
    """Read what a list is to show. A parameter that is given and empty is as one that is not given."""
    refuse_unknown(query, _LIST)
    kind, state = query.get("kind", ""), query.get("state", "")
    if kind and kind not in _KINDS:
        raise Misuse(f"kind is {printable(kind, 40)!r}; allowed are {', '.join(_KINDS)}")
    if state and state not in _STATES:
        raise Misuse(f"state is {printable(state, 40)!r}; allowed are {', '.join(_STATES)}")
    return Wanted(
        kind=_KINDS[kind] if kind else None,
        state=_STATES[state] if state else None,
        owner=query.get("owner") or None,
        tool=query.get("tool") or None,
        prefix=query.get("q", ""),
        active_after=moment(query, "active_after", default=-math.inf),
        active_before=moment(query, "active_before", default=math.inf),
        cursor=_cursor(query.get("cursor", "")),
        limit=number(query, "limit", default=DEFAULT_PAGE, low=1, high=MAX_PAGE),
    )


def _cursor(text: str) -> tuple[float, str] | None:
    if not text:
        return None
    active, colon, last = text.partition(":")
    try:
        at = float(active)
    except ValueError:
        at = math.nan
    if not colon or math.isnan(at):
        raise Misuse(f"cursor is {printable(text, 40)!r}; give the `next` of the page before")
    return at, last
