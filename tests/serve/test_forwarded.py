"""The client behind a proxy: whom a server believes, and what it does with it (promise 6)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perdure.serve.forwarded import MAX_HOPS, TrustedProxies
from tests.http.test_bounds import LIMIT, refused
from tests.support.clients.raw_http import Peer
from tests.support.processes.serving import BASIC_TOOLS, serving

PROXIES = ("127.0.0.1", "10.0.0.0/8", "2001:db8::/32")
CLIENT = "203.0.113.7"


def client_of(peer: str | None, *lines: str, proxies: tuple[str, ...] = PROXIES) -> str | None:
    headers = [(name.lower().encode(), value.encode()) for name, _, value in (line.partition(": ") for line in lines)]
    return TrustedProxies(proxies).client_of(peer, headers)


@pytest.mark.parametrize(
    ("lines", "client"),
    [
        (["X-Forwarded-For: 203.0.113.7"], CLIENT),
        (["X-Forwarded-For: 203.0.113.7:4711"], CLIENT),
        (["X-Forwarded-For: 203.0.113.7, 10.1.2.3, 10.1.2.4"], CLIENT),
        (["X-Forwarded-For: 203.0.113.7", "X-Forwarded-For: 10.1.2.3"], CLIENT),
        (["X-Forwarded-For: 192.0.2.1, 203.0.113.7"], CLIENT),
        (["X-Forwarded-For: 192.0.2.1, nonsense, 203.0.113.7, 10.1.2.3"], CLIENT),
        (["X-Forwarded-For: nonsense, 10.1.2.3"], "10.1.2.3"),
        (["X-Forwarded-For: 10.9.9.9, 10.1.2.3"], "10.9.9.9"),
        (["X-Forwarded-For: ::ffff:203.0.113.7"], CLIENT),
        (["X-Forwarded-For: [2001:DB9::1]:80"], "2001:db9::1"),
        (["X-Forwarded-For: 2001:db9::1, 2001:db8::5"], "2001:db9::1"),
        (["Forwarded: for=203.0.113.7;proto=https;by=10.1.2.3"], CLIENT),
        (['Forwarded: proto=https; FOR="203.0.113.7:4711", for=10.1.2.3'], CLIENT),
        (['Forwarded: for="[2001:db9::1]:80"', "Forwarded: for=10.1.2.3"], "2001:db9::1"),
        (["Forwarded: for=unknown, for=10.1.2.3"], "10.1.2.3"),
        (["Forwarded: for=_hidden"], None),
        (["Forwarded: for=203.0.113.7", "X-Forwarded-For: 203.0.113.7"], CLIENT),
        (["Forwarded: for=192.0.2.1", "X-Forwarded-For: 203.0.113.7"], None),
        (["X-Forwarded-For: nonsense"], None),
        (["X-Forwarded-For: "], None),
        ([], None),
    ],
)
def test_the_first_address_from_the_end_that_is_no_proxy_is_the_client(lines: list[str], client: str | None) -> None:
    assert client_of("127.0.0.1", *lines) == client
    assert client_of("::ffff:127.0.0.1", *lines) == client


@pytest.mark.parametrize("peer", ["127.0.0.2", "203.0.113.9", "2001:db9::9", "testclient", "", None])
def test_a_peer_that_is_not_trusted_is_not_believed(peer: str | None) -> None:
    assert client_of(peer, "X-Forwarded-For: 192.0.2.1") is None
    assert client_of(peer, "Forwarded: for=192.0.2.1") is None


def test_whoever_believes_everyone_takes_what_the_peer_itself_has_written() -> None:
    for peer in ("203.0.113.9", None):  # without an address: over a Unix socket
        assert client_of(peer, "X-Forwarded-For: 192.0.2.1, 203.0.113.7", proxies=("*",)) == CLIENT


def test_no_more_hops_are_read_than_there_may_be() -> None:
    hops = ", ".join(["10.1.2.3"] * (MAX_HOPS - 1))
    assert client_of("127.0.0.1", f"X-Forwarded-For: {CLIENT}, {hops}") == CLIENT
    assert client_of("127.0.0.1", f"X-Forwarded-For: {CLIENT}, 10.1.2.3, {hops}") == "10.1.2.3"


@pytest.mark.parametrize("name", ["proxy.example.com", "10.0.0.1/8", "300.1.1.1", "127.0.0.1 10.0.0.1"])
def test_what_is_no_address_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="name addresses"):
        TrustedProxies([name])


@pytest.mark.anyio
async def test_limits_and_logs_go_by_the_client_behind_a_trusted_proxy(tmp_path: Path) -> None:
    options = ("--forwarded-allow-ips", "127.0.0.1, 10.0.0.0/8", "--max-address-sessions", "1")
    logged = ("--access-log", "--log-format", "json", "--store", f"sqlite:{tmp_path}/log.db")
    async with serving(BASIC_TOOLS, *options, *logged) as served:
        proxy, stranger = Peer(port=served.port), Peer(port=served.port, address="127.0.0.2")
        for client in ("192.0.2.1", "192.0.2.2"):
            await proxy.session(**{"x-forwarded-for": f"198.51.100.1, {client}, 10.1.2.3"})
        refused(await proxy.initialize(**{"forwarded": "for=192.0.2.2"}), 429, LIMIT, "Your address has 1 sessions")
        # A stranger is who it is, whatever it says.
        await stranger.session(**{"x-forwarded-for": "192.0.2.3"})
        forged = await stranger.initialize(**{"x-forwarded-for": "192.0.2.4"})
        refused(forged, 429, LIMIT, "Your address has 1 sessions")
        assert await served.stop() == 0
    lines = [json.loads(line) for line in served.output if line.startswith("{")]
    clients = {line["client"] for line in lines if line["action"] == "http.request"}
    assert clients == {"192.0.2.1", "192.0.2.2", "127.0.0.2"}
