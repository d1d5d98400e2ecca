"""server-everything, which has one of everything, tells a client the same directly and through the gateway."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.session import ClientRequestContext, IncomingMessage
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CreateMessageRequestParams,
    CreateMessageResult,
    ElicitRequestParams,
    ElicitResult,
    ListRootsResult,
    LoggingMessageNotificationParams,
    PromptReference,
    Root,
    TextContent,
)
from pydantic import BaseModel, FileUrl

from tests.gateway.real_upstreams import REAL_SERVERS, gateway_to
from tests.support.servers.in_process import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning"),  # features of a session alone
]

#: What each run has anew: the time of day in a resource's text.
CLOCK = re.compile(r"\d{1,2}:\d\d:\d\d [AP]M")

#: Each tool that answers for itself, and one that is not there or is called wrongly.
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("echo", {"message": "rye – ржаной 🍞"}),
    ("get-sum", {"a": 2, "b": 0.5}),
    ("get-structured-content", {"location": "Chicago"}),
    ("get-annotated-message", {"messageType": "error", "includeImage": True}),
    ("get-tiny-image", {}),
    ("get-resource-links", {"count": 4}),
    ("get-resource-reference", {"resourceType": "Text", "resourceId": 3}),
    ("get-roots-list", {}),
    ("trigger-sampling-request", {"prompt": "bake", "maxTokens": 7}),
    ("trigger-elicitation-request", {}),
    ("gzip-file-as-resource", {"name": "flour", "data": "data:text/plain,rye", "outputType": "resourceLink"}),
    ("get-sum", {"a": "two"}),
    ("not-there", {}),
]


class Teller:
    """A client's callbacks, and all that they were told."""

    def __init__(self) -> None:
        self.told: defaultdict[str, list[Any]] = defaultdict(list)

    def tell(self, what: str, value: Any) -> None:
        text = value.model_dump_json(by_alias=True, exclude_none=True) if isinstance(value, BaseModel) else value
        self.told[what].append(json.loads(CLOCK.sub("noon", text)) if isinstance(value, BaseModel) else value)

    async def on_message(self, message: IncomingMessage) -> None:
        if not isinstance(message, Exception):
            self.tell(message.method, message)

    async def on_log(self, params: LoggingMessageNotificationParams) -> None:
        self.tell("log", params)

    async def on_sampling(
        self, context: ClientRequestContext, params: CreateMessageRequestParams
    ) -> CreateMessageResult:
        self.tell("sampling", params)
        return CreateMessageResult(role="assistant", content=TextContent(type="text", text="a loaf"), model="oven")

    async def on_elicitation(self, context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        self.tell("elicitation", params)
        return ElicitResult(action="accept", content={"name": "ada", "check": True})

    async def on_roots(self, context: ClientRequestContext) -> ListRootsResult:
        self.told["roots"].append("asked")
        return ListRootsResult(roots=[Root(uri=FileUrl("file:///bakery"), name="bakery")])

    async def on_progress(self, progress: float, total: float | None, message: str | None) -> None:
        self.told["progress"].append((progress, total, message))


async def tell_all(server: Any) -> dict[str, list[Any]]:
    """Use each feature once; what a client is told."""
    teller = Teller()
    async with Client(
        server,
        mode="legacy",
        message_handler=teller.on_message,
        logging_callback=teller.on_log,
        sampling_callback=teller.on_sampling,
        elicitation_callback=teller.on_elicitation,
        list_roots_callback=teller.on_roots,
    ) as client:
        assert client.server_info is not None
        teller.tell("info", client.server_info)
        teller.tell("capabilities", client.server_capabilities)
        teller.tell("instructions", client.instructions)
        await until(lambda: teller.told["log"])  # the roots were asked for, and taken in
        for name, arguments in CALLS:
            try:
                teller.tell(name, await client.call_tool(name, arguments))
            except MCPError as error:
                teller.tell(name, (error.code, str(error)))
        slow = ("trigger-long-running-operation", {"duration": 0.3, "steps": 3})
        teller.tell("slow", await client.call_tool(*slow, progress_callback=teller.on_progress))
        teller.tell("tools", await client.list_tools())
        teller.tell("resources", await client.list_resources())
        teller.tell("templates", await client.list_resource_templates())
        teller.tell("prompts", await client.list_prompts())
        for uri in ("demo://resource/dynamic/text/2", "demo://resource/session/flour"):
            teller.tell(uri, await client.read_resource(uri))
        teller.tell("prompt", await client.get_prompt("args-prompt", {"city": "Bergen"}))
        department = PromptReference(type="ref/prompt", name="completable-prompt")
        teller.tell("completion", await client.complete(department, {"name": "department", "value": "E"}))
        teller.tell("level", await client.set_logging_level("emergency"))
        uri = "demo://resource/dynamic/text/1"
        teller.tell("subscribed", await client.subscribe_resource(uri))
        teller.tell("updates", await client.call_tool("toggle-subscriber-updates", {}))
        await until(lambda: teller.told["notifications/resources/updated"])
        teller.tell("unsubscribed", await client.unsubscribe_resource(uri))
        await client.send_roots_list_changed()
        await until(lambda: len(teller.told["roots"]) == 2)
        # They come beside the answers, on a stream of their own.
        await until(lambda: teller.told["notifications/resources/list_changed"])
        await until(lambda: teller.told["notifications/tools/list_changed"])
        await client.send_ping()
    return teller.told


async def test_everything_through_the_gateway_equals_everything(tmp_path: Path) -> None:
    """G37."""
    server = REAL_SERVERS["everything"]
    command, *words = server.argv(tmp_path)
    direct = await tell_all(stdio_client(StdioServerParameters(command=command, args=words)))
    async with gateway_to(server, tmp_path) as gateway:
        through = await tell_all(gateway.url)
    assert through.keys() == direct.keys()
    for what, told in direct.items():
        assert through[what] == told, what
