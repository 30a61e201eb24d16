// The order of floats as integers.
#pragma once

#include "ptx.cuh"

// Maps x to an integer in the same order; 0 and -0 are equal; the integer 0 stands for some NaN only.
__device__ __forceinline__ u32 to_ordered(float x) {
  const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

__device__ __forceinline__ float from_ordered(u32 key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu));
}
