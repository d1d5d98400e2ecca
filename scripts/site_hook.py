"""Gives MkDocs the pages of the site: those of docs/, those outside of it, and the API's (named in `mkdocs.yml`).

It runs in the environment of `make docs`; what it does to a page is in `site_pages`, which needs no MkDocs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from site_pages import API, CODES, IMAGES, OUTSIDE, ROOT, api_page, site_page

#: Draws the diagrams. Material takes it from another host if a page with a diagram does not have it already.
MERMAID = ROOT / "build" / "mermaid" / "mermaid.min.js"
_TAG = '<script src="assets/mermaid.min.js"></script>\n'


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for path, there in OUTSIDE.items():
        files.append(File.generated(config, there, content=site_page((ROOT / path).read_text(), path)))
    for path, there in IMAGES.items():
        files.append(File.generated(config, there, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, API, content=api_page()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    return markdown if page.file.generated_by else site_page(markdown, f"docs/{page.file.src_uri}")


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    scripts = CODES + _TAG if 'class="mermaid"' in output else CODES
    return output.replace("</main>", f"</main>\n{scripts}", 1)


def on_post_build(*, config: MkDocsConfig) -> None:
    shutil.copy(MERMAID, Path(config.site_dir) / "assets")
