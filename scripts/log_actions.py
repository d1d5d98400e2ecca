"""Every log record that the package can write, read from its source: the table of actions is made from this.

A record is written by `log_event(level, action, sentence, **facts)` of `perdure.telemetry.log_records` (the function,
or the method that limits records that peers cause), or, where the package must not be imported or an exception goes
along, by a logger with `extra={"action": …}`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "perdure"

#: How a logger's methods name their level.
_METHODS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
    "critical": "critical",
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """A place in the source that writes a record."""

    where: str
    level: str
    action: str
    """Empty where there is none, or where it is made up at run time."""
    sentence: str
    facts: tuple[str, ...] = ()


#: What stands in every module that writes records. Most modules write none, and looking at all their nodes takes long.
_WRITES = re.compile(rf"\blog_event\b|\.({'|'.join(_METHODS)})\(")


@functools.cache
def records(package: Path = PACKAGE) -> Sequence[Record]:
    return list(_read_records(package))


def _read_records(package: Path) -> Iterator[Record]:
    for source in sorted(package.rglob("*.py")):
        name = source.relative_to(package).as_posix()
        text = source.read_text()
        if name == "telemetry/log_records.py" or not _WRITES.search(text):  # the first is `log_event` itself
            continue
        nodes = list(ast.walk(ast.parse(text)))
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        for node in nodes:
            if isinstance(node, ast.Call) and (record := _record(node, name, assigned)) is not None:
                yield record


def _record(call: ast.Call, name: str, assigned: list[ast.Assign]) -> Record | None:
    where = f"{name}:{call.lineno}"
    match call:
        case ast.Call(
            func=ast.Name("log_event") | ast.Attribute(attr="log_event"),
            args=[level, action, sentence],
            keywords=keywords,
        ):
            names = tuple(fact.arg for fact in keywords if fact.arg)
            spoken = ast.unparse(level).rpartition(".")[2].lower()
            said = _said(_named(sentence, assigned))
            return Record(where=where, level=spoken, action=_text(action), sentence=said, facts=names)
        case ast.Call(func=ast.Attribute(value=logger, attr=method), args=[sentence, *_]) if (
            method in _METHODS and "log" in ast.unparse(logger).lower()
        ):
            extra = _extra(call)
            named = _text(extra.pop("action", ast.Constant("")))
            facts = tuple(extra)
            return Record(where=where, level=_METHODS[method], action=named, sentence=_said(sentence), facts=facts)
    return None


def _extra(call: ast.Call) -> dict[str, ast.expr]:
    for keyword in call.keywords:
        match keyword:
            case ast.keyword(arg="extra", value=ast.Dict(keys=keys, values=values)):
                return {_text(key): value for key, value in zip(keys, values, strict=True) if key is not None}
    return {}


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(str(text)):
            return text
    return ""


def _named(node: ast.expr, assigned: list[ast.Assign]) -> ast.expr:
    """What a name stands for that a sentence is given by: what was assigned to it last, in the lines above."""
    if not isinstance(node, ast.Name):
        return node
    above = [one for one in assigned if ast.unparse(one.targets[0]) == node.id and one.lineno < node.lineno]
    return max(above, key=lambda one: one.lineno).value if above else node


def _said(node: ast.expr) -> str:
    """A sentence, with … for what is filled in."""
    match node:
        case ast.Constant(str(text)):
            return text.replace("%s", "…").replace("%r", "…").replace("%d", "…")
        case ast.JoinedStr(values):
            return "".join(_text(value) or "…" for value in values)
    return "…"
