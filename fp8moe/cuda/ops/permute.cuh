// The rows of a token's assignments in the sorted order, and the store of a quantized token to each of these rows.
//
// Compile-time constants: BLOCK (columns per scale); WARP_COLUMNS (columns of a token that a warp handles at a time);
// those of units.cuh; HIDDEN (columns, a multiple of 16).
#pragma once

#include "units.cuh"
#include "vector.cuh"
#include "warp.cuh"

constexpr int BLOCK_LANES = WARP * BLOCK / WARP_COLUMNS;  // lanes that share a scale
constexpr u32 TOKEN_WARPS = ceil_div(HIDDEN, WARP_COLUMNS);
static_assert(BLOCK_LANES == 8 && HIDDEN % 16 == 0);

// The part of a token that a lane handles.
struct Place {
  u32 lane, token, k_block;
  int block_column;  // first column of the quantization block
  u32 block_lane;    // index among the lanes of the block

  // part: which WARP_COLUMNS columns of the token; less than TOKEN_WARPS.
  __device__ __forceinline__ Place(u32 of_token, u32 part) {
    lane = threadIdx.x % WARP;
    token = of_token;
    k_block = part * (WARP_COLUMNS / BLOCK) + lane / BLOCK_LANES;
    block_column = static_cast<int>(k_block) * BLOCK;
    block_lane = lane % BLOCK_LANES;
  }
};

struct PermuteSizes {
  u32 tokens, top_k, num_rows;
  u32 read_ahead;  // load a token before knowing whether it has a row: faster if few warps run
  u32 warps;       // warps that share a token; 1 to TOKEN_WARPS
  i64 row_stride, scale_pitch;
};

// rows (tokens, top_k): values outside [0, num_rows) mean no row. data (num_rows, HIDDEN); scale (num_rows, ceil(HIDDEN
// / 128)), columns `scale_pitch` apart.
struct Rows {
  const int* rows;
  u8* data;
  float* scale;
  int* assignments;  // output (num_rows), the assignment token * top_k + k of each row; may be null
  const PermuteSizes& sizes;

  // Returns to each lane the row of assignment k + lane of a token; -1 for none.
  __device__ __forceinline__ int from(u32 k, u32 token) const {
    const u32 lane = threadIdx.x % WARP;
    if (token >= sizes.tokens || k + lane >= sizes.top_k) return -1;
    const int row = rows[i64{token} * sizes.top_k + k + lane];
    return static_cast<u32>(row) < sizes.num_rows ? row : -1;
  }

  // Whether to load a token, given the lanes' results of from(0): it has rows, or read_ahead is set.
  __device__ __forceinline__ bool wanted(int lane_row) const {
    return sizes.read_ahead || __any_sync(FULL_WARP, lane_row >= 0);
  }

  // Writes a lane's 16 values, columns `column` to `column` + 15, and the scale of their block to all rows of the
  // token. lane_row: the result of from(0).
  __device__ __forceinline__ void write(const Bytes16& values, int column, float block_scale, const Place& place,
                                        int lane_row) const {
    for (u32 k = 0;;) {
      if (assignments && place.k_block < WARP_COLUMNS / BLOCK && lane_row >= 0) {
        assignments[lane_row] = place.token * sizes.top_k + k + place.lane;
      }
      u32 used = __ballot_sync(FULL_WARP, lane_row >= 0);
      // The 8 lanes that share a scale each write it to a different row.
      for (u32 i = 0; i < min(sizes.top_k - k, WARP); i += BLOCK_LANES) {
        const int row = __shfl_sync(FULL_WARP, lane_row, i + place.block_lane);
        if (row >= 0 && place.block_column < HIDDEN) scale[place.k_block * sizes.scale_pitch + row] = block_scale;
      }
      while (used) {
        const int row = __shfl_sync(FULL_WARP, lane_row, __ffs(used) - 1);
        used &= used - 1;
        if (column < HIDDEN) store_16(data + i64{row} * HIDDEN + column, values);
      }
      k += WARP;
      if (k >= sizes.top_k) return;
      lane_row = from(k, place.token);
    }
  }
};
