"""Reads what a server offers, calls a tool, reads a resource or a prompt, and prints the result as text or JSON."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types import METHOD_NOT_FOUND
from pydantic import BaseModel

from perdure._core.text import format_size, printable
from perdure.cli.call import FAILED, MAX_SHOWN
from perdure.cli.options import did_you_mean
from perdure.cli.terminal import Terminal
from perdure.cli.tool_arguments import Word, describe, properties, tool_arguments
from perdure.client.connect import Client
from perdure.errors import Misuse
from perdure.remote.endpoint import shown

#: Pages of a list that are read: a server that never ends its list does not keep the command from ending.
MAX_PAGES = 100

#: A value of the protocol, under the protocol's own names.
Plain = dict[str, Any]


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
    if as_json:
        click.echo(one_line(plain(result)))
    elif output is not None and not result.is_error:
        _save(output, [_saved(block) for block in result.content], _result_lines(result))
    else:
        _print(_result_lines(result), is_error=bool(result.is_error))
    return FAILED if result.is_error else 0


async def read_resource(client: Client, uri: str, *, as_json: bool, output: Path | None) -> int:
    result = await client.read_resource(uri)
    if as_json:
        click.echo(one_line(plain(result)))
    elif output is not None:
        _save(output, [_bytes_of(one) for one in result.contents], [_resource(one) for one in result.contents])
    else:
        _print([_resource(one) for one in result.contents])
    return 0


async def get_prompt(
    client: Client, url: str, name: str, words: Sequence[Word], given: dict[str, Any], *, as_json: bool
) -> int:
    """As `call_tool`, of a prompt, whose arguments are all text."""
    prompts = {prompt["name"]: prompt for prompt in await read_list(client.list_prompts, "prompts")}
    if (prompt := prompts.get(name)) is None:
        raise Misuse(f"{shown(url)} has no prompt {name!r}{did_you_mean(name, prompts)}")
    listed = prompt.get("arguments", ())
    schema = {
        "properties": {one["name"]: {"type": "string"} for one in listed},
        "required": [one["name"] for one in listed if one.get("required")],
    }
    result = await client.get_prompt(name, tool_arguments(printable(name, MAX_SHOWN), schema, words, given))
    if as_json:
        click.echo(one_line(plain(result)))
    else:
        _print([f"{message.role}: {text}" for message in result.messages for text in _blocks([message.content])])
    return 0


def _print(texts: Sequence[str], *, is_error: bool = False) -> None:
    """Print texts, those of an error on stderr. On a terminal, what is not printable is replaced."""
    stream = sys.stderr if is_error else sys.stdout
    for text in texts:
        if stream.isatty():
            text = "\n".join(printable(line.replace("\t", "    ")) for line in text.splitlines())
        click.echo(text, err=is_error)


def _save(output: Path, found: Sequence[bytes | None], texts: Sequence[str]) -> None:
    """Write the image, sound or file of a result; further ones get a number. A result without any is text."""
    data = [one for one in found if one is not None] or ["".join(f"{text}\n" for text in texts).encode()]
    for number, one in enumerate(data, 1):
        path = output if number == 1 else output.with_stem(f"{output.stem}-{number}")
        try:
            path.write_bytes(one)
        except OSError as error:
            raise Misuse(f"--output: {path} cannot be written: {error.strerror}") from None
        click.echo(f"perdure: {path}: {format_size(len(one))}", err=True)


def _saved(block: types.ContentBlock) -> bytes | None:
    """Return the bytes of an image, a sound or a file."""
    match block:
        case types.ImageContent() | types.AudioContent():
            return base64.b64decode(block.data)
        case types.EmbeddedResource():
            return _bytes_of(block.resource)
    return None


def _bytes_of(contents: types.TextResourceContents | types.BlobResourceContents) -> bytes | None:
    return base64.b64decode(contents.blob) if isinstance(contents, types.BlobResourceContents) else None


def _result_lines(result: types.CallToolResult) -> list[str]:
    found = list(_blocks(result.content))
    if not found and result.structured_content is not None:
        found = [json.dumps(result.structured_content, ensure_ascii=False, indent=2)]
    return found


def _blocks(content: Sequence[types.ContentBlock]) -> Iterator[str]:
    for block in content:
        match block:
            case types.TextContent():
                yield block.text
            case types.ImageContent() | types.AudioContent():
                yield f"[{block.type}: {block.mime_type}, {_size(block.data)}; --output FILE saves it]"
            case types.ResourceLink():
                yield f"[resource: {block.uri}]"
            case types.EmbeddedResource():
                yield _resource(block.resource)


def _resource(contents: types.TextResourceContents | types.BlobResourceContents) -> str:
    if isinstance(contents, types.TextResourceContents):
        return contents.text
    return f"[{contents.uri}: {contents.mime_type or 'bytes'}, {_size(contents.blob)}; --output FILE saves it]"


def _size(encoded: str) -> str:
    return format_size(len(encoded) * 3 // 4 - encoded.count("="))


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
    cursor: str | None = None
    for page in range(MAX_PAGES):
        try:
            result = await read(cursor=cursor)
        except MCPError as error:
            if error.code != METHOD_NOT_FOUND or page:
                raise
            break
        found += plain(result)[name]
        if (cursor := result.next_cursor) is None:
            break
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
        yield from _item(tool["name"], tool, _hints(tool.get("annotations", {})))
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


def _hints(annotations: Plain) -> str:
    """Return the annotations that matter for a call that is interrupted."""
    is_read_only = annotations.get("readOnlyHint")
    declared = {
        "read-only": is_read_only,
        "idempotent": annotations.get("idempotentHint"),
        "destructive": annotations.get("destructiveHint") and not is_read_only,
    }
    return ", ".join(word for word, is_declared in declared.items() if is_declared)


def _joined(text: object) -> str:
    return " ".join(str(text or "").split())


def _line(text: str) -> str:
    return printable(text, MAX_SHOWN).rstrip()
