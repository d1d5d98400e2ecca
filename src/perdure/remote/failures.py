"""Failures of one HTTP request, of a handshake, and refusals that waiting does not mend."""

from __future__ import annotations

from dataclasses import dataclass

from perdure._core.delivery import Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A refusal that waiting does not mend: a word for machines and a sentence for people."""

    reason: str
    sentence: str


class Refused(Exception):
    """The server, or the way to it, refuses for good."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.sentence)
        self.refusal = refusal


class Unavailable(Exception):
    """The server did not answer within the limits; asking again later may help."""

    def __init__(self, reason: str, *, at_least: float | None = None) -> None:
        super().__init__(reason)
        self.at_least = at_least
        """Seconds that the server asked for."""


class RequestFailed(Exception):
    """One HTTP request has no response, or its response broke off. `failure` says whether it may have arrived."""

    def __init__(self, failure: Failure, reason: str, *, refusal: Refusal | None = None) -> None:
        super().__init__(reason)
        self.failure = failure
        self.refusal = refusal or Refusal(reason="refused", sentence=reason)
        """For the failures that waiting does not mend."""
