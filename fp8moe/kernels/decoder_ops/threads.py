"""How many threads of a block share a row of 16-byte vectors."""

from fp8moe.quant.formats import align, ceil_div
from fp8moe.runtime.sm90 import WARP

VECTOR_BYTES = 16
_MAX_THREADS = 256  # a row has; more only where each of them would hold more than _MAX_VECTORS
_MAX_VECTORS = 8


def row_threads(row_bytes: int) -> int:
    """Threads that take a row of so many bytes in equal parts: a power of two up to 32, or a multiple of 32."""
    vectors = ceil_div(row_bytes, VECTOR_BYTES)
    if vectors <= WARP:
        return 1 << (vectors - 1).bit_length()
    each = min(ceil_div(vectors, _MAX_THREADS), _MAX_VECTORS)
    return align(ceil_div(vectors, each), WARP)
