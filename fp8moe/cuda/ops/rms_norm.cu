// RMSNorm of rows, see rms_norm.cuh. Optionally adds a residual before, and quantizes after, bit for bit like
// quantize_1x128.cu. ROW_THREADS threads share a row: the whole thread block, or some lanes of a warp.
//
// Compile-time constants: those of rms_norm.cuh; THREADS (of a thread block); SIZES_BYTES.
#include "rms_norm.cuh"

constexpr int ROWS = THREADS / ROW_THREADS;  // rows per thread block
static_assert(ROW_WARPS == 1 || ROWS == 1);

struct Sizes {
  i64 rows, row_stride, scale_pitch;
  float eps;
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

// x (rows, HIDDEN), rows `row_stride` apart; residual (rows, HIDDEN); weight (HIDDEN). Results: sum (x + residual),
// values (the norm), data (the quantized norm), all (rows, HIDDEN); scale (rows, ceil(HIDDEN / 128)), columns
// `scale_pitch` apart. May be null: residual with sum; values; data with scale. Grid: a thread block for each ROWS
// rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const Element* x, const Element* residual, const Element* weight, Element* sum, Element* values, u8* data,
             float* scale, const __grid_constant__ Sizes sizes) {
  const u32 thread = threadIdx.x % ROW_THREADS;
  const int first = thread * PER_VECTOR;
  const i64 row = i64{blockIdx.x} * ROWS + threadIdx.x / ROW_THREADS;
  const bool exists = row < sizes.rows;
  const i64 offset = row * HIDDEN + first;
  // The number of columns that this thread loads or stores in vector i.
  const auto count = [&](int i) { return exists ? HIDDEN - first - i * STEP : 0; };
  const auto weight_at = [&](int i) { return load_parameter(weight + first + i * STEP, HIDDEN - first - i * STEP); };

  if (blockIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) prefetch_parameter(weight + first + i * STEP, HIDDEN - first - i * STEP);
  }
  wait_for_previous_kernel();
  allow_next_kernel();

  Vector v[VECTORS], w[EARLY ? VECTORS : 1];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) v[i] = Vector::load(x + row * sizes.row_stride + first + i * STEP, count(i));
  if constexpr (EARLY) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) w[i] = weight_at(i);
  }
  if (residual) {
    Vector r[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) r[i] = Vector::load(residual + offset + i * STEP, count(i));
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      v[i] = v[i] + r[i];
      store(sum + offset + i * STEP, v[i], count(i));
    }
  }

  float squares[] = {sum_of_squares(v)};
  sum_rows(squares);
  const float factor = norm_factor(squares[0], sizes.eps);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) v[i] = normalized(v[i], factor, EARLY ? w[i] : weight_at(i), count(i));
  if (values) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) store(values + offset + i * STEP, v[i], count(i));
  }
  if (data) store_quantized(data + offset, scale + row, sizes.scale_pitch, v, thread, count);
}
