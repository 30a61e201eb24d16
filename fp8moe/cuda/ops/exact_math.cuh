// Exponential and logarithm in which every addition and multiplication is rounded separately, so that PyTorch
// operations reproduce them bit for bit.
//
// Compile-time constants: EXP_TERMS and LOG_TERMS (coefficients {a, b, ...}, highest power first); LOG2_E, LN2_HIGH,
// LN2_LOW, MIN_EXPONENT, SQRT_HALF_BITS.
#pragma once

#include "ptx.cuh"

template <int Count>
__device__ __forceinline__ float rounded_polynomial(float x, const float (&terms)[Count]) {
  float value = terms[0];
#pragma unroll
  for (int i = 1; i < Count; ++i) value = __fadd_rn(__fmul_rn(value, x), terms[i]);
  return value;
}

// e^x for x <= 0; e^MIN_EXPONENT for smaller x than MIN_EXPONENT.
__device__ __forceinline__ float rounded_exp(float x) {
  constexpr float terms[] = EXP_TERMS;
  x = fmaxf(x, MIN_EXPONENT);
  const float exponent = rintf(__fmul_rn(x, LOG2_E));
  float rest = __fsub_rn(x, __fmul_rn(exponent, LN2_HIGH));
  rest = __fsub_rn(rest, __fmul_rn(exponent, LN2_LOW));
  const float tail = __fmul_rn(rounded_polynomial(rest, terms), __fmul_rn(rest, rest));
  const float power = __fadd_rn(__fadd_rn(tail, rest), 1.0f);
  return __fmul_rn(power, __int_as_float((static_cast<int>(exponent) + 127) << 23));
}

// log((1 + f) * 2^exponent) for f from -0.3 to 0.42.
__device__ __forceinline__ float rounded_log_near_1(float f, float exponent) {
  constexpr float terms[] = LOG_TERMS;
  const float square = __fmul_rn(f, f);
  float tail = __fmul_rn(__fmul_rn(rounded_polynomial(f, terms), f), square);
  tail = __fsub_rn(__fadd_rn(tail, __fmul_rn(exponent, LN2_LOW)), __fmul_rn(square, 0.5f));
  return __fadd_rn(__fadd_rn(f, tail), __fmul_rn(exponent, LN2_HIGH));
}

// log(x) for normal positive x.
__device__ __forceinline__ float rounded_log(float x) {
  const int bits = __float_as_int(x);
  const int exponent = (bits - SQRT_HALF_BITS) >> 23;  // such that the mantissa is in [sqrt(1/2), sqrt(2))
  return rounded_log_near_1(__fsub_rn(__int_as_float(bits - (exponent << 23)), 1.0f), static_cast<float>(exponent));
}
