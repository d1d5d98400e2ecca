"""Handshakes: the first, the recorded one of a process of before, and another one when the session is gone."""

from __future__ import annotations

import logging
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
from pydantic import ValidationError

from perdure.client.reader import Answer, Reader
from perdure.client.state import Handshake
from perdure.client.wire import Broken, NotSent, kind, retry_after
from perdure.errors import UNREACHABLE
from perdure.observe import note

if TYPE_CHECKING:
    from perdure.client.link import Link

SESSION_HEADER = "mcp-session-id"


class Handshaking:
    """Makes and renews the session of a link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._turn = anyio.Lock()

    async def initialize(self, message: JSONRPCRequest) -> None:
        """What the SDK's client asks for first."""
        link, params = self._link, dict(message.params or {})
        recorded = link.handshake
        if recorded is not None and recorded.session and recorded.initialized and recorded.fits(params):
            link.before.recall()
            await link.deliver(JSONRPCResponse(jsonrpc="2.0", id=message.id, result=recorded.result))
            return
        if recorded is not None:
            reason = "the client now has other capabilities" if recorded.session else "the server has no sessions"
            link.before.lose(f"its session could not go on: {reason}")
        link.state.forget_session()
        body = message.model_dump(by_alias=True, mode="json", exclude_unset=True) | {"id": link.new_id()}
        answer = await self._negotiate(body, params)
        await link.deliver(answer.model_copy(update={"id": message.id}))

    async def initialized(self, message: JSONRPCNotification) -> None:
        """The second half; nothing else may be sent before it."""
        link, handshake = self._link, self._link.handshake
        if handshake is None:
            return
        if handshake.initialized:
            await link.before.revive()
        elif await link.tell(message.model_dump(by_alias=True, mode="json", exclude_unset=True)):
            handshake.initialized = True
            link.changed()
        link.listen()

    async def renew(self, gone: Handshake | None) -> bool:
        """One new session in place of one that is gone, however many requests have noticed (B5, H8)."""
        link = self._link
        async with self._turn:
            if link.handshake is not gone:
                return link.handshake is not None
            assert gone is not None
            note(logging.WARNING, "client.session_gone", "the session is gone; a new one is begun")
            body = {"jsonrpc": "2.0", "id": link.new_id(), "method": "initialize", "params": gone.request}
            answer = await self._negotiate(body, gone.request)
            if isinstance(answer, JSONRPCError):
                return False  # the next request finds out again whether it is still gone
            link.state.position = None
            link.state.asks.clear()
            await self._settle_in()
            return True

    async def _settle_in(self) -> None:
        """Bring a new session to where the old one was."""
        link, handshake = self._link, self._link.handshake
        assert handshake is not None
        handshake.initialized = await self.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})
        for sticky in list(link.state.sticky.values()):
            await self._once({"jsonrpc": "2.0", "id": link.new_id(), **sticky}, handshake)
        link.changed()
        if link.on_renewed is not None:
            link.on_renewed(types.InitializeResult.model_validate(handshake.result, by_name=False))
        link.listen()

    async def _negotiate(self, body: dict[str, Any], params: dict[str, Any]) -> Answer:
        link = self._link
        answer, session = await self._once(body, None)
        if isinstance(answer, JSONRPCResponse):
            link.state.handshake = Handshake(session=session, request=params, result=dict(answer.result))
            link.changed()
        return answer

    async def _once(self, body: dict[str, Any], handshake: Handshake | None) -> tuple[Answer, str]:
        """A request of ours and its answer, without coming back: a handshake is begun again, not resumed."""
        try:
            async with self._link.wire.post(body, handshake) as response:
                session = response.headers.get(SESSION_HEADER, "")
                return await self._answer(response, body), session
        except NotSent as error:
            return _error(body, UNREACHABLE, f"The server cannot be reached: {error}"), ""
        except Broken as error:
            return _error(body, UNREACHABLE, f"The server did not answer: {error}"), ""
        except Exception as error:  # An auth flow of the user's may raise anything.
            return _error(body, INTERNAL_ERROR, f"{type(error).__name__}: {error}"), ""

    async def _answer(self, response: httpx2.Response, body: dict[str, Any]) -> Answer:
        if response.status_code == 200 and kind(response) == "text/event-stream":
            reader = Reader(_Deaf(), self._link.patience, position=None, retry=None)
            answer = await reader.read(response)
            return answer or _error(body, UNREACHABLE, f"The server did not answer: {reader.trouble}")
        try:
            message = jsonrpc_message_adapter.validate_json(await response.aread(), by_name=False)
        except ValidationError:
            message = None
        if isinstance(message, Answer):
            return message
        if response.status_code == 404:
            return _error(body, METHOD_NOT_FOUND, "Not Found")
        code = INTERNAL_ERROR if response.status_code in (401, 403) or response.status_code >= 500 else INVALID_REQUEST
        return _error(body, code, f"HTTP {response.status_code} {kind(response)}".rstrip())

    async def tell(self, body: dict[str, Any]) -> bool:
        """Send a notification or an answer until it is accepted; False if that cannot be."""
        reader = Reader(_Deaf(), self._link.patience, position=None, retry=None)
        while True:
            try:
                async with self._link.wire.post(body, self._link.handshake) as response:
                    if response.status_code < 300:
                        return True
                    if response.status_code < 500 and response.status_code != 429:
                        return False
                    reader.failed(f"HTTP {response.status_code}", at_least=retry_after(response))
            except (NotSent, Broken) as error:
                reader.failed(str(error))
            except Exception as error:  # An auth flow of the user's may raise anything.
                note(logging.WARNING, "client.not_told", f"a message could not be sent: {error}")
                return False
            if not await reader.wait():
                return False


class _Deaf:
    """Hears nothing: a handshake has no notifications of its own."""

    async def take(self, message: object) -> None:
        return None

    async def complain(self, error: Exception) -> None:
        return None

    def move(self, position: str | None, retry: int | None) -> None:
        return None


def _error(body: dict[str, Any], code: int, message: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=body["id"], error=ErrorData(code=code, message=message))
