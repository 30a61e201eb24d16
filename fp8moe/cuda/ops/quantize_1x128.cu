// Quantizes with one scale per row and 128 columns.
//
// A warp handles ROWS_PER_WARP rows of one block of columns: 8 lanes per row, so that every access covers whole 32-byte
// sectors, and 4 rows at a time. It issues all loads before it uses the first. A warp's scales are contiguous
// (MN-major).
//
// Compile-time constants: those of quantize.cuh; WARPS (of a thread block), ROWS_PER_WARP.
#include "quantize.cuh"

constexpr int ROW_LANES = 8;
constexpr int ROWS_AT_ONCE = WARP / ROW_LANES;
constexpr int PASSES = ROWS_PER_WARP / ROWS_AT_ONCE;
constexpr int STEP = ROW_LANES * PER_VECTOR;
constexpr int ROW_VECTORS = BLOCK / STEP;
static_assert(ROWS_PER_WARP % ROWS_AT_ONCE == 0 && PASSES <= ROW_LANES);

// x (m, k), rows `row_stride` apart; data (m, k) contiguous; scale (m, k_blocks), columns `scale_pitch` apart.
// Grid: a warp for each ROWS_PER_WARP rows of each of k_blocks = ceil(k / 128) blocks of columns, which run fastest.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    quantize_1x128(const Element* x, u8* data, float* scale, i64 m, i64 k, i64 row_stride, i64 scale_pitch,
                   i64 k_blocks) {
  // This kernel is launched normally, so it need not wait for its predecessor; the GEMM of a linear layer starts 0.4 us
  // sooner.
  allow_next_kernel();
  const u32 unit = blockIdx.x * WARPS + threadIdx.x / WARP;
  const u32 lane = threadIdx.x % WARP;
  const i64 k_block = unit % static_cast<u32>(k_blocks);
  const i64 first_row = i64{unit / static_cast<u32>(k_blocks)} * ROWS_PER_WARP;
  if (first_row >= m) return;
  const int rows = inside(first_row, m, ROWS_PER_WARP);
  const int columns = inside(k_block * BLOCK, k, BLOCK);
  const int row = lane / ROW_LANES;
  const int column = lane % ROW_LANES * PER_VECTOR;
  const Element* source = x + (first_row + row) * row_stride + k_block * BLOCK + column;
  u8* target = data + (first_row + row) * k + k_block * BLOCK + column;

  Vector v[PASSES][ROW_VECTORS];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int count = row + pass * ROWS_AT_ONCE < rows ? columns - column : 0;
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
      v[pass][i] = Vector::load(source + pass * ROWS_AT_ONCE * row_stride + i * STEP, count - i * STEP);
    }
  }

  float scale_to_write = 0.0f;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    u32 amax = 0;
#pragma unroll
    for (const Vector& vector : v[pass]) amax = vector.larger_magnitude(amax);
    const Scale block_scale(Input::largest(warp_reduce<ROW_LANES>(amax, Input::larger)));
    if (lane % ROW_LANES == pass) scale_to_write = block_scale.value;
    const int count = row + pass * ROWS_AT_ONCE < rows ? columns - column : 0;
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
      store(target + pass * ROWS_AT_ONCE * k + i * STEP, Codes(v[pass][i], block_scale), count - i * STEP);
    }
  }

  // Of the lanes that share a row, lane p writes the scale of the row of pass p.
  const int scale_row = row + lane % ROW_LANES * ROWS_AT_ONCE;
  if (scale_row < rows) scale[k_block * scale_pitch + first_row + scale_row] = scale_to_write;
}
