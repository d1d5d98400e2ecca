"""Reads requests of 2026-07-28 that concern single calls. The SDK's own functions judge them."""

from dataclasses import dataclass

from mcp.shared.inbound import InboundLadderRejection, classify_inbound_request, find_duplicated_routing_header
from starlette.requests import Request as HttpRequest
from starlette.types import Scope

from perdure._core.durable_calls import MAX_KEY, Client, is_key
from perdure._core.envelope import KEY, KEY_HEADER, TASKS
from perdure._core.jsonrpc import InvalidMessage, JsonObject, Request, parse_body
from perdure.http.body import Headers, accepts, replayed
from perdure.http.credentials import principal_of
from perdure.http.refusals import Refusal, Refused


@dataclass(frozen=True, kw_only=True, slots=True)
class ModernRequest:
    """A request of 2026-07-28 that the SDK's functions have found in order."""

    request: Request
    body: bytes
    client: Client
    owner: str
    http: HttpRequest
    headers: Headers
    size: int

    @property
    def params(self) -> JsonObject:
        return self.request.params or {}


def read_request(scope: Scope, headers: Headers, body: bytes, *, size: int, json_only: bool) -> ModernRequest | None:
    """Read a request; `None` if it is to be refused, which the SDK's own handler does.

    A body that only our parser refuses is refused here, as one of a session is: the SDK's handler would run the call,
    and a key in it would mean nothing."""
    takes_json, takes_events = accepts(headers)
    if not takes_json or not (takes_events or json_only):
        raise Refused(Refusal.NOT_ACCEPTABLE_JSON if json_only else Refusal.NOT_ACCEPTABLE_POST)
    try:
        request = parse_body(body)
    except InvalidMessage as error:
        raise Refused(Refusal.BAD_MESSAGE, id=error.id, code=error.code, reason=error.reason) from None
    named = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    if not isinstance(request, Request) or find_duplicated_routing_header(named) is not None:
        return None
    route = classify_inbound_request(request.raw, headers=dict(named))
    if isinstance(route, InboundLadderRejection):
        return None
    client = Client(
        version=route.protocol_version, info=route.client_info, capabilities=route.client_capabilities or {}
    )
    return ModernRequest(
        request=request,
        body=body,
        client=client,
        owner=principal_of(scope),
        http=HttpRequest(scope, replayed(body)),
        headers=headers,
        size=size,
    )


def needs_tasks() -> Refused:
    needed: JsonObject = {"requiredCapabilities": {"extensions": {TASKS: {}}}}
    return Refused(Refusal.NEEDS_TASKS, capability=TASKS, data=needed)


def read_key(asked: ModernRequest) -> str | None:
    """The key of a call, from its `_meta` or its header."""
    meta = asked.params.get("_meta") or {}
    given = {f"_meta[{KEY!r}]": meta[KEY]} if KEY in meta else {}
    if (header := asked.headers.get(KEY_HEADER.lower().encode())) is not None:
        if (count := len(asked.http.headers.getlist(KEY_HEADER))) > 1:  # a gateway may have added another one
            raise Refused(Refusal.REPEATED_HEADER, count=count, name=KEY_HEADER)
        given[KEY_HEADER] = header.decode("latin-1")
    for where, key in given.items():
        if not is_key(key):
            raise Refused(Refusal.BAD_KEY, where=where, limit=MAX_KEY, seen=repr(key))
    if len(set(given.values())) > 1:
        where, other = given
        raise Refused(Refusal.KEYS_DIFFER, where=where, other=other)
    return next(iter(given.values()), None)
