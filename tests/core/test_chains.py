"""Chains of resume tokens: each use, and what no history of holders and thieves can do (T10, T12)."""

from __future__ import annotations

import base64
import itertools
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure._core.chains import (
    NAME_BYTES,
    SECRET_BYTES,
    TOKEN_LENGTH,
    Action,
    Chain,
    Outcome,
    Token,
    hashed,
    is_held_by,
    opened,
    read_token,
    use,
)
from perdure._core.ids import SessionId

HOLDER = "ab" * 32
SESSION = SessionId("session")


def a_token(number: int) -> Token:
    return Token(name=b"n" * NAME_BYTES, secret=number.to_bytes(SECRET_BYTES, "big"))


OLD, CURRENT, NEXT, FRESH = (a_token(number) for number in range(4))
AT_REST = opened(CURRENT, session=SESSION, holder=HOLDER)
RENEWING = replace(AT_REST, next=hashed(NEXT.secret))
RENEWED = replace(AT_REST, current=hashed(NEXT.secret))


# Tokens


def test_a_token_is_64_characters_and_read_as_it_was_written() -> None:
    token = Token(name=bytes(range(16)), secret=bytes(range(200, 232)))
    assert read_token(token.text) == token
    assert len(token.text) == TOKEN_LENGTH
    assert base64.urlsafe_b64decode(token.text) == token.name + token.secret


@pytest.mark.parametrize(
    "text", ["%" * 64, "é" * 64, "\ud800" * 64, "A" * 63 + "=", "A" * 62 + "==", "+/" * 32, " " * 64]
)
def test_whatever_spells_no_token_is_one_of_no_chain(text: str) -> None:
    """It goes the same way as one that nobody issued."""
    token = read_token(text)
    assert (len(token.name), len(token.secret)) == (NAME_BYTES, SECRET_BYTES)
    assert token.text != text


def test_a_chain_holds_hashes_and_no_secret() -> None:
    """T12."""
    for field in fields(Chain):
        value = getattr(RENEWING, field.name)
        assert field.name == "session" or (len(value) == 64 and int(value, 16) >= 0)
        assert HOLDER not in value
    assert CURRENT.text not in repr(CURRENT)
    assert str(CURRENT.secret) not in repr(CURRENT)


def test_a_chain_knows_its_holder() -> None:
    assert is_held_by(AT_REST, HOLDER)
    assert not is_held_by(AT_REST, "ba" * 32)


# Uses


ISSUED = replace(AT_REST, next=hashed(FRESH.secret))
RENEWED_AND_ISSUED = replace(RENEWED, next=hashed(FRESH.secret))


@pytest.mark.parametrize(
    ("chain", "action", "token", "after", "outcome"),
    [
        (AT_REST, Action.RESUME, CURRENT, ISSUED, Outcome.ACCEPTED),
        (RENEWING, Action.RESUME, CURRENT, ISSUED, Outcome.ACCEPTED),
        (RENEWING, Action.RESUME, NEXT, RENEWED_AND_ISSUED, Outcome.ACCEPTED),
        (AT_REST, Action.RESUME, NEXT, None, Outcome.REUSED),
        (RENEWING, Action.RESUME, OLD, None, Outcome.REUSED),
        (AT_REST, Action.CONFIRM, CURRENT, AT_REST, Outcome.ACCEPTED),
        (RENEWING, Action.CONFIRM, CURRENT, RENEWING, Outcome.ACCEPTED),
        (RENEWING, Action.CONFIRM, NEXT, RENEWED, Outcome.ACCEPTED),
        (RENEWED, Action.CONFIRM, CURRENT, None, Outcome.REUSED),
        (AT_REST, Action.CONFIRM, OLD, None, Outcome.REUSED),
        (AT_REST, Action.REVOKE, CURRENT, None, Outcome.ENDED),
        (RENEWING, Action.REVOKE, NEXT, None, Outcome.ENDED),
        (RENEWED, Action.REVOKE, CURRENT, None, Outcome.REUSED),
    ],
)
def test_a_use(chain: Chain, action: Action, token: Token, after: Chain | None, outcome: Outcome) -> None:
    assert use(chain, action, token, fresh=FRESH.secret) == (after, outcome)


def test_no_token_shows_the_next_secret_where_there_is_none() -> None:
    assert use(AT_REST, Action.RESUME, CURRENT.renewed(b""), fresh=FRESH.secret) == (None, Outcome.REUSED)


# Histories


class ChangingServers:
    """The broker: one chain and its uses, with a fresh secret each time."""

    def __init__(self) -> None:
        self._numbers = itertools.count(10)
        self.first = a_token(next(self._numbers))
        self.chain: Chain | None = opened(self.first, session=SESSION, holder=HOLDER)

    def use(self, action: Action, token: Token) -> Token | None:
        """The token that a resume gives (the same one, for other uses); `None` if the use was rejected."""
        if self.chain is None:
            return None
        fresh = a_token(next(self._numbers))
        self.chain, outcome = use(self.chain, action, token, fresh=fresh.secret)
        if outcome is Outcome.REUSED:
            return None
        return fresh if action is Action.RESUME else token


class Bridge:
    """One that does as it should: resume, write down, confirm. Only `disk` outlives a crash."""

    def __init__(self, world: ChangingServers, disk: Token) -> None:
        self.world = world
        self.disk = disk
        self.new: Token | None = None
        self.written = False
        self.accepted: Token | None = None
        """The last token of its own that it confirmed, or used again."""

    def step(self, *, answered: bool = True) -> bool:
        """Do what comes next; without an answer, it is done and will be repeated. `False`: rejected."""
        if self.new is None:
            return self._resume(answered)
        if not self.written:
            self.disk, self.written = self.new, True
            return True
        return self._confirm(answered)

    def _resume(self, answered: bool) -> bool:
        new = self.world.use(Action.RESUME, self.disk)
        if new is None:
            return False
        self.accepted = self.disk
        if answered:
            self.new, self.written = new, False
        return True

    def _confirm(self, answered: bool) -> bool:
        assert self.new is not None
        if self.world.use(Action.CONFIRM, self.new) is None:
            return False
        self.accepted = self.new
        if answered:
            self.new = None  # it will resume when it is started again
        return True

    def crash(self) -> None:
        self.new = None


@given(st.lists(st.sampled_from(["done", "unanswered", "crash", "write fails"]), max_size=60))
def test_an_honest_holder_alone_never_loses_its_session(history: list[str]) -> None:
    """T10: whatever dies or gets lost, at whatever point, and however often something is repeated."""
    world = ChangingServers()
    bridge = Bridge(world, world.first)
    for what in history:
        match what:
            case "crash":
                bridge.crash()
            case "write fails" if bridge.new is not None and not bridge.written:
                bridge.new = None  # it goes on without: nothing is confirmed that is not written down
            case _:
                assert bridge.step(answered=what != "unanswered")
    bridge.crash()
    for _ in range(3):
        assert bridge.step()


@given(
    st.lists(st.tuples(st.sampled_from(["done", "unanswered", "crash"]), st.booleans()), max_size=12),
    st.lists(st.tuples(st.sampled_from(["done"] * 9 + ["unanswered", "crash", "theft"]), st.booleans()), max_size=60),
)
def test_never_two_holders_both_go_on(before: list[tuple[str, bool]], after: list[tuple[str, bool]]) -> None:
    """T10: as soon as one of them has confirmed, or used again, a token of its own, the first use by the other one
    revokes the chain. (Until then each takes the other's new token away, and neither goes on.)"""
    world = ChangingServers()
    honest = Bridge(world, world.first)
    for what, _ in before:
        honest.crash() if what == "crash" else honest.step(answered=what == "done")
    thief = Bridge(world, honest.disk)
    shared = {honest.disk}
    honest.accepted = None
    for what, by_thief in after:
        one, other = (thief, honest) if by_thief else (honest, thief)
        if what == "theft":
            one, other = thief, honest
            thief.disk, thief.new = honest.disk, None
            shared.add(honest.disk)
            honest.accepted = thief.accepted = None
        elif what == "crash":
            one.crash()
        else:
            writes = one.new is not None and not one.written
            went_on = other.accepted is not None and other.accepted not in shared
            accepted = one.step(answered=what == "done")
            if went_on and not writes:
                assert not accepted
                assert world.chain is None
    both = [bridge for bridge in (honest, thief) if bridge.accepted is not None and bridge.accepted not in shared]
    assert len(both) <= 1
