"""Decides the handshake of a session, for its client and for the servers behind the gateway."""

import json
from collections.abc import Mapping
from typing import Any

from perdure._core.codes import INVALID_PARAMS, METHOD_NOT_FOUND, UNSUPPORTED_VERSION
from perdure._core.envelope import CALLS, KEPT
from perdure._core.jsonrpc import JsonObject
from perdure._core.revisions import LATEST_SESSION, REVISIONS

LISTS = {name: f"notifications/{name}/list_changed" for name in ("tools", "prompts", "resources")}
"""Capabilities that are lists, each with the notification that it has changed."""

OTHER_ERA = frozenset({UNSUPPORTED_VERSION, METHOD_NOT_FOUND, INVALID_PARAMS})
"""Codes with which servers that have no sessions refuse `initialize`."""


def announce_keys(result: bytes, kept_seconds: float) -> bytes:
    """An `initialize` result, as JSON, that says how long the server keeps the keys of calls. Clients of 2026-07-28
    read the same in `server/discover`; a session has no place for it but an experimental capability."""
    found = json.loads(result)
    capabilities = found.get("capabilities") or {}
    experimental = {**(capabilities.get("experimental") or {}), CALLS: {KEPT: int(kept_seconds * 1000)}}
    return json.dumps({**found, "capabilities": {**capabilities, "experimental": experimental}}).encode()


def front_version(requested: object) -> str:
    """The revision that is spoken to a client: what it asks for, if that has sessions. It does not depend on the
    upstream, because what later revisions add are members that a server may leave out."""
    return requested if isinstance(requested, str) and requested in REVISIONS else LATEST_SESSION


def capabilities_in(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The capabilities in a server's `initialize` result, each with an object: some servers declare `true`."""
    declared = result.get("capabilities")
    found = declared.items() if isinstance(declared, Mapping) else ()
    return {name: value if isinstance(value, Mapping) else {} for name, value in found if value is not None}


def front_result(result: Mapping[str, Any], version: str) -> JsonObject:
    """An upstream's `initialize` result as the client gets it. A restart may change any list, so each list that is
    declared is declared as one whose changes are notified."""
    declared = result.get("capabilities")
    capabilities = dict(declared) if isinstance(declared, Mapping) else {}
    for name, lists in capabilities_in(result).items():
        if name in LISTS:
            capabilities[name] = {**lists, "listChanged": True}
    return {**result, "protocolVersion": version, "capabilities": capabilities}


def is_for_one_client(code: int | None, *, is_up: bool) -> bool:
    """Whether a handshake that an upstream has refused with this error says nothing of the handshakes of others: it is
    about the params, as far as its code says, or the upstream has just been up. Not where it does not know the method,
    or the revision: the gateway names these."""
    if code is None or code in (METHOD_NOT_FOUND, UNSUPPORTED_VERSION):
        return False
    return is_up or code == INVALID_PARAMS


def lost_capabilities(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of capabilities (`capabilities_in`) that were declared before and are not now. The client is held to no
    experiment, and what the gateway itself has declared there is none of the upstream's."""
    lost = sorted(before.keys() - now.keys() - {"experimental"})
    if "resources" in before and "resources" in now:
        is_lost = before["resources"].get("subscribe") and not now["resources"].get("subscribe")
        lost += ["resources.subscribe"] if is_lost else []
    return lost
