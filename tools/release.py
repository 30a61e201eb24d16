"""A release: `make release VERSION=0.3.0` writes the version and CHANGELOG's heading, commits both and tags the commit.

Pushes and uploads nothing. Needs only Python and git.
"""

import argparse
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSION = re.compile(r'^__version__ = "(\d+\.\d+\.\d+)"$', re.MULTILINE)
UNRELEASED = re.compile(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def release(version: str, root: Path = ROOT) -> str:
    """Release a version and return its tag. Raises ValueError, with nothing changed, if a precondition is not met."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"VERSION: expected three numbers such as 0.3.0, got {version!r}")
    source, changelog = root / "fp8moe" / "__init__.py", root / "CHANGELOG.md"
    module, changes = (path.read_text(encoding="utf-8") for path in (source, changelog))
    before, tag = VERSION.search(module)[1], f"v{version}"
    if [*map(int, version.split("."))] <= [*map(int, before.split("."))]:
        raise ValueError(f"VERSION: expected one above {before}, got {version}")
    entries = UNRELEASED.search(changes)
    if entries is None or not re.search(r"^- ", entries[1], re.MULTILINE):
        raise ValueError("CHANGELOG.md: expected entries under [Unreleased]")
    changed = git(root, "status", "--porcelain").splitlines()
    if changed:
        raise ValueError(f"expected a tree without changes, but git status has {changed[0]!r}")
    if git(root, "tag", "--list", tag):
        raise ValueError(f"the tag {tag} is there already")
    heading = f"## [Unreleased]\n\n## [{version}] - {datetime.now(UTC).date()}\n"
    changelog.write_text(changes.replace("## [Unreleased]\n", heading, 1), encoding="utf-8")
    source.write_text(VERSION.sub(f'__version__ = "{version}"', module), encoding="utf-8")
    git(root, "commit", "--quiet", "--all", "--message", f"Release {version}")
    git(root, "tag", "--annotate", tag, "--message", f"fp8moe {version}")
    return tag


def main() -> None:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__.partition("\n")[0])
    parser.add_argument("version", metavar="VERSION")
    try:
        tag = release(parser.parse_args().version)
    except ValueError as error:
        sys.exit(f"make release: {error}")
    print(f"{tag} is committed and tagged here; git push --follow-tags sends it")


if __name__ == "__main__":
    main()
