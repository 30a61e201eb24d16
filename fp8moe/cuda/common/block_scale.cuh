// The scale of a quantization block from its largest magnitude, and conversion of values to E4M3. All kernels share
// this arithmetic; quant/reference.py defines its results bit for bit.
//
// Compile-time constants: FP8_MAX and SCALE_FLOOR, from formats.SCALE_DEFINES.
#pragma once

#include "ptx.cuh"

// The larger of `amax` and |x|; NaN if either is NaN.
__device__ __forceinline__ float larger_magnitude(float amax, float x) { return max_or_nan(amax, fabsf(x)); }

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < __int_as_float(0x7F800000); }

// 1 / x, correctly rounded if x and 1 / x are normal numbers; 0 for infinity. Same instructions as rcp.rn, without its
// branch for all other numbers.
__device__ __forceinline__ float reciprocal_of(float x) {
  const float r = reciprocal(x);
  return is_finite(x) ? __fmaf_rn(__fmaf_rn(r, x, -1.0f), -r, r) : r;
}

// x / divisor, correctly rounded, given the correctly rounded reciprocal: one Newton step on the quotient (Markstein,
// IBM J. Res. Dev. 34(1), 1990). Checked exhaustively against IEEE division for divisor 448. For all other divisors,
// checked where the last bit could change the E4M3 result: around the midpoints of E4M3 values. The sign of -0 is kept.
__device__ __forceinline__ float divide(float x, float divisor, float reciprocal) {
  const float quotient = __fmul_rn(x, reciprocal);
  return __fmaf_rn(__fmaf_rn(quotient, divisor, -x), -reciprocal, quotient);
}

// The number by which a block's values are divided. PowerOfTwo: the divisor is a power of two, so its reciprocal is
// exact.
template <bool PowerOfTwo = false>
struct alignas(8) Divisor {
  float value, reciprocal;

  __device__ __forceinline__ float quotient(float x) const {
    return PowerOfTwo ? __fmul_rn(x, reciprocal) : divide(x, value, reciprocal);
  }
  // Converts a and b to E4M3; a is in the lower byte.
  __device__ __forceinline__ u32 quantize(float a, float b) const { return pack_e4m3(quotient(a), quotient(b)); }
};

// The scale of a block, and the divisor of its values. PowerOfTwo: the scale is rounded up to a power of two.
template <bool PowerOfTwo = false>
struct BlockScale {
  float value;
  Divisor<PowerOfTwo> divisor;

  // amax: the largest magnitude of the block, or NaN if the block has a NaN. The scale is then NaN; it is infinite if
  // amax is.
  explicit __device__ __forceinline__ BlockScale(float amax) {
    value = divide(fmaxf(amax, SCALE_FLOOR), FP8_MAX, 1.0f / FP8_MAX);
    // Adding a mantissa of all ones carries into the exponent unless the mantissa is zero.
    if constexpr (PowerOfTwo) value = __uint_as_float((__float_as_uint(value) + 0x7FFFFFu) & ~0x7FFFFFu);
    if (!is_finite(amax)) value = amax == amax ? amax : __int_as_float(0x7FC00000);
    divisor.reciprocal = reciprocal_of(value);
    // The Newton step of an infinite divisor would be NaN. With a divisor of 0 it changes nothing, and finite values
    // become 0.
    divisor.value = is_finite(amax) ? value : 0.0f;
  }

  __device__ __forceinline__ float quotient(float x) const { return divisor.quotient(x); }
};

// Converts four values to E4M3, a in the lowest byte: rounded to nearest even, saturated; NaN becomes 0x7F.
__device__ __forceinline__ u32 to_e4m3(float a, float b, float c, float d) {
  u32 result;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(result)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return result;
}
