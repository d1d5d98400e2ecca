"""Reads what a server offers (tools, resources, prompts), and shows it as text or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types import METHOD_NOT_FOUND
from pydantic import BaseModel

from perdure._core.text import printable
from perdure.cli.call import MAX_PAGES, MAX_SHOWN
from perdure.cli.json_schema import describe, properties, required
from perdure.client.connect import Client

Page = TypeVar("Page", bound=types.PaginatedResult)


@dataclass(frozen=True, kw_only=True)
class Offers:
    """What a server offers, with its name and the revision that was agreed on."""

    server: types.Implementation | None
    revision: str
    instructions: str | None
    tools: list[types.Tool]
    resources: list[types.Resource]
    templates: list[types.ResourceTemplate]
    prompts: list[types.Prompt]

    def as_json(self) -> dict[str, Any]:
        """Under the protocol's own names."""
        found: dict[str, Any] = {
            "serverInfo": _plain(self.server) if self.server else None,
            "protocolVersion": self.revision,
            "instructions": self.instructions,
        }
        return {key: value for key, value in found.items() if value is not None} | {
            "tools": list(map(_plain, self.tools)),
            "resources": list(map(_plain, self.resources)),
            "resourceTemplates": list(map(_plain, self.templates)),
            "prompts": list(map(_plain, self.prompts)),
        }


async def read_offers(client: Client) -> Offers:
    can = client.server_capabilities
    tools = await all_tools(client) if can.tools is not None else []
    resources = await _pages(client.list_resources) if can.resources is not None else []
    templates = await _pages(client.list_resource_templates) if can.resources is not None else []
    return Offers(
        server=client.server_info,
        revision=client.protocol_version,
        instructions=client.instructions,
        tools=tools,
        resources=[one for page in resources for one in page.resources],
        templates=[one for page in templates for one in page.resource_templates],
        prompts=await all_prompts(client) if can.prompts is not None else [],
    )


async def all_tools(client: Client) -> list[types.Tool]:
    return [tool for page in await _pages(client.list_tools) for tool in page.tools]


async def all_prompts(client: Client) -> list[types.Prompt]:
    return [prompt for page in await _pages(client.list_prompts) for prompt in page.prompts]


async def _pages(read: Callable[..., Awaitable[Page]]) -> list[Page]:
    """All pages of a list; none if the server does not know such a list."""
    found: list[Page] = []
    cursor: str | None = None
    try:
        while len(found) < MAX_PAGES:
            found.append(await read(cursor=cursor))
            if (cursor := found[-1].next_cursor) is None:
                break
    except MCPError as error:
        if error.code != METHOD_NOT_FOUND or found:
            raise
    return found


def listing_lines(offers: Offers) -> Iterator[str]:
    name = f"{offers.server.name} {offers.server.version}".rstrip() if offers.server else "a server without a name"
    yield _line(f"{name}, MCP {offers.revision}")
    for line in (offers.instructions or "").strip().splitlines():
        yield _line(line)
    yield ""
    yield "Tools" if offers.tools else "No tools"
    for tool in offers.tools:
        yield from _tool_lines(tool)
    if offers.resources or offers.templates:
        yield ""
        yield "Resources"
        for resource in offers.resources:
            yield from _item(str(resource.uri), resource.description or resource.title, resource.mime_type)
        for template in offers.templates:
            yield from _item(template.uri_template, template.description or template.title, template.mime_type)
    if offers.prompts:
        yield ""
        yield "Prompts"
        for prompt in offers.prompts:
            yield from _item(prompt.name, prompt.description or prompt.title, None)
            for argument in prompt.arguments or []:
                needed = "required" if argument.required else "optional"
                yield _line(f"      {argument.name}  ({needed})  {_first(argument.description)}")


def _tool_lines(tool: types.Tool) -> Iterator[str]:
    yield from _item(tool.name, tool.description or tool.title, _hints(tool.annotations))
    schema = tool.input_schema
    parts, needed = properties(schema), required(schema)
    width = max((len(name) for name in parts), default=0)
    for name, part in parts.items():
        kind = describe(part, schema) + ("" if name in needed or "default" in part else ", optional")
        yield _line(f"      {name:{width}}  {kind}  {_first(part.get('description'))}")


def _item(name: str, about: str | None, note: str | None) -> Iterator[str]:
    yield _line(f"  {name}" + (f"  ({note})" if note else ""))
    for line in (about or "").strip().splitlines():
        yield _line(f"    {line.strip()}")


def _hints(annotations: types.ToolAnnotations | None) -> str:
    """What a tool says of itself that matters for a call that is interrupted."""
    if annotations is None:
        return ""
    said = {"read-only": annotations.read_only_hint, "idempotent": annotations.idempotent_hint}
    if not annotations.read_only_hint:
        said["destructive"] = annotations.destructive_hint
    return ", ".join(word for word, is_said in said.items() if is_said)


def _first(text: object) -> str:
    return " ".join(str(text or "").split())


def _line(text: str) -> str:
    return printable(text, MAX_SHOWN).rstrip()


def one_line(value: object) -> str:
    """JSON in which a terminal finds nothing to act on: what is not printable is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _plain(value: BaseModel) -> dict[str, Any]:
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)
