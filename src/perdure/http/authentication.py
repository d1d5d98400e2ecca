"""Admits callers that show a bearer token, and publishes where they get one (RFC 9728)."""

import json

from mcp.server.auth.middleware.auth_context import AuthContextMiddleware
from mcp.server.auth.middleware.bearer_auth import BearerAuthBackend, RequireAuthMiddleware
from mcp.server.auth.provider import TokenVerifier
from mcp.server.auth.routes import build_resource_metadata_url, create_protected_resource_routes
from mcp.server.auth.settings import AuthSettings
from pydantic import AnyHttpUrl
from starlette.authentication import AuthenticationError
from starlette.datastructures import Headers
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Send

from perdure._core.challenges import with_metadata
from perdure.errors import Misuse
from perdure.http.access import refusal_of
from perdure.http.issuer_tokens import IssuerTokens, KeysUnavailable
from perdure.http.refusals import HttpRefusal, Refusal
from perdure.runtime.token_check import TokenCheck
from perdure.telemetry.counters import Counters


class Authentication:
    """Checks the bearer token of each request."""

    def __init__(self, auth: TokenVerifier | AuthSettings, verifier: TokenVerifier | None, counters: Counters) -> None:
        """`auth` alone is a verifier, or names the issuer whose tokens Perdure verifies itself."""
        settings: AuthSettings | None = None
        if isinstance(auth, AuthSettings):
            if verifier is None and auth.resource_server_url is None:
                raise Misuse("AuthSettings has no resource_server_url, so no audience of tokens can be checked; set it")
            if verifier is None:
                verifier = IssuerTokens(issuer=str(auth.issuer_url), audience=str(auth.resource_server_url))
            settings, self.verifier = auth, verifier
        elif verifier is not None:
            raise Misuse("token_verifier is for auth=AuthSettings(…); give a TokenVerifier alone as auth")
        else:
            settings, self.verifier = auth.settings if isinstance(auth, IssuerTokens) else None, auth
        self._counters = counters
        self._scopes = list(settings.required_scopes or ()) if settings else []
        self._resource = settings.resource_server_url if settings else None
        self._checks_resource = settings is not None and bool(settings.validate_token_resource)
        self.metadata: ASGIApp | None = None
        """Answers who issues tokens for this server."""
        self.metadata_path = ""
        self._metadata_url: AnyHttpUrl | None = None
        if settings is not None and self._resource is not None:
            routes = create_protected_resource_routes(self._resource, [settings.issuer_url], self._scopes or None)
            self.metadata, self.metadata_path = Router(routes), routes[0].path.rstrip("/")
            self._metadata_url = build_resource_metadata_url(self._resource)

    def protect(self, app: ASGIApp) -> ASGIApp:
        """The app for callers that show a valid bearer token."""

        def on_error(connection: HTTPConnection, error: AuthenticationError) -> Response:
            if isinstance(error, KeysUnavailable):
                return refusal_of(HttpRefusal(Refusal.KEYS_UNAVAILABLE), None, self._counters).answer
            return AuthenticationMiddleware.default_on_error(connection, error)

        resource = self._resource if self._checks_resource else None
        return AuthenticationMiddleware(
            AuthContextMiddleware(RequireAuthMiddleware(app, self._scopes, self._metadata_url)),
            backend=BearerAuthBackend(self.verifier, resource_server_url=resource),
            on_error=on_error,
        )

    def challenging(self, check: TokenCheck, send: Send) -> Send:
        """Send a response, or in its place the refusal of the caller's token by the server that it was passed on to."""
        is_replaced = False

        async def send_checked(message: Message) -> None:
            nonlocal is_replaced
            if message["type"] == "http.response.start":
                headers = Headers(raw=message["headers"])
                is_stream = headers.get("content-type", "").startswith("text/event-stream")
                challenge = await check.wait() if is_stream else check.challenge
                if challenge is not None:
                    is_replaced = True
                    self._counters.requests_refused += 1
                    code = "invalid_token" if challenge.status == 401 else "insufficient_scope"
                    header = with_metadata(challenge.header or f'Bearer error="{code}"', str(self._metadata_url))
                    said = "The server behind this one does not accept the token"
                    body = json.dumps({"error": code, "error_description": said}).encode()
                    given = {
                        "content-type": "application/json",
                        "content-length": str(len(body)),
                        "www-authenticate": header,
                    }
                    raw = [(name.encode(), value.encode()) for name, value in given.items()]
                    await send({"type": "http.response.start", "status": challenge.status, "headers": raw})
                    await send({"type": "http.response.body", "body": body})
            if not is_replaced:
                await send(message)

        return send_checked
