"""Leases (design, "Ledger, leases, settling"): nobody alive is called dead, and whoever is called dead knew it first.

The store is a counter for each node here, the network three moments of a request (sent, reached the store, answered),
and each node has a clock that began somewhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure._core.ids import NodeId
from perdure._core.leases import BEATS_IN_LEASE, OWN_SHARE, Leases

ME, OTHER = NodeId("me"), NodeId("other")
LEASE = 20.0
OWN = LEASE * OWN_SHARE


def watching(*, now: float = 0.0) -> Leases:
    """A node that has seen the other's first beat."""
    mine = Leases(ME, lease=LEASE, now=now)
    assert mine.observe({ME: 1, OTHER: 1}, asked=now, now=now) == []
    return mine


def beat_until(mine: Leases, end: float, *, start: float = 0.0) -> None:
    for tick in range(int(start) + 1, int(end) + 1):
        mine.beaten(sent=tick, now=tick)


# --- One's own claim


def test_a_claim_holds_for_its_share_of_a_lease_after_the_beat_was_sent() -> None:
    mine = Leases(ME, lease=LEASE, now=100.0)
    assert mine.holds(now=100.0 + OWN - 0.1)
    assert not mine.holds(now=100.0 + OWN)
    mine.beaten(sent=105.0, now=110.0)
    assert mine.holds(now=105.0 + OWN - 0.1)
    assert not mine.holds(now=105.0 + OWN)


def test_a_claim_that_lapsed_never_comes_back() -> None:
    mine = Leases(ME, lease=LEASE, now=0.0)
    mine.beaten(sent=OWN - 1, now=OWN)
    assert not mine.holds(now=OWN)
    beat_until(mine, 3 * LEASE, start=OWN)
    assert not mine.holds(now=3 * LEASE)


def test_a_claim_that_was_given_up_never_comes_back() -> None:
    mine = Leases(ME, lease=LEASE, now=0.0)
    mine.lapse()
    mine.beaten(sent=0.0, now=0.0)
    assert not mine.holds(now=0.0)


def test_answers_that_come_in_another_order_do_not_shorten_a_claim() -> None:
    mine = Leases(ME, lease=LEASE, now=0.0)
    mine.beaten(sent=6.0, now=7.0)
    mine.beaten(sent=3.0, now=8.0)
    assert mine.holds(now=6.0 + OWN - 0.1)


# --- Somebody else's


@pytest.mark.parametrize(("asked", "dead"), [(LEASE - 0.1, []), (LEASE, [OTHER])])
def test_a_node_is_dead_when_its_beat_has_not_changed_for_a_lease(asked: float, dead: list[NodeId]) -> None:
    mine = watching()
    beat_until(mine, LEASE)
    assert mine.observe({ME: 9, OTHER: 1}, asked=asked, now=LEASE + 0.5) == dead


def test_what_counts_is_when_the_last_look_was_asked_for_and_when_the_first_was_answered() -> None:
    mine = Leases(ME, lease=LEASE, now=0.0)
    mine.observe({OTHER: 1}, asked=0.0, now=4.0)
    beat_until(mine, LEASE + 4)
    assert mine.observe({OTHER: 1}, asked=LEASE + 3.9, now=LEASE + 4) == []
    assert mine.observe({OTHER: 1}, asked=LEASE + 4, now=LEASE + 4) == [OTHER]


def test_a_beat_that_changed_begins_a_new_lease() -> None:
    mine = watching()
    beat_until(mine, 2 * LEASE)
    assert mine.observe({OTHER: 2}, asked=LEASE - 1, now=LEASE - 1) == []
    assert mine.observe({OTHER: 2}, asked=2 * LEASE - 2, now=2 * LEASE - 2) == []
    assert mine.observe({OTHER: 2}, asked=2 * LEASE - 1, now=2 * LEASE - 1) == [OTHER]


def test_nobody_calls_itself_dead() -> None:
    mine = watching()
    beat_until(mine, LEASE)
    assert mine.observe({ME: 1}, asked=LEASE, now=LEASE) == []


def test_a_node_that_was_buried_is_forgotten_and_a_namesake_starts_from_the_beginning() -> None:
    mine = watching()
    beat_until(mine, LEASE)
    assert mine.observe({ME: 5}, asked=1.0, now=1.0) == []
    assert mine.observe({ME: 5, OTHER: 1}, asked=LEASE, now=LEASE) == []
    assert mine.ages(now=LEASE) == {ME: 0.0, OTHER: 0.0}


def test_an_observer_that_was_silent_itself_starts_its_observations_again() -> None:
    """Paused or cut off for more than half a lease, less than its own claim lasts."""
    mine = watching()
    beat_until(mine, 8)
    silence_ends = 8 + LEASE * 0.6
    mine.beaten(sent=silence_ends, now=silence_ends)
    mine.observe({OTHER: 1}, asked=silence_ends, now=silence_ends)
    beat_until(mine, silence_ends + LEASE, start=silence_ends)
    assert mine.observe({OTHER: 1}, asked=silence_ends + LEASE - 1, now=silence_ends + LEASE - 1) == []
    assert mine.observe({OTHER: 1}, asked=silence_ends + LEASE, now=silence_ends + LEASE) == [OTHER]


def test_an_observer_calls_nobody_dead_while_its_own_beats_do_not_go_through() -> None:
    mine = watching()
    beat_until(mine, LEASE - 11)
    assert mine.observe({OTHER: 1}, asked=LEASE, now=LEASE) == []


def test_an_observer_whose_own_claim_lapsed_calls_nobody_dead() -> None:
    mine = watching()
    assert mine.observe({OTHER: 1}, asked=2 * LEASE, now=2 * LEASE) == []


def test_ages_tell_how_long_ago_each_was_known_to_be_alive() -> None:
    mine = watching()
    mine.beaten(sent=3.0, now=4.0)
    mine.observe({OTHER: 2}, asked=5.0, now=6.0)
    assert mine.ages(now=10.0) == {ME: 6.0, OTHER: 4.0}


# --- Made-up histories


@dataclass
class Node:
    id: NodeId
    offset: float
    leases: Leases
    beating: float | None = None
    """When the beat that is on its way was sent."""
    arrived: bool = False
    looking: tuple[float, dict[NodeId, int] | None] | None = None
    """When it asked, and what the store showed."""


@dataclass
class World:
    """Three nodes and a store. Whatever is asked for may be held up, or lost, on both ways."""

    time: float = 0.0
    beats: dict[NodeId, int] = field(default_factory=dict)
    nodes: dict[NodeId, Node] = field(default_factory=dict)

    def join(self, id_: NodeId, offset: float) -> None:
        self.nodes[id_] = Node(id_, offset, Leases(id_, lease=LEASE, now=self.time + offset))
        self.beats[id_] = 1

    def do(self, node: Node, what: str) -> None:
        getattr(self, what)(node, self.time + node.offset)

    def beat(self, node: Node, now: float) -> None:
        if node.beating is None and node.leases.holds(now=now):
            node.beating, node.arrived = now, False

    def arrive(self, node: Node, now: float) -> None:
        if node.beating is not None and not node.arrived:
            node.arrived = True
            self.beats[node.id] += 1

    def answer(self, node: Node, now: float) -> None:
        if node.beating is not None and node.arrived:
            node.leases.beaten(sent=node.beating, now=now)
            node.beating = None

    def lose(self, node: Node, now: float) -> None:
        node.beating = node.looking = None

    def ask(self, node: Node, now: float) -> None:
        if node.looking is None:
            node.looking = (now, None)

    def show(self, node: Node, now: float) -> None:
        if node.looking is not None and node.looking[1] is None:
            node.looking = (node.looking[0], dict(self.beats))

    def see(self, node: Node, now: float) -> None:
        asked, beats = node.looking or (now, None)
        if beats is None:
            return
        node.looking = None
        for dead in node.leases.observe(beats, asked=asked, now=now):
            self.check_that_it_knew(self.nodes[dead])

    def check_that_it_knew(self, dead: Node) -> None:
        a_quarter_ago = self.time + dead.offset - LEASE / 4
        assert not dead.leases.holds(now=a_quarter_ago), f"{dead.id} is called dead at {self.time} and does not know"


OFFSETS = {NodeId("a"): 0.0, NodeId("b"): 1_000_000.0, NodeId("c"): -77.25}

REGULAR = ("beat", "arrive", "answer", "ask", "show", "see")
DEAF = ("beat", "arrive", "lose")
"""What it sends gets through; no answer comes back."""


def slow(length: int, middle: int) -> list[tuple[str, ...]]:
    """Everything under way for long: sent first, in the store at some moment, answered last."""
    moments: list[tuple[str, ...]] = [("lose", "beat", "ask"), *[()] * (length + 1), ("answer", "see")]
    moments[1 + middle % length] = ("arrive", "show")
    return moments


lengths = st.integers(1, 25)
"""Moments; a lease has twenty."""
segments = st.one_of(
    lengths.map(lambda length: [REGULAR] * length),
    lengths.map(lambda length: [DEAF] * length),
    lengths.map(lambda length: [()] * length),
    st.builds(slow, st.integers(1, 14), st.integers(0, 13)),
)
lives = st.lists(segments, min_size=1, max_size=12).map(lambda parts: [moment for part in parts for moment in part])


@settings(max_examples=500, deadline=None)
@given(st.tuples(lives, lives, lives))
def test_a_node_that_is_called_dead_has_lapsed_by_its_own_clock_first(
    histories: tuple[list[tuple[str, ...]], ...],
) -> None:
    """Pauses, cut-offs, slow networks, lost answers; a life that is over is a death."""
    world = World()
    for name, offset in OFFSETS.items():
        world.join(name, offset)
    for moment in range(max(map(len, histories))):
        for node, history in zip(world.nodes.values(), histories, strict=True):
            for what in history[moment] if moment < len(history) else ():
                world.do(node, what)
        world.time += 1.0


@settings(max_examples=200, deadline=None)
@given(
    beats=st.lists(st.tuples(st.floats(0.1, 0.5), st.floats(0, 0.2)), min_size=1, max_size=30),
    looks=st.lists(st.tuples(st.floats(0.05, 0.3), st.floats(0, 0.2), st.booleans()), min_size=1, max_size=60),
)
def test_a_node_that_beats_regularly_is_never_called_dead(
    beats: list[tuple[float, float]], looks: list[tuple[float, float, bool]]
) -> None:
    """Beats at most half a lease apart and a fifth of one under way; the observer looks when it likes."""
    sent = arrived = 0.0
    arrivals, claim = [0.0], Leases(OTHER, lease=LEASE, now=0.0)
    for pause, latency in beats:
        sent = max(arrived, sent + pause * LEASE)
        assert claim.holds(now=sent)
        arrived = sent + latency * LEASE
        claim.beaten(sent=sent, now=arrived)
        arrivals.append(arrived)
    observer, now = Leases(ME, lease=LEASE, now=0.0), 0.0
    for pause, latency, beaten in looks:
        asked = now + pause * LEASE
        now = asked + latency * LEASE
        if now > arrived:
            break
        if beaten:
            observer.beaten(sent=asked, now=now)
        seen = sum(arrival <= asked for arrival in arrivals)
        assert observer.observe({OTHER: seen}, asked=asked, now=now) == []


@given(st.floats(0, LEASE), st.floats(0, LEASE / BEATS_IN_LEASE))
def test_a_dead_node_is_found_by_one_who_beats_and_looks_regularly(died: float, first: float) -> None:
    """Within a lease and two looks: nothing waits for ever (design, promise 3)."""
    interval = LEASE / BEATS_IN_LEASE
    observer, now = Leases(ME, lease=LEASE, now=0.0), first
    while now < died + LEASE + 2 * interval:
        observer.beaten(sent=now, now=now)
        dead = observer.observe({OTHER: int(min(now, died))}, asked=now, now=now)
        now += interval
    assert dead == [OTHER]
