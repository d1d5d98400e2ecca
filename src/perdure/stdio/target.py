"""What a bridge is for. A token is offered to the same target only (T9)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a bridge goes and how it was called; as it was spelled, since another spelling may mean another thing."""

    url: str
    credential: str = ""
    """The name of the credential (`--token-env`, `--token-file`), never the credential."""
    arguments: Sequence[str] = ()
    directory: str | os.PathLike[str] = ""
    secret: str = ""
    """The credential itself, where it is the same for as long as the bridge lives. It is no part of the target, since
    credentials are renewed; it tells bridges apart that differ in nothing else."""

    @property
    def hint(self) -> str:
        """Too short to find the credential by, and long enough to tell two apart."""
        return hashlib.sha256(self.secret.encode()).hexdigest()[:8] if self.secret else ""

    @property
    def digest(self) -> str:
        parts = [self.url, self.credential, list(self.arguments), os.fspath(self.directory)]
        # JSON keeps the parts apart, whatever stands in them; it also holds the bytes that are no text.
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
