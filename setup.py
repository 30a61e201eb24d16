"""The links of a distribution: FP8MOE_URL, where the repository is hosted, at build. All else is in pyproject.toml."""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
VERSION = re.search(r'^__version__ = "(.*)"$', (ROOT / "fp8moe" / "__init__.py").read_text(encoding="utf-8"), re.M)[1]


def project_urls(url: str) -> dict[str, str]:
    """Return what an index links to beside the description; nothing for an unknown place."""
    pages = {"Source": "", "Documentation": "docs/index.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
    return {name: f"{url}/blob/v{VERSION}/{page}" if page else url for name, page in pages.items()} if url else {}


def description(url: str) -> str:
    """Return README, whose links lead to the tag of this version; as it is, for an unknown place."""

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[1].startswith("!") else "blob"
        return f"{match[1]}({url}/{kind}/v{VERSION}/{match[2]})"

    return re.sub(r"(!?\[[^\]]*\])\((?!https?:|#)([^)]+)\)", link, README) if url else README


def main() -> None:
    url = os.environ.get("FP8MOE_URL", "").rstrip("/")
    if url and not re.fullmatch(r"https?://[^\s/]+\S*", url):
        raise SystemExit(f"FP8MOE_URL: expected the http address of the repository, got {url!r}")
    setup(
        long_description=description(url), long_description_content_type="text/markdown", project_urls=project_urls(url)
    )


main()
