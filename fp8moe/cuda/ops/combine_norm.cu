// combine.cu followed by rms_norm.cu in one kernel, for few tokens; bitwise equal to the two kernels. One thread block
// handles one token.
//
// The kernel may read all inputs except y before it waits for the previous kernel, which computes y. So the others must
// have been written before the previous kernel began, see wait_for_previous_kernel().
//
// Compile-time constants: those of combine.cuh, with PLACED = 0; those of rms_norm.cuh, with ROW_THREADS = the threads
// of a block.
#include "combine.cuh"
#include "rms_norm.cuh"

// Rows that a thread loads before it adds them up. Registers hold this many, and most models have top_k <= 8.
constexpr int AT_ONCE = VECTORS <= 4 ? 8 : 24 / VECTORS;
static_assert(AT_ONCE > 0 && !PLACED && ROW_THREADS % WARP == 0);

// out: the sum; values: its norm; data: the quantized norm; all (tokens, HIDDEN). scale (tokens, ceil(HIDDEN / 128)),
// columns `round_up(tokens, 4)` apart. values may be null, and so may data with scale.
struct Results {
  Element *out, *values;
  u8* data;
  float* scale;
};

// y (rows, HIDDEN); rows, weights (tokens, top_k); residual (tokens, HIDDEN) may be null; norm_weight (HIDDEN).
// Grid: a thread block for each token.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1)
    combine_norm(const Element* y, const Row* rows, const Weight::Element* weights, const Element* residual,
                 const Element* norm_weight, const __grid_constant__ Results results,
                 const __grid_constant__ RoutingSizes sizes, float eps) {
  const u32 token = blockIdx.x;
  const int first = threadIdx.x * PER_VECTOR;
  const i64 at = i64{token} * HIDDEN + first;
  const Routing routing{rows, weights, sizes};
  const auto columns = [&](int i) { return HIDDEN - first - i * STEP; };
  const auto weight_at = [&](int i) { return load_parameter(norm_weight + first + i * STEP, columns(i)); };

  const Assignment assignment = routing.from(token, 0, threadIdx.x % WARP);
  Vector r[VECTORS], w[EARLY ? VECTORS : 1];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    r[i] = Vector::load(residual + at + i * STEP, residual ? columns(i) : 0);
    if constexpr (EARLY) w[i] = weight_at(i);
  }
  wait_for_previous_kernel();
  allow_next_kernel();

  float sum[VECTORS][PER_VECTOR] = {};
  add_token<AT_ONCE>(sum, y + first, HIDDEN - first, STEP, routing, token, assignment);
  Vector v[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    v[i] = to_vector(sum[i]);
    if (residual) v[i] = r[i] + v[i];
    store(results.out + at + i * STEP, v[i], columns(i));
  }
  float squares[] = {sum_of_squares(v)};
  sum_rows(squares);
  const float factor = norm_factor(squares[0], eps);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    v[i] = normalized(v[i], factor, EARLY ? w[i] : weight_at(i), columns(i));
    if (results.values) store(results.values + at + i * STEP, v[i], columns(i));
  }
  if (results.data) {
    const i64 scale_pitch = round_up(static_cast<int>(sizes.tokens), 4);
    store_quantized(results.data + at, results.scale + token, scale_pitch, v, threadIdx.x, columns);
  }
}
