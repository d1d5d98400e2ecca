"""Refusals of the endpoint: each has one name, one status, one code and one sentence. The body is a JSON-RPC error."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from starlette.responses import Response

from perdure._core.codes import (
    ANSWER_GIVEN_UP,
    HEADER_MISMATCH,
    INVALID_PARAMS,
    INVALID_REQUEST,
    ISSUER_UNAVAILABLE,
    KEY_TAKEN,
    LIMIT_REACHED,
    MISSING_CAPABILITY,
    POSITION_LOST,
    REISSUE_FAILED,
    SESSION_NOT_FOUND,
    STOPPING,
    STORE_UNAVAILABLE,
    UNSUPPORTED_VERSION,
    UPSTREAM_UNAVAILABLE,
)
from perdure._core.jsonrpc import error_payload
from perdure._core.text import printable, see


class Refusal(enum.Enum):
    """Every reason to refuse a request: status, code, sentence. `{…}` stands for a value that was seen."""

    REPEATED_HEADER = (400, INVALID_REQUEST, "This request has {count} {name} headers; it may have one")
    BAD_HOST = (
        421,
        INVALID_REQUEST,
        "Host {host} is not allowed here; allow it with --allowed-host, or allowed_hosts in perdure.Settings;"
        f" {see('errors', '421-the-host-is-not-allowed')}",
    )
    TEST_HOST = (
        421,
        INVALID_REQUEST,
        'Host {host} is what a TestClient sends; make it with base_url="http://localhost";'
        f" {see('using', 'testing-with-a-testclient')}",
    )
    BAD_ORIGIN = (
        403,
        INVALID_REQUEST,
        "Origin {origin} is not allowed here; allow it with --allowed-origin, or a page with --cors-origin;"
        f" {see('errors', 'a-page-gets-cors-errors')}",
    )
    HEADERS_TOO_LARGE = (431, LIMIT_REACHED, "The request's headers are larger than {limit} bytes")
    METHOD = (405, INVALID_REQUEST, "Method {method} is not served here; use {allowed}")
    RESUME_FIELD = (400, INVALID_REQUEST, "{field}: {reason}")
    TOO_MANY_RESUMES = (429, LIMIT_REACHED, "More than {limit} requests to the resume broker came from you in a row")
    BODY_TOO_LARGE = (413, LIMIT_REACHED, "The body is larger than {limit} bytes")
    HANDSHAKE_TOO_LARGE = (413, LIMIT_REACHED, "An initialize request may not take more than {limit} bytes{where}")
    BODY_TOO_SLOW = (408, LIMIT_REACHED, "The body did not arrive within {limit} seconds (stream_timeout)")
    BODY_STALLED = (408, LIMIT_REACHED, "The body brought less than {least} bytes in {seconds} seconds")
    TOO_MANY_BODIES = (
        503,
        LIMIT_REACHED,
        "Request bodies that are not complete take {limit} bytes, the limit (an eighth of max_work)",
    )
    MEDIA_TYPE = (415, INVALID_REQUEST, "Content-Type must be application/json, not {seen}")
    NOT_ACCEPTABLE = (406, INVALID_REQUEST, "Accept must allow {kinds}")
    BAD_VERSION = (400, UNSUPPORTED_VERSION, "MCP-Protocol-Version {seen} is not supported")
    LED_TO_SESSION = (
        400,
        UNSUPPORTED_VERSION,
        "A client without tasks has a session here, where its calls outlive their connections: begin with initialize."
        " To stay at {seen}, declare the extension {tasks} or {keys}, or let the operator serve with --eras both",
    )
    BAD_MESSAGE = (400, INVALID_REQUEST, "{reason}")
    BATCH = (400, INVALID_REQUEST, "Batches belong to protocol version 2025-03-26; this session speaks {version}")
    INITIALIZE_IN_BATCH = (400, INVALID_REQUEST, "An initialize request must not be part of a batch")
    DUPLICATE_ID = (
        400,
        INVALID_REQUEST,
        "Request id {seen} belongs to a running request of this session; use another id",
    )
    NO_SESSION_ID = (400, INVALID_REQUEST, "Mcp-Session-Id is missing; begin with an initialize request")
    SESSION_GONE = (404, SESSION_NOT_FOUND, "Session not found")
    NOTHING_MORE = (405, POSITION_LOST, "This stream is complete: nothing follows the given Last-Event-ID")
    POSITION_UNKNOWN = (
        400,
        POSITION_LOST,
        f"This session has no stream for the given Last-Event-ID; {see('errors', 'a-position-is-lost')}",
    )
    REPLAY_OFF = (400, POSITION_LOST, "Replay is switched off on this server (enable_replay)")
    TOO_MANY_SESSIONS = (503, LIMIT_REACHED, "This server has {limit} sessions, its limit (max_sessions)")
    TOO_MANY_OF_YOURS = (429, LIMIT_REACHED, "You have {limit} sessions, your limit (max_principal_sessions)")
    TOO_MANY_FROM_THERE = (429, LIMIT_REACHED, "Your address has {limit} sessions, its limit (max_address_sessions)")
    TOO_MANY_PROCESSES = (
        503,
        LIMIT_REACHED,
        "The server {upstream} has {limit} processes, its limit (max_processes); there is room when a session ends",
    )
    TOO_MANY_OWN_PROCESSES = (
        429,
        LIMIT_REACHED,
        "You have {limit} processes of the server {upstream}, your limit (max_caller_processes)",
    )
    TOO_MANY_CALLS = (429, LIMIT_REACHED, "This session has {limit} running requests, its limit (max_calls)")
    TOO_MANY_OWN_CALLS = (429, LIMIT_REACHED, "You have {limit} running requests, your limit (max_principal_calls)")
    OWN_SHARE = (429, LIMIT_REACHED, "You take {limit} of {what} here, the limit for one caller (max_share)")
    TOO_MANY_NOTIFICATIONS = (429, LIMIT_REACHED, "This session has {limit} running notifications, its limit")
    TOO_MUCH_OF_SESSION = (
        429,
        LIMIT_REACHED,
        "This session's messages take {limit} bytes, its limit (an eighth of max_work)",
    )
    TOO_MUCH_WORK = (
        503,
        LIMIT_REACHED,
        "The messages that this server handles take {limit} bytes, its limit (max_work)",
    )
    TOO_MANY_SESSIONLESS = (
        503,
        LIMIT_REACHED,
        "This server has {limit} running requests without a session, its limit (max_sessionless)",
    )
    TOO_MANY_TASKS = (429, LIMIT_REACHED, "You have {limit} running tasks, your limit (max_principal_tasks)")
    TOO_MANY_TASKS_IN_ALL = (
        503,
        LIMIT_REACHED,
        "This server has {limit} tasks, its limit (max_tasks), and none of yours has ended",
    )
    TOO_MANY_KEYS = (
        429,
        LIMIT_REACHED,
        "The keys of {limit} calls of yours are kept, your limit; try again later, or without a key",
    )
    CLIENT_TOO_LARGE = (
        413,
        LIMIT_REACHED,
        "clientInfo and clientCapabilities in _meta may not take more than {limit} bytes together",
    )
    BAD_KEY = (
        400,
        INVALID_PARAMS,
        "{where} must be a string of 1 to {limit} characters, none of them a control character, not {seen}",
    )
    KEY_IN_BATCH = (400, INVALID_PARAMS, "A request with {where} must be sent alone, and not in a batch")
    KEYS_DIFFER = (400, INVALID_PARAMS, "{where} and {other} name different keys; send one of them")
    KEY_OF_SESSION = (
        400,
        KEY_TAKEN,
        "The key belongs to a call of yours that was begun in a session: send the request in a session, any of yours",
    )
    KEY_TAKEN = (
        400,
        KEY_TAKEN,
        "The key belongs to another call of yours, with another tool or other arguments; use a new key",
    )
    ANSWER_GIVEN_UP = (
        400,
        ANSWER_GIVEN_UP,
        "This call has ended, and does not run again; its answer was given up for newer ones of yours"
        " (max_principal_tasks, max_answers, or 256 MiB of answers), or with its session",
    )
    NO_KEY = (400, INVALID_PARAMS, "No call of yours has this key")
    NO_TASK = (400, INVALID_PARAMS, "Task not found: it is not one of yours, or it has expired")
    BAD_STATE = (400, INVALID_PARAMS, "Invalid or expired requestState")
    BAD_RESPONSES = (400, INVALID_PARAMS, "inputResponses must be an object with an object for each key, not {seen}")
    TOO_MANY_RESPONSES = (400, INVALID_PARAMS, "inputResponses may hold {limit} answers, not {seen}; send more later")
    NEEDS_TASKS = (400, MISSING_CAPABILITY, "This request needs a client that declares the capability {capability}")
    NAME_MISMATCH = (400, HEADER_MISMATCH, "{message}")
    TOO_MANY_LISTENERS = (503, LIMIT_REACHED, "This process has {limit} subscriptions, its limit (max_listeners)")
    TOO_MANY_RESOURCES = (
        503,
        LIMIT_REACHED,
        "The subscriptions of this server name {limit} resources, its limit; name fewer, or try again later",
    )
    BAD_FILTER = (400, INVALID_PARAMS, "The filter cannot be served: {reason}")
    TOO_MANY_SUBSCRIPTIONS = (429, LIMIT_REACHED, "This session may hold {limit} subscriptions of {size} bytes in all")
    TOO_MANY_READERS = (503, LIMIT_REACHED, "This server has {limit} event streams, its limit (max_readers)")
    STORE_FAILS = (503, STORE_UNAVAILABLE, "The log of this server fails at the moment; try again")
    FROZEN = (503, STORE_UNAVAILABLE, "The log of this server has not answered for too long; try again")
    HELD_ELSEWHERE = (
        503,
        STORE_UNAVAILABLE,
        "Another process of this server holds events that are not in the log yet; try again",
    )
    STORE_LOST = (
        503,
        STORE_UNAVAILABLE,
        "This server has lost its log: {state}; " + see("errors", "503-and-what-health-says"),
    )
    REISSUE_FAILED = (
        500,
        REISSUE_FAILED,
        "The session is gone, and no new one could be started in its place; send initialize",
    )
    UPSTREAM_UNAVAILABLE = (503, UPSTREAM_UNAVAILABLE, "The server {upstream} is not available: {why}")
    KEYS_UNAVAILABLE = (
        503,
        ISSUER_UNAVAILABLE,
        "The keys of the authorization server cannot be read at the moment, so your token cannot be verified",
    )
    STOPPING = (503, STOPPING, "This server is stopping")

    def __init__(self, status: int, code: int, sentence: str) -> None:
        self.status = status
        self.code = code
        self.sentence = sentence


_RECOVERIES = {
    "initialize": "Send initialize without Mcp-Session-Id, then go on.",
    "continue": "Go on with the session in Mcp-Session-Id: its handshake is done.",
}

_RETRY_AFTER = {429: {"retry-after": "1"}, 503: {"retry-after": "1"}}
"""A client may try again after a second where a refusal ends by itself."""


class HttpRefusal(Exception):
    """The endpoint refuses a request."""

    def __init__(
        self,
        refusal: Refusal,
        *,
        id: int | str | None = None,  # noqa: A002 - JSON-RPC's word
        code: int | None = None,
        data: object = None,
        headers: Mapping[str, str] | None = None,
        **seen: object,
    ) -> None:
        self.refusal = refusal
        self.id = id
        self._code = refusal.code if code is None else code
        # What was seen may be a peer's text: made safe, and short enough for a sentence.
        self.sentence = refusal.sentence.format(**{name: printable(str(value), 80) for name, value in seen.items()})
        self._data = data
        self._headers = headers or {}
        super().__init__(self.sentence)

    @property
    def body(self) -> bytes:
        return error_payload(self.id, self._code, self.sentence, self._data)

    @property
    def answer(self) -> Response:
        status = self.refusal.status
        return json_answer(self.body, status=status, headers={**self._headers, **_RETRY_AFTER.get(status, {})})


def session_gone(action: str = "initialize", why: str | None = None, *, session: str = "") -> HttpRefusal:
    """The refusal for a session that is gone, with what a client does about it and, if there is one, a new session.
    `why` it is gone is for its owner alone."""
    data: dict[str, object] = {"recovery": {"action": action, "detail": _RECOVERIES[action]}}
    if why is not None:
        data["reason"] = why
    return HttpRefusal(Refusal.SESSION_GONE, data=data, headers={"mcp-session-id": session} if session else None)


def json_answer(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status_code=status, headers=headers, media_type="application/json" if body else None)
