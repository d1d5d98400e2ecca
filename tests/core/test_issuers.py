"""Tokens of an issuer: which key verifies them, whose they are, and when keys are read again."""

from __future__ import annotations

from typing import Any

import pytest

from perdure._core.issuers import (
    FAILED_PAUSE,
    KEPT,
    READ_AGAIN,
    UNKNOWN_PAUSE,
    KeySetAge,
    KeyState,
    TokenNames,
    find_key,
    names_in,
)

KNOWN, UNKNOWN, UNAVAILABLE = KeyState.KNOWN, KeyState.UNKNOWN, KeyState.UNAVAILABLE


@pytest.mark.parametrize(
    ("read", "tried", "known", "unknown"),
    [
        # never read; then a try that failed, and its pause
        (None, None, (True, UNAVAILABLE), (True, UNAVAILABLE)),
        (None, 0.0, (False, UNAVAILABLE), (False, UNAVAILABLE)),
        (None, FAILED_PAUSE, (True, UNAVAILABLE), (True, UNAVAILABLE)),
        # read a moment ago; an unknown key is asked for after the pause
        (0.0, 0.0, (False, KNOWN), (False, UNKNOWN)),
        (UNKNOWN_PAUSE - 1, UNKNOWN_PAUSE - 1, (False, KNOWN), (False, UNKNOWN)),
        (UNKNOWN_PAUSE, UNKNOWN_PAUSE, (False, KNOWN), (True, UNKNOWN)),
        (READ_AGAIN, READ_AGAIN, (True, KNOWN), (True, UNKNOWN)),
        # another read failed: known keys are used for a while, and an unknown one may be new
        (READ_AGAIN, 0.0, (False, KNOWN), (False, UNAVAILABLE)),
        (READ_AGAIN, FAILED_PAUSE, (True, KNOWN), (True, UNAVAILABLE)),
        (KEPT - 1, 0.0, (False, KNOWN), (False, UNAVAILABLE)),
        (KEPT, 0.0, (False, UNAVAILABLE), (False, UNAVAILABLE)),
        (KEPT, KEPT, (True, UNAVAILABLE), (True, UNAVAILABLE)),
    ],
)
def test_when_keys_are_read_and_what_is_known_of_them(
    read: float | None, tried: float | None, known: tuple[bool, KeyState], unknown: tuple[bool, KeyState]
) -> None:
    """For a token whose key is known, and for one whose key is not."""
    age = KeySetAge(read=read, tried=tried)
    assert (age.is_due(is_known=True), age.judge(is_known=True)) == known
    assert (age.is_due(is_known=False), age.judge(is_known=False)) == unknown


RSA = {"kty": "RSA", "kid": "a", "use": "sig"}
EC = {"kty": "EC", "kid": "a", "alg": "ES256"}
LOCK = {"kty": "RSA", "kid": "b", "use": "enc"}
SHARED = {"kty": "oct", "kid": "c", "k": "c2VjcmV0"}
OTHER = {"kty": "RSA", "kid": "d"}


@pytest.mark.parametrize(
    ("keys", "kid", "algorithm", "found"),
    [
        ([RSA, EC], "a", "RS256", RSA),
        ([RSA, EC], "a", "PS512", RSA),
        ([RSA, EC], "a", "ES256", EC),
        ([RSA, EC], "a", "ES384", None),
        ([RSA, EC], "z", "RS256", None),
        ([RSA, EC], None, "RS256", RSA),
        ([RSA, OTHER], None, "RS256", None),
        ([LOCK], "b", "RS256", None),
        ([SHARED], "c", "RS256", None),
        ([], None, "RS256", None),
    ],
)
def test_a_token_is_verified_by_the_key_that_it_names_or_by_the_only_one(
    keys: list[dict[str, Any]], kid: str | None, algorithm: str, found: object
) -> None:
    assert find_key(keys, kid, algorithm) == found


@pytest.mark.parametrize(
    ("claims", "names"),
    [
        ({"sub": "ann", "client_id": "web", "scope": "a b"}, ("ann", "web", ["a", "b"])),
        ({"sub": "ann", "azp": "web", "scp": ["a", "b"]}, ("ann", "web", ["a", "b"])),
        ({"sub": "ann", "scp": "a"}, ("ann", "ann", ["a"])),
        ({"client_id": "batch", "scope": 7}, (None, "batch", [])),
        ({"sub": "", "client_id": "batch"}, (None, "batch", [])),
        ({"sub": "ann", "client_id": 7}, ("ann", "ann", [])),
        ({"client_id": ""}, None),
        ({}, None),
    ],
)
def test_claims_name_a_user_a_client_and_scopes(claims: dict[str, Any], names: Any) -> None:
    wanted = None if names is None else TokenNames(user=names[0], client=names[1], scopes=names[2])
    assert names_in(claims) == wanted
