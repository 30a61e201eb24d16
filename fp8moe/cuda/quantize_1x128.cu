// Quantizer with one scale per row and 128 columns.
//
// A warp takes 8 rows of one K block: 8 lanes a row, so that every access covers whole 32-byte sectors, 4 rows at a
// time, all loads issued before the first use. Its 8 scales are neighbours in the MN-major layout: one sector.
#include "quantize.cuh"

constexpr int ROW_WARPS = 4;
constexpr int ROW_LANES = 8;
constexpr int ROWS_AT_ONCE = WARP / ROW_LANES;
constexpr int ROW_PASSES = 2;
constexpr int ROWS_PER_WARP = ROWS_AT_ONCE * ROW_PASSES;
constexpr int ROW_STEP = ROW_LANES * PER_VECTOR;
constexpr int ROW_VECTORS = BLOCK / ROW_STEP;

// x (m, k), rows `row_stride` apart; data (m, k) contiguous; scale (m, k_blocks), columns `scale_pitch` apart.
// Grid: a warp for each of ceil(m / 8) * k_blocks tiles, k_blocks = ceil(k / 128) running fastest.
extern "C" __global__ void __launch_bounds__(ROW_WARPS* WARP)
    quantize_1x128(const Element* x, u8* data, float* scale, i64 m, i64 k, i64 row_stride, i64 scale_pitch,
                   i64 k_blocks) {
  allow_next_kernel();
  const u32 tile = blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
  const u32 lane = threadIdx.x % WARP;
  const i64 k_block = tile % static_cast<u32>(k_blocks);
  const i64 first_row = i64{tile / static_cast<u32>(k_blocks)} * ROWS_PER_WARP;
  if (first_row >= m) return;
  const int rows = inside(first_row, m, ROWS_PER_WARP);
  const int columns = inside(k_block * BLOCK, k, BLOCK);
  const int row = lane / ROW_LANES;
  const int column = lane % ROW_LANES * PER_VECTOR;
  const Element* source = x + (first_row + row) * row_stride + k_block * BLOCK + column;
  u8* target = data + (first_row + row) * k + k_block * BLOCK + column;

  wait_for_previous_kernel();
  Vector v[ROW_PASSES][ROW_VECTORS];
#pragma unroll
  for (int pass = 0; pass < ROW_PASSES; ++pass) {
    const int count = row + pass * ROWS_AT_ONCE < rows ? columns - column : 0;
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
      v[pass][i] = Vector::load(source + pass * ROWS_AT_ONCE * row_stride + i * ROW_STEP, count - i * ROW_STEP);
    }
  }

  float scale_to_write = 0.0f;
#pragma unroll
  for (int pass = 0; pass < ROW_PASSES; ++pass) {
    u32 amax = 0;
#pragma unroll
    for (const Vector& vector : v[pass]) amax = vector.larger_magnitude(amax);
#pragma unroll
    for (int step = 1; step < ROW_LANES; step *= 2) {
      amax = Input::larger(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    }
    const Scale block_scale(Input::largest(amax));
    if (lane % ROW_LANES == pass) scale_to_write = block_scale.value;
    const int count = row + pass * ROWS_AT_ONCE < rows ? columns - column : 0;
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
      store(target + pass * ROWS_AT_ONCE * k + i * ROW_STEP, v[pass][i], block_scale, count - i * ROW_STEP);
    }
  }

  // Lane p of each group of 8 writes the scale of pass p.
  const int scale_row = row + lane % ROW_LANES * ROWS_AT_ONCE;
  if (scale_row < rows) scale[k_block * scale_pitch + first_row + scale_row] = scale_to_write;
}
