from perdure._core.backoff import Backoff, Pauses

FRESH = Backoff(pauses=Pauses(first=0.1, longest=30.0), quick=10.0)


def test_pauses_double_and_are_bounded() -> None:
    pauses = Pauses(first=0.25, longest=10.0, free=1)
    assert [pauses.after(deaths) for deaths in range(8)] == [0, 0, 0.25, 0.5, 1, 2, 4, 8]
    assert pauses.after(1_000_000) == 10.0


def test_each_quick_death_doubles_the_wait() -> None:
    backoff, now, waits = FRESH, 100.0, []
    for _ in range(11):
        started, now = now, now + 0.01
        backoff = backoff.started(started).died(started=started, now=now)
        waits.append(round(backoff.wait(now), 6))
        now = backoff.until
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]


def test_a_process_that_served_for_a_while_is_not_a_quick_death() -> None:
    assert FRESH.died(started=100.0, now=110.0) == FRESH
    assert FRESH.died(started=100.0, now=109.5).deaths == 1


def test_processes_that_die_together_count_once() -> None:
    backoff = FRESH
    for moment in range(50):
        backoff = backoff.died(started=100.0 + moment / 1000, now=101.0 + moment / 1000)
    assert (backoff.deaths, backoff.until) == (1, 101.1)


def test_after_a_death_the_starts_keep_their_distance_until_a_handshake() -> None:
    backoff = FRESH.died(started=99.0, now=100.0)
    assert backoff.wait(100.2) == 0
    trial = backoff.started(100.2)
    assert round(trial.wait(100.2), 6) == 0.1
    assert trial.greeted().wait(100.2) == 0
    assert FRESH.started(100.0).wait(100.0) == 0


def test_a_handshake_that_held_ends_the_count_and_one_alone_does_not() -> None:
    backoff = FRESH.died(started=99.0, now=100.0).died(started=101.0, now=102.0)
    assert backoff.greeted().died(started=103.0, now=104.0).deaths == 3
    assert backoff.held().deaths == 0
