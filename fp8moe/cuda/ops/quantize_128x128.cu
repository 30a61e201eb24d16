// Quantizes with one scale per 128 rows and 128 columns, and writes the transpose too where it is wanted. A thread
// block handles one such block of the weights, with 64 elements per thread.
//
// Compile-time constants: those of quantize.cuh; WARPS (of a thread block); SIZES_BYTES.
#include "quantize.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int ROW_THREADS = BLOCK / PER_VECTOR;
constexpr int ROWS = BLOCK * ROW_THREADS / THREADS;  // of a thread, one below the other
constexpr int CHUNK = 16;                            // bytes of an output row that one thread stores
constexpr int CHUNKS = BLOCK / CHUNK;
static_assert(CHUNK % ROWS == 0 && ROWS % 4 == 0);

// The place in shared memory of 16 values of a column. Chunks are permuted by the thread that writes them, so that the
// columns of a warp are in different banks.
__device__ u8* chunk_of(u8* transposed, int column, int chunk) {
  return transposed + column * BLOCK + (chunk ^ column / PER_VECTOR % CHUNKS) * CHUNK;
}

// w is (e, n, k), experts `expert_stride` and rows `row_stride` apart; results have out_n rows and out_blocks of them.
struct Sizes {
  i64 n, k, expert_stride, row_stride, k_blocks, out_n, out_blocks;
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

// The results are rows of larger tensors: data of (e, out_n, k), scale of (e, out_blocks, k_blocks); data_transposed of
// (e, k, out_n) and scale_transposed of (e, k_blocks, out_blocks), or null. Grid: one thread block for each scale.
extern "C" __global__ void __launch_bounds__(THREADS, !VECTOR           ? 1
                                                      : PER_VECTOR == 8 ? 4
                                                                        : 2)
    quantize_128x128(const Element* w, u8* data, float* scale, u8* data_transposed, float* scale_transposed,
                     const __grid_constant__ Sizes sizes) {
  const auto [n, k, expert_stride, row_stride, k_blocks, out_n, out_blocks] = sizes;
  __shared__ u32 warp_amax[WARPS];
  __shared__ alignas(CHUNK) u8 transposed[BLOCK * BLOCK];
  const i64 k_block = blockIdx.x % static_cast<u32>(k_blocks);
  const u32 n_blocks = (n + BLOCK - 1) / BLOCK;
  const u32 block_row = blockIdx.x / static_cast<u32>(k_blocks);
  const i64 n_block = block_row % n_blocks;
  const i64 expert = block_row / n_blocks;
  const int rows = inside(n_block * BLOCK, n, BLOCK);
  const int row = threadIdx.x / ROW_THREADS * ROWS;
  const int column = threadIdx.x % ROW_THREADS * PER_VECTOR;
  const int columns = inside(k_block * BLOCK, k, BLOCK);
  const i64 first_row = n_block * BLOCK + row;
  const i64 first_column = k_block * BLOCK + column;
  const auto count = [&](int r) { return row + r < rows ? columns - column : 0; };

  wait_for_previous_kernel();
  allow_next_kernel();
  const Element* source = w + expert * expert_stride + first_row * row_stride + first_column;
  Vector v[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) v[r] = Vector::load(source + r * row_stride, count(r));

  u32 amax = 0;
#pragma unroll
  for (const Vector& vector : v) amax = vector.larger_magnitude(amax);
  amax = __reduce_max_sync(FULL_WARP, Input::largest(amax));
  if (threadIdx.x % WARP == 0) warp_amax[threadIdx.x / WARP] = amax;
  __syncthreads();
#pragma unroll
  for (u32 other : warp_amax) amax = max(amax, other);

  const Scale block_scale(amax);
  if (threadIdx.x == 0) scale[(expert * out_blocks + n_block) * k_blocks + k_block] = block_scale.value;
  u8* target = data + (expert * out_n + first_row) * k + first_column;
#pragma unroll
  for (int first = 0; first < ROWS; first += 4) {
    u32 words[4][PER_VECTOR / 4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const Codes codes(v[first + r], block_scale);
      store(target + (first + r) * k, codes, count(first + r));
#pragma unroll
      for (int i = 0; i < PER_VECTOR / 4; ++i) words[r][i] = codes.words[i];
    }
    if (!data_transposed) continue;
#pragma unroll
    for (int i = 0; i < PER_VECTOR / 4; ++i) {
      u32 square[4] = {words[0][i], words[1][i], words[2][i], words[3][i]};
      transpose_bytes(square);
      u8* to = chunk_of(transposed, column + 4 * i, row / CHUNK) + (row + first) % CHUNK;
#pragma unroll
      for (int c = 0; c < 4; ++c) *reinterpret_cast<u32*>(to + c * BLOCK) = square[c];
    }
  }
  if (!data_transposed) return;
  __syncthreads();

  if (threadIdx.x == 0) scale_transposed[(expert * k_blocks + k_block) * out_blocks + n_block] = block_scale.value;
  u8* out = data_transposed + (expert * k + k_block * BLOCK) * out_n + n_block * BLOCK;
  const bool aligned = (reinterpret_cast<i64>(data_transposed) | out_n | n) % CHUNK == 0;
#pragma unroll
  for (int i = threadIdx.x; i < BLOCK * CHUNKS; i += THREADS) {
    const int out_row = i / CHUNKS, chunk = i % CHUNKS;
    const int bytes = out_row < columns ? rows - chunk * CHUNK : 0;
    copy_16(out + out_row * out_n + chunk * CHUNK, chunk_of(transposed, out_row, chunk), bytes, aligned);
  }
}
