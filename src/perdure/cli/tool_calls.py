"""Reads what a server offers, calls a tool, reads a resource or a prompt, and prints the result as text or JSON.

The words of the command line become a tool's arguments by the types that the tool's input schema declares. `key=value`
is text where the schema allows text, and JSON otherwise. `key:=JSON` is always JSON. For an array, `key=item` may be
repeated. Only names and types are checked here, because the server checks the values.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types import METHOD_NOT_FOUND
from pydantic import BaseModel

from perdure._core.pages import Cursors
from perdure._core.text import did_you_mean, format_size, printable
from perdure.cli.call import FAILED, MAX_SHOWN
from perdure.cli.terminal import Terminal
from perdure.client.connect import Client
from perdure.errors import Misuse
from perdure.remote.endpoint import shown

#: Bytes of `--input-json`: four times what a server takes in a POST by default.
MAX_INPUT = 16 << 20
#: Characters of a list of a tool's arguments: those of most tools. A server may name thousands.
MAX_NAMES = 500
#: Characters of a property's description.
MAX_DESCRIPTION = 200

#: A value of the protocol, under the protocol's own names.
Plain = dict[str, Any]
Schema = Mapping[str, Any]
#: A part of a result.
Block = types.ContentBlock | types.TextResourceContents | types.BlobResourceContents


async def call_tool(
    client: Client,
    url: str,
    name: str,
    words: Sequence[Word],
    given: dict[str, Any],
    terminal: Terminal,
    *,
    as_json: bool,
    output: Path | None,
) -> int:
    """Return the exit status. Raises `Misuse` before the call if the tool does not exist, or an argument is wrong."""
    tools = {tool["name"]: tool for tool in await read_list(client.list_tools, "tools")}
    if (tool := tools.get(name)) is None:
        hint = did_you_mean(name, tools) or f"; perdure list {shown(url)} shows them"
        raise Misuse(f"{shown(url)} has no tool {name!r}{hint}" if tools else f"{shown(url)} has no tools")
    arguments = tool_arguments(printable(name, MAX_SHOWN), tool["inputSchema"], words, given)

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        terminal.progress(progress, total, message)

    result = await client.call_tool(name, arguments, progress_callback=on_progress)
    terminal.clear()
    lines = list(_blocks(result.content))
    if not lines and result.structured_content is not None:
        lines = [json.dumps(result.structured_content, ensure_ascii=False, indent=2)]
    return _show(result, result.content, lines, as_json=as_json, output=output, is_error=bool(result.is_error))


async def read_resource(client: Client, uri: str, *, as_json: bool, output: Path | None) -> int:
    result = await client.read_resource(uri)
    return _show(result, result.contents, list(_blocks(result.contents)), as_json=as_json, output=output)


async def get_prompt(
    client: Client, url: str, name: str, words: Sequence[Word], given: dict[str, Any], *, as_json: bool
) -> int:
    """Print a prompt, whose arguments are all text. Returns and raises as `call_tool`."""
    prompts = {prompt["name"]: prompt for prompt in await read_list(client.list_prompts, "prompts")}
    if (prompt := prompts.get(name)) is None:
        raise Misuse(f"{shown(url)} has no prompt {name!r}{did_you_mean(name, prompts)}")
    listed = prompt.get("arguments", ())
    schema = {
        "properties": {one["name"]: {"type": "string"} for one in listed},
        "required": [one["name"] for one in listed if one.get("required")],
    }
    result = await client.get_prompt(name, tool_arguments(printable(name, MAX_SHOWN), schema, words, given))
    texts = [f"{message.role}: {text}" for message in result.messages for text in _blocks([message.content])]
    return _show(result, (), texts, as_json=as_json)


def _show(
    result: BaseModel,
    found: Sequence[Block],
    texts: Sequence[str],
    *,
    as_json: bool,
    output: Path | None = None,
    is_error: bool = False,
) -> int:
    """Print a result, that of an error on stderr, and return the exit status. On a terminal, what is not printable is
    replaced.

    With `output`, the image, sound or file of a result is written there; further ones get a number. A result without
    any is text.
    """
    status = FAILED if is_error else 0
    if as_json:
        click.echo(one_line(plain(result)))
        return status
    if output is None or is_error:
        for text in texts:
            if (sys.stderr if is_error else sys.stdout).isatty():
                text = "\n".join(printable(line.replace("\t", "    ")) for line in text.splitlines())
            click.echo(text, err=is_error)
        return status
    data = [data for one in found if (data := _bytes(one)) is not None] or [
        "".join(f"{text}\n" for text in texts).encode()
    ]
    for number, one in enumerate(data, 1):
        path = output if number == 1 else output.with_stem(f"{output.stem}-{number}")
        try:
            path.write_bytes(one)
        except OSError as error:
            raise Misuse(f"--output: {path} cannot be written: {error.strerror}") from None
        click.echo(f"perdure: {path}: {format_size(len(one))}", err=True)
    return status


def _bytes(block: Block) -> bytes | None:
    """Return the bytes of an image, a sound or a file."""
    match block:
        case types.ImageContent() | types.AudioContent():
            return base64.b64decode(block.data)
        case types.BlobResourceContents():
            return base64.b64decode(block.blob)
        case types.EmbeddedResource():
            return _bytes(block.resource)
    return None


def _blocks(content: Sequence[Block]) -> Iterator[str]:
    for block in content:
        size = format_size(len(_bytes(block) or b""))
        match block:
            case types.TextContent() | types.TextResourceContents():
                yield block.text
            case types.ImageContent() | types.AudioContent():
                yield f"[{block.type}: {block.mime_type}, {size}; --output FILE saves it]"
            case types.BlobResourceContents():
                yield f"[{block.uri}: {block.mime_type or 'bytes'}, {size}; --output FILE saves it]"
            case types.ResourceLink():
                yield f"[resource: {block.uri}]"
            case types.EmbeddedResource():
                yield from _blocks([block.resource])


async def read_offers(client: Client) -> Plain:
    """Read the server's name, the revision that was agreed on, and every list of the server."""
    can, server = client.server_capabilities, client.server_info
    lists = {
        "tools": (can.tools, client.list_tools),
        "resources": (can.resources, client.list_resources),
        "resourceTemplates": (can.resources, client.list_resource_templates),
        "prompts": (can.prompts, client.list_prompts),
    }
    about = {
        "serverInfo": plain(server) if server else None,
        "protocolVersion": client.protocol_version,
        "instructions": client.instructions,
    }
    return {key: value for key, value in about.items() if value is not None} | {
        name: await read_list(read, name) if is_offered is not None else []
        for name, (is_offered, read) in lists.items()
    }


async def read_list(read: Callable[..., Awaitable[types.PaginatedResult]], name: str) -> list[Plain]:
    """Read all pages of a list. A list that the server does not know is empty."""
    found: list[Plain] = []
    cursors = Cursors()
    cursor: str | None = ""
    while cursor is not None:
        try:
            page = plain(await read(cursor=cursor or None))
        except MCPError as error:
            if error.code != METHOD_NOT_FOUND or cursor:
                raise
            break
        found += page[name]
        cursor = cursors.after(page)
    return found


def plain(value: BaseModel) -> Plain:
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)


def one_line(value: object) -> str:
    """Write JSON in which a terminal finds nothing to act on: what is not printable is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def listing_lines(offers: Plain) -> Iterator[str]:
    server = offers.get("serverInfo", {"name": "a server without a name", "version": ""})
    name = f"{server['name']} {server['version']}".rstrip()
    yield _line(f"{name}, MCP {offers['protocolVersion']}")
    for line in offers.get("instructions", "").strip().splitlines():
        yield _line(line)
    yield from ("", "Tools" if offers["tools"] else "No tools")
    for tool in offers["tools"]:
        # The annotations that matter for a call that is interrupted.
        declared = tool.get("annotations", {})
        is_read_only = declared.get("readOnlyHint")
        hints = ["read-only"] * bool(is_read_only) + ["idempotent"] * bool(declared.get("idempotentHint"))
        hints += ["destructive"] * bool(declared.get("destructiveHint") and not is_read_only)
        yield from _item(tool["name"], tool, ", ".join(hints))
        schema = tool["inputSchema"]
        parts, needed = properties(schema), schema.get("required") or ()
        width = max(map(len, parts), default=0)
        for name, part in parts.items():
            kind = describe(part, schema) + ("" if name in needed or "default" in part else ", optional")
            yield _line(f"      {name:{width}}  {kind}  {_joined(part.get('description'))}")
    if offers["resources"] or offers["resourceTemplates"]:
        yield from ("", "Resources")
        for one in [*offers["resources"], *offers["resourceTemplates"]]:
            yield from _item(one.get("uri") or one["uriTemplate"], one, one.get("mimeType"))
    if offers["prompts"]:
        yield from ("", "Prompts")
        for prompt in offers["prompts"]:
            yield from _item(prompt["name"], prompt, None)
            for one in prompt.get("arguments", ()):
                needed = "required" if one.get("required") else "optional"
                yield _line(f"      {one['name']}  ({needed})  {_joined(one.get('description'))}")


def _item(name: str, item: Plain, note: str | None) -> Iterator[str]:
    yield _line(f"  {name}" + (f"  ({note})" if note else ""))
    for line in (item.get("description") or item.get("title") or "").strip().splitlines():
        yield _line(f"    {line.strip()}")


def _joined(text: object) -> str:
    return " ".join(str(text or "").split())


def _line(text: str) -> str:
    return printable(text, MAX_SHOWN).rstrip()


# Arguments


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
        # JSON Schema allows other names where nothing is declared, but then a mistyped name would be ignored.
        takes_others = schema.get("additionalProperties") or "patternProperties" in schema or "properties" not in schema
        if key not in parts and not takes_others:
            hint = did_you_mean(key, parts) or f"; it has {printable(', '.join(parts), MAX_NAMES)}"
            raise Misuse(f"{tool} has no argument {key!r}{hint if parts else '; it takes none'}")
    found: dict[str, Any] = {}
    for word in words:
        part = parts.get(word.key, {})
        is_item = not word.is_json and word.text[:1] != "[" and word.text != "null"
        try:
            if (
                is_item
                and "array" in types_of(part, schema)
                and isinstance(items := found.setdefault(word.key, []), list)
            ):
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
    found = schema.get("properties")
    return {str(name): _resolved(part, schema) for name, part in found.items()} if isinstance(found, Mapping) else {}


def types_of(part: object, root: Schema) -> list[str]:
    """Return the JSON types that a schema declares; none if it does not. Only alternatives of the first level count:
    a schema may lead back to itself."""
    declared = [one.get("type") for one in _alternatives(part, root)]
    return [str(name) for one in declared for name in (one if isinstance(one, list) else [one]) if name is not None]


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
    return printable(f"{kind}, default {_text(found['default'])}" if "default" in found else kind, MAX_DESCRIPTION)


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


def _items(part: object, root: Schema) -> object:
    """Return the schema of an array's items, also of an array that may be null."""
    return next((way["items"] for way in _alternatives(part, root) if "items" in way), {})


def _text(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
