"""Which test proves what: the last column of the tables of promises, of requirements and of the protocol's checklist.

Tests cite the numbers in their docstrings ("A24, R4, promise 3"); here they are collected.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_ROW = r"\b([A-Z]\d{1,2})\b"

#: Tests that prove a row of the checklist without citing its number.
ALSO = {
    "A3": ["test_tokens_decide_who_comes_in", "test_others_that_could_reach_it_are_warned_about"],
    "A9": ["test_a_cut_right_after_the_priming_event_loses_nothing"],
    "A10": ["test_a_tool_that_closes_its_own_connection_is_resumed"],
    "A14": ["test_a_resumed_call_goes_on_live"],
    "A17": ["test_a_connection_that_the_server_still_believes_in_is_taken_over"],
    "A18": ["test_what_a_call_says_while_its_client_is_away_arrives_after_the_cut"],
    "A19": ["test_a_call_that_is_cut_again_and_again_arrives_whole"],
    "A20": ["test_a_call_that_is_over_is_still_there_whole"],
    "A33": ["test_a_call_that_is_cut_over_and_over_loses_nothing"],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Test:
    """A test, or a whole file of them, and what its docstring says."""

    name: str
    source: Path
    says: str

    @property
    def link(self) -> str:
        said = self.name.removeprefix("test_").replace("_", " ") or self.source.stem
        return f"[{said}](../{self.source.relative_to(ROOT)})"


def requirements(body: str) -> str:
    return _with_proofs(body, _cited(_ROW, _tests()))


def checklist(body: str) -> str:
    tests = list(_tests())
    named = {test.name: test for test in tests}
    cited = _cited(_ROW, tests)
    for number, names in ALSO.items():
        cited[number] = [*cited.get(number, []), *(named[name] for name in names)]
    return _with_proofs(body, cited)


def promises(body: str) -> str:
    # The store has promises of its own, with other numbers.
    tests = [test for test in _tests() if "store" not in test.source.relative_to(ROOT).parts]
    return _with_proofs(body, _cited(r"\bpromises? (\d)\b", tests), shown=2)


def _with_proofs(body: str, cited: Mapping[str, list[Test]], *, shown: int = 3) -> str:
    """Return the rows with a new last cell: the first tests that cite the row's number."""

    def row(match: re.Match[str]) -> str:
        # Single tests say more than files.
        tests = sorted(cited.get(match[2], []), key=lambda test: not test.name)
        links = list(dict.fromkeys(test.link for test in tests))
        return f"{match[1]}{'; '.join(links[:shown]) or 'no test of its own'} |"

    return re.sub(r"^(\| ([A-Z]?\d+) \|.*\| )[^|\n]*\|$", row, body, flags=re.MULTILINE)


def _cited(number: str, tests: Iterable[Test]) -> dict[str, list[Test]]:
    found: dict[str, list[Test]] = {}
    for test in tests:
        for cited in dict.fromkeys(re.findall(number, test.says)):
            found.setdefault(cited, []).append(test)
    return found


@functools.cache
def _tests() -> Sequence[Test]:
    return list(_read_tests())


def _read_tests() -> Iterator[Test]:
    sources = (path for path in (ROOT / "tests").rglob("test_*.py") if "node_modules" not in path.parts)
    for source in sorted(sources):
        tree = ast.parse(source.read_text())
        marks = (node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node))
        if any("pytest.mark.long" in ast.unparse(mark) for mark in marks):
            continue
        yield Test(name="", source=source, says=_said(tree))
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            # A row is proven by a test that every run has; some of its cases may be for `make test-all` alone.
            if "pytest.mark.long" in map(ast.unparse, node.decorator_list):
                continue
            if node.name.startswith("test_"):
                yield Test(name=node.name, source=source, says=_said(node))


def _said(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    # Ranges (A1–A8) stand for a subject, not for each number in them.
    return re.sub(r"\b[A-Z]\d+[–-][A-Z]?\d+", "", ast.get_docstring(node) or "")
