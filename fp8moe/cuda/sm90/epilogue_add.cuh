// out = sums + c, like D = C + A B^T in BLAS.
#pragma once

#include "epilogue_store.cuh"

struct ResultPlusMatrix : Result {
  const void* c;  // (m, N) of the result's dtype. May alias the result: a warp reads an element before it overwrites it
  long long c_pitch;  // elements between its rows

  // Overrides Result::add.
  __device__ __forceinline__ void add(float (&sum)[ACCUMULATORS], int row, int n, const Tile& tile) const {
    row += lane_id() / 4;
    n += 2 * (lane_id() % 4);
    float2 upper[COLUMNS / 8], lower[COLUMNS / 8];
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const bool inside = n + 8 * j < N;
      upper[j] = inside && row < tile.end ? pair_at(row, n + 8 * j) : make_float2(0.f, 0.f);
      lower[j] = inside && row + 8 < tile.end ? pair_at(row + 8, n + 8 * j) : make_float2(0.f, 0.f);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      sum[4 * j] += upper[j].x, sum[4 * j + 1] += upper[j].y;
      sum[4 * j + 2] += lower[j].x, sum[4 * j + 3] += lower[j].y;
    }
  }

  __device__ __forceinline__ float4 add(float4 sum, long long row, int n, const Tile& tile) const {
    const float2 left = pair_at(row, n), right = pair_at(row, n + 2);
    return make_float4(sum.x + left.x, sum.y + left.y, sum.z + right.x, sum.w + right.y);
  }

 private:
  __device__ __forceinline__ float2 pair_at(long long row, int n) const {
    const long long element = row * c_pitch + n;
    if constexpr (OUT_FLOAT32) return *reinterpret_cast<const float2*>(static_cast<const float*>(c) + element);
    const u32 pair = *reinterpret_cast<const u32*>(static_cast<const u16*>(c) + element);
    return make_float2(bfloat16_to_float(pair & 0xFFFF), bfloat16_to_float(pair >> 16));
  }
};

using AddAndStore = Store<ResultPlusMatrix>;
