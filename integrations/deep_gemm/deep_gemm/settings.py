"""DeepGEMM's settings. SM count, determinism and alignment take effect; other values are only stored or ignored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fp8moe.quant.formats import BLOCK
from fp8moe.runtime import config, launch
from fp8moe.runtime.checks import check_int

__all__ = [
    "get_compile_mode",
    "get_deterministic_algorithms",
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_num_sms",
    "get_pdl",
    "get_tc_util",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "set_block_size_multiple_of",
    "set_compile_mode",
    "set_ignore_compile_dims",
    "set_mk_alignment_for_contiguous_layout",
    "set_num_sms",
    "set_pdl",
    "set_tc_util",
    "use_deterministic_algorithms",
]

_H100_SMS = 132


@dataclass
class _Values:
    mk_alignment: int = BLOCK
    tc_util: int = 100
    pdl: bool = False
    compile_mode: int = 0


_values = _Values()


def set_num_sms(num_sms: int) -> None:
    """Limit how many SMs a GEMM or index scores may occupy from the next call on, as FP8MOE_NUM_SMS does.

    Raises TypeError for anything but an int, ValueError below 1.
    """
    check_int("num_sms", num_sms, at_least=1)
    config.settings = replace(config.settings, num_sms=num_sms)


def get_num_sms() -> int:
    """Return the limit from `set_num_sms`; by default, and at most, the number of SMs of the device.

    Without a GPU, return the limit, or 132 by default.
    """
    if torch.cuda.is_available():
        return launch.num_sms(torch.cuda.current_device())
    return config.settings.num_sms or _H100_SMS


def set_mk_alignment_for_contiguous_layout(alignment: int) -> None:
    """Set the alignment: groups of a psum layout begin at its multiples, counted in rows or along K.

    Layouts that give the group of each row ignore it. Raises TypeError for anything but an int, ValueError below 1.
    """
    check_int("alignment", alignment, at_least=1)
    _values.mk_alignment = alignment


def get_mk_alignment_for_contiguous_layout() -> int:
    """Return the value from `set_mk_alignment_for_contiguous_layout`; 128 by default."""
    return _values.mk_alignment


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout  # the names in DeepGEMM of 2025
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """Return the alignment that suits the kernels best, along M and K: 128."""
    return BLOCK


def use_deterministic_algorithms(enabled: bool) -> None:
    """Turn `fp8moe.batch_invariant` on or off in this process. The mode makes a row's bits independent of other rows.

    Raises TypeError for anything but True and False.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: expected a bool, got {type(enabled).__name__}")
    config.settings = replace(config.settings, batch_invariant=enabled)


def get_deterministic_algorithms() -> bool:
    """Return whether `use_deterministic_algorithms` or FP8MOE_BATCH_INVARIANT=1 has turned batch invariance on."""
    return config.settings.batch_invariant


def set_tc_util(tc_util: int) -> None:
    """Store the value, without other effect. tc_util: percent, an int from 0 to 100, else TypeError or ValueError."""
    check_int("tc_util", tc_util)
    if not 0 <= tc_util <= 100:
        raise ValueError(f"tc_util: expected 0 to 100 percent, got {tc_util}")
    _values.tc_util = tc_util


def get_tc_util() -> int:
    """Return the value from `set_tc_util`; 100 by default."""
    return _values.tc_util


def set_pdl(enable_pdl: bool) -> None:
    """Store the value, without other effect.

    With PDL, a GEMM could read weights that the previous kernel still writes.
    """
    _values.pdl = bool(enable_pdl)


def get_pdl() -> bool:
    """Return the value from `set_pdl`; False by default."""
    return _values.pdl


def set_compile_mode(compile_mode: int) -> None:
    """Store the value, without other effect: every call compiles missing kernels and runs."""
    check_int("compile_mode", compile_mode)
    _values.compile_mode = compile_mode


def get_compile_mode() -> int:
    """Return the value from `set_compile_mode`; 0 by default."""
    return _values.compile_mode


def set_ignore_compile_dims(ignore: bool) -> None:
    """Do nothing: M is never compiled into a kernel."""


def set_block_size_multiple_of(*multiple_of: int | Sequence[int]) -> None:
    """Do nothing: fp8moe's cost model chooses tile sizes."""
