"""The steps of a tool's run are matched with those that are recorded, and their limits hold."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from perdure._core.settling import MOST_STEPPED_RUNS, Occasion, Rerun, rerun
from perdure._core.states import ToolStepState
from perdure._core.tool_steps import (
    MOST_NAME,
    MOST_STEPS,
    MOST_VALUE,
    Mark,
    StepHistory,
    StepPlace,
    StepProblem,
    StepRefusal,
    ToolStepKind,
    is_resumable,
)

STEP, SLEEP, ASK = ToolStepKind.STEP, ToolStepKind.SLEEP, ToolStepKind.ASK
OPEN, ENDED, FAILED = ToolStepState.OPEN, ToolStepState.ENDED, ToolStepState.FAILED


@dataclass(frozen=True)
class Row:
    number: int
    name: str
    kind: ToolStepKind = STEP
    state: ToolStepState = ENDED
    again: bool = False
    own: bool = True
    attempt: int = 1
    began: float = 0.0
    ended: float | None = 0.0
    value: bytes = b""


def begun(course: StepHistory, name: str, *, own: bool = True, kind: ToolStepKind = STEP) -> StepPlace:
    place = course.begin(kind, name, own=own)
    assert isinstance(place, StepPlace), place
    course.leave(place)
    return place


def refused(course: StepHistory, name: str, *, own: bool = True) -> StepRefusal:
    refusal = course.begin(STEP, name, own=own)
    assert isinstance(refusal, StepRefusal)
    return refusal


def test_recorded_steps_return_in_their_order_and_new_ones_follow() -> None:
    course = StepHistory([Row(2, "b"), Row(1, "a")])
    places = [begun(course, name) for name in ("a", "b", "c")]
    assert [place.number for place in places] == [1, 2, 3]
    assert [place.recorded is None for place in places] == [False, False, True]


def test_the_second_of_a_name_is_another_step() -> None:
    course = StepHistory([Row(1, "mail"), Row(2, "mail")])
    labels = [(place.label, place.number) for place in (begun(course, "mail") for _ in range(3))]
    assert labels == [("mail", 1), ("mail #2", 2), ("mail #3", 3)]


def test_another_step_than_the_recorded_one_is_a_mismatch_from_then_on() -> None:
    course = StepHistory([Row(1, "a"), Row(2, "b")])
    refusal = refused(course, "c")
    assert refusal == StepRefusal(StepProblem.MISMATCH, course.mismatch)
    assert course.mismatch.startswith("this call had done 'a' as its step 1, and now begins 'c': the tool has changed")
    assert refused(course, "a").why is StepProblem.MISMATCH


def test_a_recorded_step_before_its_turn_is_a_mismatch() -> None:
    assert refused(StepHistory([Row(1, "a"), Row(2, "b")]), "b").why is StepProblem.MISMATCH


def test_a_question_is_not_shown_by_its_digest() -> None:
    course = StepHistory([Row(1, "0123abcd", ASK)])
    assert "had done a question as its step 1, and now begins 'a'" in refused(course, "a").sentence


def test_steps_of_other_tasks_come_in_any_order() -> None:
    course = StepHistory([Row(1, "begin"), *(Row(n, f"{n}", own=False) for n in range(2, 6))])
    begun(course, "begin")
    for name in ("4", "new", "2", "5", "3"):
        begun(course, name, own=False)
    assert not course.unused
    assert begun(course, "end").recorded is None


def test_recorded_steps_that_do_not_come_are_known() -> None:
    course = StepHistory([Row(1, "a"), Row(2, "b", own=False)])
    begun(course, "a")
    assert course.unused == ["b"]


def test_a_round_returns_what_the_one_before_has_done_and_asks_again() -> None:
    """What no round of this run has done comes in its order all the same."""
    rows = [Row(1, "a"), Row(2, "a"), Row(3, "0123abcd", ASK, own=False), Row(4, "b")]
    course = StepHistory(rows)
    for name, kind in (("a", STEP), ("a", STEP), ("0123abcd", ASK)):
        begun(course, name, kind=kind, own=kind is STEP)
    course.begin_round(rows)
    places = [begun(course, name) for name in ("a", "a")]
    assert [place.number for place in places] == [1, 2]
    assert begun(course, "0123abcd", kind=ASK, own=False).label == "question #2"
    assert refused(course, "c").sentence.startswith("this call had done 'b' as its step 4, and now begins 'c'")


def test_a_round_need_not_do_what_the_one_before_has_done() -> None:
    rows = [Row(1, "a")]
    course = StepHistory()
    begun(course, "a")
    course.begin_round(rows)
    assert begun(course, "b").recorded is None
    assert course.unused == []


@pytest.mark.parametrize(("again", "goes_on", "is_refused"), [(0, 1, True), (1, 1, False), (0, 0, False)])
def test_a_step_that_an_earlier_round_left_open_runs_only_if_it_may(again: int, goes_on: int, is_refused: bool) -> None:
    course = StepHistory()
    begun(course, "a")
    course.goes_on = bool(goes_on)
    course.begin_round([Row(1, "a", state=OPEN, again=bool(again))])
    assert isinstance(course.begin(STEP, "a", own=True), StepRefusal) is is_refused


def test_a_tool_that_may_only_run_again_may_take_another_way() -> None:
    course = StepHistory([Row(1, "a"), Row(2, "b")])
    course.goes_on = False
    places = [begun(course, name) for name in ("c", "b", "a")]
    assert [place.number for place in places] == [3, 2, 1]


def test_two_steps_of_one_name_at_once_are_refused() -> None:
    course = StepHistory()
    place = course.begin(STEP, "a", own=False)
    assert isinstance(place, StepPlace)
    assert refused(course, "a").why is StepProblem.MISUSE
    course.leave(place)
    assert begun(course, "a").label == "a #2"


@pytest.mark.parametrize(("name", "fits"), [("x" * MOST_NAME, True), ("x" * (MOST_NAME + 1), False), ("", False)])
def test_a_name_has_its_limit(name: str, fits: bool) -> None:
    assert isinstance(StepHistory().begin(STEP, name, own=True), StepPlace) is fits


def test_the_step_beyond_the_limit_is_refused_and_recorded_ones_are_not() -> None:
    course = StepHistory(Row(number, "a") for number in range(1, MOST_STEPS))
    for _ in range(MOST_STEPS):
        begun(course, "a")
    assert refused(course, "a").why is StepProblem.LIMIT


@pytest.mark.parametrize(("size", "fits"), [(MOST_VALUE, True), (MOST_VALUE + 1, False)])
def test_a_value_has_its_limit(size: int, fits: bool) -> None:
    assert (StepHistory().reserve(1, size) == "") is fits


def test_all_values_together_have_their_limit() -> None:
    """Also those of steps that end at the same time; a step that was cut short needs its room no longer."""
    course = StepHistory()
    for number in range(1, 17):
        course.put(number, Mark(STEP, f"{number}", ENDED, False, 1, 0.0), MOST_VALUE - 1)
    place = course.begin(STEP, "a", own=False)
    assert isinstance(place, StepPlace)
    assert course.reserve(17, 17).endswith("16,777,216 bytes as JSON; this would be the next 17")
    assert course.reserve(17, 16) == ""
    assert course.reserve(18, 1) != ""
    course.put(17, Mark(STEP, "a", OPEN, True, 1, None), 0)
    assert course.reserve(18, 1) != ""
    course.leave(place._replace(number=17))
    assert course.reserve(18, 16) == ""


def test_the_outline_tells_what_has_finished_and_what_is_open() -> None:
    rows = [
        Row(1, "a"),
        Row(2, "b", state=FAILED),
        Row(3, "nap", SLEEP, state=OPEN, ended=50.0),
        Row(6, "cut short", SLEEP, ended=50.0),
        Row(4, "0123abcd", ASK),
        Row(5, "a", state=OPEN, ended=None),
    ]
    assert StepHistory(rows).outline(now=49.0) == {"finished": ["a", "b", "cut short"], "open": ["nap", "a #2"]}
    assert StepHistory(rows).outline(now=50.0) == {"finished": ["a", "b", "nap", "cut short"], "open": ["a #2"]}
    assert StepHistory(rows).finished == 5
    assert (StepHistory(rows).sleeps(49.0), StepHistory(rows).sleeps(50.0)) == (True, False)


@pytest.mark.parametrize(
    ("state", "again", "unknown"), [(OPEN, False, True), (OPEN, True, False), (ENDED, False, False)]
)
def test_only_an_open_step_that_may_not_run_again_is_unknown(state: ToolStepState, again: bool, unknown: bool) -> None:
    assert StepHistory([Row(1, "a", state=state, again=again)]).is_unknown is unknown


def test_runs_are_counted_from_the_last_one_in_which_a_step_ended() -> None:
    progressed = StepHistory([Row(1, "a", attempt=3), Row(2, "b", state=OPEN, attempt=5)]).progressed
    assert progressed == 3
    judged = [
        rerun("tools/call", attempt=attempt, occasion=Occasion.NODE_DIED, progressed=progressed)
        for attempt in (3, 4, 5)
    ]
    assert judged == [Rerun.ASK, Rerun.ASK, Rerun.NO]


@pytest.mark.parametrize(("attempt", "may"), [(MOST_STEPPED_RUNS - 1, Rerun.ASK), (MOST_STEPPED_RUNS, Rerun.NO)])
def test_a_call_that_gets_on_has_a_limit_of_runs(attempt: int, may: Rerun) -> None:
    assert rerun("tools/call", attempt=attempt, occasion=Occasion.NODE_DIED, progressed=attempt) is may


@pytest.mark.parametrize(("claims", "may"), [(MOST_STEPPED_RUNS - 1, Rerun.ASK), (MOST_STEPPED_RUNS, Rerun.NO)])
def test_runs_that_end_in_a_sleep_or_a_question_count_for_the_limit_of_runs(claims: int, may: Rerun) -> None:
    assert rerun("tools/call", attempt=1, occasion=Occasion.NODE_DIED, progressed=1, claims=claims) is may


@pytest.mark.parametrize(
    ("tool", "is_it"),
    [
        ({"_meta": {"dev.perdure/resumable": True}}, True),
        ({"_meta": {"dev.perdure/resumable": "true"}}, False),
        ({"_meta": {"dev.perdure/resumable": False}}, False),
        ({"_meta": None}, False),
        ({"_meta": []}, False),
        ({}, False),
    ],
)
def test_only_a_plain_true_makes_a_tool_resumable(tool: dict[str, object], is_it: bool) -> None:
    assert is_resumable(tool) is is_it
