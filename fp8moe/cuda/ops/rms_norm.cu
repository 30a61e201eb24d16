// RMSNorm of rows (arXiv:1910.07467), with the addition of a residual before it and the quantization of
// quantize_1x128.cu after it, bit for bit. Every operation rounds to the type of the input where PyTorch's modules do.
//
// ROW_THREADS threads hold a row in registers, 16 bytes for each of them at a time: the whole thread block, or lanes of
// a warp where that is enough. Sums have a fixed order.
//
// Compile-time constants: those of quantize.cuh; HIDDEN, the columns; THREADS (of a thread block); ROW_THREADS, a
// multiple of 32 or a power of two; SIZES_BYTES.
#include "output.cuh"
#include "parameter.cuh"
#include "quantize.cuh"

constexpr int ROWS = THREADS / ROW_THREADS;  // of a thread block
constexpr int STEP = ROW_THREADS * PER_VECTOR;
constexpr int VECTORS = ceil_div(HIDDEN, STEP);
constexpr int ROW_WARPS = ceil_div(ROW_THREADS, WARP);
// Neighbouring lanes that hold a quantization block, or the row if that is shorter.
constexpr int BLOCK_LANES = BLOCK / PER_VECTOR < ROW_THREADS ? BLOCK / PER_VECTOR : ROW_THREADS;
constexpr bool EARLY = VECTORS <= 4;  // registers hold the weight too while the row is summed
static_assert(ROW_WARPS == 1 ? (ROW_THREADS & (ROW_THREADS - 1)) == 0 : ROWS == 1 && ROW_THREADS % WARP == 0);

struct Sizes {
  i64 rows, row_stride, scale_pitch;
  float eps;
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

__device__ Vector operator+(const Vector& a, const Vector& b) {
  float sum[PER_VECTOR];
#pragma unroll
  for (int i = 0; i < PER_VECTOR; ++i) sum[i] = __fadd_rn(a[i], b[i]);
  return to_vector(sum);
}

// weight * (x * factor), each product rounded.
__device__ Vector normalized(const Vector& x, float factor, const Vector& weight) {
  float v[PER_VECTOR];
#pragma unroll
  for (int i = 0; i < PER_VECTOR; ++i) v[i] = __fmul_rn(x[i], factor);
  const Vector n = to_vector(v);
#pragma unroll
  for (int i = 0; i < PER_VECTOR; ++i) v[i] = __fmul_rn(weight[i], n[i]);
  return to_vector(v);
}

// Stores the first `count` elements of a vector; any count.
__device__ void store(Element* target, const Vector& v, int count) {
  if constexpr (VECTOR) {
    if (count > 0) store_16(target, v);
  } else {
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      if (i < count) target[i] = static_cast<Element>(Input::bits(v.words[i / PER_WORD], i % PER_WORD));
    }
  }
}

// Of the first `count` elements of a vector; any count. Those after them are zero times a factor, which may be NaN.
__device__ u32 largest_magnitude(const Vector& v, int count) {
  u32 amax = 0;
  if constexpr (VECTOR) {
    if (count > 0) amax = v.larger_magnitude(0);
  } else {
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      if (i < count) amax = Input::larger(amax, Input::magnitude(Input::bits(v.words[i / PER_WORD], i % PER_WORD)));
    }
  }
  return amax;
}

// Of x over the threads of a row, the same in each of them.
__device__ float row_sum(float x) {
  const auto add = [](float a, float b) { return __fadd_rn(a, b); };
  if constexpr (ROW_WARPS == 1) {
    return warp_reduce<ROW_THREADS>(x, add);
  } else {
    __shared__ float sums[ROW_WARPS];
    x = warp_reduce(x, add);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    float total = sums[0];
#pragma unroll
    for (int warp = 1; warp < ROW_WARPS; ++warp) total = __fadd_rn(total, sums[warp]);
    return total;
  }
}

// x (rows, HIDDEN), rows `row_stride` apart; weight (HIDDEN); values, data (rows, HIDDEN); scale (rows,
// ceil(HIDDEN / 128)), columns `scale_pitch` apart. residual, sum (rows, HIDDEN). What is not wanted is null: residual
// and sum, values, data and scale. Grid: a thread block for each ROWS rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const Element* x, const Element* residual, const Element* weight, Element* sum, Element* values, u8* data,
             float* scale, const __grid_constant__ Sizes sizes) {
  const u32 thread = threadIdx.x % ROW_THREADS;
  const int first = thread * PER_VECTOR;
  const i64 row = i64{blockIdx.x} * ROWS + threadIdx.x / ROW_THREADS;
  const bool exists = row < sizes.rows;
  const i64 offset = row * HIDDEN;
  // How many columns vector i of this thread is to load or to store.
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
    for (int i = 0; i < VECTORS; ++i) r[i] = Vector::load(residual + offset + first + i * STEP, count(i));
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      v[i] = v[i] + r[i];
      store(sum + offset + first + i * STEP, v[i], count(i));
    }
  }

  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
    for (int c = 0; c < PER_VECTOR; ++c) squares = __fmaf_rn(v[i][c], v[i][c], squares);
  }
  const float factor = rsqrtf(__fmaf_rn(row_sum(squares), 1.0f / HIDDEN, sizes.eps));

#pragma unroll
  for (int i = 0; i < VECTORS; ++i) v[i] = normalized(v[i], factor, EARLY ? w[i] : weight_at(i));
  if (values) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) store(values + offset + first + i * STEP, v[i], count(i));
  }
  if (data) {
    u32 amax[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      amax[i] = Input::largest(warp_reduce<BLOCK_LANES>(largest_magnitude(v[i], count(i)), Input::larger));
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int column = first + i * STEP;
      const Scale block_scale(amax[i]);
      store(data + offset + column, v[i], block_scale, count(i));
      if (thread % BLOCK_LANES == 0 && count(i) > 0)
        scale[column / BLOCK * sizes.scale_pitch + row] = block_scale.value;
    }
  }
}
