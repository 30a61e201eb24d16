// The element type of a kernel's input, and vectors of 16 bytes of it in registers.
//
// Compile-time constants: INPUT (BFloat16, Float16 or Float32); VECTOR (every row of the input begins at a multiple of
// 16 bytes and its length is a multiple of 16 bytes).
#pragma once

#include "vector.cuh"

// Magnitudes of IEEE floats compare like their bits as unsigned integers, with infinity above all numbers and NaN above
// infinity. So an integer maximum propagates NaN, and one instruction compares two 16-bit elements.
//
// A raised magnitude is one plus the exponent's lowest bit, read as a signed integer: those of infinity and NaN are
// negative, so a maximum of raised magnitudes passes over them.

// Two 16-bit elements in a word. LOWEST: the exponent's lowest bit.
template <int LOWEST>
struct Pair {
  using Element = u16;

  static __device__ u32 larger(u32 a, u32 b) {
    u32 result;
    asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
  static __device__ u32 magnitude(u32 word) { return word & 0x7FFF7FFFu; }
  static __device__ u32 bits(u32 word, int i) { return i ? word >> 16 : word & 0xFFFFu; }
  static __device__ u32 largest(u32 word) { return max(bits(word, 0), bits(word, 1)); }
  static __device__ u32 raised(u32 magnitude) { return magnitude + (LOWEST << 16 | LOWEST); }
  static __device__ u32 larger_raised(u32 a, u32 b) {
    u32 result;
    asm("max.s16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
  // The largest magnitude of two raised ones; 0 if neither is finite.
  static __device__ u32 largest_lowered(u32 word) {
    return max(max(static_cast<int>(word) >> 16, static_cast<int>(word << 16) >> 16), LOWEST) - LOWEST;
  }
};

struct BFloat16 : Pair<0x0080> {
  static __device__ float value(u32 bits) { return __uint_as_float(bits << 16); }
};

struct Float16 : Pair<0x0400> {
  static __device__ float value(u32 bits) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(static_cast<u16>(bits)));
    return result;
  }
};

struct Float32 {
  using Element = u32;

  static __device__ u32 larger(u32 a, u32 b) { return max(a, b); }
  static __device__ u32 magnitude(u32 word) { return word & 0x7FFFFFFFu; }
  static __device__ u32 bits(u32 word, int) { return word; }
  static __device__ u32 largest(u32 word) { return word; }
  static __device__ u32 raised(u32 magnitude) { return magnitude + 0x00800000u; }
  static __device__ u32 larger_raised(u32 a, u32 b) { return max(static_cast<int>(a), static_cast<int>(b)); }
  static __device__ u32 largest_lowered(u32 word) { return larger_raised(word, 0x00800000u) - 0x00800000u; }
  static __device__ float value(u32 bits) { return __uint_as_float(bits); }
};

using Input = INPUT;
using Element = Input::Element;

constexpr int PER_WORD = 4 / sizeof(Element);
constexpr int PER_VECTOR = 4 * PER_WORD;

// Consecutive elements of a row of the input, in 16 bytes.
struct Vector : Bytes16 {
  // Loads the first `count` elements at `source` and sets the others to zero. `count` may be negative or exceed the
  // vector.
  static __device__ Vector load(const Element* source, int count) { return {load_elements<VECTOR>(source, count)}; }

  __device__ u32 larger_magnitude(u32 amax) const {
#pragma unroll
    for (u32 word : words) amax = Input::larger(amax, Input::magnitude(word));
    return amax;
  }

  __device__ float operator[](int i) const { return Input::value(Input::bits(words[i / PER_WORD], i % PER_WORD)); }
};
