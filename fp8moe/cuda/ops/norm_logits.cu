// rms_norm.cu with a residual, followed by router_logits.cu, in one kernel for few tokens; bitwise equal to the two
// kernels.
//
// Each thread block computes some rows of the router's weight, as in router_logits.cu. Each block adds the residual and
// normalizes all tokens itself, since it has to read them anyway. The stores of sums and norms are divided among
// blocks.
//
// Compile-time constants: those of rms_norm.cuh; those of router_logits.cuh, with TOKENS for all tokens at a time.
#include "rms_norm.cuh"
#include "router_logits.cuh"

constexpr u32 BLOCKS = ceil_div(NUM_EXPERTS, EXPERTS);
constexpr bool EARLY_ROWS = VECTORS * EXPERTS <= 8;  // registers also fit the weight rows while tokens are summed

// x, residual (tokens, HIDDEN); norm_weight (HIDDEN); weight (NUM_EXPERTS, HIDDEN); bias (NUM_EXPERTS), may be null.
struct Inputs {
  const Element *x, *residual, *norm_weight, *weight, *bias;
};

// sum: x + residual; values: its norm; data: the quantized norm; all (tokens, HIDDEN). scale (tokens, ceil(HIDDEN /
// 128)), columns `round_up(tokens, 4)` apart. logits (tokens, NUM_EXPERTS). data and scale may be null.
struct Results {
  Element *sum, *values;
  u8* data;
  float* scale;
  Output::Element* logits;
};

// tokens: 1 to TOKENS. Grid: BLOCKS.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1)
    norm_logits(const __grid_constant__ Inputs inputs, const __grid_constant__ Results results, int tokens, float eps) {
  __shared__ WarpSums<1> sums;
  const u32 lane = threadIdx.x % WARP;
  const int first = threadIdx.x * PER_VECTOR;
  const WeightRows rows(inputs.weight);
  const auto columns = [&](int i) { return HIDDEN - first - i * STEP; };
  // The number of columns of token t that this thread loads in vector i.
  const auto count = [&](int t, int i) { return t < tokens ? columns(i) : 0; };
  // Whether this block writes result i of token t; each token has three: sum, values, and quantized data.
  const auto writes = [&](int t, int i) { return t < tokens && (3 * t + i) % BLOCKS == blockIdx.x; };
  const auto weight_at = [&](int i) { return load_parameter(inputs.norm_weight + first + i * STEP, columns(i)); };

  rows.prefetch();
  if (blockIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) prefetch_parameter(inputs.norm_weight + first + i * STEP, columns(i));
  }
  wait_for_previous_kernel();
  allow_next_kernel();

  Vector v[TOKENS][VECTORS], r[TOKENS][VECTORS], w[EARLY ? VECTORS : 1], row[EARLY_ROWS ? VECTORS : 1][EXPERTS];
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const i64 at = i64{t} * HIDDEN + first + i * STEP;
      v[t][i] = Vector::load(inputs.x + at, count(t, i));
      r[t][i] = Vector::load(inputs.residual + at, count(t, i));
    }
  }
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if constexpr (EARLY) w[i] = weight_at(i);
#pragma unroll
    for (int e = 0; e < (EARLY_ROWS ? EXPERTS : 0); ++e) row[i][e] = rows.load(e, i);
  }
  float squares[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      v[t][i] = v[t][i] + r[t][i];
      if (writes(t, 0)) store(results.sum + i64{t} * HIDDEN + first + i * STEP, v[t][i], columns(i));
    }
    squares[t] = sum_of_squares(v[t]);
  }
  sum_rows(squares);

  float sum[SUMS] = {};
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const Vector norm_weight = EARLY ? w[i] : weight_at(i);
    Vector x[TOKENS];
    if constexpr (!EARLY_ROWS) {
#pragma unroll
      for (int e = 0; e < EXPERTS; ++e) row[0][e] = rows.load(e, i);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      x[t] = v[t][i] = normalized(v[t][i], norm_factor(squares[t], eps), norm_weight, columns(i));
    }
    add_products(sum, x, row[EARLY_ROWS ? i : 0]);
  }
  const float total = sum_in_lanes<SUMS>(sum, lane);
  if (lane < SUMS) sums[threadIdx.x / WARP][0][lane] = total;
  __syncthreads();
  store_logits<1>(results.logits, sums, inputs.bias, tokens);

#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    const i64 at = i64{t} * HIDDEN + first;
    if (writes(t, 1)) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) store(results.values + at + i * STEP, v[t][i], columns(i));
    }
    if (results.data && writes(t, 2)) {
      store_quantized(results.data + at, results.scale + t, round_up(tokens, 4), v[t], threadIdx.x, columns);
    }
  }
}
