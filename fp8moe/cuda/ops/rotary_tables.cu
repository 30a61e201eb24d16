// Cosines and sines of a rotary embedding (arXiv:2104.09864), in float32, rounded once. The columns of a token are
// those of its angles, twice.
//
// Compile-time constants: those of router.cuh; THREADS (of a thread block).
#include "router.cuh"

// positions (tokens); frequencies (half); cosines, sines (tokens, 2 * half). Any grid that has a thread for each angle.
extern "C" __global__ void __launch_bounds__(THREADS)
    rotary_tables(const i64* positions, const float* frequencies, Output::Element* cosines, Output::Element* sines,
                  i64 tokens, int half, float scale) {
  const i64 i = i64{blockIdx.x} * THREADS + threadIdx.x, token = i / half;
  const int column = static_cast<int>(i % half);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (token >= tokens) return;
  const float angle = __fmul_rn(static_cast<float>(positions[token]), frequencies[column]);
  const Output::Element cosine = to_output(__fmul_rn(cosf(angle), scale));
  const Output::Element sine = to_output(__fmul_rn(sinf(angle), scale));
  const i64 first = token * 2 * half + column;
  cosines[first] = cosines[first + half] = cosine;
  sines[first] = sines[first + half] = sine;
}
