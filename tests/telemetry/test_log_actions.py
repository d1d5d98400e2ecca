"""Log records have a sentence for people and a stable `action` for machines; the table in the docs names them all."""

from __future__ import annotations

import ast
import logging
import re
import sys
from pathlib import Path

import pytest

from perdure.telemetry.log_records import KEYS, log_event

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from log_actions import PACKAGE, Record, records  # noqa: E402

_ACTION = re.compile(r"[a-z]+\.[a-z]+(_[a-z]+)*")


@pytest.fixture(scope="module")
def written() -> list[Record]:
    """Every record of the package. Reading the source takes seconds, so it is read in one test and not by all
    processes that collect the tests."""
    return list(records())


def test_a_record_has_an_action(written: list[Record]) -> None:
    assert [record.where for record in written if not _ACTION.fullmatch(record.action)] == []


def test_an_action_stands_in_the_table(written: list[Record]) -> None:
    table = (ROOT / "project" / "log-actions.md").read_text()
    assert [record.where for record in written if f"| `{record.action}` |" not in table] == []


def test_no_fact_has_the_name_of_a_member_that_every_object_of_a_json_log_has(written: list[Record]) -> None:
    assert [record.where for record in written if set(record.facts) & set(KEYS)] == []


def test_nothing_that_writes_records_is_overlooked(written: list[Record]) -> None:
    """The reader of the source has found every call of a logger and of `log_event`."""
    for source in PACKAGE.rglob("*.py"):
        text = source.read_text()
        if "log" not in text:
            continue
        name = source.relative_to(PACKAGE).as_posix()
        found = sum(record.where.startswith(f"{name}:") for record in written)
        calls = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call)
            and re.fullmatch(
                r"log_event|.*(peer_log|\.log)\.log_event|.*log(ger)?\.(log|debug|info|warning|error|exception|critical)",
                ast.unparse(node.func),
            )
        ]
        assert found == (0 if name == "telemetry/log_records.py" else len(calls)), name


def test_the_facts_of_a_record_are_attributes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="perdure"):
        log_event(logging.INFO, "store.swept", "3 expired rows were removed", rows=3)
        log_event(logging.DEBUG, "ask.unknown", "not at this level")
    [record] = caplog.records
    told = (record.levelname, record.message, vars(record)["action"], vars(record)["rows"])
    assert told == ("INFO", "3 expired rows were removed", "store.swept", 3)


def test_the_reader_of_the_source_reads_every_way_to_write_a_record(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(
        'log_event(logging.INFO, "a.b", f"{x} rows of {y}", rows=x)\n'
        'context.peer_log.log_event(logging.WARNING, "e.f", "again", rows=x)\n'
        '_log.exception("it %s", what, extra={"action": "c.d", "stream": s})\n'
        'logging.getLogger("perdure").warning("naked")\n'
        "checkpoints.note(7)\n"
        'sentence = f"{x} is named"\n'
        'log_event(logging.INFO, "g.h", sentence)\n'
        'log_event(logging.INFO, "i.j", why)\n'
    )
    assert list(records(tmp_path)) == [
        Record(where="sample.py:1", level="info", action="a.b", sentence="… rows of …", facts=("rows",)),
        Record(where="sample.py:2", level="warning", action="e.f", sentence="again", facts=("rows",)),
        Record(where="sample.py:3", level="error", action="c.d", sentence="it …", facts=("stream",)),
        Record(where="sample.py:4", level="warning", action="", sentence="naked"),
        Record(where="sample.py:7", level="info", action="g.h", sentence="… is named"),
        Record(where="sample.py:8", level="info", action="i.j", sentence="…"),
    ]
