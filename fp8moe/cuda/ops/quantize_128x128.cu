// Quantizes with one scale per 128 rows and 128 columns. A thread block handles one such block of the weights, with 64
// elements per thread.
//
// Compile-time constants: those of quantize.cuh; WARPS (of a thread block).
#include "quantize.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int ROW_THREADS = BLOCK / PER_VECTOR;
constexpr int ROWS_AT_ONCE = THREADS / ROW_THREADS;
constexpr int PASSES = BLOCK / ROWS_AT_ONCE;

// w (e, n, k), experts `expert_stride` and rows `row_stride` apart; data (e, n, k) and scale (e, ceil(n / 128),
// k_blocks) contiguous. Grid: one thread block for each scale.
extern "C" __global__ void __launch_bounds__(THREADS, VECTOR&& PER_VECTOR == 8 ? 4 : 2)
    quantize_128x128(const Element* w, u8* data, float* scale, i64 n, i64 k, i64 expert_stride, i64 row_stride,
                     i64 k_blocks) {
  __shared__ u32 warp_amax[WARPS];
  const i64 k_block = blockIdx.x % static_cast<u32>(k_blocks);
  const u32 n_blocks = (n + BLOCK - 1) / BLOCK;
  const u32 block_row = blockIdx.x / static_cast<u32>(k_blocks);
  const i64 n_block = block_row % n_blocks;
  const i64 expert = block_row / n_blocks;
  const int rows = inside(n_block * BLOCK, n, BLOCK);
  const int row = threadIdx.x / ROW_THREADS;
  const int column = threadIdx.x % ROW_THREADS * PER_VECTOR;
  const int columns = inside(k_block * BLOCK, k, BLOCK) - column;
  const i64 first_row = n_block * BLOCK + row;
  const i64 first_column = k_block * BLOCK + column;

  wait_for_previous_kernel();
  allow_next_kernel();
  const Element* source = w + expert * expert_stride + first_row * row_stride + first_column;
  Vector v[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    v[pass] = Vector::load(source, row + pass * ROWS_AT_ONCE < rows ? columns : 0);
    source += ROWS_AT_ONCE * row_stride;
  }

  u32 amax = 0;
#pragma unroll
  for (const Vector& vector : v) amax = vector.larger_magnitude(amax);
  amax = __reduce_max_sync(FULL_WARP, Input::largest(amax));
  if (threadIdx.x % WARP == 0) warp_amax[threadIdx.x / WARP] = amax;
  __syncthreads();
#pragma unroll
  for (u32 other : warp_amax) amax = max(amax, other);

  const Scale block_scale(amax);
  if (threadIdx.x == 0) scale[blockIdx.x] = block_scale.value;
  u8* target = data + (expert * n + first_row) * k + first_column;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    store(target, v[pass], block_scale, row + pass * ROWS_AT_ONCE < rows ? columns : 0);
    target += ROWS_AT_ONCE * k;
  }
}
