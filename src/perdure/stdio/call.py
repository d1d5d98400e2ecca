"""One request of the host's on its way to its one answer.

It is sent until it has left, then followed until it is answered. What may have left is not sent again, unless the
specification makes it a read: then nothing can happen twice, and it goes out under a new id. The rules are those of the
client for programs (`client/call.py` has the table).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import httpx2

from perdure._core import splice
from perdure._core.codes import NO_SERVER, OUTCOME_UNKNOWN, UNREACHABLE
from perdure._core.reconnect import Patience
from perdure._core.settling import READS
from perdure._core.sse import EventTooLarge
from perdure._core.sticky import METHODS as STICKY
from perdure.remote.heartbeat import Heartbeat as Pulse
from perdure.remote.old_wire import Broken, NotSent, Wire, kind, retry_after
from perdure.remote.state import Handshake
from perdure.stdio import failures as troubles
from perdure.stdio.following import Following, whole
from perdure.stdio.messages import INTERNAL_ERROR, FromServer, encode, error, from_server

#: A gateway's word that the server behind it did not answer: the request may have arrived there.
NO_ANSWER = frozenset({502, 503, 504})
#: Seconds until a request without any sign of the server's counts as sent, and the next message may follow it. Servers
#: that answer with plain JSON give no sign before the answer.
DEPARTURE = 0.5


class _Gone(Exception):
    """The server does not know the session (404)."""


class Sessions(Protocol):
    """Where a call finds its session."""

    wire: Wire
    patience: Patience
    pulse: Pulse
    teller: troubles.Teller
    credentials: bool

    @property
    def handshake(self) -> Handshake | None: ...

    async def renew(self, gone: Handshake | None) -> Exception | None:
        """A new session in place of this one; why not, if there is none to be had."""

    async def take(self, message: FromServer) -> None: ...

    def misheard(self, reason: str) -> None: ...

    def changed(self) -> None: ...

    def moved(self) -> None: ...

    def new_id(self) -> str: ...


@dataclass(kw_only=True)
class Asked:
    """What the host asked for."""

    id: str
    """As the host wrote it."""
    method: str
    name: str = ""
    """Of the tool."""
    position: str | None = None

    @property
    def may_be_repeated(self) -> bool:
        return self.method in READS or self.method in STICKY


class Call:
    """`text` is the request as the host sent it, or "" for one of before, which is only followed."""

    def __init__(
        self, sessions: Sessions, asked: Asked, text: str, *, wire_id: str, since: float | None = None
    ) -> None:
        self.asked = asked
        self.wire_id = wire_id
        self.token = wire_id
        """The progress token on the wire, if there is one: it stays when the request is renamed."""
        self.is_begun = False
        self.scope = anyio.CancelScope()
        self.departed = anyio.Event()
        """Set when the next message may follow."""
        self._text = text
        self._sessions = sessions
        self._handshake = sessions.handshake
        self._following = Following(self, sessions.patience, position=asked.position, since=since, pulse=sessions.pulse)
        self._renewed = False

    async def answer(self) -> str:
        """Exactly one, under the host's own id, whatever happens."""
        self.is_begun = True
        try:
            while True:
                found = await (self._post() if self._following.position is None else self._resume())
                if found is not None:
                    return found
                self._sessions.teller.waiting(self._sessions.wire.url, self._following.trouble)
                if not await self._following.wait():
                    return self._gave_up()
        except EventTooLarge as too_large:
            return self.unknown(str(too_large))
        except troubles.Refused as refused:
            return self._refused(refused.trouble)
        except Exception as failure:  # whatever it is, it costs this request alone
            return self._failed(failure)
        finally:
            self.departed.set()

    # The stream's listener

    async def hear(self, message: FromServer) -> FromServer | None:
        if message.is_answer:
            return message if message.body.get("id") in (self.wire_id, None) else None
        await self._sessions.take(message)
        return None

    def misheard(self, reason: str) -> None:
        self._sessions.misheard(reason)

    def move(self, position: str) -> None:
        is_first, self.asked.position = self.asked.position is None, position
        if self.asked.may_be_repeated:
            return
        if is_first:
            self._sessions.changed()  # without a position the next instance could not go on at all
        else:
            self._sessions.moved()

    # Sending

    async def _post(self) -> str | None:
        self._handshake = self._sessions.handshake
        body = splice.replaced(self._text, encode(self.wire_id), "id").encode()
        timer = asyncio.get_running_loop().call_later(DEPARTURE, self.departed.set)
        try:
            async with self._sessions.wire.post(body, self._handshake) as response:
                return await self._posted(response)
        except NotSent as failure:
            if (trouble := troubles.of_error(failure, self._sessions.wire.url)) is not None:
                raise troubles.Refused(trouble) from failure
            self._following.failed(str(failure))
            return None
        except Broken as failure:
            return self._broken(str(failure))
        except _Gone:
            timer.cancel()
            return await self._begin_again()
        finally:
            timer.cancel()

    async def _posted(self, response: httpx2.Response) -> str | None:
        status = response.status_code
        if status == 404 and self._handshake is not None and self._handshake.session:
            raise _Gone
        if status == 429 or (status == 503 and retry_after(response) is not None):
            self._following.failed(f"HTTP {status}", at_least=retry_after(response))
            if status == 429:
                self.departed.set()  # too many at once: those in front must be able to end
            return None
        if status in NO_ANSWER:
            return self._broken(f"HTTP {status}")
        self.departed.set()
        if status == 200 and kind(response) == "text/event-stream":
            self._sessions.teller.reached(self._sessions.wire.url)
            return await self._followed(response)
        return await self._whole(response)

    async def _begin_again(self) -> str | None:
        """The session is gone, so this request was not accepted: it may go out again, once, in a new one."""
        if self._renewed:
            return self._error(UNREACHABLE, "The session is gone, and so is the new one")
        trouble = await self._sessions.renew(self._handshake)
        if trouble is None:
            self._renewed = True
            return await self._post()
        if isinstance(trouble, troubles.Refused):
            raise trouble
        self._following.failed(str(trouble))
        return None

    async def _followed(self, response: httpx2.Response) -> str | None:
        if not self.asked.may_be_repeated:
            self._text = ""  # it will not be sent again
        answer = await self._following.read(response)
        if answer is not None:
            return answer.answering(self.asked.id)
        if self._following.position is not None:
            return None
        if not self.asked.may_be_repeated:
            return self.unknown(self._following.trouble)
        self._rename()
        return None

    async def _whole(self, response: httpx2.Response) -> str:
        """An answer in one piece, or what an HTTP error says."""
        if kind(response) == "application/json":
            try:
                messages = from_server(await whole(response))
            except ValueError:
                messages = []
            for message in messages:
                if message.is_answer and (message.is_error or response.status_code == 200):
                    self._sessions.teller.reached(self._sessions.wire.url)
                    return message.answering(self.asked.id)
        found = troubles.of_response(response, self._sessions.wire.url, credentials=self._sessions.credentials)
        if (response.status_code < 300 or response.status_code >= 500) and not self.asked.may_be_repeated:
            return self.unknown(found.sentence)  # the server has taken it, and does not say what became of it
        raise troubles.Refused(found)

    # Following

    async def _resume(self) -> str | None:
        self.departed.set()
        handshake = self._handshake
        try:
            async with self._sessions.wire.get(self._following.position, handshake) as response:
                if response.status_code == 200 and kind(response) == "text/event-stream":
                    self._sessions.teller.reached(self._sessions.wire.url)
                    answer = await self._following.read(response)
                    return None if answer is None else answer.answering(self.asked.id)
                if response.status_code == 404:
                    raise _Gone
                if response.status_code in (400, 405):
                    return self._cannot_resume(f"the server does not resume it: HTTP {response.status_code}")
                self._following.failed(f"HTTP {response.status_code}", at_least=retry_after(response))
        except (NotSent, Broken) as failure:
            self._following.failed(str(failure))
        except _Gone:
            await self._sessions.renew(handshake)
            return self._cannot_resume("its session is gone")
        except Exception as failure:  # the call runs: no token to be had at this moment says nothing about it
            self._following.not_opened(failure)
        return None

    def _cannot_resume(self, reason: str) -> str | None:
        if not self.asked.may_be_repeated:
            return self.unknown(reason)
        self._following.failed(reason)
        self._following.position = None
        self._rename()
        return None

    # Endings

    def _broken(self, trouble: str) -> str | None:
        if not self.asked.may_be_repeated:
            return self.unknown(trouble)
        self._following.failed(trouble)
        self._rename()
        return None

    def _rename(self) -> None:
        """The server may still have the first one: ids never repeat within a session."""
        self.wire_id = self._sessions.new_id()

    def _gave_up(self) -> str:
        if self._following.position is not None and not self.asked.may_be_repeated:
            return self.unknown(f"the server did not come back: {self._following.trouble}")
        return self._error(UNREACHABLE, f"The server did not answer within the limits: {self._following.trouble}")

    def _failed(self, failure: Exception) -> str:
        said = f"{type(failure).__name__}: {failure}"
        if self._following.position is not None and not self.asked.may_be_repeated:
            return self.unknown(said)
        return self._error(INTERNAL_ERROR, said)

    def _refused(self, trouble: troubles.Trouble) -> str:
        self._sessions.teller.refused(trouble)
        return self._error(NO_SERVER, trouble.sentence, {"reason": trouble.reason})

    def unknown(self, reason: str) -> str:
        data = {
            "outcome": "unknown",
            "reason": reason,
            "method": self.asked.method,
            "name": self.asked.name,
            "told_by": "client",
        }
        return self._error(OUTCOME_UNKNOWN, "Interrupted, outcome unknown", data)

    def _error(self, code: int, message: str, data: dict[str, Any] | None = None) -> str:
        return error(self.asked.id, code, message, data)
