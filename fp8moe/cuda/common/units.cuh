// Work shared out to the warps of a grid of any size, one unit after the other.
//
// Compile-time constants: WARPS (of a thread block).
#pragma once

#include "ptx.cuh"

// Those of one warp: first, first + step and so on.
struct Units {
  u32 first = blockIdx.x * WARPS + threadIdx.x / WARP;
  u32 step = gridDim.x * WARPS;
};
