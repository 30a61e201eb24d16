// Chooses the experts of each token from router logits, and computes their weights: see route.cuh.
//
// Compile-time constants: those of route.cuh; WARPS (of a thread block).
#include "route.cuh"

// logits (tokens, NUM_EXPERTS); bias (NUM_EXPERTS), unused without BIAS; index, weights (tokens, TOP_K). Grid: a warp
// for each token.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    route(const Element* logits, const float* bias, i64* index, Output::Element* weights, i64 tokens, float scale) {
  const u32 lane = threadIdx.x % WARP;
  const i64 token = i64{blockIdx.x} * WARPS + threadIdx.x / WARP;

  wait_for_previous_kernel();
  allow_next_kernel();
  if (token >= tokens) return;
  const Choice choice = choose(logits + token * NUM_EXPERTS, bias, scale);
  if (lane >= TOP_K) return;
  index[token * TOP_K + lane] = choice.expert;
  weights[token * TOP_K + lane] = to_output(choice.weight);
}
