"""Takes requests without a session (2026-07-28) to their answers: those of a program, and the client's own.

Each attempt is a POST of its own, under a new id, because the revision has no way to read a broken response on. The
meaning of a response or a failure for the request stands in `_core/delivery.py`, as for calls of a session: reads and
the requests of tasks are sent again, and so are calls with a key. A tool's call without a key that may have arrived is
sent again only if its tool says that it may run twice; otherwise its outcome is unknown.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure._core import splice
from perdure._core.codes import INTERNAL_ERROR
from perdure._core.delivery import SESSIONLESS, Attempt, Failure, Meaning, Purpose, of_failure
from perdure._core.envelope import SUBSCRIPTION, envelope_in, headers_of, with_tasks
from perdure._core.jsonrpc import JsonObject
from perdure._core.listening import Subscription
from perdure._core.reconnect import Patience
from perdure._core.settling import may_run_again
from perdure._core.sse import EventTooLarge
from perdure.remote.call import not_run, unknown
from perdure.remote.endpoint import Endpoint, Refused, RequestFailed
from perdure.remote.link import Notice, Report
from perdure.remote.message import Message, encode, error, messages_in
from perdure.remote.stream import Limits, Listener, Stream, pause_before_return

#: Runs of one tool that says that it may run twice, and whose call has no key. Each lost connection is another run: a
#: tool that takes longer than a proxy keeps a silent connection would otherwise run for ever.
MOST_RUNS = 5
#: Pages of `tools/list` that are read to find one tool.
TOOL_PAGES = 100

Take = Callable[[Message], Awaitable[None]]
"""Takes a message that comes before the answer."""
ToolPage = Callable[[str | None], Awaitable[Mapping[str, Any]]]
"""Returns the page of `tools/list` at a cursor."""
Body = Callable[[JsonObject, str], bytes]
"""Makes the JSON of a request for its `_meta` and its id on the wire."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request as it is sent. Each attempt has a progress token of its own, if the request has one: the id."""

    method: str
    name: str = ""
    """Of the tool, for people."""
    meta: Mapping[str, Any]
    body: Body
    headers: Mapping[str, str] = field(default_factory=dict)
    is_keyed: bool = False
    """The server runs it once, however often it comes."""
    is_first: bool = False
    """Patience is for servers that answered before: the request fails at once if no connection can be made."""
    may_run_again: Callable[[], Awaitable[bool]] | None = None
    """Called for a call without a key when it may have run. None: it may not."""

    def encoded(self, wire_id: str) -> bytes:
        token = {"progressToken": wire_id} if "progressToken" in self.meta else {}
        return self.body({**self.meta, **token}, wire_id)


def params_body(method: str, params: Mapping[str, Any]) -> Body:
    """The body of a request whose params are values."""

    def body(meta: JsonObject, wire_id: str) -> bytes:
        whole = {"jsonrpc": "2.0", "id": wire_id, "method": method, "params": {**params, "_meta": meta}}
        return encode(whole).encode()

    return body


def text_body(text: str) -> Body:
    """The body of a request that is kept as the text that it came in."""

    def body(meta: JsonObject, wire_id: str) -> bytes:
        return splice.replaced(splice.replaced(text, encode(meta), "params", "_meta"), encode(wire_id), "id").encode()

    return body


async def ignore(_: object) -> None:
    """For requests whose messages have no reader."""


class Requests:
    """Sends requests to one server.

    `new_id` makes ids that never repeat. `complain` is given what is not a message, `report` whether the server is away
    or answers.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        limits: Limits,
        *,
        new_id: Callable[[], str],
        complain: Callable[[Exception], Awaitable[object]],
        report: Report,
    ) -> None:
        self.endpoint = endpoint
        self.limits = limits
        self.new_id = new_id
        self.complain = complain
        self.report = report

    async def send(
        self, request: Request, take: Take = ignore, *, patience: Patience | None = None, may_have_arrived: bool = False
    ) -> Message:
        """The answer: exactly one, whatever happens. `may_have_arrived`: an earlier process has sent the request."""
        delivery = _RequestDelivery(self, request, take, patience or self.limits.patience, may_have_arrived)
        return await delivery.answer()

    async def ask(self, method: str, params: Mapping[str, Any], of: Mapping[str, Any]) -> Message:
        """The answer to a request of the client's own that may be repeated, with the envelope of a program's params."""
        whole = {**params, "_meta": with_tasks(envelope_in(of) or {})}
        headers = headers_of(method, whole)
        return await self.send(
            Request(method=method, meta=whole["_meta"], body=params_body(method, params), headers=headers)
        )

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


class _RequestDelivery:
    """One request, over as many attempts as it takes."""

    def __init__(
        self, requests: Requests, request: Request, take: Take, patience: Patience, may_have_arrived: bool
    ) -> None:
        self._requests = requests
        self._request = request
        self._id = ""
        """Of the newest attempt."""
        self._is_repeatable = request.method in SESSIONLESS
        self._may_have_arrived = may_have_arrived
        self._runs = 1
        self._stream = Stream(
            requests.endpoint,
            requests.limits,
            Listener(take=take, complain=requests.complain, move=lambda position, retry: None),
            patience=patience,
            begins_now=True,
            has_positions=False,
            may_break=self._is_repeatable or request.is_keyed,
        )

    async def answer(self) -> Message:
        try:
            if self._may_have_arrived and not self._request.is_keyed and not await self._runs_again():
                return self._end(Meaning.UNKNOWN, "the client's process ended before the server had answered")
            while (found := await self._attempt()) is None:
                self._requests.report(Notice.WAITING, self._stream.trouble)
                if not await self._stream.wait():
                    ended = of_failure(self._attempted(), Failure.PATIENCE_ENDED)
                    return self._end(ended, f"the server did not come back: {self._stream.trouble}")
            return found
        except EventTooLarge as too_large:
            ended = of_failure(self._attempted(), Failure.TOO_LARGE)
            return self._end(ended, str(too_large), Refused("too_large", str(too_large)))
        except Exception as failure:  # whatever it is, it costs this request alone
            said = f"{type(failure).__name__}: {failure}"
            if self._may_have_arrived:
                return self._end(Meaning.UNKNOWN, said)
            return error(encode(self._id), INTERNAL_ERROR, said)

    def _attempted(self) -> Attempt:
        if self._request.is_keyed or self._runs > 1:
            return Attempt(purpose=Purpose.KEYED, may_have_arrived=self._may_have_arrived)
        return Attempt(purpose=Purpose.CALL, is_repeatable=self._is_repeatable)

    async def _attempt(self) -> Message | None:
        """One HTTP request; None if another one follows after a pause."""
        self._id = self._requests.new_id()
        endpoint, request = self._requests.endpoint, self._request
        attempt, at_least, refusal = self._attempted(), None, None
        try:
            async with endpoint.post(request.encoded(self._id), None, request.headers) as response:
                meaning, message = await response.meaning(attempt, self._id, self._requests.limits.message_bytes)
                if meaning in (Meaning.FOLLOW, Meaning.ANSWER):
                    self._requests.report(Notice.REACHED)
                if meaning is Meaning.FOLLOW:
                    message = await self._stream.read(response, awaited=self._id)
                    meaning = Meaning.ANSWER if message is not None else of_failure(attempt, Failure.LOST)
                    why = self._stream.trouble
                else:
                    at_least, refusal = response.retry_after, endpoint.refusal(response)
                    why = str(refusal) if response.status < 300 else f"HTTP {response.status}"
                if message is not None and meaning is Meaning.ANSWER:
                    return message
        except RequestFailed as failed:
            meaning, why, refusal = of_failure(attempt, failed.failure), str(failed), failed.refusal
            if request.is_first and failed.failure is Failure.NOT_SENT:
                meaning, self._stream.trouble = Meaning.UNREACHABLE, why
        if meaning in (Meaning.UNKNOWN, Meaning.RESTART) and not (request.is_keyed or self._is_repeatable):
            meaning = Meaning.RESTART if await self._runs_again() else Meaning.UNKNOWN
        if meaning not in (Meaning.AGAIN, Meaning.RESTART):
            return self._end(meaning, why, refusal)
        if meaning is Meaning.RESTART:
            self._may_have_arrived = True
        self._stream.failed(why, at_least=at_least)
        return None

    async def _runs_again(self) -> bool:
        """Whether a call without a key is sent again, though it may have run."""
        may_run_again = self._request.may_run_again
        if may_run_again is None or self._runs >= MOST_RUNS or not await may_run_again():
            return False
        self._runs += 1
        return True

    def _end(self, meaning: Meaning, why: str, refusal: Refused | None = None) -> Message:
        if meaning is Meaning.UNKNOWN:
            return unknown(self._id, self._request.method, self._request.name, why)
        return not_run(meaning, self._id, self._stream.trouble, refusal or Refused("refused", why))


async def listen(requests: Requests, request: Request, subscriber_id: str, deliver: Take) -> Message:
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
        answer = await requests.send(request, take, patience=requests.limits.listening)
        if (after := subscription.ended(is_error=answer.is_error)) is None:
            return answer
        subscription = after
        await pause_before_return(after.barren, requests.limits.listening)
