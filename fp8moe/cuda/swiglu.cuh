// SwiGLU (arXiv:2002.05202) of a pair of values, and its derivatives.
#pragma once

#include "ptx.cuh"

// gate * sigmoid(gate) * up. Both are clamped first if Form > 1; then, if Form > 2, it is the form of GPT-OSS,
// gate * sigmoid(alpha * gate) * (up + 1).
template <int Form>
struct Swiglu {
  float gate, linear, slope, gate_sigmoid;
  bool gate_clamped = false, up_clamped = false;

  __device__ __forceinline__ Swiglu(float gate_value, float up_value, float limit, float alpha)
      : gate(gate_value), linear(up_value), slope(Form > 2 ? alpha : 1.f) {
    if constexpr (Form > 1) {
      // Comparisons, not fminf and fmaxf: a NaN stays.
      gate_clamped = gate > limit;
      up_clamped = fabsf(linear) > limit;
      if (gate_clamped) gate = limit;
      if (up_clamped) linear = copysignf(limit, linear);
    }
    if constexpr (Form > 2) linear += 1.f;
    gate_sigmoid = sigmoid(slope * gate);
  }

  __device__ __forceinline__ float value() const { return gate * gate_sigmoid * linear; }
  __device__ __forceinline__ float d_gate(float grad) const {
    return gate_clamped ? 0.f : grad * linear * gate_sigmoid * (1.f + slope * gate * (1.f - gate_sigmoid));
  }
  __device__ __forceinline__ float d_up(float grad) const { return up_clamped ? 0.f : grad * (gate * gate_sigmoid); }
};
