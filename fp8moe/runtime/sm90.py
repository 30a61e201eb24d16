"""The limits of a Hopper GPU (compute capability 9.0) that launches and tiles are planned by.

Source: CUDA C++ Programming Guide, "Compute Capabilities", table of technical specifications.
"""

ARCHITECTURE_DIR = "sm90"  # of fp8moe/cuda

WARP = 32
WARPGROUP = 128
SHARED_LIMIT = 227 * 1024  # bytes of shared memory one block may use
SHARED_PER_SM = 228 * 1024  # of which every resident block costs 1 KB more
REGISTERS_PER_SM = 65536
MAX_BLOCKS_PER_PORTABLE_CLUSTER = 8
SWIZZLE_ALIGNMENT = 1024  # bytes: of a tile in shared memory under a 128-byte swizzle
