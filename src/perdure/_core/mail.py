"""What nodes tell each other: small values, and their form in the store's mailbox."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from perdure._core.ids import SessionId


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """To everybody: the session has ended."""

    session: SessionId
    reason: str


def encode(message: Ended) -> bytes:
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return json.dumps({"kind": "ended", **fields}, separators=(",", ":")).encode()
