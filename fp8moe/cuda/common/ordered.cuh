// Maps floats to unsigned integers that compare in the same order, and back.
#pragma once

#include "ptx.cuh"

// Maps x to an integer such that integers compare like the floats. 0 and -0 map to one integer; only a NaN maps to 0.
__device__ __forceinline__ u32 to_ordered(float x) {
  const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

__device__ __forceinline__ float from_ordered(u32 key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu));
}
