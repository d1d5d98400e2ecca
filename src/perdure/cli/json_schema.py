"""Reads values by a JSON Schema that a server wrote: which types it allows, what it says in words, what does not fit.

Servers write what they like, so a schema that cannot be understood allows everything: the server has the last word.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from perdure._core.text import printable

Schema = Mapping[str, Any]

#: References and alternatives that are followed below each other; a schema may lead back to itself.
MAX_DEPTH = 16
#: Schemas that are looked at to say which types one allows: alternatives that each lead to the same two others double
#: with each level.
MAX_LOOKS = 1_000
#: Arrays in each other that are described.
MAX_ARRAYS = 4
#: Seconds for the comparison of a value with a schema. It takes milliseconds, unless the schema was made to take long.
MISFIT_SECONDS = 2.0
#: Characters of a server's text in a line.
MAX_SHOWN = 200

_ANY = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
_WORDS = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "a JSON array",
    "object": "a JSON object",
}
_BOOLEANS = {"true": True, "false": False}


class Unfit(ValueError):
    """A value does not fit its schema; the message says why."""


def resolved(schema: object, root: Schema, depth: int = 0) -> Schema:
    """The schema behind a reference within the document. One that leads elsewhere says nothing."""
    found = schema if isinstance(schema, Mapping) else {}
    reference = found.get("$ref")
    if not isinstance(reference, str):
        return found
    place: object = root
    for part in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ():
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    if place is root or not isinstance(place, Mapping) or depth >= MAX_DEPTH:
        return {}
    beside = {key: value for key, value in found.items() if key != "$ref"}
    return {**resolved(place, root, depth + 1), **beside}


def properties(schema: Schema) -> dict[str, Schema]:
    """The named parts of an object, in the server's order."""
    found = schema.get("properties")
    return {str(name): resolved(part, schema) for name, part in found.items()} if isinstance(found, Mapping) else {}


def required(schema: Schema) -> list[str]:
    found = schema.get("required")
    return [str(name) for name in found] if isinstance(found, list) else []


def types_of(schema: object, root: Schema) -> frozenset[str]:
    """The types of JSON that a schema allows."""
    return _types(schema, root, 0, iter(range(MAX_LOOKS)))


def _types(schema: object, root: Schema, depth: int, looks: Iterator[int]) -> frozenset[str]:
    found = resolved(schema, root)
    if isinstance(named := found.get("type"), str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(map(str, named))
    if (values := _choices(found)) is not None:
        return frozenset(map(_type_of, values))
    if depth >= MAX_DEPTH or next(looks, None) is None:
        return _ANY
    for key in ("anyOf", "oneOf"):
        if isinstance(ways := found.get(key), list) and ways:
            return frozenset().union(*(_types(way, root, depth + 1, looks) for way in ways))
    if isinstance(ways := found.get("allOf"), list) and ways:
        return _ANY.intersection(*(_types(way, root, depth + 1, looks) for way in ways))
    return _ANY


def choices(schema: object, root: Schema, depth: int = 0) -> list[tuple[object, str]] | None:
    """The values that a schema lists, each with its title; None if it lists none."""
    found = resolved(schema, root)
    if (values := _choices(found)) is not None:
        named = found.get("enumNames")
        titles: list[Any] = named if isinstance(named, list) and len(named) == len(values) else [""] * len(values)
        return [(value, str(title)) for value, title in zip(values, titles, strict=True)]
    for key in ("oneOf", "anyOf"):
        ways = found.get(key)
        if isinstance(ways, list) and ways and all(isinstance(way, Mapping) and "const" in way for way in ways):
            return [(way["const"], str(way.get("title", ""))) for way in ways]
    if isinstance(ways := found.get("anyOf"), list) and depth < MAX_DEPTH:  # one that may be left out
        rest = [way for way in ways if types_of(way, root) != {"null"}]
        return choices(rest[0], root, depth + 1) if len(rest) == 1 else None
    return None


def item_schema(schema: object, root: Schema, depth: int = 0) -> Schema:
    """What an array has in it; also of an array that may be left out."""
    found = resolved(schema, root)
    if "items" not in found and isinstance(ways := found.get("anyOf"), list) and depth < MAX_DEPTH:
        arrays = [way for way in ways if "array" in types_of(way, root)]
        return item_schema(arrays[0], root, depth + 1) if arrays else {}
    return resolved(found.get("items"), root)


def read_text(text: str, schema: object, root: Schema) -> Any:
    """A value from its text: text where the schema allows text, otherwise JSON. Raises `Unfit`."""
    allowed = types_of(schema, root)
    if allowed == _ANY:  # the schema does not say
        try:
            return read_json(text)
        except Unfit:
            return text
    if "string" in allowed:
        return text
    if "boolean" in allowed and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    try:
        found = read_json(text)
    except Unfit:
        found = None
    is_null = text == "null" and "null" in allowed
    if not is_null and (found is None or not _is_of(found, allowed)):
        raise Unfit(f"{shown(text)} is not {type_words(allowed)}")
    return found


def read_json(text: str) -> Any:
    """Raises `Unfit`."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise Unfit(f"{shown(text)} is not JSON: {error}") from None
    except RecursionError:
        raise Unfit(f"{shown(text)} is nested too deeply") from None


def misfit(value: object, schema: Schema, *, seconds: float = MISFIT_SECONDS) -> str | None:
    """Why a value does not fit, in one line that begins with the place; None if it fits, or nothing can be said."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from jsonschema.exceptions import SchemaError, best_match  # type: ignore[import-untyped]
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        kind = validator_for(schema, default=Draft202012Validator)
        with _at_most(seconds):
            kind.check_schema(schema)
            # Without a registry of its own it would fetch what the server's schema refers to.
            found = best_match(kind(schema, registry=Registry()).iter_errors(value))
    except (SchemaError, Unresolvable, RecursionError, TimeoutError):
        return None
    if found is None:
        return None
    place = ".".join(map(str, found.absolute_path))
    said = printable(str(found.message), MAX_SHOWN)
    return f"{place}: {said}" if place else said


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in a block that takes longer. A signal reaches regular expressions as well, which other
    timeouts do not. Where there is no such signal, and beside the main thread, nothing is limited."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def type_words(types: frozenset[str]) -> str:
    order = [name for name in _WORDS if name in types and not (name == "integer" and "number" in types)]
    return " or ".join(_WORDS[name] for name in order) or "anything that could be given"


def describe(schema: object, root: Schema, depth: int = 0) -> str:
    """A schema in a few words for people: `integer, 1 to 12, default 3`. An array may have others of its kind in it, as
    in a tree: what is deep in it is left out."""
    found = resolved(schema, root)
    values = choices(found, root)
    if values is not None:
        parts = [" | ".join(_value(value) + (f" ({title})" if title else "") for value, title in values)]
    else:
        types = types_of(found, root)
        order = [name for name in _WORDS if name in types]
        parts = ["any" if types == _ANY else " or ".join(order)]
        if types - {"null"} == {"array"} and depth < MAX_ARRAYS and (items := item_schema(found, root)):
            parts = [f"array of {describe(items, root, depth + 1)}"]
        if types - {"null"} == {"object"} and (fields := properties(found)):
            parts = [f"object of {', '.join(fields)}"]
        parts += _limits(found)
    if "default" in found:
        parts.append(f"default {_value(found['default'])}")
    return printable(", ".join(parts), MAX_SHOWN)


def _limits(schema: Schema) -> list[str]:
    found = []
    for low, high, unit in (
        ("minimum", "maximum", ""),
        ("minLength", "maxLength", " characters"),
        ("minItems", "maxItems", " items"),
    ):
        least, most = schema.get(low), schema.get(high)
        if least is not None and most is not None:
            found.append(f"{least} to {most}{unit}")
        elif least is not None:
            found.append(f"at least {least}{unit}")
        elif most is not None:
            found.append(f"at most {most}{unit}")
    for key, word in (("exclusiveMinimum", "more than"), ("exclusiveMaximum", "less than"), ("format", "")):
        if (limit := schema.get(key)) is not None:
            found.append(f"{word} {limit}".strip())
    return found


def _choices(schema: Schema) -> Sequence[object] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _type_of(value: object) -> str:
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def _is_of(value: object, types: frozenset[str]) -> bool:
    name = _type_of(value)
    return name in types or (name == "integer" and "number" in types) or (name == "number" and "integer" in types)


def _value(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…")
