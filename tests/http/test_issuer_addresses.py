"""Addresses of authorization servers: which are accepted, and what is wrong with the others."""

from __future__ import annotations

import pytest

from perdure.http.issuer_addresses import (
    is_same_origin,
    parse_issuer,
    parse_key_source,
    parse_resource,
    parse_scopes,
)


@pytest.mark.parametrize(
    "address",
    [
        "https://login.example",
        "https://login.example:8443/a/b",
        "http://127.0.0.1:9000",
        "http://[::1]/a",
        "http://[::ffff:127.0.0.1]:9000",
        "http://login.localhost:9000",
    ],
)
def test_the_address_of_an_issuer_is_https_or_on_this_machine(address: str) -> None:
    assert parse_issuer(address) == parse_resource(address) == address


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://login.example", "is not https:; keys that come over plain http: may be anyone's"),
        ("http://127.0.0.1.evil.example", "is not https:"),
        ("http://localhost.evil.example", "is not https:"),
        ("http://notlocalhost", "is not https:"),
        ("http://0.0.0.0:9000", "is not https:"),
        ("https://login.example?tenant=1", "has a query"),
        ("https://login.example/#x", "has a fragment"),
        ("https://ann:secret@login.example", "has a user name or a password"),
        ("login.example", "is not an address such as https://login.example"),
        ("ftp://login.example", "is not an address"),
        ("https://", "is not an address"),
        ("https://[::1", "is not an address"),
        ("https://login.example:99999", "is not an address"),
        ("https://login.example/ x", "is not an address"),
        ("https://login.example/\n", "is not an address"),
    ],
)
def test_any_other_address_is_refused_with_its_reason_and_without_a_password(address: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        parse_issuer(address)
    assert "secret" not in str(refused.value)


def test_the_keys_may_have_a_query_and_a_resource_may_be_http() -> None:
    assert parse_key_source("https://keys.example/jwks?v=2")
    assert parse_resource("http://mcp.example/mcp")
    for text in ("mcp.example", "urn:mcp", "api://mcp", ""):
        with pytest.raises(ValueError, match="is not an address"):
            parse_resource(text)


def test_an_origin_is_scheme_host_and_port() -> None:
    assert is_same_origin("https://a.example/x", "https://A.example:443/y")
    for other in ("http://a.example", "https://b.example", "https://a.example:444", "https://a.example.evil.example"):
        assert not is_same_origin("https://a.example", other)


def test_scopes_are_names_that_a_header_can_carry() -> None:
    assert parse_scopes("read, mcp:tools,files/*") == ("read", "mcp:tools", "files/*")
    for text in ("", "a,,b", 'a"b', "a b", "a\\b", "ä"):
        with pytest.raises(ValueError, match="is not the name of a scope"):
            parse_scopes(text)
