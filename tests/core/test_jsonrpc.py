"""What a peer may send as a body, what it is read as, and how everything else is refused."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.dispatcher import coerce_request_id
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
from mcp_types.jsonrpc import jsonrpc_message_adapter

from perdure._core.codes import INVALID_REQUEST, PARSE_ERROR
from perdure._core.jsonrpc import (
    MAX_BATCH,
    MAX_DEPTH,
    MAX_ID,
    MAX_ID_CHARS,
    MAX_METHOD_CHARS,
    Batch,
    Envelope,
    InvalidMessage,
    JsonObject,
    Notification,
    Request,
    Response,
    coerce_id,
    parse_body,
)


def call(**members: Any) -> JsonObject:
    """A valid request, changed; a member given as `...` is left out."""
    message = {"jsonrpc": "2.0", "id": 1, "method": "ping", **members}
    return {name: value for name, value in message.items() if value is not ...}


def answer(**members: Any) -> JsonObject:
    return call(method=..., **members)


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


def holding(text: str) -> bytes:
    """A valid notification with this JSON text as a parameter."""
    return b'{"jsonrpc":"2.0","method":"m","params":{"v":%b}}' % text.encode()


def refusal(raw: bytes) -> InvalidMessage:
    with pytest.raises(InvalidMessage) as caught:
        parse_body(raw)
    return caught.value


FAULT = {"code": -32603, "message": "no"}


# --- what is read


@pytest.mark.parametrize(
    ("message", "id_", "params"),
    [
        pytest.param(call(), 1, None, id="without params"),
        pytest.param(call(id="a", params={"x": [1]}), "a", {"x": [1]}, id="with params"),
        pytest.param(call(params=None), 1, None, id="null params are absent, as SDK clients send them"),
        pytest.param(call(id=0), 0, None, id="id zero"),
        pytest.param(call(id=""), "", None, id="an empty string is a string"),
        pytest.param(call(id="7"), "7", None, id="an id keeps its type"),
        pytest.param(call(id=MAX_ID), MAX_ID, None, id="largest id"),
        pytest.param(call(id=-MAX_ID - 1), -MAX_ID - 1, None, id="smallest id"),
        pytest.param(call(id="x" * MAX_ID_CHARS), "x" * MAX_ID_CHARS, None, id="longest id"),
        pytest.param(call(extra=1), 1, None, id="an unknown member is left alone"),
        pytest.param(call(error=None), 1, None, id="a null error is absent"),
    ],
)
def test_a_message_with_method_and_id_is_a_request(message: JsonObject, id_: int | str, params: Any) -> None:
    assert parse_body(body(message)) == Request(id=id_, method="ping", params=params, raw=message)


@pytest.mark.parametrize("params", [..., None, {}, {"progress": 0.5}])
def test_a_message_with_method_and_no_id_is_a_notification(params: Any) -> None:
    message = call(id=..., params=params)
    expected = Notification(method="ping", params=None if params is ... else params, raw=message)
    assert parse_body(body(message)) == expected


@pytest.mark.parametrize(
    ("message", "id_"),
    [
        pytest.param(answer(result={}), 1, id="a result"),
        pytest.param(answer(id="a", error=FAULT), "a", id="an error"),
        pytest.param(answer(result={}, error=None), 1, id="a result beside a null error"),
        pytest.param(answer(id=None, error=FAULT), None, id="an error about no known request"),
        pytest.param(answer(id=..., error=FAULT), None, id="the same without id, as 2025-11-25 writes it"),
    ],
)
def test_a_message_without_method_is_a_response(message: JsonObject, id_: int | str | None) -> None:
    assert parse_body(body(message)) == Response(id=id_, raw=message)


def test_a_batch_keeps_its_order() -> None:
    messages = [call(id=2), call(id=...), answer(result={})]
    assert parse_body(body(messages)) == Batch(
        messages=(
            Request(id=2, method="ping", params=None, raw=messages[0]),
            Notification(method="ping", params=None, raw=messages[1]),
            Response(id=1, raw=messages[2]),
        )
    )


def test_white_space_around_a_message_is_allowed() -> None:
    assert parse_body(b" \r\n\t" + body(call()) + b" \n") == parse_body(body(call()))


def test_of_duplicate_keys_the_last_wins() -> None:
    raw = b'{"jsonrpc":"2.0","id":1,"method":"first","id":2,"method":"last"}'
    assert parse_body(raw) == Request(id=2, method="last", params=None, raw=call(id=2, method="last"))


def test_the_longest_method_is_read() -> None:
    method = "m" * MAX_METHOD_CHARS
    assert parse_body(body(call(method=method))) == Request(id=1, method=method, params=None, raw=call(method=method))


# --- text that is refused (A7)

BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        pytest.param(b"", "the body is empty", id="empty"),
        pytest.param(b" \n", "the body is not JSON: Expecting value at character 2", id="blank"),
        pytest.param(BOM + body(call()), "the body begins with a byte order mark", id="BOM"),
        pytest.param(b'{"a":"\xff"}', "the body is not UTF-8: invalid start byte at byte 6", id="a bad byte"),
        pytest.param(b'{"a":"\xed\xa0\x80"}', "the body is not UTF-8: invalid continuation byte", id="surrogate bytes"),
        pytest.param(b'{"a":"\xe2\x82', "the body is not UTF-8: unexpected end of data", id="half a character"),
        pytest.param('{"a":1}'.encode("utf-16"), "the body is not UTF-8", id="UTF-16"),
        pytest.param('{"a":1}'.encode("utf-16-le"), "the body is not JSON", id="UTF-16 without a mark"),
        pytest.param(body(call())[:-1], "the body is not JSON: Expecting ',' delimiter", id="cut before the end"),
        pytest.param(body(call())[:-3], "the body is not JSON: Unterminated string", id="cut in a string"),
        pytest.param(body(call()) * 2, "the body is not JSON: Extra data", id="two messages"),
        pytest.param(b"{'a':1}", "the body is not JSON: Expecting property name", id="single quotes"),
        pytest.param(
            holding('"\n"'), "the body is not JSON: Invalid control character", id="a raw newline in a string"
        ),
        pytest.param(holding("NaN"), "the body is not JSON: NaN is not a JSON number", id="NaN"),
        pytest.param(holding("Infinity"), "the body is not JSON: Infinity is not a JSON number", id="Infinity"),
        pytest.param(holding("-Infinity"), "the body is not JSON: -Infinity is no", id="-Infinity"),
        pytest.param(holding("1e999"), "the body holds a number out of range: 1e999", id="1e999"),
        pytest.param(holding("-1e999"), "the body holds a number out of range: -1e999", id="-1e999"),
        pytest.param(holding("9" * 400 + ".0"), f"number out of range: {'9' * 60}…", id="a long float"),
        pytest.param(holding("9" * 5000), "the body holds an integer with too many digits", id="a long integer"),
        pytest.param(holding(r'"\ud800"'), "the body holds a lone surrogate", id="the first half of a pair"),
        pytest.param(holding(r'"\uDe00"'), "the body holds a lone surrogate", id="the second half of a pair"),
        pytest.param(holding(r'"\ude00\ud83d"'), "the body holds a lone surrogate", id="a pair turned round"),
        pytest.param(holding(r'{"\ud800":1}'), "the body holds a lone surrogate", id="a surrogate in a key"),
    ],
)
def test_text_that_is_no_json_is_a_parse_error(raw: bytes, reason: str) -> None:
    error = refusal(raw)
    assert reason in error.reason
    assert (error.code, error.id, str(error)) == (PARSE_ERROR, None, error.reason)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param("1e308", 1e308, id="a large float"),
        pytest.param("1e-999", 0.0, id="a float too small to tell from zero"),
        pytest.param("0." + "1" * 5000, 1 / 9, id="a float with many digits"),
        pytest.param("9" * 4300, 10**4300 - 1, id="as many digits as Python reads"),
        pytest.param(r'"\ud83d\ude00"', "😀", id="an escaped pair"),
        pytest.param(r'"\\ud800"', r"\ud800", id="a backslash before letters"),
        pytest.param('"' + "[{" * 1000 + '"', "[{" * 1000, id="brackets in a string"),
        pytest.param('"' + r"\"[\\" * 1000 + '"', '"[\\' * 1000, id="brackets between escapes"),
        pytest.param("[" + "[]," * 1000 + "[]]", [[]] * 1001, id="a wide value"),
        pytest.param('"\\u0000"', "\0", id="NUL"),
    ],
)
def test_unusual_text_is_read(text: str, value: Any) -> None:
    message = call(id=..., method="m", params={"v": value})
    assert parse_body(holding(text)) == Notification(method="m", params={"v": value}, raw=message)


def nested(depth: int) -> bytes:
    """A notification with this many levels, the message and its params included."""
    return holding("[" * (depth - 2) + "]" * (depth - 2))


def test_nesting_is_read_up_to_its_limit_and_no_further() -> None:
    assert isinstance(parse_body(nested(MAX_DEPTH)), Notification)
    assert refusal(nested(MAX_DEPTH + 1)).reason == f"the body nests deeper than {MAX_DEPTH} levels"


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":', b'{"\\"[":[', b'{"]}\\\\":'])
def test_a_nesting_bomb_is_refused_by_the_limit_and_not_by_the_stack(opening: bytes) -> None:
    error = refusal(opening * 100_000)
    assert (error.code, error.reason) == (PARSE_ERROR, f"the body nests deeper than {MAX_DEPTH} levels")
    assert error.__cause__ is None


def test_the_limit_on_digits_is_pythons_own() -> None:
    """The case above with 4300 digits stands at this limit; who moves it for the process moves ours."""
    assert sys.get_int_max_str_digits() == 4300


# --- messages that are refused

EITHER = 'a message has either "method" or "result" or "error"'
ID_RULE = '"id" must be a 64-bit integer or a string of at most 256 characters'
ERROR_RULE = '"error" must be an object with an integer "code" and a string "message"'
METHOD_RULE = '"method" must be a string of 1 to 256 characters'


@pytest.mark.parametrize(
    ("value", "reason", "id_"),
    [
        pytest.param(None, "a message must be an object, not null", None, id="null"),
        pytest.param(1, "a message must be an object, not 1", None, id="a number"),
        pytest.param("x" * 99, f'a message must be an object, not "{"x" * 59}…', None, id="a string"),
        pytest.param({}, '"jsonrpc" must be "2.0", not missing', None, id="an empty object"),
        pytest.param(call(jsonrpc=...), '"jsonrpc" must be "2.0", not missing', 1, id="no version"),
        pytest.param(call(jsonrpc="1.0"), '"jsonrpc" must be "2.0", not "1.0"', 1, id="version 1"),
        pytest.param(call(jsonrpc=2.0), '"jsonrpc" must be "2.0", not 2.0', 1, id="version as a number"),
        pytest.param(call(jsonrpc=["2.0"]), '"jsonrpc" must be "2.0", not an array', 1, id="version as an array"),
        pytest.param(call(id=None), f"{ID_RULE}, not null", None, id="id null"),
        pytest.param(call(id=True), f"{ID_RULE}, not true", None, id="id true"),
        pytest.param(call(id=1.0), f"{ID_RULE}, not 1.0", None, id="id 1.0"),
        pytest.param(call(id={}), f"{ID_RULE}, not an object", None, id="id object"),
        pytest.param(call(id=[1]), f"{ID_RULE}, not an array", None, id="id array"),
        pytest.param(call(id=MAX_ID + 1), f"{ID_RULE}, not 9223372036854775808", None, id="id too large"),
        pytest.param(call(id=-MAX_ID - 2), f"{ID_RULE}, not -9223372036854775809", None, id="id too small"),
        pytest.param(call(id="x" * 257), f'{ID_RULE}, not "{"x" * 59}…', None, id="id too long"),
        pytest.param(call(method=None), f"{METHOD_RULE}, not null", 1, id="method null"),
        pytest.param(call(method=7), f"{METHOD_RULE}, not 7", 1, id="method number"),
        pytest.param(call(method=""), f'{METHOD_RULE}, not ""', 1, id="method empty"),
        pytest.param(call(method="x" * 257), f'{METHOD_RULE}, not "{"x" * 59}…', 1, id="method too long"),
        pytest.param(call(method=["ping"]), f"{METHOD_RULE}, not an array", 1, id="method array"),
        pytest.param(call(params=[1]), '"params" must be an object, not an array', 1, id="params array"),
        pytest.param(call(params="x"), '"params" must be an object, not "x"', 1, id="params string"),
        pytest.param(call(params=False), '"params" must be an object, not false', 1, id="params false"),
        pytest.param(call(id=..., params=0), '"params" must be an object, not 0', None, id="params of a notification"),
        pytest.param(call(result={}), EITHER, 1, id="a request with a result"),
        pytest.param(call(error=FAULT), EITHER, 1, id="a request with an error"),
        pytest.param(answer(), EITHER, None, id="only an id"),
        pytest.param(answer(result=None), EITHER, None, id="a null result"),
        pytest.param(answer(result={}, error=FAULT), EITHER, None, id="result and error"),
        pytest.param(answer(result=[]), '"result" must be an object, not an array', None, id="result array"),
        pytest.param(answer(result=0), '"result" must be an object, not 0', None, id="result number"),
        pytest.param(answer(id=None, result={}), f"{ID_RULE}, not null", None, id="result for id null"),
        pytest.param(answer(id=..., result={}), f"{ID_RULE}, not missing", None, id="result without id"),
        pytest.param(answer(id=True, error=FAULT), f"{ID_RULE}, not true", None, id="error for id true"),
        pytest.param(answer(error="no"), ERROR_RULE, None, id="error string"),
        pytest.param(answer(error={"message": "no"}), ERROR_RULE, None, id="error without code"),
        pytest.param(answer(error={"code": 1}), ERROR_RULE, None, id="error without message"),
        pytest.param(answer(error={**FAULT, "code": 1.5}), ERROR_RULE, None, id="error code float"),
        pytest.param(answer(error={**FAULT, "code": True}), ERROR_RULE, None, id="error code true"),
        pytest.param(answer(error={**FAULT, "message": None}), ERROR_RULE, None, id="error message null"),
        pytest.param([], "the batch is empty", None, id="empty batch"),
        pytest.param([call(), [call()]], "message 1 of the batch: a message must be", None, id="nested batch"),
        pytest.param(
            [call(), call(method=7)], f"message 1 of the batch: {METHOD_RULE}", None, id="a bad one among good"
        ),
    ],
)
def test_json_that_is_no_message_is_an_invalid_request(value: Any, reason: str, id_: int | str | None) -> None:
    """The id is there to answer under when it is a request's; that of a response would name another request."""
    error = refusal(body(value))
    assert error.reason.startswith(reason)
    assert (error.code, error.id) == (INVALID_REQUEST, id_)


def test_a_batch_at_the_limit_is_read_and_one_more_is_refused() -> None:
    full = parse_body(body([call()] * MAX_BATCH))
    assert isinstance(full, Batch)
    assert len(full.messages) == MAX_BATCH
    assert refusal(body([call()] * (MAX_BATCH + 1))).reason == "the batch holds 101 messages, more than 100"


# --- properties

texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('[]{}"\\'))
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=MAX_METHOD_CHARS)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=10
)
objects = st.dictionaries(texts, values, max_size=4)
request_ids = st.integers(-MAX_ID - 1, MAX_ID) | st.just("") | names
some_params = st.fixed_dictionaries({}, optional={"params": objects | st.none()})
calls = st.builds(
    lambda head, params: {"jsonrpc": "2.0", **head, **params},
    st.fixed_dictionaries({"method": names}, optional={"id": request_ids}),
    some_params,
)
errors = st.fixed_dictionaries({"code": st.integers(), "message": texts}, optional={"data": values})
answers = st.fixed_dictionaries({"jsonrpc": st.just("2.0"), "id": request_ids, "result": objects}) | (
    st.fixed_dictionaries({"jsonrpc": st.just("2.0"), "id": request_ids | st.none(), "error": errors})
)
messages = calls | answers


def read_as(message: JsonObject) -> Envelope:
    if "method" not in message:
        return Response(id=message["id"], raw=message)
    method, params = message["method"], message.get("params")
    if "id" in message:
        return Request(id=message["id"], method=method, params=params, raw=message)
    return Notification(method=method, params=params, raw=message)


@given(batch=st.lists(messages, min_size=1, max_size=3), ascii_only=st.booleans())
def test_any_valid_batch_is_read_whole_and_so_is_each_message(batch: list[JsonObject], ascii_only: bool) -> None:
    encoded = json.dumps(batch, ensure_ascii=ascii_only).encode()
    assert parse_body(encoded) == Batch(messages=tuple(map(read_as, batch)))
    assert parse_body(body(batch[0])) == read_as(batch[0])


MEMBERS = ["jsonrpc", "id", "method", "params", "result", "error", "else"]
altered = st.builds(
    lambda message, name, value: {**message, name: value},
    messages,
    st.sampled_from(MEMBERS),
    scalars | request_ids | objects | errors,
)
PIECES = [*'{}[]":,\\', r"\ud800", "null", "1e9", "1e999", "NaN", '"jsonrpc":"2.0"', '"id":1']
almost_json = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=200).map(
    lambda pieces: "".join(pieces).encode("utf-8", "surrogatepass")
)


@given(raw=st.binary() | almost_json | altered.map(body) | st.lists(altered).map(body))
def test_any_bytes_are_a_message_or_a_named_refusal(raw: bytes) -> None:
    try:
        outcome: object = parse_body(raw)
    except InvalidMessage as error:
        outcome = error
    assert isinstance(outcome, Request | Notification | Response | Batch | InvalidMessage)
    assert getattr(outcome, "code", PARSE_ERROR) in (PARSE_ERROR, INVALID_REQUEST)


strings = st.lists(st.sampled_from([r"\ud83d", r"\ude00", r"\\", r"\"", "ud83d", "é"])).map(
    lambda parts: f'"{"".join(parts)}"'
)
numbers = st.from_regex(r"-?[1-9][0-9]{0,400}(\.[0-9]{1,9})?([eE][+-]?[0-9]{1,4})?", fullmatch=True)


@given(text=strings | numbers)
def test_what_was_read_can_be_written_again(text: str) -> None:
    try:
        message = parse_body(holding(text))
    except InvalidMessage:
        return
    assert isinstance(message, Notification)
    assert parse_body(json.dumps(message.raw, ensure_ascii=False, allow_nan=False).encode()) == message


KINDS = {Request: JSONRPCRequest, Notification: JSONRPCNotification, Response: JSONRPCResponse | JSONRPCError}


@given(message=messages | altered)
def test_what_we_read_the_sdk_reads_as_the_same_kind(message: JsonObject) -> None:
    """So the runtime never refuses what was accepted."""
    try:
        ours = parse_body(body(message))
    except InvalidMessage:
        return
    assert isinstance(jsonrpc_message_adapter.validate_python(message), KINDS[type(ours)])


def depth(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)
    return 0


@given(value=values, levels=st.integers(MAX_DEPTH - 12, MAX_DEPTH + 2), in_objects=st.booleans())
def test_depth_is_counted_outside_of_strings(value: Any, levels: int, in_objects: bool) -> None:
    for _ in range(levels):
        value = {"[{": value} if in_objects else [value, "]}\\"]
    message = call(params={"v": value})
    if depth(message) <= MAX_DEPTH:
        assert parse_body(body(message)) == read_as(message)
    else:
        assert refusal(body(message)).reason == f"the body nests deeper than {MAX_DEPTH} levels"


# --- comparing ids


@pytest.mark.parametrize(
    "form",
    [
        *["7", "+7", "-7", "-0", "007", "1_000", "1__0", "٧", "７", "7.0", "7e0", "0x7", "²"],
        *(7, -(2**70), " 7\n", "", " ", "\0", "9" * 256, "9" * 5000),
    ],
)
def test_ids_are_compared_as_the_sdk_compares_them(form: int | str) -> None:
    ours, theirs = coerce_id(form), coerce_request_id(form)
    assert (ours, type(ours)) == (theirs, type(theirs))


def test_seven_and_its_spelling_are_one_id() -> None:
    assert coerce_id("7") == coerce_id(7) == 7
    assert coerce_id("seven") == "seven"
