// Scans and reductions over the lanes of a warp. All 32 lanes must call them together.
#pragma once

#include "ptx.cuh"

constexpr u32 FULL_WARP = 0xFFFFFFFFu;  // the mask of all lanes

// Inclusive scan: combines x over lanes 0 to this one. `lane` is this lane's index.
template <class T, class Combine>
__device__ __forceinline__ T warp_inclusive_scan(T x, const Combine& combine, u32 lane = lane_id()) {
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const T before = __shfl_up_sync(FULL_WARP, x, distance);
    if (lane >= distance) x = combine(x, before);
  }
  return x;
}

template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T x, u32 lane = lane_id()) {
  return warp_inclusive_scan(x, [](T a, T b) { return a + b; }, lane);
}

// Combines x over `Lanes` lanes that are `Stride` apart (both powers of two). All of these lanes get the result.
template <int Lanes = WARP, int Stride = 1, class T, class Combine>
__device__ __forceinline__ T warp_reduce(T x, const Combine& combine) {
#pragma unroll
  for (int distance = Stride; distance < Stride * Lanes; distance *= 2) {
    x = combine(x, __shfl_xor_sync(FULL_WARP, x, distance));
  }
  return x;
}
