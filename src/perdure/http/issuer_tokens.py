"""Verifies access tokens of an authorization server: JSON Web Tokens (RFC 9068), by the keys that the issuer publishes.

Keys are read when a token needs them, so that a server starts while its issuer is down. They come from the issuer's own
origin, or from the address that the operator gave; an address that a token or another host names is never read.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import jwt
from mcp.client.auth.utils import build_oauth_authorization_server_metadata_discovery_urls
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.auth.settings import AuthSettings
from pydantic import ValidationError
from starlette.authentication import AuthenticationError

from perdure._core.issuers import (
    ALGORITHMS,
    LEEWAY,
    KeySetAge,
    KeyState,
    find_key,
    names_in,
    read_key_set,
)
from perdure._core.principals import token_principal
from perdure.errors import Misuse
from perdure.http.issuer_addresses import is_same_origin, parse_issuer, parse_key_source, parse_resource
from perdure.remote.endpoint import http_client
from perdure.telemetry.log_records import PeerLog, log_event

#: Seconds for all that is read to have the keys: three documents of an issuer in the neighbourhood take one.
READ_SECONDS = 5.0
#: Bytes of a document. Key sets have a few KiB, and some dozens where certificates are in them.
MAX_DOCUMENT = 256 << 10
#: Tokens that are not verified again while the same keys are in use: a client sends the same one for minutes, and each
#: verification takes half a millisecond. A token with its claims takes some KiB.
MAX_VERIFIED = 1024

_OPTIONS: Any = {"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True}


class IssuerToken(AccessToken):
    """A token that Perdure has verified by its issuer's keys."""

    principal: str
    """Whose it is: issuer and subject, whatever client the subject uses."""


class KeysUnavailable(AuthenticationError):
    """The issuer's keys cannot be read, so nothing is known of the token."""


class IssuerTokens(TokenVerifier):
    """Accepts tokens that `issuer` signed for `audience`. Its principals are the issuer's subjects, whichever OAuth
    client they use: a client that registers again would lose its sessions otherwise."""

    def __init__(
        self,
        *,
        issuer: str,
        audience: str,
        public_url: str | None = None,
        scopes: Sequence[str] | None = None,
        jwks: str | None = None,
    ) -> None:
        """`public_url`: the address by which clients know this server, if it is not the audience. `scopes`: those that
        a token must have. `jwks`: the address of the keys, if the issuer does not publish it or has them elsewhere."""
        try:
            self._issuer = parse_issuer(issuer)
            self._audience = parse_resource(audience)
            self._jwks = None if jwks is None else parse_key_source(jwks)
            self.settings = AuthSettings.model_validate(
                {
                    "issuer_url": issuer,
                    "resource_server_url": parse_resource(public_url or audience),
                    "required_scopes": None if scopes is None else list(scopes),
                    "validate_token_resource": False,  # the audience is checked here
                }
            )
        except ValidationError as error:
            raise Misuse(f"tokens cannot be verified: {error.errors()[0]['msg']}") from None
        except ValueError as error:
            raise Misuse(f"tokens cannot be verified: {error}") from None
        self._keys: Sequence[Mapping[str, Any]] = ()
        self._prepared: dict[tuple[object, str], jwt.PyJWK] = {}
        """What became of the keys that tokens have named, each with its algorithm."""
        self._verified: dict[str, IssuerToken] = {}
        """Tokens that these keys have verified; the one that was verified first is dropped first."""
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._reading = asyncio.Lock()
        self._why = ""
        """Why the keys could not be read at the last try."""
        self._peer_log = PeerLog()

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return the token's claims and principal, or `None` if it is not good here. Raises `KeysUnavailable`."""
        age, known = self._age, self._verified.get(token)
        # The SDK's bearer check, which calls this, looks at the time of expiry itself.
        if known is not None and age.judge(is_known=True) is KeyState.KNOWN and not age.is_due(is_known=True):
            return known
        try:
            verified = await self._verify(token)
            if len(self._verified) >= MAX_VERIFIED:
                del self._verified[next(iter(self._verified))]
            self._verified[token] = verified
            return verified
        except jwt.InvalidIssuerError:
            reason = f"it is of issuer {_unverified(token, 'iss')!r}, not of {self._issuer!r}"
        except jwt.InvalidAudienceError:
            reason = f"it is for {_unverified(token, 'aud')!r}, not for {self._audience!r}"
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            reason = _REASONS.get(type(error), str(error))
        # For the operator alone. It may have a peer's text in it, and never the token.
        self._peer_log.log_event(logging.INFO, "auth.refused", f"a token was refused: {reason}")
        return None

    async def _verify(self, token: str) -> IssuerToken:
        header = jwt.get_unverified_header(token)
        algorithm = header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise ValueError(f"its algorithm is {algorithm!r}, and {', '.join(ALGORITHMS)} are accepted")
        key = await self._find_key(header.get("kid"), algorithm)
        claims = jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            audience=self._audience,
            issuer=self._issuer,
            leeway=LEEWAY,
            options=_OPTIONS,
        )
        if (names := names_in(claims)) is None:
            raise ValueError("it names neither a subject (sub) nor a client (client_id)")
        return IssuerToken(
            token=token,
            client_id=names.client,
            subject=names.user or names.client,
            scopes=list(names.scopes),
            expires_at=int(claims["exp"]) + LEEWAY,
            resource=self._audience,
            claims=claims,
            # A client without a user is told from a user of the same name.
            principal=token_principal(None, self._issuer, names.user)
            if names.user
            else token_principal(names.client, self._issuer, names.client),
        )

    async def _find_key(self, kid: object, algorithm: str) -> jwt.PyJWK:
        age, found = self._age, find_key(self._keys, kid, algorithm)
        is_good = age.judge(is_known=found is not None) is KeyState.KNOWN
        # One request reads, and those wait for it that lack their key.
        if age.is_due(is_known=found is not None) and not (is_good and self._reading.locked()):
            async with self._reading:
                if self._age.is_due(is_known=find_key(self._keys, kid, algorithm) is not None):
                    await self._read()
            age, found = self._age, find_key(self._keys, kid, algorithm)
        if age.judge(is_known=found is not None) is KeyState.UNAVAILABLE:
            raise KeysUnavailable(self._why)
        if found is None:
            raise ValueError(f"the issuer has no key {kid!r} for {algorithm}")
        if (kid, algorithm) not in self._prepared:
            self._prepared[kid, algorithm] = jwt.PyJWK(dict(found), algorithm)
        return self._prepared[kid, algorithm]

    @property
    def _age(self) -> KeySetAge:
        now = asyncio.get_running_loop().time()
        return KeySetAge(
            read=None if self._read_at is None else now - self._read_at,
            tried=None if self._tried_at is None else now - self._tried_at,
        )

    async def _read(self) -> None:
        failed_before, self._why = self._why, ""
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(READ_SECONDS), http_client(self._jwks or self._issuer) as http:
                address = self._jwks or await self._discover(http)
                self._keys = read_key_set(await _fetch(http, address))
            self._prepared.clear()
            self._verified.clear()
            self._tried_at = self._read_at = now()
        except TimeoutError:
            self._why = f"no answer within {READ_SECONDS:g} s"
        except (httpx2.HTTPError, OSError, ValueError, ImportError) as error:  # also of the environment's proxies
            self._why = str(error) or type(error).__name__
        if self._why:
            self._tried_at = now()
            if not failed_before:
                sentence = f"tokens cannot be verified by new keys of {self._issuer}: {self._why}"
                log_event(logging.WARNING, "auth.keys_unavailable", sentence)
        elif failed_before:
            log_event(logging.WARNING, "auth.keys_read", f"the keys of {self._issuer} can be read again")

    async def _discover(self, http: httpx2.AsyncClient) -> str:
        """Find the address of the keys: in the metadata of RFC 8414, or of OpenID Connect."""
        reasons = []
        for address in build_oauth_authorization_server_metadata_discovery_urls(self._issuer, self._issuer):
            try:
                metadata = await _fetch(http, address)
                if not isinstance(metadata, dict) or metadata.get("issuer") != self._issuer:
                    seen = metadata.get("issuer") if isinstance(metadata, dict) else None
                    raise ValueError(f"{address} is of issuer {seen!r}, not of {self._issuer!r}")
                keys = metadata.get("jwks_uri")
                if not isinstance(keys, str):
                    raise ValueError(f"{address} has no jwks_uri; give the address of the keys with --jwks")
                if not is_same_origin(keys, self._issuer):
                    raise ValueError(f"{address} has its keys at another host; give that address with --jwks {keys}")
                return keys
            except (httpx2.HTTPError, ValueError) as error:
                reasons.append(str(error) or type(error).__name__)
        raise ValueError("; ".join(dict.fromkeys(reasons)))


def _unverified(token: str, claim: str) -> object:
    return jwt.decode(token, options={"verify_signature": False}).get(claim)


async def _fetch(http: httpx2.AsyncClient, address: str) -> object:
    """Read a JSON document. Redirects are not followed."""
    # Compressed, a small answer could fill the memory.
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    async with http.stream("GET", address, headers=headers, follow_redirects=False) as response:
        if response.status_code != 200:
            raise ValueError(f"{address} answered {response.status_code}")
        body = b""
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_DOCUMENT:
                raise ValueError(f"{address} answered more than {MAX_DOCUMENT >> 10} KiB")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError(f"{address} did not answer with JSON") from None


_REASONS: Mapping[type[Exception], str] = {
    jwt.ExpiredSignatureError: "it has expired",
    jwt.ImmatureSignatureError: "it is not good yet (nbf, iat)",
    jwt.InvalidSignatureError: "its signature is wrong",
    jwt.DecodeError: "it is not a JSON Web Token",
    RecursionError: "it is not a JSON Web Token",
}
