"""Handshakes: the first, the recorded one of a process of before, and another one when the session is gone.

A renewal is a task of its own: whoever found the session gone waits for it, and may stop waiting, but it is made whole.
Only then is the new session the one that requests go to; so none of them comes before `initialized`.

A Perdure server with `recover="reissue"` answers 404 with the id of a session that it has made already. That id is
not used: the specification has a client begin anew without one (B5), and what the server agreed to would be unknown.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
import mcp_types as types
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    ErrorData,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from pydantic import ValidationError

from perdure.client.reader import Answer, Reader
from perdure.errors import UNREACHABLE
from perdure.remote.endpoint import Broken, NotSent, kind, whole
from perdure.remote.state import Handshake
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.client.link import Link

SESSION_HEADER = "mcp-session-id"
#: Seconds for one handshake, however lively the answer is: as long as an answer may be silent.
HANDSHAKE_SECONDS = 300.0
#: What a server, or a gateway before it, says that is busy or not yet there.
BUSY = frozenset({429, 502, 503, 504})


@dataclass(kw_only=True)
class _Renewal:
    trouble: JSONRPCError | None = None
    is_over: anyio.Event = field(default_factory=anyio.Event)


class Handshaking:
    """Makes and renews the session of a link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._renewal: _Renewal | None = None
        self.is_ready = anyio.Event()
        """The first handshake is through: nothing else may be sent before."""

    async def initialize(self, message: JSONRPCRequest) -> None:
        """What the SDK's client asks for first."""
        link, params = self._link, dict(message.params or {})
        recorded = link.handshake
        trouble = None if recorded is None else _why_not(recorded, params)
        if recorded is not None and trouble is None:
            link.before.recall()
            await link.deliver(JSONRPCResponse(jsonrpc="2.0", id=message.id, result=recorded.result))
            return
        if recorded is not None:
            link.before.lose(f"its session could not go on: {trouble}")
        link.state.forget_session()
        body = message.model_dump(by_alias=True, mode="json", exclude_unset=True) | {"id": link.new_id()}
        answer, session = await self._once(body, None)
        if isinstance(answer, JSONRPCResponse):
            link.state.handshake = Handshake(session=session, request=params, result=dict(answer.result))
            link.changed()
        await link.deliver(answer.model_copy(update={"id": message.id}))

    async def initialized(self, message: JSONRPCNotification) -> None:
        """The second half."""
        link, handshake = self._link, self._link.handshake
        is_new = handshake is not None and not handshake.initialized
        if handshake is not None and is_new:
            body = message.model_dump(by_alias=True, mode="json", exclude_unset=True)
            handshake.initialized = await link.teller.tell(body, handshake)
            link.changed()
        link.listen(is_new=is_new)
        if is_new:
            await link.listening()
        self.is_ready.set()
        if not is_new:
            await link.before.revive()

    async def renew(self, gone: Handshake | None) -> JSONRPCError | None:
        """One new session in place of one that is gone, however many requests have noticed (B5, H8)."""
        if gone is None or self._link.handshake is not gone:
            return None
        renewal = self._renewal
        if renewal is None:
            renewal = self._renewal = _Renewal()
            self._link.start(self._renew, gone, renewal)
        await renewal.is_over.wait()
        return renewal.trouble

    async def _renew(self, gone: Handshake, renewal: _Renewal) -> None:
        log_event(logging.WARNING, "client.session_gone", "the session is gone; a new one is begun")
        try:
            renewal.trouble = await self._begin_again(gone)
        finally:
            self._renewal = None
            renewal.is_over.set()

    async def _begin_again(self, gone: Handshake) -> JSONRPCError | None:
        link = self._link
        body = {"jsonrpc": "2.0", "id": link.new_id(), "method": "initialize", "params": gone.request}
        answer, session = await self._once(body, None)
        if isinstance(answer, JSONRPCError):
            return answer
        handshake = Handshake(session=session, request=gone.request, result=dict(answer.result))
        if (result := _read(handshake)) is None:
            return _error(body, INVALID_REQUEST, "the handshake cannot be read, or is of an unknown revision")
        await self._bring_up(handshake)
        link.state.replace_session(handshake)
        link.changed()
        if link.on_renewed is not None:
            link.on_renewed(result)
        link.listen(is_new=True)
        await link.listening()
        return None

    async def _bring_up(self, handshake: Handshake) -> None:
        """Bring a new session to where the old one was."""
        body = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        handshake.initialized = await self._link.teller.tell(body, handshake)
        for sticky in list(self._link.state.sticky.values()):
            await self._once({"jsonrpc": "2.0", "id": self._link.new_id(), **sticky}, handshake)

    async def _once(self, body: dict[str, Any], handshake: Handshake | None) -> tuple[Answer, str]:
        """A request of ours and its answer, without coming back: a handshake is begun again, not resumed."""
        try:
            with anyio.fail_after(HANDSHAKE_SECONDS):
                async with self._link.wire.post(body, handshake) as response:
                    session = response.headers.get(SESSION_HEADER, "")
                    return await self._answer(response, body), session
        except NotSent as error:
            return _error(body, UNREACHABLE, f"The server cannot be reached: {error}"), ""
        except (Broken, TimeoutError) as error:
            return _error(body, UNREACHABLE, f"The server did not answer: {error}"), ""
        except Exception as error:  # An auth flow of the user's may raise anything.
            return _error(body, INTERNAL_ERROR, f"{type(error).__name__}: {error}"), ""

    async def _answer(self, response: httpx2.Response, body: dict[str, Any]) -> Answer:
        if response.status_code == 200 and kind(response) == "text/event-stream":
            reader = Reader(_Deaf(), self._link.patience, position=None, retry=None)
            answer = await reader.read(response)
            return answer or _error(body, UNREACHABLE, f"The server did not answer: {reader.trouble}")
        try:
            message = jsonrpc_message_adapter.validate_json(await whole(response), by_name=False)
        except ValidationError:
            message = None
        if isinstance(message, Answer):
            return message
        return _error(body, _code(response.status_code), f"HTTP {response.status_code} {kind(response)}".rstrip())


def _why_not(recorded: Handshake, request: dict[str, Any]) -> str | None:
    """Why a session of before cannot go on; None if it can."""
    if not recorded.session:
        return "the server has no sessions"
    if not recorded.initialized:
        return "its handshake was not finished"
    if not recorded.fits(request):
        return "the client now has other capabilities"
    return None if _read(recorded) is not None else "its handshake cannot be read"


def _read(handshake: Handshake) -> types.InitializeResult | None:
    """What the server agreed to, if the SDK's client can take it."""
    try:
        result = types.InitializeResult.model_validate(handshake.result, by_name=False)
    except ValidationError:
        return None
    return result if result.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS else None


def _code(status: int) -> int:
    if status == 404:
        return METHOD_NOT_FOUND
    if status in BUSY:
        return UNREACHABLE
    return INTERNAL_ERROR if status in (401, 403) or status >= 500 else INVALID_REQUEST


def _error(body: dict[str, Any], code: int, message: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=body["id"], error=ErrorData(code=code, message=message))


class _Deaf:
    """A listener that hears nothing but an answer."""

    def awaits(self, answer: Answer) -> bool:
        return True

    async def take(self, message: object) -> None:
        return None

    async def complain(self, error: Exception) -> None:
        return None

    def move(self, position: str | None, retry: int | None) -> None:
        return None
