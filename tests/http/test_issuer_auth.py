"""Tokens of an authorization server: each that is good has a principal, and each that is not has its answer."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastmcp import FastMCP
from fastmcp.server.dependencies import get_access_token as fastmcp_token
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

import perdure
from perdure._core import issuers
from perdure._core.issuers import LEEWAY
from perdure._core.principals import token_principal
from perdure.errors import Misuse
from perdure.http import issuer_tokens
from perdure.http.issuer_tokens import MAX_DOCUMENT, IssuerTokens
from tests.support.clients.raw_http import Answer, Peer, SessionPeer, bearer, message, text_of
from tests.support.servers.authorization_server import (
    OAUTH,
    OPENID,
    AuthorizationServer,
    SigningKey,
    authorization_server,
    new_key,
)
from tests.support.servers.gated_server import Live, live
from tests.support.servers.gated_tools import open_gate
from tests.support.servers.in_process import info_of

pytestmark = pytest.mark.anyio

HERE = "https://mcp.example/mcp"
METADATA = "/.well-known/oauth-protected-resource/mcp"
CHALLENGE = (
    'Bearer error="invalid_token", error_description="Authentication required",'
    f' resource_metadata="https://mcp.example{METADATA}"'
)


@pytest.fixture
async def issuer() -> AsyncIterator[AuthorizationServer]:
    async with authorization_server() as server:
        yield server


@pytest.fixture
async def served(issuer: AuthorizationServer) -> AsyncIterator[Live]:
    async with live(auth=IssuerTokens(issuer=issuer.issuer, audience=HERE)) as running:
        yield running


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "perdure")
    return caplog


def owner(served: Live, peer: SessionPeer) -> str:
    return info_of(served.app, peer.id).owner


async def ask(served: Peer, token: str) -> Answer:
    return await served.initialize(**bearer(token))


def spoil(token: str, **header: Any) -> str:
    """The token with another header, without a signature that fits."""
    _, claims, signature = token.split(".")
    return f"{encoded(header)}.{claims}.{signature}"


def encoded(part: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")


# Whose a token is


async def test_a_subject_keeps_its_session_with_another_token_and_another_client(
    issuer: AuthorizationServer, served: Live
) -> None:
    """R9: a client that registers again has another id, and its user the same sessions."""
    ann = await served.session(**bearer(issuer.token(HERE, client_id="one")))
    again = SessionPeer(
        port=ann.port, headers={**ann.headers, **bearer(issuer.token(HERE, client_id="two"))}, id=ann.id
    )
    assert text_of((await again.call("count", n=1)).messages[-1]) == "counted to 1"
    assert owner(served, ann) == token_principal(None, issuer.issuer, "ann")


async def test_another_subject_cannot_tell_a_session_from_none(issuer: AuthorizationServer, served: Live) -> None:
    """Promise 5."""
    ann = await served.session(**bearer(issuer.token(HERE)))
    answers = []
    for named in (ann.id, "A" * len(ann.id)):
        bob = {**ann.headers, **bearer(issuer.token(HERE, subject="bob")), "mcp-session-id": named}
        answers.append(await SessionPeer(port=ann.port, headers=bob, id=named).ask("POST", message("ping", id=1)))
    assert answers[0].status == 404
    assert answers[0].body == answers[1].body


async def test_a_client_without_a_user_is_a_principal_and_not_a_user_of_that_name(
    issuer: AuthorizationServer, served: Live
) -> None:
    batch = await served.session(**bearer(issuer.token(HERE, subject=None, client_id="batch")))
    user = await served.session(**bearer(issuer.token(HERE, subject="batch")))
    assert owner(served, batch) == token_principal("batch", issuer.issuer, "batch") != owner(served, user)


def sdk_server() -> MCPServer:
    server = MCPServer("who", log_level="WARNING")

    @server.tool()
    async def whoami() -> str:
        token = get_access_token()
        assert token is not None
        return f"{token.subject} {token.client_id} {token.scopes} {token.resource} {(token.claims or {})['team']}"

    return server


def fastmcp_server() -> FastMCP[Any]:
    server: FastMCP[Any] = FastMCP("who")

    @server.tool
    async def whoami() -> str:
        token = fastmcp_token()
        assert token is not None
        claims = token.claims or {}
        return f"{claims['sub']} {token.client_id} {token.scopes} {token.resource} {claims['team']}"

    return server


@pytest.mark.parametrize("make", [sdk_server, fastmcp_server])
async def test_a_tool_sees_whose_token_it_is(issuer: AuthorizationServer, make: Callable[[], object]) -> None:
    async with live(server=make(), auth=IssuerTokens(issuer=issuer.issuer, audience=HERE)) as served:
        token = issuer.token([HERE, "other"], client_id="web", scope="read write", team="ovens")  # type: ignore[arg-type]
        ann = await served.session(**bearer(token))
        assert text_of((await ann.call("whoami")).messages[-1]) == f"ann web ['read', 'write'] {HERE} ovens"


# Tokens that are not good


def none_algorithm(issuer: AuthorizationServer) -> str:
    token = spoil(issuer.token(HERE), alg="none", kid="first")
    return token.rpartition(".")[0] + "."


def public_key_as_secret(issuer: AuthorizationServer) -> str:
    """Everyone has the public key; a server that takes it for a shared secret would accept this."""
    pem = issuer.keys[0].private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signed = f"{encoded({'alg': 'HS256', 'kid': 'first'})}.{issuer.token(HERE).split('.')[1]}"
    digest = hmac.new(pem, signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def own_key_in_header(issuer: AuthorizationServer) -> str:
    """A token that brings its key, and one that names where it is: neither is looked at."""
    forged = new_key("first")
    header = {"jwk": forged.public, "jku": f"{issuer.issuer}/forged", "x5u": f"{issuer.issuer}/forged"}
    return forged.sign(jwt.decode(issuer.token(HERE), options={"verify_signature": False}), **header)


def now() -> int:
    return int(time.time())


BAD: dict[str, tuple[Callable[[AuthorizationServer], str], str]] = {
    "another audience": (
        lambda i: i.token("https://other.example"),
        f"it is for 'https://other.example', not for '{HERE}'",
    ),
    "an address inside ours": (lambda i: i.token(f"{HERE}/more"), "it is for 'https://mcp.example/mcp/more'"),
    "no audience": (lambda i: i.token(HERE, aud=None), 'Token is missing the "aud" claim'),
    "another issuer": (lambda i: i.token(HERE, iss="https://evil.example"), "it is of issuer 'https://evil.example'"),
    "no issuer": (lambda i: i.token(HERE, iss=None), 'Token is missing the "iss" claim'),
    "no end": (lambda i: i.token(HERE, exp=None), 'Token is missing the "exp" claim'),
    "expired": (lambda i: i.token(HERE, exp=now() - LEEWAY - 1), "it has expired"),
    "too early": (lambda i: i.token(HERE, nbf=now() + LEEWAY + 60), "it is not good yet (nbf, iat)"),
    "nobody's": (lambda i: i.token(HERE, subject=None), "it names neither a subject (sub) nor a client (client_id)"),
    "no algorithm": (none_algorithm, "its algorithm is 'none'"),
    "the public key as a secret": (public_key_as_secret, "its algorithm is 'HS256'"),
    "a key of its own": (own_key_in_header, "its signature is wrong"),
    "an unknown key": (lambda i: i.token(HERE, key=new_key("stolen")), "the issuer has no key 'stolen' for ES256"),
    "an algorithm that is not the key's": (lambda i: spoil(i.token(HERE), alg="RS256", kid="first"), "no key 'first'"),
    "not a token": (lambda i: "a-plain-token", "it is not a JSON Web Token"),
    "a deep header": (lambda i: f"{base64.urlsafe_b64encode(b'[' * 9000).decode()}.e30.e30", "not a JSON Web Token"),
    "no text": (lambda i: "\xe9.\xe9.\xe9", "it is not a JSON Web Token"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_token_is_refused_and_the_operator_reads_why(
    case: str, issuer: AuthorizationServer, served: Live, log: pytest.LogCaptureFixture
) -> None:
    make, reason = BAD[case]
    token = make(issuer)
    answer = await ask(served, token)
    assert (answer.status, answer.header("www-authenticate")) == (401, CHALLENGE)
    [record] = [record for record in log.records if getattr(record, "action", "") == "auth.refused"]
    assert record.getMessage().startswith("a token was refused: ")
    assert reason in record.getMessage()
    assert token not in record.getMessage()
    assert "/forged" not in issuer.asked


async def test_clocks_may_differ_a_little(issuer: AuthorizationServer, served: Live) -> None:
    assert (await ask(served, issuer.token(HERE, exp=now() - LEEWAY + 5))).status == 200
    assert (await ask(served, issuer.token(HERE, nbf=now() + LEEWAY - 5))).status == 200


async def test_an_rsa_key_verifies_its_own_algorithm_and_a_short_one_nothing(
    issuer: AuthorizationServer, served: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = SigningKey("good", rsa.generate_private_key(65537, 2048), "PS256")
    short = SigningKey("short", rsa.generate_private_key(65537, 1024), "RS256")
    issuer.keys = [good, short]
    assert (await ask(served, issuer.token(HERE))).status == 200
    claims = jwt.decode(issuer.token(HERE), options={"verify_signature": False})
    signed = jwt.api_jws.PyJWS(options={"enforce_minimum_key_length": False})
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        token = signed.encode(json.dumps(claims).encode(), short.private, "RS256", {"kid": "short"})
    assert (await ask(served, token)).status == 401


async def test_a_stream_ends_with_its_token(
    issuer: AuthorizationServer, served: Live, request: pytest.FixtureRequest
) -> None:
    name = request.node.name
    ann = await served.session(**bearer(issuer.token(HERE)))
    brief = SessionPeer(
        port=ann.port, headers={**ann.headers, **bearer(issuer.token(HERE, exp=now() + 1 - LEEWAY))}, id=ann.id
    )
    async with await brief.begin_call("count", n=2, gate=name, first=1) as call:
        assert len((await call.answer()).messages) == 1
    assert (await brief.ask("GET")).status == 401
    open_gate(name)
    async with await ann.resume(call.position) as again:
        assert text_of((await again.answer()).messages[-1]) == "counted to 2"


# What clients are told


async def test_the_metadata_names_resource_issuer_and_scopes(issuer: AuthorizationServer) -> None:
    async with live(auth=IssuerTokens(issuer=issuer.issuer, audience=HERE, scopes=["read", "write"])) as served:
        answer = await served.ask("GET", path=METADATA)
        assert answer.json == {
            "resource": HERE,
            "authorization_servers": [issuer.issuer],
            "scopes_supported": ["read", "write"],
            "bearer_methods_supported": ["header"],
        }
        assert (await served.ask("GET", path=METADATA, headers={"host": "evil.example"})).status == 421
        assert (await served.initialize()).header("www-authenticate") == CHALLENGE


async def test_the_public_address_may_be_another_than_the_audience(issuer: AuthorizationServer) -> None:
    public = "https://tools.example/a/mcp"
    auth = IssuerTokens(issuer=issuer.issuer, audience="https://api.example", public_url=public)
    async with live(auth=auth) as served:
        path = "/.well-known/oauth-protected-resource/a/mcp"
        assert (await served.ask("GET", path=path)).json["resource"] == public
        assert f'"https://tools.example{path}"' in str((await served.initialize()).header("www-authenticate"))
        assert (await ask(served, issuer.token("https://api.example"))).status == 200
        assert (await ask(served, issuer.token(public))).status == 401


@pytest.mark.parametrize("claims", [{"scope": "read write"}, {"scp": ["write", "read"]}, {"scp": "write read"}])
async def test_a_token_needs_every_scope(claims: dict[str, Any], issuer: AuthorizationServer) -> None:
    async with live(auth=IssuerTokens(issuer=issuer.issuer, audience=HERE, scopes=["read", "write"])) as served:
        assert (await ask(served, issuer.token(HERE, **claims))).status == 200
        for fewer in ({"scope": "read"}, {"scope": "read writer"}, {"scp": [["write"], "read"]}, {}):
            answer = await ask(served, issuer.token(HERE, **fewer))
            assert answer.status == 403
            assert str(answer.header("www-authenticate")).startswith('Bearer error="insufficient_scope"')
            assert METADATA in str(answer.header("www-authenticate"))


# From Python


class Introspection(TokenVerifier):
    """A verifier of a user's own, for tokens that are no JWTs."""

    async def verify_token(self, token: str) -> AccessToken | None:
        scopes = {"opaque-token-1": ["read"], "opaque-token-2": []}.get(token)
        return None if scopes is None else AccessToken(token=token, client_id="web", subject="ann", scopes=scopes)


def settings(issuer: AuthorizationServer, **more: Any) -> AuthSettings:
    values = {"issuer_url": issuer.issuer, "resource_server_url": HERE, "required_scopes": ["read"], **more}
    return AuthSettings.model_validate({"validate_token_resource": True, **values})


async def test_auth_settings_have_tokens_verified_by_the_issuers_keys(issuer: AuthorizationServer) -> None:
    async with live(auth=settings(issuer)) as served:
        assert (await ask(served, issuer.token(HERE, scope="read"))).status == 200
        assert (await ask(served, issuer.token(HERE))).status == 403
        assert (await ask(served, issuer.token("https://other.example", scope="read"))).status == 401
        assert (await served.ask("GET", path=METADATA)).json["authorization_servers"] == [issuer.issuer]


async def test_auth_settings_go_with_a_verifier_of_ones_own(issuer: AuthorizationServer) -> None:
    described = settings(issuer, validate_token_resource=False)
    async with live(auth=described, token_verifier=Introspection()) as served:
        for token, status in (("opaque-token-1", 200), ("opaque-token-2", 403), ("opaque-token-3", 401)):
            assert (await ask(served, token)).status == status
        assert (await served.initialize()).header("www-authenticate") == CHALLENGE
        assert (await served.ask("GET", path=METADATA)).status == 200
    assert not issuer.asked
    async with live(auth=settings(issuer), token_verifier=Introspection()) as served:
        assert (await ask(served, "opaque-token-1")).status == 401  # its verifier does not say what it is for


def test_incomplete_settings_are_refused() -> None:
    lacks = AuthSettings.model_validate({"issuer_url": "https://login.example", "resource_server_url": None})
    with pytest.raises(Misuse, match="has no resource_server_url"):
        perdure.asgi(sdk_server(), store="memory:", auth=lacks)
    with pytest.raises(Misuse, match="token_verifier is for auth=AuthSettings"):
        perdure.asgi(sdk_server(), store="memory:", auth=Introspection(), token_verifier=Introspection())
    plain = AuthSettings.model_validate(
        {"issuer_url": "http://login.example", "resource_server_url": HERE, "validate_token_resource": True}
    )
    with pytest.raises(Misuse, match=r"'http://login\.example' is not https:"):
        perdure.asgi(sdk_server(), store="memory:", auth=plain)


# Keys


@pytest.mark.parametrize(
    ("path", "at"), [("", OAUTH), ("", OPENID), ("/a/b", OAUTH), ("/a/b", OPENID), ("/", OAUTH)], ids=str
)
async def test_keys_are_found_by_the_issuers_metadata(path: str, at: str) -> None:
    async with authorization_server(path) as issuer:
        issuer.metadata_at = at
        async with live(auth=IssuerTokens(issuer=issuer.issuer, audience=HERE)) as served:
            assert (await ask(served, issuer.token(HERE))).status == 200


async def test_keys_are_read_where_the_operator_says_and_metadata_is_not(issuer: AuthorizationServer) -> None:
    auth = IssuerTokens(issuer="https://login.example", audience=HERE, jwks=f"{issuer.issuer}/jwks")
    async with live(auth=auth) as served:
        assert (await ask(served, issuer.token(HERE, iss="https://login.example"))).status == 200
    assert issuer.asked == {"/jwks": 1}


async def test_keys_are_read_once_and_again_for_an_unknown_one_after_a_pause(
    issuer: AuthorizationServer, served: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, fresh = issuer.keys[0], new_key("fresh")
    assert [(await ask(served, issuer.token(HERE))).status for _ in range(3)] == [200] * 3
    issuer.keys = [fresh]
    assert [(await ask(served, issuer.token(HERE))).status for _ in range(3)] == [401] * 3
    assert issuer.asked["/jwks"] == 1
    monkeypatch.setattr(issuers, "UNKNOWN_PAUSE", 0.0)
    assert (await ask(served, issuer.token(HERE))).status == 200
    assert (await ask(served, issuer.token(HERE, key=old))).status == 401  # it was removed, and asks for another read
    assert issuer.asked["/jwks"] == 3


async def test_a_token_that_was_verified_is_forgotten_for_newer_ones_and_when_keys_are_read(
    issuer: AuthorizationServer, served: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_tokens, "MAX_VERIFIED", 2)
    shown = [issuer.token(HERE, jti=str(number)) for number in range(4)]
    assert [(await ask(served, token)).status for token in (*shown, *shown)] == [200] * 8
    issuer.rotate("fresh")
    monkeypatch.setattr(issuers, "READ_AGAIN", 0.0)
    monkeypatch.setattr(issuers, "UNKNOWN_PAUSE", 0.0)
    assert (await ask(served, shown[-1])).status == 401


async def test_many_first_requests_read_the_keys_once(issuer: AuthorizationServer, served: Live) -> None:
    answers = await asyncio.gather(*(ask(served, issuer.token(HERE)) for _ in range(8)))
    assert {answer.status for answer in answers} == {200}
    assert issuer.asked == {OAUTH: 1, "/jwks": 1}


async def test_keys_that_cannot_be_read_again_are_used_for_a_while(
    issuer: AuthorizationServer, served: Live, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    assert (await ask(served, issuer.token(HERE))).status == 200
    issuer.answers["/jwks"] = lambda: Response(status_code=500)
    monkeypatch.setattr(issuers, "READ_AGAIN", 0.0)
    monkeypatch.setattr(issuers, "UNKNOWN_PAUSE", 0.0)
    assert [(await ask(served, issuer.token(HERE))).status for _ in range(2)] == [200, 200]
    unknown = await ask(served, issuer.token(HERE, key=new_key("fresh")))
    assert unknown.status == 503  # it may be a new one
    monkeypatch.setattr(issuers, "KEPT", 0.0)
    assert (await ask(served, issuer.token(HERE))).status == 503
    assert issuer.asked["/jwks"] == 2
    del issuer.answers["/jwks"]
    monkeypatch.setattr(issuers, "FAILED_PAUSE", 0.0)
    monkeypatch.setattr(issuers, "KEPT", 3600.0)
    assert (await ask(served, issuer.token(HERE))).status == 200
    told = [record.getMessage() for record in log.records if record.levelno == logging.WARNING]
    assert told == [
        f"tokens cannot be verified by new keys of {issuer.issuer}: {issuer.issuer}/jwks answered 500",
        f"the keys of {issuer.issuer} can be read again",
    ]


Change = Callable[[AuthorizationServer], object]


def answers(path: str, make: Callable[[], Response]) -> Change:
    return lambda issuer: issuer.answers.update({path: make})


def describes(**metadata: Any) -> Change:
    return lambda issuer: issuer.metadata.update(metadata)


UNREADABLE: dict[str, tuple[Change, str]] = {
    "no metadata": (answers(OAUTH, lambda: Response(status_code=404)), f"{OPENID} answered 404"),
    "a page": (answers(OAUTH, lambda: PlainTextResponse("<html>")), f"{OAUTH} did not answer with JSON"),
    "a deep document": (answers("/jwks", lambda: Response(b"[" * 100_000)), "/jwks did not answer with JSON"),
    "another's metadata": (describes(issuer="https://evil.example"), "is of issuer 'https://evil.example', not of"),
    "a list": (answers(OAUTH, lambda: JSONResponse([])), "is of issuer None, not of"),
    "no keys": (describes(jwks_uri=None), "has no jwks_uri; give the address of the keys with --jwks"),
    "keys elsewhere": (
        describes(jwks_uri="http://127.0.0.1:1/jwks"),
        "has its keys at another host; give that address with --jwks http://127.0.0.1:1/jwks",
    ),
    "keys in a file": (describes(jwks_uri="file:///etc/passwd"), "'file:///etc/passwd' is not an address"),
    "a redirect": (answers("/jwks", lambda: RedirectResponse("http://127.0.0.1:1/")), "/jwks answered 307"),
    "no key set": (answers("/jwks", lambda: JSONResponse({})), 'it has no list "keys"'),
    "too much": (answers("/jwks", lambda: Response(b" " * (MAX_DOCUMENT + 1))), "/jwks answered more than 256 KiB"),
}


@pytest.mark.parametrize("case", UNREADABLE)
async def test_a_token_is_not_judged_while_keys_cannot_be_read(
    case: str, issuer: AuthorizationServer, served: Live, log: pytest.LogCaptureFixture
) -> None:
    change, reason = UNREADABLE[case]
    change(issuer)
    answer = await ask(served, issuer.token(HERE))
    assert (answer.status, answer.header("retry-after"), answer.error["code"]) == (503, "1", -31012)
    assert answer.error["message"].startswith("The keys of the authorization server cannot be read at the moment")
    [record] = [record for record in log.records if getattr(record, "action", "") == "auth.keys_unavailable"]
    assert reason in record.getMessage()
    assert (await served.ask("GET", path=METADATA)).status == 200
    assert (await ask(served, "a-plain-token")).status == 401


async def test_an_issuer_that_is_silent_or_gone_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(issuer_tokens, "READ_SECONDS", 0.1)

    @asynccontextmanager
    async def silent() -> AsyncIterator[int]:
        async def keep(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)

        writers: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(keep, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]
            for writer in writers:
                writer.transport.abort()

    async with silent() as port:
        auth = IssuerTokens(issuer=f"http://127.0.0.1:{port}", audience=HERE)
        async with live(auth=auth) as served:
            assert (await ask(served, new_key("any").sign({}))).status == 503
    async with live(auth=IssuerTokens(issuer=f"http://127.0.0.1:{port}", audience=HERE)) as served:
        assert (await ask(served, new_key("any").sign({}))).status == 503
    told = [record.getMessage() for record in log.records if getattr(record, "action", "") == "auth.keys_unavailable"]
    assert len(told) == 2
    assert told[0].endswith(": no answer within 0.1 s")
