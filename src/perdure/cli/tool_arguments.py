"""Makes a tool's arguments from the words of a command line, by the tool's input schema.

`key=value` is text where the schema allows text, and JSON otherwise. `key:=JSON` is always JSON. For an array,
`key=item` may be repeated. What is wrong is found here, before the tool is called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure._core.text import printable
from perdure.cli.hints import did_you_mean
from perdure.cli.json_schema import (
    Schema,
    Unfit,
    item_schema,
    misfit,
    properties,
    read_json,
    read_text,
    required,
    types_of,
)
from perdure.cli.json_schema import resolved as resolve
from perdure.errors import Misuse

#: Bytes of `--input-json`: four times what a server takes in a POST unless it is told otherwise.
MAX_INPUT = 16 << 20
#: Characters of a list of a tool's arguments: those of most tools. A server may name thousands.
MAX_NAMES = 500


@dataclass(frozen=True, kw_only=True)
class Word:
    """One argument as it was written."""

    key: str
    text: str
    is_json: bool


def parse_words(words: Iterable[str]) -> list[Word]:
    """Raises `Misuse` for what is not `key=value`."""
    found = []
    for word in words:
        name, sign, text = word.partition("=")
        is_json = name.endswith(":")
        key = name.removesuffix(":")
        if not sign or not key:
            raise Misuse(f"{word!r} is not an argument; write key=value, or key:=JSON")
        found.append(Word(key=key, text=text, is_json=is_json))
    return found


def read_input(given: str | None) -> dict[str, Any]:
    """The object of `--input-json`: JSON, `@FILE`, or `-` for stdin. Raises `Misuse`."""
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
        found = read_json(text)
    except Unfit as problem:
        raise Misuse(f"{where}: {problem}") from None
    if not isinstance(found, dict):
        raise Misuse(f'{where} is not a JSON object such as {{"key": "value"}}')
    return found


def tool_arguments(tool: str, schema: Schema, words: Iterable[Word], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the tool is called with. Words override what is `given` as JSON. Raises `Misuse`."""
    parts = properties(schema)
    found: dict[str, Any] = dict(given)
    arrays: dict[str, list[Any]] = {}
    for key in [*given, *(word.key for word in words)]:
        if key not in parts and not _takes_others(schema):
            raise Misuse(f"{tool} has no argument {key!r}{_hint(key, parts)}")
    seen: set[str] = set()
    for word in words:
        part = parts.get(word.key, {})
        try:
            if not word.is_json and _is_item(word.text, part, schema):
                items = arrays.setdefault(word.key, [])
                items.append(read_text(word.text, item_schema(part, schema), schema))
                found[word.key] = items
                continue
            if word.key in seen or word.key in arrays:
                raise Unfit("it is given twice")
            seen.add(word.key)
            found[word.key] = read_json(word.text) if word.is_json else read_text(word.text, part, schema)
        except Unfit as problem:
            raise Misuse(f"{tool}: {word.key}: {problem}") from None
    missing = [key for key in required(schema) if key not in found]
    if missing:
        listed = printable(" and ".join(f"{key}=…" for key in missing), MAX_NAMES)
        raise Misuse(f"{tool} needs {listed}; perdure list shows its arguments")
    if (why := misfit(found, schema)) is not None:
        raise Misuse(f"{tool}: {why}")
    return found


def _hint(key: str, parts: Mapping[str, Schema]) -> str:
    if not parts:
        return "; it takes none"
    return did_you_mean(key, parts) or f"; it has {printable(', '.join(parts), MAX_NAMES)}"


def _takes_others(schema: Schema) -> bool:
    """Whether it says that it takes arguments that it does not name. JSON Schema allows them where nothing is said, but
    then a mistyped name would be ignored."""
    return bool(schema.get("additionalProperties")) or "patternProperties" in schema or "properties" not in schema


def _is_item(text: str, part: Schema, root: Schema) -> bool:
    allowed = types_of(resolve(part, root), root)
    return "array" in allowed and "string" not in allowed and not text.lstrip().startswith("[") and text != "null"
