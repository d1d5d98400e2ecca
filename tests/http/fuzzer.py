"""What a fuzzer sends: requests that are mostly right, and wrong in one place or another."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.http.fuzz_target import Target
from tests.support.clients.raw_http import BOTH, VERSION

text = st.text(st.characters(codec="utf-8"), max_size=40)
numbers = st.one_of(
    st.integers(-5, 5),
    st.sampled_from([2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400, 1e308, -0.0, 5e-324]),
    st.floats(allow_nan=False, allow_infinity=False),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, text)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=12
)


def mostly(good: st.SearchStrategy[Any], bad: st.SearchStrategy[Any] = values) -> st.SearchStrategy[Any]:
    """The good one, but for one time in eight: what is wrong everywhere is refused at the first look."""
    return st.integers(0, 7).flatmap(lambda die: bad if die == 0 else good)


ids = mostly(st.integers(0, 9) | st.text("ab7", min_size=1, max_size=3))
meta = mostly(st.fixed_dictionaries({}, optional={"progressToken": mostly(st.integers(0, 9) | text)}))
implementation = st.just({"name": "fuzz", "version": "1"})
versions = st.sampled_from([VERSION, "2025-06-18", "2025-03-26", "2024-11-05", "2026-07-28", "1999-01-01", ""])
names = st.sampled_from(["add", "say", "boom", "none"])
tool_arguments = st.one_of(
    st.fixed_dictionaries({"a": mostly(st.integers(-3, 3))}, optional={"b": mostly(numbers)}),
    st.fixed_dictionaries({"text": mostly(text), "n": mostly(st.integers(0, 9))}),
)
uris = st.fixed_dictionaries({"uri": mostly(st.sampled_from(["note://x", "note://", "x", "a b"]))})
PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "initialize": st.fixed_dictionaries(
        {"protocolVersion": mostly(versions), "capabilities": mostly(st.just({})), "clientInfo": mostly(implementation)}
    ),
    "ping": st.just({}),
    "tools/list": st.fixed_dictionaries({}, optional={"cursor": mostly(text)}),
    "tools/call": st.fixed_dictionaries({"name": mostly(names), "arguments": mostly(tool_arguments)}),
    "resources/list": st.just({}),
    "resources/read": uris,
    "resources/templates/list": st.just({}),
    "resources/subscribe": uris,
    "resources/unsubscribe": uris,
    "prompts/list": st.just({}),
    "prompts/get": st.fixed_dictionaries(
        {"name": mostly(st.just("greet")), "arguments": mostly(st.just({"name": "x"}))}
    ),
    "completion/complete": st.fixed_dictionaries({"ref": values, "argument": values}),
    "logging/setLevel": st.fixed_dictionaries({"level": mostly(st.sampled_from(["info", "debug", "loud"]))}),
    "server/discover": st.just({}),
    "no/such/method": values,
}
NOTIFICATIONS: dict[str, st.SearchStrategy[Any]] = {
    "notifications/initialized": st.just({}),
    "notifications/cancelled": st.fixed_dictionaries({"requestId": ids}, optional={"reason": mostly(text)}),
    "notifications/progress": st.fixed_dictionaries({"progressToken": ids, "progress": mostly(numbers)}),
    "notifications/roots/list_changed": st.just({}),
    "notifications/no_such_thing": values,
}


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    method = draw(st.sampled_from(sorted(PARAMS)))
    params = draw(mostly(PARAMS[method]))
    if isinstance(params, dict) and draw(st.booleans()):
        params = {**params, "_meta": draw(meta)}
    return {"jsonrpc": "2.0", "id": draw(ids), "method": method, "params": params}


@st.composite
def notifications(draw: st.DrawFn) -> dict[str, object]:
    method = draw(st.sampled_from(sorted(NOTIFICATIONS)))
    return {"jsonrpc": "2.0", "method": method, "params": draw(mostly(NOTIFICATIONS[method]))}


errors = st.fixed_dictionaries({"code": mostly(st.integers(-40_000, 0)), "message": mostly(text)})
responses = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0"), "id": ids | st.just("ask-x-1")},
    optional={"result": mostly(st.just({})), "error": mostly(errors)},
)
odd_messages = st.dictionaries(
    st.sampled_from(["jsonrpc", "id", "method", "params", "result", "error", "extra"]), values, max_size=6
)
messages = mostly(
    mostly(requests(), notifications()), st.one_of(responses, odd_messages, values, st.just({"jsonrpc": "2.0"}))
)
bodies = mostly(messages, st.lists(messages, max_size=5)).map(lambda value: json.dumps(value).encode())


@st.composite
def broken_bodies(draw: st.DrawFn) -> bytes:
    """JSON that something happened to."""
    body = bytearray(draw(bodies))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, len(body) - 1)))
        match draw(st.sampled_from(["cut", "byte", "insert", "double", "nest"])):
            case "cut":
                del body[place:]
            case "byte" if body:
                body[place] = draw(st.integers(0, 255))
            case "insert":
                body[place:place] = draw(
                    st.sampled_from(
                        [b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\\ud800", b"NaN", b"1e999", b"9" * 5_000, b"\r\n"]
                    )
                )
            case "double":
                body += body[:place]
            case "nest":
                depth = draw(st.sampled_from([10, 70, 20_000]))
                body[place:place] = b"[" * depth
    return bytes(body)


long = st.sampled_from(["x" * 300, "x" * 9_000, "x" * 40_000])
odd = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=30).filter(lambda t: t == t.strip())


def header_values(session_id: str, old_id: str) -> dict[str, st.SearchStrategy[str]]:
    position = "c" + "A" * 22 + ".000001.0000000001"
    choices = {
        "accept": [BOTH, "*/*", "application/json", "text/event-stream", "", "text/html", "a/b;q=x,,,"],
        "content-type": ["application/json", "application/json; charset=utf-8", "text/plain", "", "APPLICATION/JSON"],
        "mcp-session-id": [session_id, old_id, session_id[:-1], session_id + "A", "A" * 43, "", "a b"],
        "mcp-protocol-version": [VERSION, "2025-06-18", "2025-03-26", "2026-07-28", "2099-01-01", "1999-01-01", ""],
        "last-event-id": ["", position, "s" + position[1:], position + "~abc", "0", position[:-1] + "x", "c"],
        "origin": ["http://localhost", "http://evil.example", "null", "http://[", "http://localhost:99999"],
        "host": ["127.0.0.1", "localhost:1", "evil.example", "", "[::1]", "[", "a:b:c", "127.0.0.1:x"],
        "authorization": ["Bearer x", "Basic x", ""],
        "connection": ["close", "keep-alive", "upgrade", "close, upgrade"],
        "upgrade": ["h2c", "websocket"],
        "expect": ["100-continue", "200-ok"],
        "mcp-method": ["tools/call", "x"],
        "mcp-name": ["add", "x"],
        "accept-encoding": ["gzip", "identity;q=0"],
        "cookie": ["a=b"],
        "x-mcp-reconnect-session": [session_id, "x"],
    }
    return {name: st.one_of(st.sampled_from(known), odd, long) for name, known in choices.items()}


ODD_METHODS = ["OPTIONS", "PUT", "HEAD", "PATCH", "TRACE", "BREW", "post"]


@st.composite
def http_requests(draw: st.DrawFn, target: Target) -> tuple[str, bytes]:
    """A whole request: its framing is right, all the rest may be anything."""
    method = draw(mostly(st.sampled_from(["POST", "POST", "POST", "GET", "DELETE"]), st.sampled_from(ODD_METHODS)))
    path = draw(
        mostly(st.just("/mcp"), st.sampled_from(["/mcp/", "/mcp?x=1", "/", "/healthz", "/%2e%2e/mcp", "//mcp"]))
    )
    body = draw(mostly(bodies, broken_bodies() | st.binary(max_size=200)))
    # A DELETE must not take the session away from those who see whether it is well.
    session = target.session_id if method != "DELETE" else "A" * 43
    fields = [
        ("host", f"127.0.0.1:{target.port}"),
        ("accept", BOTH),
        ("content-type", "application/json"),
        ("mcp-session-id", session),
        ("content-length", str(len(body))),
    ]
    pool = header_values(session, target.old_id if method != "DELETE" else session)
    for name in draw(st.lists(st.sampled_from(sorted(pool)), max_size=3)):
        value = draw(pool[name])
        if draw(st.booleans()):
            fields = [pair for pair in fields if pair[0] != name]
        fields.append((name, value))
    if draw(st.booleans()):
        fields = draw(st.permutations(fields))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields), "", ""]
    return method, "\r\n".join(lines).encode("latin-1") + body


@st.composite
def mangled_bytes(draw: st.DrawFn) -> bytes:
    """Bytes that were a request, or never were."""
    base = draw(
        st.sampled_from(
            [
                b"POST /mcp HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5\r\n\r\nhello",
                b"POST /mcp HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
                b"GET /mcp HTTP/1.0\r\nhost: 127.0.0.1\r\n\r\n",
                b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 3,
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"",
            ]
        )
    )
    data = bytearray(base + draw(mostly(st.just(b""), st.binary(max_size=60))))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 8))] = draw(
            st.one_of(
                st.binary(max_size=8),
                st.sampled_from(
                    [
                        b"\r\n\r\n",
                        b"\r\n",
                        b"\n",
                        b": ",
                        b"content-length: -1\r\n",
                        b"content-length: 99999999999999999999\r\n",
                        b"content-length: 3\r\ncontent-length: 4\r\n",
                        b"transfer-encoding: chunked\r\n",
                        b"transfer-encoding: chunked, identity\r\n",
                        b"\x00" * 20,
                        b"ffffffffffffffff\r\n",
                        b" /mcp HTTP/9.9",
                        b"x" * 2_000,
                    ]
                ),
            )
        )
    return bytes(data)


answers_to_asks = st.one_of(
    st.fixed_dictionaries({"result": mostly(st.just({"roots": []}))}, optional={"error": st.none() | values}),
    st.fixed_dictionaries({"error": mostly(errors)}, optional={"result": st.none() | values}),
    odd_messages,
)
