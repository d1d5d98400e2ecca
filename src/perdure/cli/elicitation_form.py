"""Asks the user on the terminal what a tool wants to know (elicitation): the fields of its schema, one by one.

Ctrl-D declines. An answer that does not fit is asked for again. If stdin is not a terminal, the question is not
answered, and a line says so.
"""

from __future__ import annotations

from typing import Any

import anyio
import mcp_types as types
from mcp.client.session import ClientRequestContext

from perdure._core.text import printable
from perdure.cli.json_schema import (
    Schema,
    Unfit,
    choices,
    describe,
    item_schema,
    misfit,
    properties,
    read_text,
    required,
    types_of,
)
from perdure.cli.terminal import Declined, Terminal

#: Characters of the server's words for one field.
MAX_WORDS = 500
#: Choices that are listed.
MAX_CHOICES = 100

_YES_OR_NO = {"y": True, "yes": True, "true": True, "n": False, "no": False, "false": False}


class ElicitationForm:
    """Asks one question after the other: tools may ask several at once."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._turn = anyio.Lock()

    async def answer(
        self, context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        if not self._terminal.can_ask:
            asked = printable(params.message, MAX_WORDS)
            self._terminal.line(f"perdure: not answered, because stdin is not a terminal: {asked}")
            return types.ElicitResult(action="cancel")
        async with self._turn:
            self._terminal.line("")
            for line in params.message.splitlines():
                self._terminal.line(line)
            self._terminal.line("(Ctrl-D declines)")
            try:
                if isinstance(params, types.ElicitRequestURLParams):
                    self._terminal.line(f"The server wants you to open this address: {params.url}")
                    is_accepted = await self._ask_yes_or_no("Have you opened it? (y/n) ")
                    return types.ElicitResult(action="accept" if is_accepted else "decline")
                return types.ElicitResult(action="accept", content=await self._fill(params.requested_schema))
            except Declined:
                self._terminal.line("declined")
                return types.ElicitResult(action="decline")

    async def _fill(self, schema: Schema) -> dict[str, Any]:
        found: dict[str, Any] = {}
        fields = properties(schema)
        if not fields and not await self._ask_yes_or_no("Accept? (y/n) "):
            raise Declined
        for name, field in fields.items():
            value = await self._ask_field(name, field, schema, is_required=name in required(schema))
            if value is not None:
                found[name] = value
        return found

    async def _ask_field(self, name: str, field: Schema, root: Schema, *, is_required: bool) -> Any:
        """The value of a field; None if it is left out."""
        title = printable(str(field.get("title") or name), MAX_WORDS)
        if about := field.get("description"):
            self._terminal.line(f"  {printable(str(about), MAX_WORDS)}")
        listed = choices(field, root) or choices(item_schema(field, root), root) or []
        for number, (value, words) in enumerate(listed[:MAX_CHOICES], 1):
            self._terminal.line(f"  {number}. {value}" + (f"  {words}" if words and words != value else ""))
        prompt = f"  {title} ({_kind(field, root, is_required=is_required)}){_default(field)}: "
        while True:
            text = (await self._terminal.ask(prompt)).strip()
            if not text and "default" in field:
                return field["default"]
            if not text and not is_required:
                return None
            try:
                value = _read(text, field, root)
            except Unfit as problem:
                self._terminal.line(f"  {problem}")
                continue
            if (why := misfit(value, {**field, "$defs": root.get("$defs", {})})) is None:
                return value
            self._terminal.line(f"  {why}")

    async def _ask_yes_or_no(self, prompt: str) -> bool:
        while (text := (await self._terminal.ask(prompt)).strip().lower()) not in _YES_OR_NO:
            pass
        return _YES_OR_NO[text]


def _kind(field: Schema, root: Schema, *, is_required: bool) -> str:
    """What may be written, in a few words."""
    allowed = types_of(field, root)
    if allowed == {"boolean"}:
        kind = "y/n"
    elif choices(item_schema(field, root), root):
        kind = "numbers or values, separated by commas"
    elif choices(field, root):
        kind = "number or value"
    else:
        kind = describe({key: value for key, value in field.items() if key != "default"}, root)
    return kind if is_required or "default" in field else f"{kind}, optional"


def _default(field: Schema) -> str:
    if "default" not in field:
        return ""
    value = field["default"]
    if isinstance(value, bool):
        return f" [{'y' if value else 'n'}]"
    return f" [{', '.join(map(str, value)) if isinstance(value, list) else value}]"


def _read(text: str, field: Schema, root: Schema) -> Any:
    """Raises `Unfit`."""
    if not text:
        raise Unfit("an answer is needed")
    allowed = types_of(field, root)
    if allowed == {"array"}:
        items = item_schema(field, root)
        return [_chosen(part.strip(), items, root) for part in text.split(",") if part.strip()]
    if "boolean" in allowed and text.lower() in _YES_OR_NO:
        return _YES_OR_NO[text.lower()]
    return _chosen(text, field, root)


def _chosen(text: str, schema: Schema, root: Schema) -> Any:
    """A value as it is written, by its title, or by its number in the list."""
    listed = choices(schema, root)
    if listed is None:
        return read_text(text, schema, root)
    for value, title in listed:
        if text in (str(value), title):
            return value
    if text.isascii() and text.isdigit() and 0 < int(text[:9]) <= len(listed):
        return listed[int(text[:9]) - 1][0]
    raise Unfit(f"{text!r} is not one of {', '.join(str(value) for value, _ in listed)}")
