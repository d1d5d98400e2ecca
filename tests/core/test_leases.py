"""Leases (design, "Ledger, leases, settling"): no node that beats is called dead, and none is buried that holds its
claim.

The store is a counter for each node here, the network three moments of a request (sent, reached the store, answered),
and each node has a clock that began somewhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure._core.ids import NodeId
from perdure._core.leases import BEATS_IN_LEASE, FREE_SECONDS, FREE_SHARE, OWN_SHARE, Leases
from perdure._core.states import ClaimState

HOLDING, FROZEN, BURIED = ClaimState.HOLDING, ClaimState.FROZEN, ClaimState.BURIED

ME, OTHER, THIRD = NodeId("me"), NodeId("other"), NodeId("third")
LEASE = 20.0
OWN = LEASE * OWN_SHARE
FREE = LEASE * FREE_SHARE


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
    assert mine.claim.at(100.0 + OWN - 0.1) is HOLDING
    mine.beaten(sent=105.0, now=110.0)
    assert mine.claim.at(105.0 + OWN - 0.1) is HOLDING
    assert mine.claim.at(105.0 + OWN) is FROZEN


def test_a_claim_that_lapsed_is_renewed_by_the_next_beat_that_goes_through() -> None:
    mine = Leases(ME, lease=LEASE, now=0.0)
    assert mine.claim.at(10 * LEASE) is FROZEN
    mine.beaten(sent=10 * LEASE, now=10 * LEASE + 1)
    assert mine.claim.at(10 * LEASE + 1) is HOLDING
    assert mine.claim.at(10 * LEASE + OWN) is FROZEN


@pytest.mark.parametrize(("late", "claim"), [(OWN - 0.1, HOLDING), (OWN, FROZEN)])
def test_an_answer_that_comes_too_late_renews_nothing(late: float, claim: ClaimState) -> None:
    """The store knew the node when the beat came there, which may be long ago."""
    mine = Leases(ME, lease=LEASE, now=0.0)
    assert mine.claim.at(2 * LEASE) is FROZEN
    mine.beaten(sent=2 * LEASE, now=2 * LEASE + late)
    assert mine.claim.at(2 * LEASE + late) is claim


def test_a_claim_that_was_buried_never_comes_back() -> None:
    mine = Leases(ME, lease=LEASE, now=0.0)
    mine.claim.bury()
    mine.beaten(sent=0.0, now=0.0)
    mine.alone(now=0.0)
    assert mine.claim.at(0.0) is mine.claim.at(LEASE) is BURIED


def test_answers_that_come_in_another_order_do_not_shorten_a_claim() -> None:
    mine = Leases(ME, lease=LEASE, now=0.0)
    mine.beaten(sent=6.0, now=7.0)
    mine.beaten(sent=3.0, now=8.0)
    assert mine.claim.at(6.0 + OWN - 0.1) is HOLDING


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


# --- By locks


def beating(mine: Leases, at: float) -> float:
    mine.beaten(sent=at, now=at)
    return at


def test_a_free_lock_tells_when_it_will_have_been_free_for_long_enough() -> None:
    mine = Leases(ME, lease=LEASE, now=0.0)
    assert mine.due(now=0.5) is None
    mine.observe({OTHER: 1}, asked=1.0, now=1.0, free={OTHER})
    mine.observe({OTHER: 1, THIRD: 1}, asked=2.0, now=2.0, free={OTHER, THIRD})
    assert mine.due(now=2.0) == pytest.approx(FREE - 1.0)
    assert mine.due(now=LEASE) == 0.0
    mine.observe({OTHER: 1, THIRD: 1}, asked=2.5, now=2.5)
    assert mine.due(now=2.5) is None


@pytest.mark.parametrize(("later", "dead"), [(FREE - 0.01, []), (FREE + 0.01, [OTHER])])
def test_a_node_is_dead_when_its_lock_stays_free(later: float, dead: list[NodeId]) -> None:
    """Long before its lease has run out."""
    mine = watching()
    assert mine.observe({ME: 1, OTHER: 1}, asked=0.9, now=1.0, free={OTHER}) == []
    now = beating(mine, 1.0 + later)
    assert mine.observe({ME: 1, OTHER: 1}, asked=now, now=now, free={OTHER}) == dead


def test_a_lock_that_was_taken_again_or_a_beat_in_between_is_a_sign_of_life() -> None:
    for beat, free in ((1, set[NodeId]()), (2, {OTHER})):
        mine = watching()
        mine.observe({OTHER: 1}, asked=1.0, now=1.0, free={OTHER})
        mine.observe({OTHER: beat}, asked=2.0, now=2.0, free=free)
        now = beating(mine, 2.0 + FREE - 0.1)
        assert mine.observe({OTHER: beat}, asked=now, now=now, free={OTHER}) == []
        now = beating(mine, now + FREE + 0.01)
        assert mine.observe({OTHER: beat}, asked=now, now=now, free={OTHER}) == [OTHER]


def test_locks_say_nothing_before_the_observer_has_its_own() -> None:
    """The server was restarted: all locks are free, and each node takes its own again."""
    mine = watching()
    for now in (1.0, 2.0, 3.0, 4.0):
        assert mine.observe({OTHER: 1}, asked=now, now=beating(mine, now), free={ME, OTHER}) == []
    assert mine.observe({OTHER: 1}, asked=5.0, now=beating(mine, 5.0), free={OTHER}) == []
    now = beating(mine, 5.01 + FREE)
    assert mine.observe({OTHER: 1}, asked=now, now=now, free={OTHER}) == [OTHER]


def test_a_node_that_holds_its_lock_and_is_silent_is_dead_by_its_lease() -> None:
    mine = watching()
    beat_until(mine, LEASE)
    assert mine.observe({OTHER: 1}, asked=LEASE, now=LEASE, free=()) == [OTHER]


@given(st.floats(0, 5), st.floats(0, 0.1))
def test_a_crash_elsewhere_is_found_a_look_behind_a_third_of_the_lease(died: float, latency: float) -> None:
    """With a look each half second, as a node makes them."""
    mine, now = watching(), 0.0
    while True:
        asked, now = now, now + latency
        mine.beaten(sent=asked, now=now)
        if mine.observe({OTHER: 1}, asked=asked, now=now, free={OTHER} if asked >= died else ()):
            break
        now = asked + 0.5
    assert now - died <= FREE + 1.0 + latency


def test_a_process_that_was_looked_up_and_has_ended_is_dead_at_once() -> None:
    mine = watching()
    assert mine.observe({OTHER: 1}, asked=1.0, now=1.0, free={OTHER}, ended={OTHER}) == [OTHER]


@pytest.mark.parametrize(("lease", "seconds"), [(1.0, 1.0), (3.0, FREE_SECONDS), (12.0, 4.0)])
def test_a_short_lease_gives_a_process_time_enough_to_beat(lease: float, seconds: float) -> None:
    mine = Leases(ME, lease=lease, now=0.0)
    mine.observe({OTHER: 1}, asked=0.0, now=0.0, free={OTHER})
    assert mine.due(now=0.0) == pytest.approx(seconds)


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
    dead: dict[NodeId, int] = field(default_factory=dict)
    """The nodes that it found dead, with the beat that it saw."""
    beating: float | None = None
    """When the beat that is on its way was sent."""
    arrived: bool = False
    buried_at: float | None = None
    looking: tuple[float, dict[NodeId, int] | None] | None = None
    """When it asked, and what the store showed."""


@dataclass
class ChangingServers:
    """Three nodes and a store. Whatever is asked for may be held up, or lost, on both ways. A node that was found dead
    is buried at some later moment, unless it has beaten since."""

    time: float = 0.0
    beats: dict[NodeId, int] = field(default_factory=dict)
    nodes: dict[NodeId, Node] = field(default_factory=dict)

    def join(self, id_: NodeId, offset: float) -> None:
        self.nodes[id_] = Node(id_, offset, Leases(id_, lease=LEASE, now=self.time + offset))
        self.beats[id_] = 1

    def do(self, node: Node, what: str) -> None:
        getattr(self, what)(node, self.time + node.offset)

    def beat(self, node: Node, now: float) -> None:
        if node.beating is None:
            node.beating, node.arrived = now, False

    def arrive(self, node: Node, now: float) -> None:
        if node.beating is not None and not node.arrived:
            node.arrived = True
            if node.id in self.beats:
                self.beats[node.id] += 1
            else:
                node.beating = None
                node.leases.claim.bury()

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
        node.dead = {dead: beats[dead] for dead in node.leases.observe(beats, asked=asked, now=now)}

    def bury(self, node: Node, now: float) -> None:
        for dead, beat in node.dead.items():
            if self.beats.get(dead) == beat:
                del self.beats[dead]
        node.dead = {}

    def check(self) -> None:
        for node in self.nodes.values():
            now = self.time + node.offset
            if node.id not in self.beats and node.buried_at is None:
                node.buried_at = now
            if node.buried_at is not None:
                held = node.leases.claim.at(now) is HOLDING
                assert not held, f"{node.id} was buried at {node.buried_at} and holds its claim at {now}"


OFFSETS = {NodeId("a"): 0.0, NodeId("b"): 1_000_000.0, NodeId("c"): -77.25}

REGULAR = ("beat", "arrive", "answer", "ask", "show", "see", "bury")
DEAF = ("beat", "arrive", "lose")
"""What it sends gets through; no answer comes back."""


def slow(length: int, middle: int) -> list[tuple[str, ...]]:
    """Everything under way for long: sent first, in the store at some moment, answered last."""
    moments: list[tuple[str, ...]] = [("lose", "beat", "ask"), *[()] * (length + 1), ("answer", "see"), ("bury",)]
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


@given(st.tuples(lives, lives, lives))
def test_no_node_is_buried_that_holds_its_claim_and_none_holds_it_afterwards(
    histories: tuple[list[tuple[str, ...]], ...],
) -> None:
    """Pauses, cut-offs, slow networks, lost answers; a life that is over is a death."""
    world = ChangingServers()
    for name, offset in OFFSETS.items():
        world.join(name, offset)
    for moment in range(max(map(len, histories))):
        for node, history in zip(world.nodes.values(), histories, strict=True):
            for what in history[moment] if moment < len(history) else ():
                world.do(node, what)
                world.check()
        world.time += 1.0
        world.check()


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
        assert claim.claim.at(sent) is HOLDING
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
