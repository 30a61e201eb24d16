// Transposing quantizer with one scale per column and 128 rows.
//
// A block of 8 warps transposes a tile of 128 rows (along k) and 64 columns: a thread holds 4 rows of 8 columns, so 4
// bytes of each of 8 output rows, which meet in shared memory.
#include "quantize.cuh"

constexpr int COLUMN_WARPS = 8;
constexpr int COLUMNS = 64;
constexpr int THREAD_ROWS = 4;
constexpr int THREAD_COLUMNS = 8;
constexpr int THREAD_VECTORS = THREAD_COLUMNS / PER_VECTOR;
constexpr int COLUMN_WORDS = COLUMNS / PER_WORD;
constexpr int THREAD_WORDS = THREAD_COLUMNS / PER_WORD;
constexpr int CHUNK = 16;  // bytes of an output row that move as one
constexpr int CHUNKS = BLOCK / CHUNK;

// x (k, m), rows `row_stride` apart; data (m, k) contiguous; scale (m, ceil(k / 128)), columns `scale_pitch` apart.
// Grid: ceil(k / 128) * m_tiles, m_tiles = ceil(m / 64) running fastest.
extern "C" __global__ void __launch_bounds__(COLUMN_WARPS* WARP)
    quantize_128x1(const Element* x, u8* data, float* scale, i64 k, i64 m, i64 row_stride, i64 scale_pitch, i64 m_tiles) {
  __shared__ u32 warp_amax[COLUMN_WARPS][COLUMN_WORDS];
  __shared__ Divisor<> divisors[COLUMNS];
  __shared__ alignas(16) u8 transposed[COLUMNS * BLOCK];
  allow_next_kernel();
  const u32 lane = threadIdx.x % WARP;
  const u32 warp = threadIdx.x / WARP;
  const u32 column_group = lane % (COLUMNS / THREAD_COLUMNS);
  const u32 row_group = lane / (COLUMNS / THREAD_COLUMNS);
  const i64 k_block = blockIdx.x / static_cast<u32>(m_tiles);
  const i64 first_column = i64{blockIdx.x % static_cast<u32>(m_tiles)} * COLUMNS;
  const int rows = inside(k_block * BLOCK, k, BLOCK);
  const int columns = inside(first_column, m, COLUMNS);
  const int row = (warp * THREAD_ROWS + row_group) * THREAD_ROWS;
  const int column = column_group * THREAD_COLUMNS;

  wait_for_previous_kernel();
  const Element* source = x + (k_block * BLOCK + row) * row_stride + first_column + column;
  Vector v[THREAD_ROWS][THREAD_VECTORS];
#pragma unroll
  for (int r = 0; r < THREAD_ROWS; ++r) {
    const int count = row + r < rows ? columns - column : 0;
#pragma unroll
    for (int i = 0; i < THREAD_VECTORS; ++i) {
      v[r][i] = Vector::load(source + r * row_stride + i * PER_VECTOR, count - i * PER_VECTOR);
    }
  }

#pragma unroll
  for (int i = 0; i < THREAD_WORDS; ++i) {
    u32 amax = 0;
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) amax = Input::larger(amax, Input::magnitude(v[r][i / 4].words[i % 4]));
#pragma unroll
    for (int step = COLUMNS / THREAD_COLUMNS; step < WARP; step *= 2) {
      amax = Input::larger(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    }
    if (row_group == 0) warp_amax[warp][column_group * THREAD_WORDS + i] = amax;
  }
  __syncthreads();

  if (threadIdx.x < COLUMNS) {
    u32 amax = 0;
#pragma unroll
    for (int w = 0; w < COLUMN_WARPS; ++w) amax = Input::larger(amax, warp_amax[w][threadIdx.x / PER_WORD]);
    const Scale column_scale(Input::bits(amax, threadIdx.x % PER_WORD));
    divisors[threadIdx.x] = column_scale.divisor;
    if (static_cast<int>(threadIdx.x) < columns) scale[k_block * scale_pitch + first_column + threadIdx.x] = column_scale.value;
  }
  __syncthreads();

  // The 16-byte chunks of a row are permuted by its column group: a warp's 32 words then fall in 32 banks.
#pragma unroll
  for (int c = 0; c < THREAD_COLUMNS; ++c) {
    const Divisor<> divisor = divisors[column + c];
    float quotient[THREAD_ROWS];
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) quotient[r] = divisor.quotient(v[r][c / PER_VECTOR][c % PER_VECTOR]);
    *reinterpret_cast<u32*>(&transposed[(column + c) * BLOCK + (warp ^ column_group) * CHUNK + row_group * THREAD_ROWS]) =
        to_e4m3(quotient[0], quotient[1], quotient[2], quotient[3]);
  }
  __syncthreads();

#pragma unroll
  for (int i = threadIdx.x; i < COLUMNS * CHUNKS; i += COLUMN_WARPS * WARP) {
    const int c = i / CHUNKS;
    const int chunk = i % CHUNKS;
    const int count = c < columns ? rows - chunk * CHUNK : 0;
    const u8* from = &transposed[c * BLOCK + (chunk ^ (c / THREAD_COLUMNS)) * CHUNK];
    u8* to = data + (first_column + c) * k + k_block * BLOCK + chunk * CHUNK;
    if (k % CHUNK == 0) {
      if (count > 0) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int b = 0; b < min(count, CHUNK); ++b) to[b] = from[b];
    }
  }
}
