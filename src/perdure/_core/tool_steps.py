"""Matches the steps of a tool's run with those that its earlier runs have recorded, and decides by them whether the
call may run again.

A step is known by its kind, its name and how often the name came before in the call. In the tool's own task recorded
steps come in their recorded order: there a step that is not recorded, while recorded ones have not come yet, is a
mismatch. Steps of other tasks begin in any order, so they are matched by name alone.
"""

import enum
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from perdure._core.states import TOOL_STEP, ToolStepState
from perdure._core.unknown_outcome import Outline

RESUMABLE_META = "dev.perdure/resumable"
"""In the `_meta` of a tool, as `tools/list` shows it: outside its steps it does nothing that must not be done twice."""

MOST_STEPS = 1_000
"""Of one call, questions included. They are read in one go when the call runs again, and each is a row."""

MOST_NAME = 200
"""Characters of a step's name: it is shown to people, and to models in an error."""

MOST_VALUE = 1 << 20
MOST_VALUES = 16 << 20
"""Bytes of one value, and of all values of a call: the next process reads them before the call goes on."""

MOST_SLEEP = 366 * 86_400
"""Seconds of one sleep, a year: a longer one is a mistake, as milliseconds are, and its end may have no date."""

LOST = "lost"
"""The name of the step that stands for those that the store has lost."""


class ToolStepKind(enum.Enum):
    STEP = "step"
    SLEEP = "sleep"
    ASK = "ask"
    """A question that its client has answered."""

    __hash__ = object.__hash__  # as those of `_core.states`


class Recorded(Protocol):
    """The part of a step's record that is needed here."""

    @property
    def number(self) -> int: ...
    @property
    def kind(self) -> ToolStepKind: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> ToolStepState: ...
    @property
    def again(self) -> bool: ...
    @property
    def own(self) -> bool: ...
    @property
    def attempt(self) -> int: ...
    @property
    def began(self) -> float: ...
    @property
    def ended(self) -> float | None: ...
    @property
    def value(self) -> bytes: ...


class Mark(NamedTuple):
    """A step that is recorded, without its value."""

    kind: ToolStepKind
    label: str
    """Its name; of the second one of a name, `mail #2`."""
    state: ToolStepState
    again: bool
    attempt: int
    ended: float | None

    @property
    def got_on(self) -> bool:
        """The call has got on with it. A sleep is recorded with its end, and is open while the call sleeps."""
        return self.kind is ToolStepKind.SLEEP or not TOOL_STEP[self.state]

    def sleeps(self, now: float) -> bool:
        return self.kind is ToolStepKind.SLEEP and bool(TOOL_STEP[self.state]) and (self.ended or 0.0) > now

    def is_over(self, now: float) -> bool:
        return self.got_on and not self.sleeps(now)


class StepPlace(NamedTuple):
    """A step that begins in this run."""

    number: int
    kind: ToolStepKind
    name: str
    label: str
    own: bool
    recorded: Recorded | None
    """As an earlier run has left it."""


class StepProblem(enum.Enum):
    MISUSE = "misuse"
    LIMIT = "limit"
    MISMATCH = "mismatch"


class StepRefusal(NamedTuple):
    """A step that does not begin, and the reason for the tool's author."""

    why: StepProblem
    sentence: str


Key = tuple[ToolStepKind, str, int]


class StepHistory:
    """The steps of one call, in this run and in those before it."""

    __slots__ = (
        "_counts",
        "_next",
        "_own",
        "_recorded",
        "_repeated",
        "_sizes",
        "_under_way",
        "goes_on",
        "marks",
        "mismatch",
        "size",
    )

    def __init__(self, records: Iterable[Recorded] = ()) -> None:
        self.marks: dict[int, Mark] = {}
        """All that are recorded, by number."""
        self.size = 0
        """Bytes of their values, and of those that are about to be recorded."""
        self._sizes: dict[int, int] = {}
        self.mismatch = ""
        """The reason why this run does not do what earlier ones have done; empty while it does."""
        self.goes_on = True
        """The tool says that it takes the same way in each run. One that may only run again may take another one."""
        self._recorded: dict[Key, Recorded] = {}
        """Recorded steps that this run has not reached."""
        self._own: deque[Key] = deque()
        """The keys of those that the tool's own task has done, in their order."""
        self._counts: Counter[tuple[ToolStepKind, str]] = Counter()
        self._repeated: set[Key] = set()
        """Those that have come in an earlier round of this run."""
        self._under_way: set[tuple[ToolStepKind, str]] = set()
        for key, record in _keyed(records):
            self._recorded[key] = record
            if record.own:
                self._own.append(key)
            label = _label(*key)
            mark = Mark(record.kind, label, record.state, record.again, record.attempt, record.ended)
            self.put(record.number, mark, len(record.value))
        self._next = max(self.marks, default=0) + 1

    def begin(self, kind: ToolStepKind, name: str, *, own: bool) -> StepPlace | StepRefusal:
        """Begin a step, in the tool's own task or in another one."""
        if self.mismatch:
            return StepRefusal(StepProblem.MISMATCH, self.mismatch)
        if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
            return StepRefusal(
                StepProblem.MISUSE, f"the name of a step is a text of 1 to {MOST_NAME} characters, not {name!r:.50}"
            )
        if (kind, name) in self._under_way:
            sentence = f"two steps with the name {name!r} run at the same time; give each its own name"
            return StepRefusal(StepProblem.MISUSE, sentence)
        nth = self._counts[kind, name] + 1
        key, label = (kind, name, nth), _label(kind, name, nth)
        recorded = self._recorded.get(key)
        if recorded is not None and self.goes_on and TOOL_STEP[recorded.state] and not recorded.again:
            self.mismatch = f"{label!r}, its step {recorded.number}, was begun in an earlier round and has not finished"
            return StepRefusal(StepProblem.MISMATCH, self.mismatch)
        is_in_turn = not self._own or self._own[0] == key or (recorded is not None and key not in self._own)
        if own and self.goes_on and not is_in_turn:
            expected = self._recorded[self._own[0]]
            done = self.marks[expected.number].label
            self.mismatch = (
                f"this call had done {_quoted(expected.kind, done)} as its step {expected.number}, and now begins "
                f"{_quoted(kind, label)}: the tool has changed, or is not deterministic outside its steps"
            )
            return StepRefusal(StepProblem.MISMATCH, self.mismatch)
        number = self._next if recorded is None else recorded.number
        if number > MOST_STEPS and recorded is None:
            return StepRefusal(StepProblem.LIMIT, f"a call may do {MOST_STEPS:,} steps, questions included")
        self._counts[kind, name] = nth
        if recorded is None:
            self._next += 1
        else:
            del self._recorded[key]
            if key in self._own:
                self._own.remove(key)
        if kind is not ToolStepKind.ASK:
            self._under_way.add((kind, name))
        return StepPlace(number, kind, name, label, own, recorded)

    def begin_round(self, records: Iterable[Recorded]) -> None:
        """The tool is called again, in the same run: what it has done in the round before returns. A question does not,
        because a round may ask what the one before has asked."""
        for key, record in _keyed(records):
            if key[0] is not ToolStepKind.ASK and key not in self._recorded:
                self._recorded[key] = record
                self._repeated.add(key)
        for named in [named for named in self._counts if named[0] is not ToolStepKind.ASK]:
            del self._counts[named]

    def leave(self, place: StepPlace) -> None:
        """A step runs no longer: it has ended, or was cut short."""
        self._under_way.discard((place.kind, place.name))
        if place.number not in self.marks or TOOL_STEP[self.marks[place.number].state]:
            self._resize(place.number, 0)

    def put(self, number: int, mark: Mark, size: int) -> None:
        """A step, or its end, is in the store."""
        self.marks[number] = mark
        if not TOOL_STEP[mark.state]:
            self._resize(number, size)

    def _resize(self, number: int, size: int) -> None:
        self.size += size - self._sizes.pop(number, 0)
        if size:
            self._sizes[number] = size

    def new_number(self) -> int:
        number, self._next = self._next, self._next + 1
        return number

    def reserve(self, number: int, size: int) -> str:
        """Reserve the room for the value of a step, as long as the step runs. Returns why such a value is not kept;
        empty if it is."""
        if size > MOST_VALUE:
            return f"the value of a step may have {MOST_VALUE:,} bytes as JSON; this one has {size:,}"
        if self.size - self._sizes.get(number, 0) + size > MOST_VALUES:
            return (
                f"the values of a call's steps may have {MOST_VALUES:,} bytes as JSON; this would be the next {size:,}"
            )
        self._resize(number, size)
        return ""

    # What is recorded

    @property
    def unused(self) -> list[str]:
        """The labels of recorded steps that have not come in this run."""
        return [self.marks[record.number].label for key, record in self._recorded.items() if key not in self._repeated]

    @property
    def finished(self) -> int:
        """The number of steps that have ended, and return in the next run."""
        return sum(mark.got_on for mark in self.marks.values())

    @property
    def progressed(self) -> int:
        """The last run in which a step ended; 0 if none did."""
        return max((mark.attempt for mark in self.marks.values() if mark.got_on), default=0)

    @property
    def is_unknown(self) -> bool:
        """Whether a step was begun, has not ended, and may not be run again."""
        return any(TOOL_STEP[mark.state] and not mark.again for mark in self.marks.values())

    def sleeps(self, now: float) -> bool:
        return any(mark.sleeps(now) for mark in self.marks.values())

    def outline(self, now: float) -> Outline:
        """Labels of finished and unfinished steps, without questions."""
        shown = [mark for mark in self.marks.values() if mark.kind is not ToolStepKind.ASK]
        return {
            "finished": [mark.label for mark in shown if mark.is_over(now)],
            "open": [mark.label for mark in shown if not mark.is_over(now)],
        }


def is_resumable(tool: Mapping[str, Any]) -> bool:
    """Whether a tool declares itself resumable in `tools/list`."""
    meta = tool.get("_meta")
    return isinstance(meta, Mapping) and meta.get(RESUMABLE_META) is True


def _keyed(records: Iterable[Recorded]) -> Iterator[tuple[Key, Recorded]]:
    """The steps of a call in the order in which they began, with their keys."""
    counts: Counter[tuple[ToolStepKind, str]] = Counter()
    for record in sorted(records, key=lambda record: record.number):
        counts[record.kind, record.name] += 1
        yield (record.kind, record.name, counts[record.kind, record.name]), record


def _label(kind: ToolStepKind, name: str, nth: int) -> str:
    name = "question" if kind is ToolStepKind.ASK else name
    return name if nth == 1 else f"{name} #{nth}"


def _quoted(kind: ToolStepKind, label: str) -> str:
    return "a question" if kind is ToolStepKind.ASK else repr(label)
