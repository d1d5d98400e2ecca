"""Counts events and durations of one process: plain numbers in one object.

`prometheus` exports them, and so may the application around Perdure. The help of each counter stands beside it and
nowhere else: the metrics and the documentation are made from this table.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from perdure._core.histograms import BUCKETS as BUCKETS
from perdure._core.histograms import CALL_BUCKETS as CALL_BUCKETS
from perdure._core.histograms import Histogram as Histogram


def _counter(says: str, *, outcome: str = "") -> Any:
    """A counter and its help. `outcome`: it is part of a metric with that label (`METRICS` names both)."""
    return field(default=0, metadata={"help": says, "outcome": outcome})


def _of_calls() -> Histogram:
    return Histogram(CALL_BUCKETS)


@dataclass(slots=True)
class UpstreamNumbers:
    """The numbers of one upstream, a server that is not in this process."""

    upstream_up: int = _counter("0 while an upstream is down or backing off, else 1.")
    upstream_children: int = _counter("Processes of an upstream that have not ended.")
    upstream_starts: int = _counter("Processes of an upstream that were started.")
    upstream_restarts: int = _counter(
        "Processes of an upstream that died, or were ended because they hung or grew too large: the next request starts"
        " another."
    )
    upstream_handshakes_repeated: int = _counter(
        "Handshakes that were made again for a session, because the upstream had lost its process or session."
    )
    upstream_start_seconds: Histogram = field(
        default_factory=_of_calls,
        metadata={"help": "From the start of a process or a connection to the answer to its handshake."},
    )
    upstream_request_seconds: Histogram = field(
        default_factory=_of_calls,
        metadata={"help": "From a request to an upstream to its answer."},
    )


@dataclass(slots=True)
class Counters:
    """Counts what happened since the start of this process (P9)."""

    sessions_opened: int = _counter("Sessions opened by initialize.")
    sessions_loaded: int = _counter("Sessions loaded from their records.")
    reattaches: int = _counter("Clients that came back to their session with initialize.")
    sessions_ended: int = _counter("Sessions ended: deleted by their client, expired, or without a handshake.")
    sessions_not_found: int = _counter("Requests answered 404 because there is no such session for the caller.")
    call_streams: int = _counter("Streams opened by POST.")
    standalone_readers: int = _counter("GETs attached to a standalone stream.")
    resumes: int = _counter("GETs that named a position.")
    events_appended: int = _counter("Events appended to streams.")
    events_replayed: int = _counter("Events that a reader got from before its arrival.")
    replays_completed: int = _counter("Readers that got all events that they had missed.", outcome="complete")
    replays_abandoned: int = _counter("Readers that left before they had got all of them.", outcome="abandoned")
    replays_refused: int = _counter("GETs with a position that were refused.", outcome="refused")
    gaps: int = _counter("Gaps reported to readers: events that no longer exist.")
    orphans_told: int = _counter("Calls reported to a client that had lost their positions.")
    positions_lost: int = _counter("Positions that could not be honoured.")
    take_overs: int = _counter("Readers ended because a newer one took their stream.")
    slow_readers_ended: int = _counter("Readers ended because they took nothing for stream_timeout.")
    calls_accepted: int = _counter("Requests written into the ledger.")
    calls_answered: int = _counter("Requests answered by the server.")
    calls_cancelled: int = _counter("Requests cancelled by their client.")
    calls_settled: int = _counter("Calls answered with: interrupted, outcome unknown.", outcome="unknown")
    calls_rerun: int = _counter("Calls of a dead node or server that were run again here.", outcome="rerun")
    calls_followed: int = _counter("Calls that a server went on with when their node had died.", outcome="followed")
    settles_cancelled: int = _counter(
        "Calls of a dead node that their client cancelled while they waited to be settled.", outcome="cancelled"
    )
    calls_joined: int = _counter("Requests that joined a call which another request had begun, by its key.")
    calls_answered_early: int = _counter("Calls whose client was answered that they still run (answer_within).")
    calls_cut: int = _counter(
        "Calls of 2026-07-28 without handle and key that were cancelled because their client's connection closed."
    )
    tasks_handed_out: int = _counter("Calls whose client got the handle of a task in place of the answer.")
    answers_given_up: int = _counter(
        "Answers of ended tasks and calls with a key that were given up before their time, for newer ones."
    )
    keys_given_up: int = _counter("Requests refused because the answer of their call or task was given up.")
    tool_steps_ended: int = _counter("Steps of tools that ended with a value.", outcome="ended")
    tool_steps_failed: int = _counter("Steps of tools that ended with an error.", outcome="failed")
    tool_steps_slept: int = _counter("Sleeps of tools that were recorded.", outcome="ended")
    tool_steps_answered: int = _counter("Answers to questions of tools that were recorded.", outcome="ended")
    tool_steps_replayed: int = _counter("Recorded steps, sleeps and answers that a call which runs again got back.")
    tool_step_mismatches: int = _counter("Calls that ran again and did not do what they had done.")
    nodes_settled: int = _counter("Dead nodes whose calls this one has settled.")
    recoveries_tried: int = _counter('New sessions begun in place of lost ones (`recover="reissue"`).', outcome="tried")
    recoveries_succeeded: int = _counter("New sessions that were ready in place of lost ones.", outcome="succeeded")
    recoveries_failed: int = _counter("New sessions whose handshake failed.", outcome="failed")
    recoveries_refused: int = _counter(
        "Callers that had lost too many sessions to be given another one.", outcome="refused"
    )
    resume_chains_opened: int = _counter("Chains of resume tokens that the broker opened.")
    resume_tokens_accepted: int = _counter("Resume tokens that led back to their session.")
    resume_tokens_rejected: int = _counter("Resume tokens that the broker rejected, for whatever reason.")
    #: A security event: the token had been voided or retired.
    resume_chains_revoked: int = _counter("Chains of resume tokens revoked because a retired token was used again.")
    requests_refused: int = _counter("Requests that the endpoint answered with 400 and above.")
    outages: int = _counter("Times that the store began to fail.")
    events_held: int = _counter("Events that went on live from memory while the store failed.")

    call_seconds: Histogram = field(
        default_factory=_of_calls,
        metadata={"help": "From the acceptance of a request to the server's answer."},
    )
    append_seconds: Histogram = field(
        default_factory=Histogram,
        metadata={"help": "From the first step of a group until the group is written."},
    )
    replay_seconds: Histogram = field(
        default_factory=Histogram,
        metadata={"help": "From the arrival of a reader until it has the events that existed then."},
    )

    upstream: UpstreamNumbers | None = None
    """Of a server that is not in this process."""

    def snapshot(self) -> dict[str, int]:
        return {name: value for name, value in self._values().items() if isinstance(value, int)}

    def seconds(self) -> dict[str, Histogram]:
        """The histograms, by their names without `_seconds`."""
        values = self._values().items()
        return {name.removesuffix("_seconds"): value for name, value in values if isinstance(value, Histogram)}

    def _values(self) -> dict[str, object]:
        parts = [part for part in (self, self.upstream) if part is not None]
        return {field.name: getattr(part, field.name) for part in parts for field in dataclasses.fields(part)}


HELP: dict[str, str] = {
    field.name: field.metadata["help"]
    for part in (Counters, UpstreamNumbers)
    for field in dataclasses.fields(part)
    if "help" in field.metadata
}
OUTCOMES: dict[str, str] = {
    field.name: field.metadata["outcome"] for field in dataclasses.fields(Counters) if field.metadata.get("outcome")
}
