"""Turn the pages of the repository into pages of the site: links, fences and lists as MkDocs reads them.

The pages are written for the web page of a repository. There, links may lead to any file, a fence may carry words for
the tests behind its language, and the text of a list item is indented as far as its marker is wide. The site has only
pages and images, and Python-Markdown wants four spaces.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Pages outside of docs/, and where they are on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "deploy/README.md": "deploy.md",
    "bench/README.md": "bench.md",
}
#: Images outside of docs/, and where they are on the site.
IMAGES = {"bench/results/latest.png": "latest.png"}

#: The page that is made from the docstrings, and its chapters: the public names of `perdure`, and two modules.
API = "api.md"
CHAPTERS: Mapping[str, tuple[str, ...]] = {
    "Serving": ("asgi", "App", "Settings", "open_store"),
    "Steps of a tool": ("step", "step_sync", "sleep", "step_key", "NOT_DONE", "RESUMABLE"),
    "The client": ("connect", "Client", "PendingCall", "Patience", "Gap", "StateStore"),
    "Errors": (
        "PerdureError",
        "BadSetting",
        "BadTarget",
        "Misuse",
        "StepFailed",
        "StoreError",
        "StoreUnavailable",
        "StoreLost",
        "StoreReplaced",
        "StoreTooNew",
        "NodeBuried",
        "ClientError",
        "OutcomeUnknown",
        "Unreachable",
        "EventsLost",
        "StateError",
        "StateInUse",
        "StateUnusable",
    ),
}
#: `perdure.Store` is `perdure.store.interface.Store`, whose module has the promises.
MODULES = {"A store of your own": "perdure.store.interface", "Testing a store": "perdure.testing"}

#: The search takes a minus before a word for "not", so an error's code would find every page that does not name it.
CODES = """<script>
document.addEventListener("input", ({ target }) => {
  if (target.matches(".md-search__input")) target.value = target.value.replace(/(^|\\s)-(?=\\d)/g, "$1")
}, true)
</script>
"""

_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE_HEAD = re.compile(r"( *)```(\w+)([^`]*)$")
_ITEM = re.compile(r"( *)([-*]|\d+\.) +(?=\S)")
_INDENT = re.compile(r" *")


def site_path(path: str) -> str | None:
    """Where a file of the repository is on the site; None if it is not there."""
    if path in OUTSIDE or path in IMAGES:
        return OUTSIDE.get(path) or IMAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def site_page(text: str, path: str) -> str:
    """The text of the repository's page `path` as the site has it."""
    return indented("".join(part if is_fence else linked(part, path) for is_fence, part in parts(text)))


def parts(text: str) -> list[tuple[bool, str]]:
    """The text, divided into fenced blocks (True) and what stands between them."""
    found, behind = [], 0
    for fence in _FENCE.finditer(text):
        found += [(False, text[behind : fence.start()]), (True, fence[0])]
        behind = fence.end()
    return [*found, (False, text[behind:])]


def linked(text: str, path: str) -> str:
    """Links to pages and images lead there on the site; of links to other files of the repository the text stays."""

    def changed(link: re.Match[str]) -> str:
        mark, label, target = link[1], link[2], link[3]
        file, hash_sign, anchor = target.partition("#")
        if "://" in target or not file:
            return link[0]
        there = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(path), file)))
        return label if there is None else f"{mark}[{label}]({there}{hash_sign}{anchor})"

    return _LINK.sub(changed, text)


def indented(text: str) -> str:
    """Text of list items is indented by four spaces for each level, and fences name a language and a title only."""
    lines: list[str] = []
    levels: list[int] = []  # how far the text of each enclosing list item is indented in the source
    fence: tuple[str, int] | None = None  # the end of the block that is open, and how far it is moved
    for line in text.split("\n"):
        if not line:
            lines.append(line)
            continue
        if fence is not None:
            lines.append(" " * fence[1] + line)
            fence = None if line == fence[0] else fence
            continue
        width = len(_INDENT.match(line)[0])  # type: ignore[index]  # it matches every line
        item = _ITEM.match(line)
        levels = [level for level in levels if level <= width]
        depth = 4 * len(levels)
        moved = depth - (levels[-1] if levels else 0)
        if head := _FENCE_HEAD.match(line):
            fence = (head[1] + "```", moved)
            lines.append(" " * (width + moved) + fence_head(head[2], head[3].split()))
        elif item is not None:
            if not levels and lines and lines[-1] and not _is_in_list(lines[-1]):
                lines.append("")  # only a blank line begins a list
            lines.append(" " * depth + item[2].ljust(4) + line[item.end() :])
            levels.append(item.end())
        else:
            lines.append(" " * (width + moved) + line[width:])
    return "\n".join(lines)


def _is_in_list(line: str) -> bool:
    return line.startswith(" ") or _ITEM.match(line) is not None


def fence_head(language: str, words: list[str]) -> str:
    names = [word.removeprefix("file=") for word in words if word.startswith("file=")]
    return f"```{language}" + "".join(f' title="{name}"' for name in names)


def api_page() -> str:
    """The page that mkdocstrings fills from the docstrings."""
    text = "# API reference\n\nWhat `perdure` offers to programs, from its docstrings. Everything else may change.\n"
    for chapter, names in CHAPTERS.items():
        text += f"\n## {chapter}\n" + "".join(map(entry, names))
    for chapter, module in MODULES.items():
        text += f"\n## {chapter}\n\n::: {module}\n"
    return text


def entry(name: str) -> str:
    """A public name's part of the page. Each setting has its row in settings.md, so its field is not shown here."""
    options = "    options: {members: [longest_drain]}\n" if name == "Settings" else ""
    return f"\n::: perdure.{name}\n{options}"
