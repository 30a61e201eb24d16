// Shared by the quantizers: input that is read once and kept in registers, the scale of a block, stores of E4M3.
//
// Compile-time constants: those of input.cuh and block_scale.cuh; UE8M0 (scales are rounded up to powers of two).
// Sizes, strides and pitches are in elements.
#pragma once

#include "block_scale.cuh"
#include "input.cuh"
#include "warp.cuh"

struct Scale : BlockScale<UE8M0> {
  // amax: the largest magnitude of a block, as bits of the input's type.
  explicit __device__ Scale(u32 amax) : BlockScale(Input::value(amax)) {}
};

// The E4M3 values of one vector.
struct Codes {
  u32 words[PER_VECTOR / 4];

  __device__ Codes(const Vector& v, const Scale& scale) {
#pragma unroll
    for (int i = 0; i < PER_VECTOR; i += 4) {
      words[i / 4] =
          to_e4m3(scale.quotient(v[i]), scale.quotient(v[i + 1]), scale.quotient(v[i + 2]), scale.quotient(v[i + 3]));
    }
  }
};

// Stores the first `count` values. `count` may be negative or exceed the vector.
__device__ void store(u8* target, const Codes& codes, int count) {
  if constexpr (VECTOR) {
    if (count <= 0) return;
    if constexpr (PER_VECTOR == 8) {
      *reinterpret_cast<uint2*>(target) = make_uint2(codes.words[0], codes.words[1]);
    } else {
      *reinterpret_cast<u32*>(target) = codes.words[0];
    }
  } else {
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      if (i < count) target[i] = static_cast<u8>(codes.words[i / 4] >> (i % 4 * 8));
    }
  }
}
