"""A small authorization server in the test's own event loop: discovery, keys that can be rotated, dynamic registration,
logins that ask no one (the user is always `ann`), and tokens by a code with PKCE or by a refresh token."""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from tests.support.servers.in_process import under_uvicorn

USER = "ann"
OAUTH = "/.well-known/oauth-authorization-server"
OPENID = "/.well-known/openid-configuration"


@dataclass(frozen=True)
class SigningKey:
    """A key, under the name by which tokens refer to it."""

    kid: str
    private: Any
    algorithm: str

    @property
    def public(self) -> dict[str, Any]:
        implementation = jwt.get_algorithm_by_name(self.algorithm)
        key: dict[str, Any] = implementation.to_jwk(self.private.public_key(), as_dict=True)
        return {**key, "kid": self.kid, "use": "sig", "alg": self.algorithm}

    def sign(self, claims: dict[str, Any], **header: Any) -> str:
        return jwt.encode(claims, self.private, self.algorithm, headers={"kid": self.kid, "typ": "at+jwt", **header})


def new_key(kid: str) -> SigningKey:
    return SigningKey(kid, ec.generate_private_key(ec.SECP256R1()), "ES256")


@dataclass(kw_only=True)
class AuthorizationServer:
    """What it knows and has done. Tests change it while it runs."""

    issuer: str
    keys: list[SigningKey] = field(default_factory=lambda: [new_key("first")])
    """The first one signs; all are published."""
    metadata_at: str = OAUTH
    """Where the path of its issuer is put in, or `OPENID`, which is put after it."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Replaces members of the metadata."""
    answers: dict[str, Callable[[], Response]] = field(default_factory=dict)
    """Answers that replace the server's own, by path."""
    asked: Counter[str] = field(default_factory=Counter)
    """Requests, by path."""
    life: int = 3600
    behind: int = 0
    """Seconds by which its clock is behind."""
    clients: dict[str, dict[str, Any]] = field(default_factory=dict)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    refreshes: dict[str, dict[str, str]] = field(default_factory=dict)

    def token(self, audience: str, *, subject: str | None = USER, key: SigningKey | None = None, **claims: Any) -> str:
        """An access token. A claim that is given as `None` is left out."""
        now = int(time.time()) - self.behind
        made = {"iss": self.issuer, "aud": audience, "sub": subject, "iat": now, "exp": now + self.life, **claims}
        return (key or self.keys[0]).sign({name: value for name, value in made.items() if value is not None})

    def rotate(self, kid: str) -> None:
        """Sign with a new key, and publish no other."""
        self.keys = [new_key(kid)]

    async def __call__(self, request: Request) -> Response:
        path = request.url.path
        self.asked[path] += 1
        if path in self.answers:
            return self.answers[path]()
        prefix = "/" + "/".join(self.issuer.split("/")[3:])
        here = prefix.rstrip("/")
        wanted = here + OPENID if self.metadata_at == OPENID else self.metadata_at + here
        if path == wanted:
            return JSONResponse(self._describe())
        if path == f"{here}/jwks":
            return JSONResponse({"keys": [key.public for key in self.keys]})
        handlers = {f"{here}/register": self._register, f"{here}/token": self._give_token}
        if path in handlers and request.method == "POST":
            return await handlers[path](request)
        if path == f"{here}/authorize":
            return self._authorize(dict(request.query_params))
        return Response(status_code=404)

    def _describe(self) -> dict[str, Any]:
        here = self.issuer.rstrip("/")
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{here}/authorize",
            "token_endpoint": f"{here}/token",
            "registration_endpoint": f"{here}/register",
            "jwks_uri": f"{here}/jwks",
            "response_types_supported": ["code"],
            "grant_types_supported": ["authorization_code", "refresh_token"],
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": ["none"],
            **self.metadata,
        }

    async def _register(self, request: Request) -> Response:
        client = {
            **await request.json(),
            "client_id": secrets.token_hex(8),
            "token_endpoint_auth_method": "none",
        }
        self.clients[client["client_id"]] = client
        return JSONResponse(client, status_code=201)

    def _authorize(self, asked: dict[str, str]) -> Response:
        client = self.clients[asked["client_id"]]
        assert asked["redirect_uri"] in client["redirect_uris"]
        assert asked["code_challenge_method"] == "S256"
        code = secrets.token_hex(8)
        self.codes[code] = asked
        return RedirectResponse(f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}")

    async def _give_token(self, request: Request) -> Response:
        async with request.form() as form:
            given = {name: str(value) for name, value in form.items()}
        if given["grant_type"] == "authorization_code":
            granted = self.codes.pop(given["code"])
            digest = hashlib.sha256(given["code_verifier"].encode()).digest()
            proven = base64.urlsafe_b64encode(digest).decode().rstrip("=") == granted["code_challenge"]
        else:
            granted, proven = self.refreshes.pop(given["refresh_token"]), True
        if not proven or given["client_id"] != granted["client_id"]:
            return JSONResponse({"error": "invalid_grant"}, status_code=400)
        refresh = secrets.token_hex(8)
        self.refreshes[refresh] = granted
        scope = granted.get("scope", "")
        token = self.token(granted["resource"], client_id=granted["client_id"], scope=scope)
        body = {"access_token": token, "token_type": "Bearer", "expires_in": self.life, "refresh_token": refresh}
        return JSONResponse({**body, "scope": scope}, headers={"cache-control": "no-store"})


@asynccontextmanager
async def authorization_server(path: str = "") -> AsyncIterator[AuthorizationServer]:
    """A running one, whose issuer has that path."""
    server: AuthorizationServer

    async def answer(request: Request) -> Response:
        return await server(request)

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    async with under_uvicorn(app) as port:
        server = AuthorizationServer(issuer=f"http://127.0.0.1:{port}{path}")
        yield server
