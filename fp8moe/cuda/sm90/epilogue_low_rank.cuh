// out = sums + ranks @ factors^T, the term of LoRA adapters (arXiv:2106.09685). Each group of rows has its own factors.
//
// Constants from kernels/gemm/epilogue.py: RANK.
#pragma once

#include "epilogue_store.cuh"

static_assert(RANK % 16 == 0, "a step of the product takes 16 ranks");

struct ResultPlusLowRank : Result {
  static constexpr bool TO_ALL_SLABS_FIRST = true;  // so that the warp waits for loads only once

  const u16* ranks;    // (m, RANK) bfloat16
  const u16* factors;  // (groups, N, RANK) bfloat16

  // Overrides Result::add.
  __device__ __forceinline__ void add(float (&sum)[ACCUMULATORS], int row, int n, const Tile& tile) const {
    const int lane = lane_id(), k = 4 * (lane % 4);
    row += lane / 4, n += lane / 4;
    const u16* upper = ranks + static_cast<long long>(row) * RANK + k;
    const u16* feature = factors + (static_cast<long long>(tile.group) * N + n) * RANK + k;
#pragma unroll 1
    for (int step = 0; step < RANK; step += 16, upper += 16, feature += 16) {
      const uint2 first = load_8(upper, row < tile.end), second = load_8(upper + 8 * RANK, row + 8 < tile.end);
      uint2 values[COLUMNS / 8];
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) values[j] = load_8(feature + 8 * j * RANK, n + 8 * j < N);
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) mma_bfloat16(sum + 4 * j, first, second, values[j]);
    }
  }

  // Adds to four output features of a token.
  __device__ __forceinline__ float4 add(float4 sum, long long row, int n, const Tile& tile) const {
    const u16* token = ranks + row * RANK;
    const u16* feature = factors + (static_cast<long long>(tile.group) * N + n) * RANK;
#pragma unroll 1
    for (int k = 0; k < RANK; k += 4) {
      const uint2 values = load_8(token + k, true);
      sum.x = add_product(sum.x, values, load_8(feature + k, true));
      sum.y = add_product(sum.y, values, load_8(feature + RANK + k, true));
      sum.z = add_product(sum.z, values, load_8(feature + 2 * RANK + k, true));
      sum.w = add_product(sum.w, values, load_8(feature + 3 * RANK + k, true));
    }
    return sum;
  }

 private:
  // Loads four values, 8 bytes; zeros if `there` is false.
  static __device__ __forceinline__ uint2 load_8(const u16* values, bool there) {
    return there ? *reinterpret_cast<const uint2*>(values) : make_uint2(0, 0);
  }

  static __device__ __forceinline__ float add_product(float sum, uint2 a, uint2 b) {
    sum = fmaf(bfloat16_to_float(a.x & 0xFFFF), bfloat16_to_float(b.x & 0xFFFF), sum);
    sum = fmaf(bfloat16_to_float(a.x >> 16), bfloat16_to_float(b.x >> 16), sum);
    sum = fmaf(bfloat16_to_float(a.y & 0xFFFF), bfloat16_to_float(b.y & 0xFFFF), sum);
    return fmaf(bfloat16_to_float(a.y >> 16), bfloat16_to_float(b.y >> 16), sum);
  }
};

using AddLowRank = Store<ResultPlusLowRank>;
