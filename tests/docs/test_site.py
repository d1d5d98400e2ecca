"""The site has every page, and what the repository's pages mean is the same there (`make docs` builds it)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest

import perdure
from perdure._core.text import SITE, see
from tests.docs.test_docs import SITE_PAGES, anchors
from tests.support.processes.node_programs import program
from tests.support.processes.serving import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from site_pages import API, CHAPTERS, CODES, site_page, site_path

_POINTER = re.compile(r"""see\(["']([a-z]+)["'], ["']([a-z0-9-]+)["']\)""")


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    pages = [site_path(str(page.relative_to(ROOT))) for page in SITE_PAGES]
    assert sorted(named) == sorted([API, *map(str, pages)])


def test_every_page_of_docs_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"](docs/{page.name})" not in readme] == []


def test_the_reference_has_every_public_name() -> None:
    """`Store` is with its promises, in the part of the module that has them."""
    told = [name for names in CHAPTERS.values() for name in names]
    assert sorted([*told, "Store"]) == sorted(perdure.__all__)


@pytest.mark.parametrize(
    ("typed", "searched"),
    [("-31001", "31001"), ("error -31001 kill -9", "error 31001 kill 9"), ("re-run 2026-07-28", "re-run 2026-07-28")],
)
def test_the_code_of_an_error_is_searched_without_its_minus(typed: str, searched: str) -> None:
    """The search would look for the pages that do not have it."""
    body = CODES.removeprefix("<script>").partition("</script>")[0]
    story = f"""let hear; globalThis.document = {{ addEventListener: (_, listener) => {{ hear = listener }} }}; {body}
        const target = {{ matches: () => true, value: {json.dumps(typed)} }}; hear({{ target }})
        console.log(target.value)"""
    said = subprocess.run([program("node"), "-e", story], capture_output=True, text=True, check=True)
    assert said.stdout == f"{searched}\n"


def test_links_lead_to_pages_of_the_site_and_files_of_the_source_are_text() -> None:
    page = "[a](../README.md#two-commands), [b](using.md), [`c`](../src/perdure/errors.py), ![d\ne](idea.svg), [f](#g)"
    told = "[a](index.md#two-commands), [b](using.md), `c`, ![d\ne](idea.svg), [f](#g)"
    assert site_page(page, "docs/design.md") == told
    links = "[a](docs/tasks.md) [b](LICENSE) [c](https://semver.org) [d](docs/idea.svg)"
    assert site_page(links, "README.md") == "[a](tasks.md) b [c](https://semver.org) [d](idea.svg)"
    plot = site_page("![plot](../bench/results/latest.png)", "docs/benchmarks.md")
    assert plot == "![plot](latest.png)"
    assert site_page("[a](../docs/deploying.md) [b](kubernetes)", "deploy/README.md") == "[a](deploying.md) b"


def test_a_fence_keeps_its_language_and_its_name_and_what_is_in_it_stays() -> None:
    page = "```python file=a.py\n- [a](../src/b.py)\n```\n\n```console by-hand\n$ ls\n```"
    told = '```python title="a.py"\n- [a](../src/b.py)\n```\n\n```console\n$ ls\n```'
    assert site_page(page, "docs/using.md") == told


def test_text_of_list_items_is_indented_by_four_spaces_for_each_level() -> None:
    page = "Text\n- one\n  more\n\n  ```sh run\n  - no item\n      deep\n  ```\n  1. inner\n     text\n- two\n\nText"
    told = (
        "Text\n\n-   one\n    more\n\n    ```sh\n    - no item\n        deep\n    ```\n"
        "    1.  inner\n        text\n-   two\n\nText"
    )
    assert site_page(page, "docs/using.md") == told


def test_messages_point_to_sections_that_are_there_on_the_one_site() -> None:
    """An installed package has no `docs`, so messages name the site's address (`perdure._core.text`)."""
    sources = {file: file.read_text() for file in (ROOT / "src").rglob("*.py")}
    pointers = [(file, found) for file, text in sources.items() for found in _POINTER.findall(text)]
    assert len(pointers) > 10
    dead = [
        f"{file.relative_to(ROOT)}: {page}#{anchor}"
        for file, (page, anchor) in pointers
        if not (there := ROOT / "docs" / f"{page}.md").exists() or anchor not in anchors(there.read_text())
    ]
    assert dead == []
    assert [file for file, text in sources.items() if "see docs/" in text] == []
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert (urls["Documentation"], urls["Changelog"]) == (SITE, f"{SITE}/changelog.html")
    assert f"site_url: {SITE}/\n" in (ROOT / "mkdocs.yml").read_text()
    assert see("errors", "codes") == f"see {SITE}/errors.html#codes"
