// Promotion: multiplies each 128-deep product by the scales of both operands and adds it to a float32 sum. This is
// needed because tensor cores keep only about 14 bits while they sum FP8 products (DeepSeek-V3, arXiv:2412.19437,
// section 3.3.2).
#pragma once

#include "gemm_schedule.cuh"

// The weight scales of a tile, one copy in every math warp. Each lane holds the scales of one K block, so a warp holds
// 32 blocks at a time. The next 32 are fetched one turn ahead, to hide the latency. With CHANNEL all these scales are
// 1: the scales of output features multiply the finished sums instead.
//
// The scales of MXFP4 are powers of two: an exponent of E8M0, less 6 (E2M1 has magnitudes up to 6, E4M3 up to 448).
// Those of NVFP4 lie at the same places, in float32.
struct WeightScales {
  const float* b_scale;
  float held[TILE_SCALE_ROWS], next[TILE_SCALE_ROWS];

  __device__ __forceinline__ explicit WeightScales(const float* b_scale) : b_scale(b_scale) {}

  // The scale in this row of scales and in this K block of all groups.
  __device__ __forceinline__ float load(int group, int row, int block) const {
    if constexpr (E2M1) {
      constexpr int ROWS = SCALE_ROWS / PROJECTIONS;
      const long long projection = static_cast<long long>(group) * PROJECTIONS + row / ROWS;
      const long long at =
          (projection * K_BLOCKS + block) * ARRANGED_WORDS + FEATURE_WORDS * (N / PROJECTIONS) + row % ROWS;
      if constexpr (PACKED == NVFP4) return b_scale[at];
      const u32 exponent = reinterpret_cast<const u32*>(b_scale)[at];
      return __uint_as_float(exponent == 0 ? 0x00400000 : exponent << 23) * 0.015625f;  // E8M0 has no zero
    }
    return b_scale[(static_cast<long long>(group) * SCALE_ROWS + row) * K_BLOCKS + block];
  }

  // Fetches the scales of K blocks `first` to `first` + 31, out of `count` blocks.
  __device__ __forceinline__ void fetch(const Tile& tile, int first, int count) {
    if constexpr (CHANNEL) return;
    const int block = min(first + static_cast<int>(lane_id()), count - 1);
#pragma unroll
    for (int r = 0; r < TILE_SCALE_ROWS; ++r) {
      const int within = tile.upright() ? 0 : r;  // both slabs have the same columns
      const int row = GATED ? r * PROJECTION_SCALE_ROWS + tile.n / 256 : min(tile.n / 128 + within, SCALE_ROWS - 1);
      next[r] = load(tile.group, row, block);
    }
  }

  // Makes the fetched scales current.
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int r = 0; r < TILE_SCALE_ROWS; ++r) held[r] = CHANNEL ? 1.f : next[r];
  }
};

// The scales from K block `first` on.
__device__ __forceinline__ const float* first_scale(const float* b_scale, int first) {
  return b_scale + static_cast<long long>(first) * (E2M1 ? ARRANGED_WORDS : 1);
}

// The weight scales of one K block of a tile; the same values in every lane.
struct TileScales {
  float rows[TILE_SCALE_ROWS];
  int end;  // columns before `end` have the scale rows[0], the next 128 have rows[1]

  TileScales() = default;

  // Broadcasts the scales that lane `source` holds.
  __device__ __forceinline__ TileScales(const WeightScales& weights, int source, const Tile& tile)
      : end(128 - (BLOCK_N % 128 == 0 ? 0 : tile.n % 128)) {
#pragma unroll
    for (int r = 0; r < TILE_SCALE_ROWS; ++r) {
      rows[r] = CHANNEL ? 1.f : __shfl_sync(FULL_WARP, weights.held[r], source);
    }
  }

  __device__ __forceinline__ float at(int column) const {
    if constexpr (TILE_SCALE_ROWS == 1) return rows[0];
    const float later = TILE_SCALE_ROWS == 2 || column < end + 128 ? rows[1] : rows[TILE_SCALE_ROWS - 1];
    return column < end ? rows[0] : later;
  }
};

// Adds scale * product to `sum`, or with First sets it.
template <bool First>
__device__ __forceinline__ void add_product(float& sum, float scale, float product) {
  sum = First ? scale * product : fmaf(scale, product, sum);
}

// Adds token scale * weight scale * partial to a slab whose rows are tokens and whose columns are output features, from
// feature `column` of the tile on. tokens: the scales of this lane's two rows.
template <bool First>
__device__ __forceinline__ void promote(float (&sum)[ACCUMULATORS], const float (&partial)[ACCUMULATORS],
                                        const float (&tokens)[2], const TileScales& weights, int column) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const float weight = weights.at((column + 8 * j) / GRANULE * GRANULE);
    const float upper = tokens[0] * weight, lower = tokens[1] * weight;
    add_product<First>(sum[4 * j], upper, partial[4 * j]);
    add_product<First>(sum[4 * j + 1], upper, partial[4 * j + 1]);
    add_product<First>(sum[4 * j + 2], lower, partial[4 * j + 2]);
    add_product<First>(sum[4 * j + 3], lower, partial[4 * j + 3]);
  }
}

// Adds token scale * weight scale * partial to a slab whose rows are output features and whose columns are tokens. All
// features of the slab have one weight scale.
template <bool First>
__device__ __forceinline__ void promote_swapped(float (&sum)[ACCUMULATORS], const float (&partial)[ACCUMULATORS],
                                                const float (&tokens)[ACCUMULATORS / 2], float weight) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const float left = tokens[2 * j] * weight, right = tokens[2 * j + 1] * weight;
    add_product<First>(sum[4 * j], left, partial[4 * j]);
    add_product<First>(sum[4 * j + 1], right, partial[4 * j + 1]);
    add_product<First>(sum[4 * j + 2], left, partial[4 * j + 2]);
    add_product<First>(sum[4 * j + 3], right, partial[4 * j + 3]);
  }
}
