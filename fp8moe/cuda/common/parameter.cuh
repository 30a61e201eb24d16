// Vectors of a parameter that many thread blocks read; its type is that of the input.
#pragma once

#include "input.cuh"

// Prefetches vectors to L2, where writes arrive too: so it may run before wait_for_previous_kernel.
__device__ __forceinline__ void prefetch_parameter(const Element* source, int count) {
  if (count > 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

// Loads a vector as Vector::load, and keeps it in L1.
__device__ __forceinline__ Vector load_parameter(const Element* source, int count) {
  if constexpr (VECTOR) {
    Vector v = {};
    if (count > 0) v = {load_16(source)};
    return v;
  } else {
    return Vector::load(source, count);
  }
}
