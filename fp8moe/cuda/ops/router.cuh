// The output type of the router's kernels.
//
// Compile-time constants: those of input.cuh; OUTPUT (BFloat16, Float16 or Float32).
#pragma once

#include "output.cuh"
#include "warp.cuh"

using Output = OUTPUT;

// Rounds x to the output type. A template, with Type = Output, so that only the conversion in use is compiled.
template <class Type = Output>
__device__ __forceinline__ typename Type::Element to_output(float x) {
  if constexpr (sizeof(typename Type::Element) == 4) {
    return __float_as_uint(x);
  } else {
    return static_cast<typename Type::Element>(pack(Type(), x, 0.0f));
  }
}

__device__ __forceinline__ float sum_in_warp(float x) {
  return warp_reduce(x, [](float a, float b) { return a + b; });
}
