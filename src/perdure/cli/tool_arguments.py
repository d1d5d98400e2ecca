"""Makes a tool's arguments from the words of a command line, by the types that the tool's input schema declares.

`key=value` is text where the schema allows text, and JSON otherwise. `key:=JSON` is always JSON. For an array,
`key=item` may be repeated. Only names and types are checked here, because the server checks the values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure._core.text import printable
from perdure.cli.options import did_you_mean
from perdure.errors import Misuse

Schema = Mapping[str, Any]

#: Bytes of `--input-json`: four times what a server takes in a POST unless it is told otherwise.
MAX_INPUT = 16 << 20
#: Characters of a list of a tool's arguments: those of most tools. A server may name thousands.
MAX_NAMES = 500
#: Characters of a property's description.
MAX_SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class Word:
    """One argument as the user wrote it."""

    key: str
    text: str
    is_json: bool


def parse_words(words: Iterable[str]) -> list[Word]:
    """Raises `Misuse` for a word that is not `key=value`."""
    found = []
    for word in words:
        name, sign, text = word.partition("=")
        key = name.removesuffix(":")
        if not sign or not key:
            raise Misuse(f"{word!r} is not an argument; write key=value, or key:=JSON")
        found.append(Word(key=key, text=text, is_json=name.endswith(":")))
    return found


def read_input(given: str | None) -> dict[str, Any]:
    """Read the object of `--input-json`: JSON, `@FILE`, or `-` for stdin. Raises `Misuse`."""
    if given is None:
        return {}
    text, where = given, "--input-json"
    if given == "-" or given.startswith("@"):
        where = "stdin" if given == "-" else given[1:]
        try:
            with sys.stdin.buffer if given == "-" else Path(where).open("rb") as opened:
                data = opened.read(MAX_INPUT + 1)
        except OSError as error:
            raise Misuse(f"{where} of --input-json cannot be read: {error.strerror}") from None
        if len(data) > MAX_INPUT:
            raise Misuse(f"{where} of --input-json is larger than {MAX_INPUT >> 20} MiB")
        text = data.decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Misuse(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Misuse(f'{where} is not a JSON object such as {{"key": "value"}}')
    return found


def tool_arguments(tool: str, schema: Schema, words: Iterable[Word], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call. Words override what is `given` as JSON. Raises `Misuse`."""
    parts = properties(schema)
    for key in [*given, *(word.key for word in words)]:
        if key not in parts and not _takes_others(schema):
            hint = did_you_mean(key, parts) or f"; it has {printable(', '.join(parts), MAX_NAMES)}"
            raise Misuse(f"{tool} has no argument {key!r}{hint if parts else '; it takes none'}")
    found: dict[str, Any] = {}
    for word in words:
        part = parts.get(word.key, {})
        is_item = (
            "array" in types_of(part, schema) and not word.is_json and word.text[:1] != "[" and word.text != "null"
        )
        try:
            if is_item and not word.is_json and isinstance(items := found.setdefault(word.key, []), list):
                items.append(_value(word.text, _items(part, schema), schema))
            elif word.key in found:
                raise ValueError("it is given twice")
            else:
                found[word.key] = json.loads(word.text) if word.is_json else _value(word.text, part, schema)
        except (ValueError, RecursionError) as error:
            raise Misuse(f"{tool}: {word.key}: {error}") from None
    found = {**given, **found}
    required = schema.get("required")
    if missing := [f"{key}=…" for key in required if key not in found] if isinstance(required, list) else []:
        listed = printable(" and ".join(missing), MAX_NAMES)
        raise Misuse(f"{tool} needs {listed}; perdure list shows its arguments")
    return found


def properties(schema: Schema) -> dict[str, Schema]:
    """Return the properties of an object, in the server's order."""
    found = schema.get("properties")
    return {str(name): _resolved(part, schema) for name, part in found.items()} if isinstance(found, Mapping) else {}


def types_of(part: object, root: Schema) -> list[str]:
    """Return the JSON types that a schema declares; none if it does not. Only alternatives of the first level count:
    a schema may lead back to itself."""
    return [name for one in _alternatives(part, root) for name in _declared(one)]


def describe(part: object, root: Schema) -> str:
    """Describe a property in a few words: `array of string`, `wood | gas, default wood`."""
    found = _resolved(part, root)
    types, values = types_of(found, root), found.get("enum")
    kind = " or ".join(types) or "any"
    if isinstance(values, list):
        kind = " | ".join(map(_text, values))
    elif "array" in types and (items := types_of(_items(found, root), root)):
        kind = f"array of {' or '.join(items)}"
    elif types == ["object"] and (fields := properties(found)):
        kind = f"object of {', '.join(fields)}"
    return printable(f"{kind}, default {_text(found['default'])}" if "default" in found else kind, MAX_SHOWN)


def _value(text: str, part: object, root: Schema) -> Any:
    """Raises `ValueError` for a text that is not JSON where the schema declares types other than text."""
    types = types_of(part, root)
    if "string" in types:
        return text
    try:
        return json.loads(text.lower() if "boolean" in types else text)
    except ValueError:
        if types:
            raise ValueError(f"{text!r} is not of the type {' or '.join(types)}") from None
        return text


def _resolved(part: object, root: Schema) -> Schema:
    """Return the schema that a reference within the document names. A reference to elsewhere resolves to nothing."""
    found = part if isinstance(part, Mapping) else {}
    reference = found.get("$ref")
    if not isinstance(reference, str):
        return found
    place: object = root
    for name in reference.removeprefix("#/").split("/"):
        place = place.get(name) if isinstance(place, Mapping) else None
    return {**place, **found} if isinstance(place, Mapping) else {}


def _alternatives(part: object, root: Schema) -> list[Schema]:
    found = _resolved(part, root)
    ways = found.get("anyOf", found.get("oneOf"))
    return [_resolved(way, root) for way in ways] if isinstance(ways, list) else [found]


def _declared(part: Schema) -> list[str]:
    found = part.get("type")
    return list(map(str, found)) if isinstance(found, list) else [found] if isinstance(found, str) else []


def _items(part: object, root: Schema) -> object:
    """Return the schema of an array's items, also of an array that may be null."""
    return next((way["items"] for way in _alternatives(part, root) if "items" in way), {})


def _takes_others(schema: Schema) -> bool:
    """Whether the schema declares that the tool takes arguments without names. JSON Schema allows them where nothing is
    declared, but then a mistyped name would be ignored."""
    return bool(schema.get("additionalProperties")) or "patternProperties" in schema or "properties" not in schema


def _text(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
