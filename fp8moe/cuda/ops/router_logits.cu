// Router logits for few tokens: x times the transposed weight, see router_logits.cuh. Most of the time goes into
// reading the weight, so all SMs share it.
//
// Compile-time constants: those of router_logits.cuh; MAX_TOKENS (a multiple of TOKENS); ROUNDS (of loads in flight).
#include "router_logits.cuh"

// Vectors of a row that a thread loads before it uses them: as many as registers can hold.
constexpr int REGISTER_VECTORS = 24 / (EXPERTS + TOKENS) > 1 ? 24 / (EXPERTS + TOKENS) : 1;
constexpr int AT_ONCE = VECTORS < REGISTER_VECTORS ? VECTORS : REGISTER_VECTORS;
static_assert(MAX_TOKENS % TOKENS == 0);

// x (tokens, HIDDEN); weight (NUM_EXPERTS, HIDDEN); bias (NUM_EXPERTS), may be null; logits (tokens, NUM_EXPERTS).
// Grid: a thread block for each EXPERTS experts and MAX_TOKENS tokens.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1)
    router_logits(const Element* x, const Element* weight, const Element* bias, Output::Element* logits, int tokens) {
  __shared__ WarpSums<MAX_TOKENS / TOKENS> sums;
  const u32 lane = threadIdx.x % WARP;
  const int first_token = static_cast<int>(blockIdx.y) * MAX_TOKENS;
  tokens = min(tokens - first_token, MAX_TOKENS);
  const int first = threadIdx.x * PER_VECTOR;
  x += i64{first_token} * HIDDEN + first;
  const WeightRows rows(weight, blockIdx.x, threadIdx.x);

  rows.prefetch();
  wait_for_previous_kernel();
  allow_next_kernel();

#pragma unroll 1
  for (int token = 0; token < tokens; token += TOKENS) {
    float sum[SUMS] = {};
#pragma unroll ROUNDS
    for (int at = 0; at < VECTORS; at += AT_ONCE) {
      Vector w[AT_ONCE][EXPERTS], v[AT_ONCE][TOKENS];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
        for (int e = 0; e < EXPERTS; ++e) w[i][e] = rows.load(e, at + i);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
          const int columns = HIDDEN - first - (at + i) * STEP;
          v[i][t] = Vector::load(x + i64{token + t} * HIDDEN + (at + i) * STEP, token + t < tokens ? columns : 0);
        }
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) add_products(sum, v[i], w[i]);
    }
    const float total = sum_in_lanes(sum, lane);
    if (lane < SUMS) sums[threadIdx.x / WARP][token / TOKENS][lane] = total;
  }
  __syncthreads();
  store_logits<MAX_TOKENS / TOKENS>(logits + i64{first_token} * NUM_EXPERTS, sums, bias, tokens);
}
