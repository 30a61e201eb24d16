"""The table of GPU architectures that kernels are compiled for."""

from typing import NamedTuple


class Architecture(NamedTuple):
    """A GPU architecture that kernels are compiled for.

    folder: folder of fp8moe/cuda with sources for this architecture only. flag: the architecture's name in compiler
    options. capability: compute capability (major, minor), as PyTorch reports it.
    """

    folder: str
    flag: str
    capability: tuple[int, int]


SM90 = Architecture("sm90", "sm_90a", (9, 0))  # Hopper; the "a" enables instructions that no later GPU has

ARCHITECTURES = (SM90,)
SHARED_FOLDERS = ("common", "ops")  # folders of fp8moe/cuda with sources for every architecture
