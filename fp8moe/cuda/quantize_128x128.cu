// Quantizer with one scale per tile of 128x128. One tile per block of 256 threads, 64 elements a thread.
#include "quantize.cuh"

constexpr int TILE_THREADS = 256;
constexpr int TILE_ROW_THREADS = BLOCK / PER_VECTOR;
constexpr int TILE_ROWS_AT_ONCE = TILE_THREADS / TILE_ROW_THREADS;
constexpr int TILE_PASSES = BLOCK / TILE_ROWS_AT_ONCE;

// w (e, n, k), experts `expert_stride` and rows `row_stride` apart; data (e, n, k) and scale (e, n_blocks, k_blocks)
// contiguous. Grid: e * n_blocks * k_blocks, k_blocks running fastest.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, VECTOR && PER_VECTOR == 8 ? 4 : 2)
    quantize_128x128(const Element* w, u8* data, float* scale, i64 n, i64 k, i64 expert_stride, i64 row_stride,
                     i64 n_blocks, i64 k_blocks) {
  __shared__ u32 warp_amax[TILE_THREADS / WARP];
  allow_next_kernel();
  const i64 k_block = blockIdx.x % static_cast<u32>(k_blocks);
  const u32 tile_row = blockIdx.x / static_cast<u32>(k_blocks);
  const i64 n_block = tile_row % static_cast<u32>(n_blocks);
  const i64 expert = tile_row / static_cast<u32>(n_blocks);
  const int rows = inside(n_block * BLOCK, n, BLOCK);
  const int row = threadIdx.x / TILE_ROW_THREADS;
  const int column = threadIdx.x % TILE_ROW_THREADS * PER_VECTOR;
  const int columns = inside(k_block * BLOCK, k, BLOCK) - column;
  const i64 first_row = n_block * BLOCK + row;
  const i64 first_column = k_block * BLOCK + column;

  wait_for_previous_kernel();
  const Element* source = w + expert * expert_stride + first_row * row_stride + first_column;
  Vector v[TILE_PASSES];
#pragma unroll
  for (int pass = 0; pass < TILE_PASSES; ++pass) {
    v[pass] = Vector::load(source, row + pass * TILE_ROWS_AT_ONCE < rows ? columns : 0);
    source += TILE_ROWS_AT_ONCE * row_stride;
  }

  u32 amax = 0;
#pragma unroll
  for (const Vector& vector : v) amax = vector.larger_magnitude(amax);
  amax = __reduce_max_sync(0xFFFFFFFFu, Input::largest(amax));
  if (threadIdx.x % WARP == 0) warp_amax[threadIdx.x / WARP] = amax;
  __syncthreads();
#pragma unroll
  for (u32 other : warp_amax) amax = max(amax, other);

  const Scale tile_scale(amax);
  if (threadIdx.x == 0) scale[blockIdx.x] = tile_scale.value;
  u8* target = data + (expert * n + first_row) * k + first_column;
#pragma unroll
  for (int pass = 0; pass < TILE_PASSES; ++pass) {
    store(target, v[pass], tile_scale, row + pass * TILE_ROWS_AT_ONCE < rows ? columns : 0);
    target += TILE_ROWS_AT_ONCE * k;
  }
}
