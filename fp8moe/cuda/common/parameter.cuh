// Loads of parameters, such as norm weights, that many thread blocks read. They have the input's type.
#pragma once

#include "input.cuh"

// Prefetches a vector to L2. All writes go through L2, so this is safe before wait_for_previous_kernel.
__device__ __forceinline__ void prefetch_parameter(const Element* source, int count) {
  if (count > 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

// Loads a vector like Vector::load, but keeps it in L1.
__device__ __forceinline__ Vector load_parameter(const Element* source, int count) {
  if constexpr (VECTOR) {
    Vector v = {};
    if (count > 0) v = {load_16(source)};
    return v;
  } else {
    return Vector::load(source, count);
  }
}
