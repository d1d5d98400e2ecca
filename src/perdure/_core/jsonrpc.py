"""Reads the JSON-RPC messages that a peer sent, as far as routing needs it, and builds error responses.

The envelope is judged here; what is in `params`, `result` and `error.data` stays as it came, for the runtime to judge.
Two kinds of refusal, both `InvalidMessage`:

- `PARSE_ERROR`: the body is not JSON that we read. That includes limits on depth, numbers and characters, which
  RFC 8259 (section 9) leaves to the parser. Everything that passes can be encoded again as UTF-8 JSON.
- `INVALID_REQUEST`: it is JSON, but not a message that MCP allows.

We follow the SDK where the rules are silent or often broken: a null `params`, `result` or `error` counts as absent
(SDK clients do send `"params": null`), unknown members are left alone, and of duplicate keys the last wins, as in
JavaScript. We are stricter in one place: an id that MCP forbids makes no notification out of a request.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn, TypeAlias, TypeGuard

from perdure._core.codes import INVALID_REQUEST, PARSE_ERROR

#: The parser recurses once per level, and so does most code after it: far below Python's 1000 frames, and far above
#: what people nest by hand. The SDK's own parser ends at about 200.
MAX_DEPTH = 64

#: A batch (2025-03-26 only) becomes one stream and a ledger row per request, in one step. As many as a session may
#: have streams by default.
MAX_BATCH = 100

#: What an SQLite INTEGER, a PostgreSQL bigint and an int64 hold. Clients count up from 0; JavaScript ends at 2**53.
MAX_ID = 2**63 - 1

#: Ids stand in ledger rows, keys and log records. Clients use counters or UUIDs (36 characters).
MAX_ID_CHARS = 256

#: Methods stand in log records and spans. The longest name in the specifications has 40 characters.
MAX_METHOD_CHARS = 256

RequestId: TypeAlias = int | str
JsonObject: TypeAlias = dict[str, Any]


class InvalidMessage(ValueError):
    """The peer sent something that cannot be answered or routed as a message.

    `id` is the id to answer under: that of a request, where it could be read, else None. A response never has one
    here, because its id is one of ours and would name another request at the peer.
    """

    def __init__(self, reason: str, *, code: int, id: RequestId | None = None) -> None:  # noqa: A002 - JSON-RPC's word
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.id = id


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Wants one answer."""

    id: RequestId
    method: str
    params: JsonObject | None
    raw: JsonObject

    @property
    def meta(self) -> Mapping[str, Any]:
        """`_meta` of its params."""
        meta = (self.params or {}).get("_meta")
        return meta if isinstance(meta, Mapping) else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Notification:
    """Wants none."""

    method: str
    params: JsonObject | None
    raw: JsonObject


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """Answers an ask: a result or an error. Only an error may lack an id."""

    id: RequestId | None
    raw: JsonObject


Envelope: TypeAlias = Request | Notification | Response


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Several messages in one body, in their order. One bad message refuses them all, so nothing runs by halves."""

    messages: tuple[Envelope, ...]


def parse_body(body: bytes) -> Envelope | Batch:
    """The message or batch in a request's body, or `InvalidMessage`."""
    value = _parse_json(body)
    if not isinstance(value, list):
        return _read_message(value)
    if not value:
        raise _refused("the batch is empty")
    if len(value) > MAX_BATCH:
        raise _refused(f"the batch holds {len(value)} messages, more than {MAX_BATCH}")
    messages: list[Envelope] = []
    for index, item in enumerate(value):
        try:
            messages.append(_read_message(item))
        except InvalidMessage as error:
            # Without the id: the refusal is about the whole batch, not about this request.
            raise InvalidMessage(f"message {index} of the batch: {error.reason}", code=error.code) from error
    return Batch(messages=tuple(messages))


def coerce_id(id: RequestId) -> RequestId:  # noqa: A002 - JSON-RPC's word
    """The form in which ids are compared: "7" and 7 are one id, as for the SDK (`coerce_request_id`).

    A string of digits may become an integer beyond `MAX_ID`, so a store keeps the result as text.
    """
    try:
        return int(id)
    except ValueError:
        return id


def error_payload(request_id: RequestId | None, code: int, message: str, data: object = None) -> bytes:
    """An error response, encoded."""
    error: JsonObject = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}, separators=(",", ":")).encode()


def _parse_json(body: bytes) -> object:
    if not body:
        raise _not_json("the body is empty")
    if body.startswith(b"\xef\xbb\xbf"):
        raise _not_json("the body begins with a byte order mark, which JSON on a network must not have")
    # Few brackets cannot nest deep, so most bodies are spared the exact count.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _nests_too_deep(body):
        raise _not_json(f"the body nests deeper than {MAX_DEPTH} levels")
    try:
        value: object = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise _not_json(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise _not_json(f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except InvalidMessage:
        raise
    except ValueError as error:  # int() has a limit of its own, 4300 digits unless the process set another
        raise _not_json("the body holds an integer with too many digits") from error
    if _BACKSLASH in body and _has_lone_surrogate(body, value):
        raise _not_json("the body holds a lone surrogate, which is not a character")
    return value


def _nests_too_deep(body: bytes) -> bool:
    """Counts before parsing, so that a bomb never meets the parser's recursion, whatever its limit is set to.

    Without escaped backslashes and quotes, every second piece between quotes is outside of strings. For a body that
    is not JSON this holds up to its first error, and the parser reads no further.
    """
    pieces = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    brackets = b"".join(pieces[::2]).translate(None, _NOT_BRACKETS)
    return any(depth > MAX_DEPTH for depth in accumulate(map(_STEPS.__getitem__, brackets)))


_BACKSLASH = ord("\\")  # an integer is found about ten times as fast as b"\\"
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _STEPS)


def _has_lone_surrogate(body: bytes, value: object) -> bool:
    """Only an escape can bring one in: as bytes it is not UTF-8. Half an emoji would fail later, when it is encoded."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return False
    try:
        _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        return True
    return False


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _not_json(f"the body holds a number out of range: {_shortened(digits)}")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise _not_json(f"the body is not JSON: {name} is not a JSON number")


def _not_json(reason: str) -> InvalidMessage:
    return InvalidMessage(reason, code=PARSE_ERROR)


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False)


def _read_message(message: object) -> Envelope:
    if not isinstance(message, dict):
        raise _refused(f"a message must be an object, not {_seen(message)}")
    if message.get("jsonrpc") != "2.0":
        raise _refused(f'"jsonrpc" must be "2.0", not {_seen(message.get("jsonrpc", _MISSING))}', message)
    result, error = message.get("result"), message.get("error")
    if ("method" in message) + (result is not None) + (error is not None) != 1:
        raise _refused('a message has either "method" or "result" or "error"', message)
    if "method" in message:
        method, params = message["method"], message.get("params")
        if not isinstance(method, str) or not 0 < len(method) <= MAX_METHOD_CHARS:
            rule = f"a string of 1 to {MAX_METHOD_CHARS} characters"
            raise _refused(f'"method" must be {rule}, not {_seen(method)}', message)
        if params is not None and not isinstance(params, dict):
            raise _refused(f'"params" must be an object, not {_seen(params)}', message)
        if "id" not in message:
            return Notification(method=method, params=params, raw=message)
        return Request(id=_read_id(message), method=method, params=params, raw=message)
    if error is None:
        if not isinstance(result, dict):
            raise _refused(f'"result" must be an object, not {_seen(result)}', message)
        return Response(id=_read_id(message), raw=message)
    if not isinstance(error, dict) or type(error.get("code")) is not int or type(error.get("message")) is not str:
        raise _refused('"error" must be an object with an integer "code" and a string "message"', message)
    return Response(id=None if message.get("id") is None else _read_id(message), raw=message)


def mapping(found: object) -> Mapping[str, Any]:
    """An object in a message; empty where there is none, or something else in its place."""
    return found if isinstance(found, Mapping) else {}


def meta_of(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """`_meta` of params or of a result."""
    meta = (given or {}).get("_meta")
    return meta if isinstance(meta, Mapping) else {}


def _read_id(message: JsonObject) -> RequestId:
    value = message.get("id")
    if not _is_request_id(value):
        rule = f"a 64-bit integer or a string of at most {MAX_ID_CHARS} characters"
        raise _refused(f'"id" must be {rule}, not {_seen(message.get("id", _MISSING))}', message)
    return value


def _is_request_id(value: object) -> TypeGuard[RequestId]:
    if isinstance(value, str):
        return len(value) <= MAX_ID_CHARS
    return type(value) is int and -MAX_ID - 1 <= value <= MAX_ID  # bool is an int to isinstance


def _refused(reason: str, message: JsonObject | None = None) -> InvalidMessage:
    id_ = message.get("id") if message is not None and "method" in message else None
    return InvalidMessage(reason, code=INVALID_REQUEST, id=id_ if _is_request_id(id_) else None)


_MISSING = object()


def _seen(value: object) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    return _shortened(json.dumps(value))


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"
