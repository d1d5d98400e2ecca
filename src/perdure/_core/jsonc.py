"""Reads JSON as people keep it in configurations: with comments, and with a comma after a last value.

Both are replaced by spaces, one for each character. The result is JSON with every value in its old place, so that
errors name the right line and column, and an editor finds the places of values.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

BOM = "\ufeff"
SPACE = r"[ \t\r\n]*"
_STRING = r'"(?:[^"\\]|\\.)*+"'
_STRING_OR_COMMENT = re.compile(rf"{_STRING}|(//[^\r\n]*|/\*.*?\*/)", re.DOTALL)
#: A comma after a value and before a bracket: no host accepts `[,]`.
_STRING_OR_LAST_COMMA = re.compile(rf'(?:{_STRING}|[^ \t\r\n[{{,:"]){SPACE},(?={SPACE}[\]}}])|{_STRING}', re.DOTALL)


class BadDocument(ValueError):
    """The text is not JSON with comments, or not of the expected form."""


class Members(dict[str, Any]):
    """An object. Of members given twice the last counts, as it does for the hosts."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.repeated = tuple(name for name in self if names.count(name) > 1) if len(names) > len(self) else ()
        """The names that are given more than once."""


def without_comments(text: str) -> str:
    """Return the text with spaces in place of its comments and of the mark that some editors put before a text."""
    return _STRING_OR_COMMENT.sub(
        lambda found: re.sub(r"[^\r\n]", " ", found[0]) if found[1] else found[0], re.sub(f"^{BOM}", " ", text)
    )


def without_last_commas(text: str) -> str:
    """Return a text without comments that has spaces in place of commas after last values."""
    return _STRING_OR_LAST_COMMA.sub(lambda found: found[0][:-1] + " " if found[0].endswith(",") else found[0], text)


def refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def decode(text: str, decoder: json.JSONDecoder | None = None) -> Any:
    """Return the value of a text; objects are `Members`, unless the decoder makes others. Raises `BadDocument`."""
    decoder = decoder or json.JSONDecoder(object_pairs_hook=Members, parse_constant=refuse_constant)
    try:
        return decoder.decode(without_last_commas(without_comments(text)))
    except json.JSONDecodeError as error:
        raise BadDocument(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise BadDocument("it nests too deep") from error
    except ValueError as error:
        raise BadDocument(str(error)) from error
