"""Method auto over NCCL: gather or all_to_all, by what they send and what a call costs besides."""

# Two H200s over NVLink, DeepSeek-V3's layer (issue 16): NCCL moves 200 GB/s. A token costs gather 7392 bytes there and
# 28672 back for each other rank. Eager all_to_all of few tokens takes 1.5 ms more: it waits for sizes.
_MICROSECONDS_A_ROW = 0.18
_MICROSECONDS_A_CALL = 1500


def choose(tokens: int, top_k: int, world: int) -> str:
    """The method for at most so many tokens a rank. It is the same on all ranks."""
    spared = (1 - 1 / world) ** top_k  # of the ranks: those that have no expert of a token
    saved = _MICROSECONDS_A_ROW * tokens * (world - 1) * spared
    return "all_to_all" if saved > _MICROSECONDS_A_CALL else "gather"
