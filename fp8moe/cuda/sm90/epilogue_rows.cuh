// Converts the sums of a warp, 16 rows of a slab, to rows of bfloat16 in the warp's staging tile of 16 x STORE_COLUMNS.
#pragma once

#include "gemm_reduction.cuh"

constexpr int STORE_CHUNKS = STORE_COLUMNS / 8;  // 16-byte chunks in a row of the staging tile
constexpr int STORE_PIECES = ceil_div(COLUMNS, STORE_COLUMNS);

// The number of chunks in a piece. A piece is up to STORE_COLUMNS columns of the slab, what the staging tile holds.
__device__ __forceinline__ constexpr int piece_width(int piece) {
  return min(STORE_COLUMNS, COLUMNS - STORE_COLUMNS * piece) / 8;
}

// Writes a piece to the staging tile, swizzled against bank conflicts.
__device__ __forceinline__ void stage_piece(const float (&sum)[ACCUMULATORS], int piece, u32 staging) {
  const int lane = lane_id();
#pragma unroll
  for (int j = 0; j < piece_width(piece); j += 2) {
    const float* v = sum + 4 * (STORE_CHUNKS * piece + j);
    stmatrix_x4(staging + lane % 16 * 128 + ((j + lane / 16) ^ lane % 8) * 16, pack_bfloat16(v[0], v[1]),
                pack_bfloat16(v[2], v[3]), pack_bfloat16(v[4], v[5]), pack_bfloat16(v[6], v[7]));
  }
}

// Reads a chunk of a row from the staging tile.
__device__ __forceinline__ uint4 staged_chunk(u32 staging, int row, int chunk) {
  return load_shared_16(staging + row * 128 + (chunk ^ row % 8) * 16);
}
