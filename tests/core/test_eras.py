"""The translations between the eras: tables of what changes, and properties of what does not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure._core import eras
from perdure._core.durable_calls import STATE_PREFIX, CallClient
from perdure._core.envelope import CALLS, CAPABILITIES, CLIENT, KEY, LOG_LEVEL, SERVER, TASKS, VERSION

SHOP = {"name": "shop", "version": "3"}
DESK = {"name": "desk", "version": "1", "title": "A desk"}
MODERN = "2026-07-28"

OWN = frozenset({"_meta", "resultType", "ttlMs", "cacheScope"})
"""Members that one of the eras gives a meaning."""
names = st.text(max_size=8).filter(lambda name: name not in OWN)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(names, values, max_size=5)
methods = st.sampled_from(sorted(eras.CACHEABLE)) | st.sampled_from(["tools/call", "prompts/get"]) | names


# --- Which era


def test_the_era_of_the_clients_is_tried_first_unless_another_was_learnt_or_is_pinned() -> None:
    session, modern = eras.Era.SESSION, eras.Era.MODERN
    for front, other in ((session, modern), (modern, session)):
        assert eras.eras_to_try(pinned=None, known=None, front=front) == (front, other)
        assert eras.eras_to_try(pinned=None, known=session, front=front) == (session, modern)
        assert eras.eras_to_try(pinned=None, known=modern, front=front) == (modern, session)
        assert eras.eras_to_try(pinned=session, known=modern, front=front) == (session,)
        assert eras.eras_to_try(pinned=modern, known=session, front=front) == (modern,)


@pytest.mark.parametrize(
    ("supported", "expected"),
    [([MODERN], MODERN), (["2025-11-25", MODERN], MODERN), (["2027-01-01"], None), ([], None), (None, None), (7, None)],
)
def test_the_version_that_both_speak(supported: object, expected: str | None) -> None:
    assert eras.modern_version({"supportedVersions": supported}) == expected


# --- Down


def test_the_handshake_that_a_discovery_comes_to() -> None:
    discovered = {
        "resultType": "complete",
        "supportedVersions": [MODERN],
        "capabilities": {
            "tools": {"listChanged": True},
            "extensions": {TASKS: {}, CALLS: {"keptMs": 1}, "com.example/x": {"y": 1}},
            "com.example": {},
        },
        "instructions": "Be kind.",
        "ttlMs": 5,
        "cacheScope": "public",
        "other": [1],
        "_meta": {SERVER: SHOP, "com.example/z": 1},
    }
    assert eras.initialize_result(discovered, "2025-06-18") == {
        "protocolVersion": "2025-06-18",
        "capabilities": {
            "tools": {"listChanged": True},
            "extensions": {"com.example/x": {"y": 1}},
            "com.example": {},
        },
        "serverInfo": SHOP,
        "instructions": "Be kind.",
        "other": [1],
        "_meta": {"com.example/z": 1},
    }


@pytest.mark.parametrize("requested", [MODERN, "1999-01-01", None, 7, [], {}])
def test_a_client_that_requests_an_unknown_version_is_offered_the_newest_one_with_sessions(requested: object) -> None:
    made = eras.initialize_result({}, requested)
    unknown = {"name": "unknown", "version": ""}
    assert made == {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": unknown}


def test_the_envelope_of_a_sessions_client() -> None:
    """Tasks of 2025-11-25 and changes of roots do not exist in the newer revision."""
    told = {
        "protocolVersion": "2025-11-25",
        "capabilities": {
            "roots": {"listChanged": True, "x": 1},
            "tasks": {"list": {}},
            "elicitation": {},
            "experimental": {"a": {}},
        },
        "clientInfo": DESK,
    }
    expected = {
        VERSION: MODERN,
        CAPABILITIES: {"roots": {"x": 1}, "elicitation": {}, "experimental": {"a": {}}},
        CLIENT: DESK,
    }
    assert eras.envelope(told) == expected
    assert eras.envelope(told, level="error") == {**expected, LOG_LEVEL: "error"}
    assert eras.envelope({}) == {VERSION: MODERN, CAPABILITIES: {}}


def test_a_request_keeps_its_own_meta_beside_the_envelope() -> None:
    made = eras.request_down({"name": "t", "_meta": {"progressToken": 3, VERSION: "x"}}, {VERSION: MODERN})
    assert made == {"name": "t", "_meta": {"progressToken": 3, VERSION: MODERN}}
    assert eras.request_down(None, {VERSION: MODERN}) == {"_meta": {VERSION: MODERN}}
    assert eras.request_down({"_meta": None}, {VERSION: MODERN}) == {"_meta": {VERSION: MODERN}}


@pytest.mark.parametrize(
    ("method", "result", "expected"),
    [
        ("tools/list", '{"resultType":"complete","tools":[],"ttlMs":9,"cacheScope":"public"}', '{"tools":[]}'),
        ("tools/call", '{"resultType":"complete","ttlMs":9}', '{"ttlMs":9}'),
        ("x/y", f'{{"_meta":{{"{SERVER}":{{}}}}}}', "{}"),
        ("x/y", f'{{"_meta":{{"{SERVER}":{{}},"a":1}}}}', '{"_meta":{"a":1}}'),
        ("x/y", '{"_meta":{}}', '{"_meta":{}}'),
        ("x/y", '{"_meta":null, "n": 1e400}', '{"_meta":null,"n":1e400}'),
    ],
)
def test_a_result_loses_what_only_the_newer_revision_has(method: str, result: str, expected: str) -> None:
    """Cache hints belong to the methods that have them; numbers that no program can hold stay as they came."""
    assert eras.result_down(method, result) == expected


@given(methods, objects, objects)
def test_unknown_members_and_meta_of_results_pass_down(
    method: str, result: dict[str, Any], meta: dict[str, Any]
) -> None:
    plain = {**result, "_meta": meta}
    sent = {**plain, "resultType": "complete", "_meta": {**meta, SERVER: SHOP}}
    if method in eras.CACHEABLE:
        sent |= {"ttlMs": 1, "cacheScope": "public"}
    found = json.loads(eras.result_down(method, json.dumps(sent)))
    assert {"_meta": {}, **found} == plain


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ({"inputRequests": []}, "are not an object"),
        ({"inputRequests": {"a": 1}}, "'a' is not a request"),
        ({"inputRequests": {"a": {"method": 1}}}, "'a' is not a request"),
        ({"inputRequests": {"a": {"method": "x", "params": []}}}, "'a' is not a request"),
        ({"inputRequests": {str(n): {"method": "x"} for n in range(101)}}, "101 things at once; 100 are allowed"),
        ({}, "neither inputRequests nor requestState"),
        ({"requestState": 1}, "neither inputRequests nor requestState"),
    ],
)
def test_input_that_cannot_be_asked_for(result: dict[str, Any], problem: str) -> None:
    with pytest.raises(eras.BadQuestions, match=problem):
        eras.questions_in(result)


def test_a_round_brings_its_answers_and_the_state_as_it_came() -> None:
    asked = {"inputRequests": {"a": {"method": "roots/list"}, "b": {"method": "x/y", "params": {"c": 1}}}}
    assert eras.questions_in(asked) == {
        "a": eras.Question(method="roots/list", params=None),
        "b": eras.Question(method="x/y", params={"c": 1}),
    }
    before = {"name": "t", "_meta": {"m": 1}, "inputResponses": {"old": {}}, "requestState": "old"}
    answers: dict[str, Any] = {"a": {"roots": []}}
    with_state = eras.next_round(before, {**asked, "requestState": " s\n"}, answers)
    assert with_state == {"name": "t", "_meta": {"m": 1}, "inputResponses": answers, "requestState": " s\n"}
    assert eras.next_round(before, asked, answers) == {"name": "t", "_meta": {"m": 1}, "inputResponses": answers}
    assert eras.questions_in({"requestState": "s"}) == {}
    assert eras.next_round({}, {"requestState": "s"}, {}) == {"requestState": "s"}


# --- Neither


@pytest.mark.parametrize("state", ["", "s1", "=", "=s1", "perdure.x", "=perdure.x", "==perdure.x", 'a"b', "é"])
def test_a_state_passes_and_never_looks_like_one_of_the_gateway(state: str) -> None:
    shown = json.loads(eras.round_through(json.dumps({"a": 1e300, "requestState": state})))
    assert not shown["requestState"].startswith(STATE_PREFIX)
    assert (shown["requestState"] == state) is not state.lstrip("=").startswith(STATE_PREFIX)
    assert eras.request_through({"requestState": shown["requestState"]}, {})["requestState"] == state


def test_a_request_passes_with_its_own_envelope_and_without_its_key() -> None:
    own = {VERSION: "2026-07-28", KEY: "k", "mine": 1}
    assert eras.request_through({"a": 1, "_meta": own}, {VERSION: "-", CLIENT: {}}) == {
        "a": 1,
        "_meta": {VERSION: "2026-07-28", CLIENT: {}, "mine": 1},
    }
    assert eras.request_through(None, {VERSION: "-"}) == {"_meta": {VERSION: "-"}}


# --- Up


def test_the_discovery_that_a_handshake_comes_to() -> None:
    initialized = {
        "protocolVersion": "2025-11-25",
        "capabilities": {"tools": {}, "resources": {"subscribe": True}, "tasks": {"list": {}}, "logging": {}, "x": {}},
        "serverInfo": SHOP,
        "instructions": "Be kind.",
        "other": 1,
        "_meta": {"a": 1},
    }
    assert eras.discover_result(initialized) == {
        "resultType": "complete",
        "supportedVersions": [MODERN],
        "capabilities": {
            "tools": {"listChanged": True},
            "resources": {"subscribe": True, "listChanged": True},
            "logging": {},
            "x": {},
        },
        "ttlMs": 0,
        "cacheScope": "private",
        "instructions": "Be kind.",
        "other": 1,
        "_meta": {"a": 1, SERVER: SHOP},
    }


def test_the_handshake_of_a_requests_client() -> None:
    """Extensions between the client and the gateway end at the gateway."""
    capabilities: dict[str, Any] = {
        "elicitation": {"form": {}},
        "extensions": {TASKS: {}, CALLS: {}, "com.example/x": {}},
    }
    assert eras.handshake_params(CallClient(version=MODERN, info=DESK, capabilities=capabilities)) == {
        "protocolVersion": "2025-11-25",
        "capabilities": {"elicitation": {"form": {}}, "extensions": {"com.example/x": {}}},
        "clientInfo": DESK,
    }
    nameless = eras.handshake_params(CallClient(version=MODERN, info=None, capabilities=None))
    assert nameless["clientInfo"] == {"name": "unknown", "version": ""}


def test_tools_lose_the_execution_of_2025_11_25() -> None:
    listed = '{"tools":[{"name":"a","execution":{"taskSupport":"required"},"x":1e400},{"name":"b"}],"nextCursor":"2"}'
    assert eras.result_up("tools/list", listed, SHOP) == (
        '{"resultType":"complete","ttlMs":0,"cacheScope":"private","tools":[{"name":"a","x":1e400},{"name":"b"}],'
        f'"nextCursor":"2","_meta":{{"{SERVER}":{{"name":"shop","version":"3"}}}}}}'
    )


@given(methods, objects, objects)
def test_unknown_members_and_meta_of_results_pass_up(method: str, result: dict[str, Any], meta: dict[str, Any]) -> None:
    sent = {**result, "_meta": meta}
    found = json.loads(eras.result_up(method, json.dumps(sent), SHOP))
    assert found.pop("resultType") == "complete"
    if method in eras.CACHEABLE:
        assert (found.pop("ttlMs"), found.pop("cacheScope")) == (0, "private")
    assert found == {**sent, "_meta": {**meta, SERVER: SHOP}}


@given(methods, objects)
def test_a_result_that_goes_up_and_down_is_the_same(method: str, result: dict[str, Any]) -> None:
    text = json.dumps(result)
    assert json.loads(eras.result_down(method, eras.result_up(method, text, SHOP))) == result


@given(objects, st.none() | objects.filter(bool))
def test_params_that_go_down_and_up_are_the_same(params: dict[str, Any], meta: dict[str, Any] | None) -> None:
    """The envelope comes and goes; all other params and `_meta` pass."""
    sent = params if meta is None else {**params, "_meta": meta}
    envelope = eras.envelope({"capabilities": {}, "clientInfo": DESK}, level="info")
    assert eras.request_up(eras.request_down(sent, envelope)) == (sent or None)


@pytest.mark.parametrize(
    ("method", "params", "level", "expected"),
    [
        ("notifications/progress", {"progressToken": 1, "progress": 1}, None, True),
        ("notifications/anything", None, None, True),
        ("notifications/message", {"level": "error"}, None, False),
        ("notifications/message", {"level": "error"}, "error", True),
        ("notifications/message", {"level": "warning"}, "error", False),
        ("notifications/message", {"level": "emergency"}, "debug", True),
        ("notifications/message", {"level": "loud"}, "debug", False),
        ("notifications/message", None, "debug", False),
        ("notifications/tools/list_changed", None, "debug", False),
        ("notifications/resources/updated", {"uri": "a:"}, "debug", False),
        ("notifications/elicitation/complete", {"elicitationId": "1"}, "debug", False),
    ],
)
def test_notifications_on_the_response_to_a_request(
    method: str, params: dict[str, Any] | None, level: str | None, expected: bool
) -> None:
    assert eras.passes_up(method, params, level=level) is expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"_meta": {LOG_LEVEL: "notice"}}, "notice"),
        ({"_meta": {LOG_LEVEL: "loud"}}, None),
        ({"_meta": {LOG_LEVEL: ["info"]}}, None),
        ({"_meta": {}}, None),
        (None, None),
    ],
)
def test_the_log_level_of_a_request(params: dict[str, Any] | None, expected: str | None) -> None:
    assert eras.log_level_in(params) == expected


def test_every_method_of_the_sdks_tables_has_its_place() -> None:
    """The sets here are those of the specification, as the SDK has it."""
    from mcp_types import methods as sdk

    def of(version: str, table: Any) -> set[str]:
        return {method for method, found in table if found == version}

    before, now = of("2025-11-25", sdk.CLIENT_REQUESTS), of(MODERN, sdk.CLIENT_REQUESTS)
    assert now - before == eras.ADDED_REQUESTS
    assert eras.CACHEABLE == sdk.CACHEABLE_METHODS
    notices = of("2025-11-25", sdk.CLIENT_NOTIFICATIONS) - of(MODERN, sdk.CLIENT_NOTIFICATIONS)
    assert notices == eras.REMOVED_NOTIFICATIONS


def test_the_key_of_a_call_stays_at_the_gateway() -> None:
    """Callers whom the gateway tells apart may be one to the server."""
    for meta, kept in (({KEY: "k", "mine": 1}, {"_meta": {"mine": 1}}), ({KEY: "k"}, {}), ({"mine": 1}, None)):
        params = {"name": "pay", "_meta": meta}
        expected = params if kept is None else {"name": "pay", **kept}
        assert eras.request_along(params) == eras.request_up(params) == expected
    assert eras.request_along(None) is None
