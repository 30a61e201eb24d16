// What the quantizers share: 16 bytes of input in registers, the search for a block's largest magnitude, its scale, the
// conversion to E4M3. The input is read once and stays in registers between the search and the conversion.
//
// Compile-time constants: INPUT (BFloat16, Float16 or Float32), UE8M0 (scales rounded up to powers of two), VECTOR
// (every row of the input starts at a multiple of 16 bytes and is a multiple of 16 bytes long).
// Sizes, strides and pitches count elements.
#pragma once

#include "block_scale.cuh"
#include "warp.cuh"

using u8 = unsigned char;
using i64 = long long;

// How many of the next `size` indices from `begin` on lie before `end`.
__device__ int inside(i64 begin, i64 end, int size) {
  return end - begin < size ? static_cast<int>(end - begin) : size;
}

// ---- input types ----
//
// The bits of a magnitude order as unsigned integers in every IEEE format, infinity above the numbers and NaN above
// infinity: so the search for the largest one keeps NaN, and 16-bit types search two elements at a time.

// Two 16-bit elements in a word.
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
};

struct BFloat16 : Pair {
  static __device__ float value(u32 bits) { return __uint_as_float(bits << 16); }
};

struct Float16 : Pair {
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
  static __device__ float value(u32 bits) { return __uint_as_float(bits); }
};

using Input = INPUT;
using Element = Input::Element;

constexpr int PER_WORD = 4 / sizeof(Element);
constexpr int PER_VECTOR = 4 * PER_WORD;

// 16 bytes of a row of the input.
struct Vector {
  u32 words[4];

  // The first `count` elements at `source`, zeros after them; any count.
  static __device__ Vector load(const Element* source, int count) {
    Vector v = {};
    if constexpr (VECTOR) {
      asm volatile(
          "{\n.reg .pred inside;\nsetp.ne.u32 inside, %5, 0;\n"
          "@inside ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
          : "+r"(v.words[0]), "+r"(v.words[1]), "+r"(v.words[2]), "+r"(v.words[3])
          : "l"(source), "r"(static_cast<u32>(count > 0))
          : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < PER_VECTOR; ++i) {
        if (i < count) v.words[i / PER_WORD] |= static_cast<u32>(source[i]) << (i % PER_WORD * 16);
      }
    }
    return v;
  }

  __device__ u32 larger_magnitude(u32 amax) const {
#pragma unroll
    for (u32 word : words) amax = Input::larger(amax, Input::magnitude(word));
    return amax;
  }

  __device__ float operator[](int i) const { return Input::value(Input::bits(words[i / PER_WORD], i % PER_WORD)); }
};

// ---- results ----

struct Scale : BlockScale<UE8M0> {
  // From the bits, in the input's type, of the largest magnitude of a block.
  explicit __device__ Scale(u32 amax) : BlockScale(Input::value(amax)) {}
};

// Quantizes one vector and stores its first `count` elements; any count.
__device__ void store(u8* target, const Vector& v, const Scale& scale, int count) {
  u32 out[PER_VECTOR / 4];
#pragma unroll
  for (int i = 0; i < PER_VECTOR; i += 4) {
    out[i / 4] =
        to_e4m3(scale.quotient(v[i]), scale.quotient(v[i + 1]), scale.quotient(v[i + 2]), scale.quotient(v[i + 3]));
  }
  if constexpr (VECTOR) {
    if (count <= 0) return;
    if constexpr (PER_VECTOR == 8) {
      *reinterpret_cast<uint2*>(target) = make_uint2(out[0], out[1]);
    } else {
      *reinterpret_cast<u32*>(target) = out[0];
    }
  } else {
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      if (i < count) target[i] = static_cast<u8>(out[i / 4] >> (i % 4 * 8));
    }
  }
}
