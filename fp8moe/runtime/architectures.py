"""The architectures of GPUs that kernels are compiled for: a table with a row for each."""

from typing import NamedTuple


class Architecture(NamedTuple):
    """folder: of fp8moe/cuda, with what only this architecture compiles. flag: its name for compilers.

    capability: as PyTorch reports it.
    """

    folder: str
    flag: str
    capability: tuple[int, int]


SM90 = Architecture("sm90", "sm_90a", (9, 0))  # Hopper; "a" for instructions that no later GPU has

ARCHITECTURES = (SM90,)
SHARED_FOLDERS = ("common", "ops")  # of fp8moe/cuda, for every architecture
