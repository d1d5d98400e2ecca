"""Reads files of SQL: statements by the names that stand above them."""

import re
from collections.abc import Mapping
from types import MappingProxyType

_HEADING = re.compile(r"^-- (\w+): (.+)$", re.MULTILINE)


def statements_by_name(text: str) -> Mapping[str, str]:
    """Give the statements of a file in which each stands below a line with its name and its purpose."""
    headings = list(_HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    found = {heading[1]: text[heading.end() : end].strip() for heading, end in zip(headings, ends, strict=True)}
    return MappingProxyType(found)
