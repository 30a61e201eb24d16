// Quantizes a matrix with one scale per column and 128 rows, and transposes it.
//
// A thread block of 8 warps transposes 128 rows (along k) of COLUMNS columns. A thread holds 4 rows of 8 columns, that
// is 4 bytes of each of 8 output rows; output rows are assembled in shared memory.
//
// Compile-time constants: those of quantize.cuh; WARPS (of a thread block), COLUMNS.
#include "quantize.cuh"

constexpr int THREAD_ROWS = 4;
constexpr int THREAD_COLUMNS = 8;
constexpr int THREAD_VECTORS = THREAD_COLUMNS / PER_VECTOR;
constexpr int THREAD_WORDS = THREAD_COLUMNS / PER_WORD;
constexpr int COLUMN_GROUPS = COLUMNS / THREAD_COLUMNS;
constexpr int COLUMN_WORDS = COLUMNS / PER_WORD;
constexpr int CHUNK = 16;  // bytes of an output row that come from one warp and are stored together
constexpr int CHUNKS = BLOCK / CHUNK;
static_assert(WARPS == CHUNKS && COLUMN_GROUPS == CHUNKS && WARP / COLUMN_GROUPS * THREAD_ROWS == CHUNK);

// x (k, m), rows `row_stride` apart; data (m, k) contiguous; scale (m, ceil(k / 128)), columns `scale_pitch` apart.
// Grid: ceil(k / 128) * m_tiles, with m_tiles = ceil(m / COLUMNS) running fastest.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    quantize_128x1(const Element* x, u8* data, float* scale, i64 k, i64 m, i64 row_stride, i64 scale_pitch,
                   i64 m_tiles) {
  __shared__ u32 warp_amax[WARPS][COLUMN_WORDS];
  __shared__ Divisor<> divisors[COLUMNS];
  __shared__ alignas(16) u8 transposed[COLUMNS * BLOCK];
  const u32 lane = threadIdx.x % WARP;
  const u32 warp = threadIdx.x / WARP;
  const u32 column_group = lane % COLUMN_GROUPS;
  const u32 row_group = lane / COLUMN_GROUPS;
  const i64 k_block = blockIdx.x / static_cast<u32>(m_tiles);
  const i64 first_column = i64{blockIdx.x % static_cast<u32>(m_tiles)} * COLUMNS;
  const int rows = inside(k_block * BLOCK, k, BLOCK);
  const int columns = inside(first_column, m, COLUMNS);
  const int row = warp * CHUNK + row_group * THREAD_ROWS;
  const int column = column_group * THREAD_COLUMNS;

  wait_for_previous_kernel();
  allow_next_kernel();
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
    amax = warp_reduce<WARP / COLUMN_GROUPS, COLUMN_GROUPS>(amax, Input::larger);
    if (row_group == 0) warp_amax[warp][column_group * THREAD_WORDS + i] = amax;
  }
  __syncthreads();

  if (threadIdx.x < COLUMNS) {
    u32 amax = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) amax = Input::larger(amax, warp_amax[w][threadIdx.x / PER_WORD]);
    const BlockScale<> column_scale(Input::value(Input::bits(amax, threadIdx.x % PER_WORD)));
    divisors[threadIdx.x] = column_scale.divisor;
    if (static_cast<int>(threadIdx.x) < columns) {
      scale[k_block * scale_pitch + first_column + threadIdx.x] = column_scale.value;
    }
  }
  __syncthreads();

  // The chunks of an output row are permuted by its column group, so that the 32 words a warp writes are in 32 banks.
#pragma unroll
  for (int c = 0; c < THREAD_COLUMNS; ++c) {
    const Divisor<> divisor = divisors[column + c];
    float quotient[THREAD_ROWS];
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) quotient[r] = divisor.quotient(v[r][c / PER_VECTOR][c % PER_VECTOR]);
    u8* piece = &transposed[(column + c) * BLOCK + (warp ^ column_group) * CHUNK + row_group * THREAD_ROWS];
    *reinterpret_cast<u32*>(piece) = to_e4m3(quotient[0], quotient[1], quotient[2], quotient[3]);
  }
  __syncthreads();

#pragma unroll
  for (int i = threadIdx.x; i < COLUMNS * CHUNKS; i += WARPS * WARP) {
    const int c = i / CHUNKS;
    const int chunk = i % CHUNKS;
    const int count = c < columns ? rows - chunk * CHUNK : 0;
    copy_16(data + (first_column + c) * k + k_block * BLOCK + chunk * CHUNK,
            &transposed[c * BLOCK + (chunk ^ (c / THREAD_COLUMNS)) * CHUNK], count, k % CHUNK == 0);
  }
}
