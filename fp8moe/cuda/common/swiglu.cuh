// SwiGLU (arXiv:2002.05202) of one gate value and one up value.
#pragma once

#include "ptx.cuh"

// Form 1: gate * sigmoid(gate) * up. Form 2: the same, with gate and up clamped first. Form 3 (GPT-OSS): clamped, then
// gate * sigmoid(alpha * gate) * (up + 1).
template <int Form>
struct Swiglu {
  float gate, linear, slope, gate_sigmoid;

  __device__ __forceinline__ Swiglu(float gate_value, float up_value, float limit, float alpha)
      : gate(gate_value), linear(up_value), slope(Form > 2 ? alpha : 1.f) {
    if constexpr (Form > 1) {
      gate = min_or_nan(gate, limit);
      linear = max_or_nan(min_or_nan(linear, limit), -limit);
    }
    if constexpr (Form > 2) linear += 1.f;
    gate_sigmoid = sigmoid(slope * gate);
  }

  __device__ __forceinline__ float value() const { return gate * gate_sigmoid * linear; }
};
