"""The small files that go along with the weights of a checkpoint, and the links that are followed there."""

import os
from pathlib import Path

from fp8moe.checkpoints.files import CONFIG
from fp8moe.checkpoints.untrusted import MAX_BYTES

_SUFFIXES = (".bpe", ".json", ".jinja", ".md", ".model", ".py", ".tiktoken", ".txt")
_LICENSES = ("LICENSE", "NOTICE", "USE_POLICY")


def read_companions(directory: Path) -> tuple[dict[str, bytes], list[str]]:
    """Tokenizer, generation settings, code and licence by name, and why others of this kind were left out.

    config.json and indices are not among them: a changed checkpoint has its own.
    """
    contents, left_out = {}, []
    for path in sorted(directory.iterdir()):
        name = path.name
        is_companion = path.suffix in _SUFFIXES or name.startswith(_LICENSES)
        if not is_companion or name == CONFIG or name.endswith(".index.json"):
            continue
        if leaves(path):
            left_out.append(f"{name} (a link to outside of the checkpoint)")
        elif not path.is_file():
            if path.is_symlink():
                left_out.append(f"{name} (a link to no file)")
        elif path.stat().st_size > MAX_BYTES:
            left_out.append(f"{name} (more than {MAX_BYTES:,} bytes)")
        else:
            contents[name] = path.read_bytes()
    return contents, left_out


def leaves(path: Path) -> bool:
    """Whether this is a link to outside of its directory.

    The links of a snapshot in the hub's cache lead to the blobs of the same repository: snapshots/REVISION/FILE to
    blobs/HASH. These count as inside.
    """
    directory, target = (Path(os.path.realpath(place)) for place in (path.parent, path))
    roots = [directory]
    if directory.parent.name == "snapshots":
        roots.append(directory.parent.parent / "blobs")
    return path.is_symlink() and not any(target.is_relative_to(root) for root in roots)
