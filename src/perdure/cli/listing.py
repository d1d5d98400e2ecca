"""Reads the lists of tools, resources and prompts that a server offers, and prints them for people."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types import METHOD_NOT_FOUND
from pydantic import BaseModel

from perdure._core.text import printable
from perdure.cli.call import MAX_SHOWN
from perdure.cli.tool_arguments import describe, properties
from perdure.client.connect import Client

#: Pages of a list that are read: a server that never ends its list does not keep the command from ending.
MAX_PAGES = 100

#: A value of the protocol, under the protocol's own names.
Plain = dict[str, Any]


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
