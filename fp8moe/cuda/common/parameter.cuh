// Vectors of a parameter that many thread blocks read, of the type of the input.
#pragma once

#include "input.cuh"

// Brings them to L2, in which all that is written arrives: so it may run before wait_for_previous_kernel.
__device__ __forceinline__ void prefetch_parameter(const Element* source, int count) {
  if (count > 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

// As Vector::load, but L1 keeps them.
__device__ __forceinline__ Vector load_parameter(const Element* source, int count) {
  if constexpr (VECTOR) {
    Vector v = {};
    if (count > 0) v = {load_16(source)};
    return v;
  } else {
    return Vector::load(source, count);
  }
}
