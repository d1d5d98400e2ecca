"""Sends requests without a session (2026-07-28): those of a program, and the client's own.

A request is a `Call` without a link: each attempt is a POST of its own.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from perdure._core import splice
from perdure._core.envelope import SUBSCRIPTION, envelope_in, headers_of, with_tasks
from perdure._core.listening import Subscription
from perdure._core.reconnect import Patience
from perdure._core.settling import may_run_again
from perdure.remote.call import Call, OutgoingRequest, params_body
from perdure.remote.message import Message, encode, messages_in
from perdure.remote.route import Route
from perdure.remote.stream import Take, ignore, pause_before_return

#: Pages of `tools/list` that are read to find one tool.
TOOL_PAGES = 100

ToolPage = Callable[[str | None], Awaitable[Mapping[str, Any]]]
"""Returns the page of `tools/list` at a cursor."""


class Requests:
    """Sends requests to one server."""

    def __init__(self, route: Route) -> None:
        self.route = route

    async def send(
        self,
        request: OutgoingRequest,
        take: Take = ignore,
        *,
        patience: Patience | None = None,
        may_have_arrived: bool = False,
    ) -> Message:
        """The answer: exactly one, whatever happens."""
        call = Call(self.route, request, take=take, patience=patience, may_have_arrived=may_have_arrived)
        return await call.answer()

    async def ask(self, method: str, params: Mapping[str, Any], of: Mapping[str, Any]) -> Message:
        """The answer to a request of the client's own that may be repeated, with the envelope of a program's params."""
        whole = {**params, "_meta": with_tasks(envelope_in(of) or {})}
        body = params_body(method, whole)
        return await self.send(OutgoingRequest(method=method, body=body, headers=headers_of(method, whole)))

    async def tool(self, name: str, of: Mapping[str, Any]) -> Mapping[str, Any]:
        """A tool as `tools/list` shows it; empty if the server does not show it."""

        async def page(cursor: str | None) -> Mapping[str, Any]:
            found = await self.ask("tools/list", {"cursor": cursor} if cursor else {}, of)
            return {} if found.is_error else found.result

        return await _find_tool(name, page)


async def _find_tool(name: str, page: ToolPage) -> Mapping[str, Any]:
    cursor: str | None = None
    for _ in range(TOOL_PAGES):
        found = await page(cursor)
        tools = found.get("tools")
        for tool in tools if isinstance(tools, list) else ():
            if isinstance(tool, Mapping) and tool.get("name") == name:
                return tool
        if not (cursor := found.get("nextCursor")):
            break
    return {}


async def may_run_twice(name: str, page: ToolPage) -> bool:
    """Whether a tool says that a second run does no harm. `page` reads one page of `tools/list`."""
    return may_run_again(await _find_tool(name, page))


async def listen(requests: Requests, request: OutgoingRequest, subscriber_id: str, deliver: Take) -> Message:
    """Keep one `subscriptions/listen` open (`_core/listening.py` has the rules); returns the answer that ends it.

    `deliver` hands notifications on, under the id by which the subscriber knows the subscription, given as JSON.
    """
    subscription = Subscription()

    async def take(message: Message) -> None:
        nonlocal subscription
        if message.method is None or message.is_request:
            return
        subscription, hands_on, cues = subscription.heard(message.method, message.params)
        texts = [message.text] if hands_on else []
        for method, params in cues:
            texts.append(encode({"jsonrpc": "2.0", "method": method, "params": {**params, "_meta": {SUBSCRIPTION: 0}}}))
        for text in texts:
            await deliver(messages_in(splice.replaced(text, subscriber_id, "params", "_meta", SUBSCRIPTION))[0])

    while True:
        answer = await requests.send(request, take, patience=requests.route.limits.listening)
        if (after := subscription.ended(is_error=answer.is_error)) is None:
            return answer
        subscription = after
        await pause_before_return(after.barren, requests.route.limits.listening)
