"""One request on its way to its one answer.

It is sent until it has left, then followed until it is answered. What may have left is not sent again, unless the
specification makes it a read: then nothing can happen twice, and it goes out under a new id.

| what happens | a tool's call | a read |
|---|---|---|
| nobody listens, 429, or 503 with `Retry-After` | sent again | sent again |
| 404: the session is gone | a new session, sent again once | the same |
| the connection breaks, or 502, 503, 504, with no position yet | outcome unknown | sent again |
| another 5xx, or an answer that is none | outcome unknown | an error |
| the connection breaks, position known | resumed from there | the same |
| the position is refused, or the session is gone by then | outcome unknown | sent again |
| patience ends before it has left | unreachable | unreachable |
| patience ends later | outcome unknown | unreachable |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import httpx2
from mcp_types import INTERNAL_ERROR, INVALID_REQUEST, ErrorData, JSONRPCError, JSONRPCMessage, jsonrpc_message_adapter
from pydantic import ValidationError

from perdure._core.codes import OUTCOME_UNKNOWN
from perdure._core.settling import READS
from perdure._core.sse import EventTooLarge
from perdure._core.sticky import METHODS as STICKY
from perdure.client.reader import Answer, Reader
from perdure.client.sessions import Sessions
from perdure.errors import UNREACHABLE
from perdure.remote.endpoint import Broken, NotSent, kind, retry_after, whole
from perdure.remote.state import Running

#: A gateway's word that the server behind it did not answer: the request may have arrived there.
NO_ANSWER = frozenset({502, 503, 504})


class _Gone(Exception):
    """The server does not know the session (404)."""


class Call:
    """`request` is the JSON-RPC request as it goes out, `running` what is remembered of it."""

    def __init__(self, sessions: Sessions, request: dict[str, Any], running: Running) -> None:
        self.request = request
        self.running = running
        self._sessions = sessions
        self._renewed = False
        self._handshake = sessions.handshake
        self._reader = Reader(
            self, sessions.patience, position=running.position, retry=running.retry, pulse=sessions.pulse
        )
        self._may_be_repeated = request["method"] in READS or request["method"] in STICKY
        self.scope = anyio.CancelScope()
        self.mark: Callable[[str | None, int | None], None] = self._mark
        """Told of each position; whoever hands messages on later puts it off."""

    async def answer(self) -> Answer:
        """Exactly one, whatever happens."""
        try:
            while True:
                found = await (self._post() if self._reader.position is None else self._resume())
                if found is not None:
                    return found
                if not await self._reader.wait():
                    return self._gave_up()
        except EventTooLarge as error:
            return self.unknown(str(error))
        except Exception as error:  # An auth flow of the user's may raise anything; it costs this request alone.
            return self._failed(error)

    # The reader's listener

    def awaits(self, answer: Answer) -> bool:
        return answer.id == self.request["id"] or (answer.id is None and isinstance(answer, JSONRPCError))

    async def take(self, message: JSONRPCMessage) -> None:
        await self._sessions.take(message, self.running.id, self.running.tool or None)

    async def complain(self, error: Exception) -> None:
        await self._sessions.complain(error)

    def move(self, position: str | None, retry: int | None) -> None:
        self.mark(position, retry)

    def _mark(self, position: str | None, retry: int | None) -> None:
        """What the next process shall go on from."""
        is_first, self.running.position = self.running.position is None, position
        if retry is not None:
            self.running.retry = retry
        if self.request["method"] != "tools/call":
            return
        if is_first:
            self._sessions.changed()  # without a position the next process could not go on at all
        else:
            self._sessions.moved()

    # Sending

    async def _post(self) -> Answer | None:
        self._handshake = self._sessions.handshake
        try:
            async with self._sessions.wire.post(self.request, self._handshake) as response:
                return await self._posted(response)
        except NotSent as error:
            self._reader.failed(str(error))
            return None
        except Broken as error:
            return self._broken(str(error))
        except _Gone:
            return await self._begin_again()

    async def _posted(self, response: httpx2.Response) -> Answer | None:
        status = response.status_code
        if status == 200 and kind(response) == "text/event-stream":
            return await self._followed(response)
        if status == 404 and self._handshake is not None and self._handshake.session:
            raise _Gone
        if status == 429 or (status == 503 and retry_after(response) is not None):
            self._reader.failed(f"HTTP {status}", at_least=retry_after(response))
            return None
        if status < 300:
            return self._whole(await whole(response), kind(response))
        return await self._refused(response)

    async def _begin_again(self) -> Answer | None:
        """The session is gone, so this request was not accepted: it may go out again, once, in a new one."""
        if self._renewed:
            return self._error(INVALID_REQUEST, "Session terminated, and so was the new one")
        trouble = await self._sessions.renew(self._handshake)
        if trouble is None:
            self._renewed = True
            return await self._post()
        if trouble.error.code == UNREACHABLE:
            self._reader.failed(trouble.error.message)
            return None
        return self._error(
            INVALID_REQUEST, f"Session terminated, and no new one could be begun: {trouble.error.message}"
        )

    async def _followed(self, response: httpx2.Response) -> Answer | None:
        answer = await self._reader.read(response)
        if answer is None and self._reader.position is None and not self._may_be_repeated:
            return self.unknown(self._reader.trouble)
        if answer is None and self._reader.position is None:
            self._rename()
        return answer

    def _whole(self, body: bytes, media: str) -> Answer:
        if media != "application/json":
            return self._undone(f"Unexpected content type: {media or 'none'}")
        try:
            message = jsonrpc_message_adapter.validate_json(body, by_name=False)
        except ValidationError as error:
            return self._undone(f"The answer is no JSON-RPC message: {error.error_count()} errors")
        if isinstance(message, Answer) and self.awaits(message):
            return message
        return self._undone("The answer is no response to this request")

    async def _refused(self, response: httpx2.Response) -> Answer | None:
        """What the server says in the body, or else the status."""
        status = response.status_code
        if kind(response) == "application/json":
            try:
                message = jsonrpc_message_adapter.validate_json(await whole(response), by_name=False)
            except ValidationError:
                message = None
            if isinstance(message, JSONRPCError):
                return message
        if status in NO_ANSWER:
            return self._broken(f"HTTP {status}")
        if status >= 500:
            return self._undone(f"HTTP {status}")
        if response.next_request is not None:
            place = response.next_request.url.copy_with(userinfo=b"", query=None, fragment=None)
            return self._error(INVALID_REQUEST, f"Redirect to {place} not followed: use that address")
        return self._error(INTERNAL_ERROR, f"HTTP {status}")

    # Following

    async def _resume(self) -> Answer | None:
        handshake = self._handshake
        try:
            async with self._sessions.wire.get(self._reader.position, handshake) as response:
                if response.status_code == 200 and kind(response) == "text/event-stream":
                    return await self._followed(response)
                if response.status_code == 404:
                    raise _Gone
                if response.status_code in (400, 405):
                    return self._cannot_resume(f"the server does not resume it: HTTP {response.status_code}")
                self._reader.failed(f"HTTP {response.status_code}", at_least=retry_after(response))
        except (NotSent, Broken) as error:
            self._reader.failed(str(error))
        except _Gone:
            await self._sessions.renew(handshake)
            return self._cannot_resume("its session is gone")
        except Exception as error:
            self._reader.not_opened(error)
        return None

    def _cannot_resume(self, reason: str) -> Answer | None:
        if not self._may_be_repeated:
            return self.unknown(reason)
        self._reader.failed(reason)
        self._reader.position = None
        self._rename()
        return None

    # Endings

    def _broken(self, trouble: str) -> Answer | None:
        if not self._may_be_repeated:
            return self.unknown(trouble)
        self._reader.failed(trouble)
        self._rename()
        return None

    def _undone(self, trouble: str) -> Answer:
        """The server has taken it, and does not say what became of it."""
        return self._error(INTERNAL_ERROR, trouble) if self._may_be_repeated else self.unknown(trouble)

    def _rename(self) -> None:
        """The server may still have the first one: ids never repeat within a session."""
        self.request = {**self.request, "id": self._sessions.new_id()}

    def _gave_up(self) -> Answer:
        if self._reader.position is not None and not self._may_be_repeated:
            return self.unknown(f"the server did not come back: {self._reader.trouble}")
        return self._error(UNREACHABLE, f"The server did not answer within the limits: {self._reader.trouble}")

    def _failed(self, error: Exception) -> Answer:
        if self._reader.position is not None and not self._may_be_repeated:
            return self.unknown(f"{type(error).__name__}: {error}")
        return self._error(INTERNAL_ERROR, f"{type(error).__name__}: {error}")

    def unknown(self, reason: str) -> Answer:
        data = {
            "outcome": "unknown",
            "reason": reason,
            "method": self.request["method"],
            "name": self.running.tool,
            "told_by": "client",
        }
        return self._error(OUTCOME_UNKNOWN, "Interrupted, outcome unknown", data)

    def _error(self, code: int, message: str, data: Any = None) -> JSONRPCError:
        return JSONRPCError(jsonrpc="2.0", id=self.running.id, error=ErrorData(code=code, message=message, data=data))
