"""The client that the conformance suite drives: `python -m tests.conformance.client_program [--stock] [--modern] URL`.

The suite names the scenario in the environment. `--stock` runs the official client in place of ours, for comparison;
`--modern` speaks 2026-07-28 in place of the revisions with sessions.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlparse

import httpx2
import mcp
import mcp_types as types
from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider
from mcp.client.auth.extensions.client_credentials import (
    ClientCredentialsOAuthProvider,
    PrivateKeyJWTOAuthProvider,
    SignedJWTParameters,
)
from mcp.client.session import ClientRequestContext
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata, OAuthToken
from pydantic import AnyUrl

import perdure

CLIENT_METADATA_URL = "https://conformance-test.local/client-metadata.json"
REDIRECT = "http://localhost:3000/callback"

Connect = Callable[..., AbstractAsyncContextManager[mcp.Client]]
Run = Callable[[Connect, str], Awaitable[None]]


class Memory:
    """Tokens and registration, for one run."""

    def __init__(self, registered: OAuthClientInformationFull | None = None) -> None:
        self.tokens: OAuthToken | None = None
        self.registered = registered

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.registered

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.registered = client_info


class Browser:
    """The user's browser: follows the address, and brings back what it is sent home with."""

    def __init__(self) -> None:
        self._found = AuthorizationCodeResult(code="", state=None)

    async def open(self, url: str) -> None:
        async with httpx2.AsyncClient() as http:
            response = await http.get(url, follow_redirects=False)
        query = parse_qs(urlparse(response.headers["location"]).query)
        found = {name: query[name][0] for name in ("code", "state", "iss") if name in query}
        self._found = AuthorizationCodeResult.model_validate(found)

    async def result(self) -> AuthorizationCodeResult:
        return self._found


def oauth(url: str, context: dict[str, Any]) -> httpx2.Auth:
    browser = Browser()
    registered = None
    if "client_id" in context:
        registered = OAuthClientInformationFull(
            client_id=context["client_id"],
            client_secret=context.get("client_secret"),
            redirect_uris=[AnyUrl(REDIRECT)],
            token_endpoint_auth_method="client_secret_basic",
        )
    return OAuthClientProvider(
        server_url=url,
        client_metadata=OAuthClientMetadata(
            client_name="perdure-conformance",
            redirect_uris=[AnyUrl(REDIRECT)],
            grant_types=["authorization_code", "refresh_token"],
            response_types=["code"],
        ),
        storage=Memory(registered),
        redirect_handler=browser.open,
        callback_handler=browser.result,
        client_metadata_url=CLIENT_METADATA_URL,
    )


def credentials(url: str, context: dict[str, Any]) -> httpx2.Auth:
    if "private_key_pem" not in context:
        return ClientCredentialsOAuthProvider(url, Memory(), context["client_id"], context["client_secret"])
    signed = SignedJWTParameters(
        issuer=context["client_id"],
        subject=context["client_id"],
        signing_algorithm=context["signing_algorithm"],
        signing_key=context["private_key_pem"],
    )
    return PrivateKeyJWTOAuthProvider(
        url, Memory(), context["client_id"], assertion_provider=signed.create_assertion_provider()
    )


def stock(
    url: str, *, auth: httpx2.Auth | None = None, mode: str, **callbacks: Any
) -> AbstractAsyncContextManager[mcp.Client]:
    http = httpx2.AsyncClient(auth=auth, timeout=httpx2.Timeout(30, read=300))
    return mcp.Client(streamable_http_client(url, http_client=http), mode=mode, **callbacks)


async def fill_in(context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
    """Accept with the defaults of the schema (SEP-1034)."""
    assert isinstance(params, types.ElicitRequestFormParams)
    fields: dict[str, Any] = params.requested_schema.get("properties", {})
    content = {name: field["default"] for name, field in fields.items() if "default" in field}
    return types.ElicitResult(action="accept", content=content)


async def call_everything(connect: Connect, url: str, **options: Any) -> None:
    async with connect(url, **options) as client:
        tools = (await client.list_tools()).tools
        for tool in tools:
            arguments: dict[str, Any] = {"a": 5, "b": 3} if tool.name == "add_numbers" else {}
            if "schema" in tool.input_schema.get("properties", {}):
                # It wants to see the schema of another tool come back as it went out.
                arguments = {"schema": next(other.input_schema for other in tools if other is not tool)}
            await client.call_tool(tool.name, arguments)


async def call_what_is_asked_for(connect: Connect, url: str, calls: list[dict[str, Any]]) -> None:
    async with connect(url) as client:
        await client.list_tools()
        for call in calls:
            await client.call_tool(call["name"], call["arguments"])


async def main(connect: Connect, url: str) -> None:
    scenario = os.environ["MCP_CONFORMANCE_SCENARIO"]
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
    if scenario.startswith("auth/client-credentials"):
        await call_everything(connect, url, auth=credentials(url, context))
    elif scenario.startswith("auth/"):
        await call_everything(connect, url, auth=oauth(url, context))
    elif "toolCalls" in context:
        await call_what_is_asked_for(connect, url, context["toolCalls"])
    elif scenario == "initialize":
        async with connect(url) as client:
            await client.list_tools()
    else:
        await call_everything(connect, url, elicitation_callback=fill_in)


if __name__ == "__main__":
    is_stock, is_modern = "--stock" in sys.argv, "--modern" in sys.argv
    modern = "auto" if is_stock else "2026-07-28"
    connection: Connect = partial(stock if is_stock else perdure.connect, mode=modern if is_modern else "legacy")
    asyncio.run(main(connection, sys.argv[-1]))
