// What the quantizers share: 16 bytes of input in registers, the search for a block's largest magnitude, its scale, the
// conversion to E4M3. The input is read once and stays in registers between the search and the conversion.
//
// Compile-time constants: INPUT (BFloat16, Float16 or Float32), UE8M0 (scales rounded up to powers of two), VECTOR
// (every row of the input starts at a multiple of 16 bytes and is a multiple of 16 bytes long).
// Sizes, strides and pitches count elements.
#pragma once

#include "ptx.cuh"

using u8 = unsigned char;
using i64 = long long;

constexpr int BLOCK = 128;
constexpr float FP8_MAX = 448.0f;
constexpr float SCALE_FLOOR = 1e-12f;

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

// ---- arithmetic of a block ----

__device__ bool is_finite(float x) { return fabsf(x) < __int_as_float(0x7F800000); }

// 1 / x, correctly rounded for normal x whose reciprocal is normal: the instructions of rcp.rn without its way out for
// other numbers. 0 for infinity.
__device__ float reciprocal_of(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return is_finite(x) ? __fmaf_rn(__fmaf_rn(r, x, -1.0f), -r, r) : r;
}

// x / divisor, correctly rounded, given the correctly rounded reciprocal: one Newton step on the quotient (Markstein,
// IBM J. Res. Dev. 34(1), 1990). Checked exhaustively against IEEE division for divisor 448 and, for every other
// divisor, where a last bit could matter: around the midpoints of E4M3. The signs are such that -0 stays -0.
__device__ float divide(float x, float divisor, float reciprocal) {
  const float quotient = __fmul_rn(x, reciprocal);
  return __fmaf_rn(__fmaf_rn(quotient, divisor, -x), -reciprocal, quotient);
}

struct Scale {
  float value;
  float divisor;
  float reciprocal;

  // From the block's largest magnitude, or from the bits of that in the input's type.
  explicit __device__ Scale(u32 amax_bits) : Scale(Input::value(amax_bits)) {}
  explicit __device__ Scale(float amax) {
    value = divide(fmaxf(amax, SCALE_FLOOR), FP8_MAX, 1.0f / FP8_MAX);
    // Adding the full mantissa carries into the exponent unless the mantissa was zero.
    if constexpr (UE8M0) value = __uint_as_float((__float_as_uint(value) + 0x7FFFFFu) & ~0x7FFFFFu);
    if (!is_finite(amax)) value = amax == amax ? amax : __int_as_float(0x7FC00000);
    reciprocal = reciprocal_of(value);
    // Against an infinite divisor the Newton step would be NaN; against zero it vanishes, and finite values give zero.
    divisor = is_finite(amax) ? value : 0.0f;
  }

  __device__ float quotient(float x) const {
    if constexpr (UE8M0) return __fmul_rn(x, reciprocal);
    return divide(x, divisor, reciprocal);
  }
};

// Four values to E4M3, the first in the lowest byte: nearest even, saturating, NaN to 0x7F.
__device__ u32 to_e4m3(float a, float b, float c, float d) {
  u32 result;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(result)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return result;
}

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
