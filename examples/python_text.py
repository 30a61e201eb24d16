"""A training text that every machine has: the source of Python's standard library, as bytes."""

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

VALIDATION_EVERY = 20  # every 20th file is kept for validation
NOT_PYTHONS_OWN = {"site-packages", "dist-packages"}


class Text(NamedTuple):
    """train, validation: (N,) uint8. files: their number. digest: of all bytes, to tell texts apart."""

    train: Tensor
    validation: Tensor
    files: int
    digest: str


def load() -> Text:
    """Return all .py files of the standard library, ordered by path. Raises SystemExit if there are none."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    contents = [paths[name].read_bytes() for name in sorted(paths) if not NOT_PYTHONS_OWN & set(name.split("/"))]
    train = b"".join(content for i, content in enumerate(contents) if i % VALIDATION_EVERY)
    validation = b"".join(contents[::VALIDATION_EVERY])
    if len(train) < 1 << 20:
        raise SystemExit(f"{root} holds no source of the standard library: use a Python that comes with it")
    digest = hashlib.sha256(train + validation).hexdigest()
    return Text(
        *(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, validation)), len(contents), digest
    )


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return `length` bytes of text (N,) from each of starts (B,) on, as tokens (B, length) int64."""
    return text[starts[:, None] + torch.arange(length, device=text.device)].long()
