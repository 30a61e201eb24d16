// Rows of 16-bit elements in shared memory, as mma's operands are loaded from there.
#pragma once

#include "ptx.cuh"

// The offset of a 16-byte chunk in a row of shared memory. Swizzled by row, so that 8 rows of one column are in
// different banks.
__device__ __forceinline__ int swizzled(int row, int chunk) { return (chunk ^ row % 8) * 16; }

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }
