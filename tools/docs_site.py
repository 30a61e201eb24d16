"""A hook for mkdocs.yml: adds pages for files outside of docs/, and rewrites links between them and docs/.

Links to other files of the repository become plain text, since the site does not know where the repository is hosted.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}

_LINK = re.compile(r"(!?\[([^\]]*)\])\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=with_links(text, os.path.dirname(source), "")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    path = page.file.src_uri
    if path in PAGES.values():
        return markdown
    folder = os.path.dirname(path)
    return with_links(markdown, os.path.join("docs", folder), folder)


def with_links(text: str, source: str, folder: str) -> str:
    """Rewrite the links in a file of the repository's folder `source`, for a page in the site's folder `folder`."""

    def link(match: re.Match[str]) -> str:
        label, words, path, anchor = match.groups()
        target = os.path.normpath(os.path.join(source, path))
        page = PAGES.get(target, target.removeprefix("docs/"))
        if page == target:
            return words
        return f"{label}({os.path.relpath(page, folder or os.curdir)}{anchor or ''})"

    return _LINK.sub(link, text)
