"""Patterns that choose modules and tensors by name."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def as_patterns(argument: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """The patterns of a caller's argument. TypeError, naming it, for a single string."""
    if isinstance(patterns, str):
        raise TypeError(
            f"{argument}: expected a sequence of patterns, got the string {patterns!r}; did you mean ({patterns!r},)?"
        )
    return tuple(patterns)


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Whether an fnmatch pattern matches the qualified name of a module, or the last part of it."""
    last = module.rpartition(".")[2]
    return any(fnmatchcase(module, pattern) or fnmatchcase(last, pattern) for pattern in patterns)
