// Distributes units of work over the warps of a grid of any size.
//
// Compile-time constants: WARPS (of a thread block).
#pragma once

#include "ptx.cuh"

// The units of this warp: first, first + step, first + 2 * step and so on.
struct Units {
  u32 first = blockIdx.x * WARPS + threadIdx.x / WARP;
  u32 step = gridDim.x * WARPS;
};
