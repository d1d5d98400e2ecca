"""The resume broker on the wire: four POSTs beside the endpoint, JSON in and out (T10, T12).

Every rejection is the same answer, byte for byte, so that a caller that guesses tokens learns nothing from it. A body
that cannot be read, too many requests, or a store that fails are refused as at the endpoint.
"""

import re

from pydantic_core import from_json
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope

from perdure._core.chains import TOKEN_LENGTH
from perdure._core.limits import RateLimit
from perdure.http.access import SessionAccess
from perdure.http.refusals import HttpRefusal, Refusal
from perdure.http.request import Headers, require_json
from perdure.sessions.broker import Broker, Rejected, TokenUser

ACTIONS = ("open", "resume", "confirm", "revoke")

ALLOW_POST = {"allow": "POST, OPTIONS"}

REQUESTS = 600
REQUESTS_A_SECOND = 10.0
"""Requests of one caller in a row, and how fast that room comes back. Guessing is hopeless anyway (256 bits); this
bounds the writes that a loop of restarts causes. A start takes two requests: 300 servers at once, then five in each
second, is more than a desktop starts."""

_HOLDER = re.compile(r"[0-9a-f]{64}")

_NO_STORE = {"cache-control": "no-store"}
REJECTED = JSONResponse({"error": "rejected"}, 403, _NO_STORE)


def resume_paths(endpoint: str) -> dict[str, str]:
    """The broker's paths, siblings of the endpoint's, each with its action."""
    parent = endpoint.rpartition("/")[0]
    return {f"{parent}/resume/{action}": action for action in ACTIONS}


class ResumeTokenHandler:
    """Answers requests to the broker; raises `HttpRefusal`, unless a token is rejected."""

    def __init__(self, access: SessionAccess) -> None:
        self._access = access
        self._broker = Broker(access.context, access.sessions)
        self._limit = RateLimit[tuple[str, str]](REQUESTS, per_second=REQUESTS_A_SECOND)

    async def __call__(self, action: str, scope: Scope, receive: Receive, headers: Headers, owner: str) -> JSONResponse:
        if scope["method"] != "POST":
            raise HttpRefusal(Refusal.METHOD, method=scope["method"], allowed="POST", headers=ALLOW_POST)
        self._access.refuse_if_draining()
        client = scope.get("client")
        name = ("principal", owner) if owner else ("address", client[0] if client else "")
        if not self._limit.take(name, now=self._access.context.hub.monotonic()):
            raise HttpRefusal(Refusal.TOO_MANY_RESUMES, limit=REQUESTS)
        require_json(headers)
        body = await self._access.bodies.read(receive, headers)
        try:
            fields = from_json(body)
        except ValueError:
            raise _bad("body", "it is not JSON") from None
        if not isinstance(fields, dict):
            raise _bad("body", "it is not a JSON object")
        holder, token = fields.get("holder"), fields.get("token")
        if not isinstance(holder, str) or not _HOLDER.fullmatch(holder):
            how = "it is missing" if holder is None else "it is not a SHA-256 in 64 lower-case hex digits"
            raise _bad("holder", how)
        caller = TokenUser(principal=owner, holder=holder)
        if action == "open":
            session = headers.get(b"mcp-session-id")
            if not session:
                raise _bad("Mcp-Session-Id", "the header is missing: it names the session to open a chain for")
            token = session.decode("latin-1")
        elif not isinstance(token, str) or len(token) != TOKEN_LENGTH:
            how = "it is missing" if token is None else f"it is not a string of {TOKEN_LENGTH} characters"
            raise _bad("token", how)
        answer: dict[str, str] = {}
        try:
            match action:
                case "open":
                    answer = {"token": await self._broker.open(token, caller)}
                case "resume":
                    resumed = await self._broker.resume(token, caller)
                    answer = {"session": resumed.session, "token": resumed.token}
                case "confirm":
                    await self._broker.confirm(token, caller)
                case "revoke":
                    await self._broker.revoke(token, caller)
        except Rejected:
            return REJECTED
        return JSONResponse(answer, headers=_NO_STORE)


def _bad(field: str, reason: str) -> HttpRefusal:
    return HttpRefusal(Refusal.RESUME_FIELD, field=field, reason=reason, data={"field": field})
