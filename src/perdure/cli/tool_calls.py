"""Calls one tool, or reads one resource, over a connected client, and prints what came."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import mcp_types as types

from perdure._core.text import format_size, printable
from perdure.cli.call import FAILED, MAX_SHOWN
from perdure.cli.listing import one_line, plain, read_list
from perdure.cli.options import did_you_mean
from perdure.cli.terminal import Terminal
from perdure.cli.tool_arguments import Word, tool_arguments
from perdure.client.connect import Client
from perdure.errors import Misuse
from perdure.remote.endpoint import shown


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
    """The status. Raises `Misuse` if there is no such tool, or its arguments do not fit: nothing was called then."""
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
    """A tool's error goes to stderr. Elsewhere than on a terminal a text is written as it is."""
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
    """The bytes of what is no text."""
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
