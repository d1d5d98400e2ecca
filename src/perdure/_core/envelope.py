"""The envelope, which describes a request of 2026-07-28 in `_meta` and in HTTP headers; and the names that the tasks
extension and Perdure add to its messages."""

import base64
import contextlib
import re
from collections.abc import Mapping
from typing import Any, Final

from perdure._core.jsonrpc import JsonObject, meta_of

PREFIX: Final = "io.modelcontextprotocol/"
VERSION: Final = f"{PREFIX}protocolVersion"
CLIENT: Final = f"{PREFIX}clientInfo"
CAPABILITIES: Final = f"{PREFIX}clientCapabilities"
LOG_LEVEL: Final = f"{PREFIX}logLevel"
"""The least level of log messages that the client wants; without it the client gets none."""
SERVER: Final = f"{PREFIX}serverInfo"
"""The server's name and version, in the `_meta` of results."""
SUBSCRIPTION: Final = f"{PREFIX}subscriptionId"
"""The id of the `subscriptions/listen` that a notification belongs to."""

DISCOVER: Final = "server/discover"
LISTEN: Final = "subscriptions/listen"
GET_TASK: Final = "tasks/get"
UPDATE_TASK: Final = "tasks/update"
CANCEL_TASK: Final = "tasks/cancel"

TASKS: Final = "io.modelcontextprotocol/tasks"
"""The extension for tasks; a client declares it in its capabilities, a server names it in `server/discover`."""

OWN_PREFIX: Final = "dev.perdure"
"""The prefix of every name that is Perdure's own."""

CALLS: Final = f"{OWN_PREFIX}/calls"
"""Perdure's extension: a call may bring a key, and is run once for it. A client that declares it
repeats requests whose connection broke."""

KEPT: Final = "keptMs"
"""Beside `CALLS` in `server/discover`: how long the server keeps a key, from the first request that brought it."""

HOST: Final = f"{OWN_PREFIX}/host"
"""In the `_meta` of a call: its key and its tasks are those of a bridge, for a host that waits for the answer."""

KEY: Final = f"{OWN_PREFIX}/key"
"""The key of a call, in `_meta`: requests with equal keys are one call."""

KEY_HEADER: Final = "Idempotency-Key"
"""The same key as an HTTP header, for gateways."""

CANCEL: Final = f"{OWN_PREFIX}/cancel"
"""The method that cancels a call by its key."""

_NAMES = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_PLAIN = re.compile(r"[!-~](?:[\t -~]*[!-~])?")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_ENCODED = re.compile(r"=\?base64\?.*\?=")


def envelope_in(params: Mapping[str, Any] | None) -> JsonObject | None:
    """The envelope in the params of a message, if it has one: the message is of a revision without sessions then."""
    meta = meta_of(params)
    if not isinstance(meta.get(VERSION), str):
        return None
    return {name: value for name, value in meta.items() if name.startswith(PREFIX)}


def declares(capabilities: object, extension: str) -> bool:
    """Whether a client's capabilities name an extension."""
    extensions = capabilities.get("extensions") if isinstance(capabilities, Mapping) else None
    return isinstance(extensions, Mapping) and extension in extensions


def with_tasks(meta: Mapping[str, Any]) -> JsonObject:
    """The same envelope of a client that takes tasks, and sends again what breaks."""
    found = meta.get(CAPABILITIES)
    capabilities = dict(found) if isinstance(found, Mapping) else {}
    extensions = capabilities.get("extensions")
    declared = {**(extensions if isinstance(extensions, Mapping) else {}), TASKS: {}, CALLS: {}}
    return {**meta, CAPABILITIES: {**capabilities, "extensions": declared}}


def headers_of(method: str, params: Mapping[str, Any]) -> dict[str, str]:
    """The headers by which gateways, and the server, know a request."""
    envelope = envelope_in(params) or {}
    headers = {"mcp-protocol-version": str(envelope.get(VERSION, "")), "mcp-method": method}
    name = params.get("taskId" if method.startswith("tasks/") else _NAMES.get(method, ""))
    return {**headers, "mcp-name": header_value(name)} if isinstance(name, str) else headers


def param_headers(schema: object, arguments: object) -> dict[str, str]:
    """The headers that repeat a call's arguments, where the tool's schema wants that (`x-mcp-header`)."""
    found: dict[str, str] = {}
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    for name, inner in properties.items() if isinstance(properties, Mapping) else ():
        value = arguments.get(name) if isinstance(arguments, Mapping) else None
        token = inner.get("x-mcp-header") if isinstance(inner, Mapping) else None
        if isinstance(token, str) and _TOKEN.fullmatch(token) and isinstance(value, bool | str | int | float):
            with contextlib.suppress(ValueError):  # an integer of thousands of digits
                found[f"mcp-param-{token}"] = header_value(
                    str(value).lower() if isinstance(value, bool) else str(value)
                )
        found |= param_headers(inner, value)
    return found


def header_value(text: str) -> str:
    """Visible ASCII as it is, all else in the revision's own form."""
    if _PLAIN.fullmatch(text) and not _ENCODED.fullmatch(text):
        return text
    return f"=?base64?{base64.b64encode(text.encode('utf-8', 'surrogatepass')).decode()}?="
