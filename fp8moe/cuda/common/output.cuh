// Rounding of floats to a tensor's element type: BFloat16, Float16 or Float32.
#pragma once

#include "input.cuh"

__device__ __forceinline__ u32 pack(BFloat16, float low, float high) { return pack_bfloat16(low, high); }

__device__ __forceinline__ u32 pack(Float16, float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Rounds 4 values to `Type` and stores them.
template <class Type>
__device__ __forceinline__ void store4(typename Type::Element* target, const float* v) {
  if constexpr (sizeof(typename Type::Element) == 4) {
    *reinterpret_cast<float4*>(target) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
    *reinterpret_cast<uint2*>(target) = make_uint2(pack(Type(), v[0], v[1]), pack(Type(), v[2], v[3]));
  }
}

// Rounds the 4 values in `v` to `Type`, then adds the 4 elements at `source` to them.
template <class Type>
__device__ __forceinline__ void add4(float* v, const typename Type::Element* source) {
  if constexpr (sizeof(typename Type::Element) == 4) {
    const float4 x = *reinterpret_cast<const float4*>(source);
    v[0] = __fadd_rn(x.x, v[0]), v[1] = __fadd_rn(x.y, v[1]), v[2] = __fadd_rn(x.z, v[2]), v[3] = __fadd_rn(x.w, v[3]);
  } else {
    const uint2 words = *reinterpret_cast<const uint2*>(source);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const u32 word = i ? words.y : words.x, sum = pack(Type(), v[i], v[i + 1]);
      v[i] = __fadd_rn(Type::value(Type::bits(word, 0)), Type::value(Type::bits(sum, 0)));
      v[i + 1] = __fadd_rn(Type::value(Type::bits(word, 1)), Type::value(Type::bits(sum, 1)));
    }
  }
}

// Rounds values to the type of the input. A template, so that the branch that calls pack(Float32), which does not
// exist, is not compiled.
template <class Type = Input>
__device__ Vector to_vector(const float (&v)[PER_VECTOR]) {
  Vector result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (PER_WORD == 1) {
      result.words[i] = __float_as_uint(v[i]);
    } else {
      result.words[i] = pack(Type(), v[2 * i], v[2 * i + 1]);
    }
  }
  return result;
}
