// Sums and reductions over the lanes of a warp. All 32 lanes call them together.
#pragma once

#include "ptx.cuh"

constexpr u32 FULL_WARP = 0xFFFFFFFFu;  // every lane takes part

// The sum of x over this lane and those before it.
template <class Integer>
__device__ __forceinline__ Integer warp_inclusive_sum(Integer x) {
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const Integer before = __shfl_up_sync(FULL_WARP, x, distance);
    if (lane_id() >= distance) x += before;
  }
  return x;
}

// The same for sums that stop at `limit`, as each x does already: none overflows.
template <class Integer>
__device__ __forceinline__ Integer warp_inclusive_sum(Integer x, Integer limit) {
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const Integer before = __shfl_up_sync(FULL_WARP, x, distance);
    if (lane_id() >= distance) x = min(x + before, limit);
  }
  return x;
}

// combine(...) of x over `Lanes` lanes that lie `Stride` apart; each of them returns it. Both are powers of two.
template <int Lanes = WARP, int Stride = 1, class T, class Combine>
__device__ __forceinline__ T warp_reduce(T x, const Combine& combine) {
#pragma unroll
  for (int distance = Stride; distance < Stride * Lanes; distance *= 2) {
    x = combine(x, __shfl_xor_sync(FULL_WARP, x, distance));
  }
  return x;
}
