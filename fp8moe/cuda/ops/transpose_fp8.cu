// Transposes FP8 weights with one scale per 128 rows and 128 columns. Values do not change.
//
// A thread block of 8 warps handles the 128x128 values of one scale. A thread holds 4 rows of 16 columns, and writes 4
// bytes of each of 16 output rows to shared memory. Loads and stores cover 128 bytes of a row.
//
// Compile-time constants: BLOCK; WARPS (of a thread block); LOAD_ALIGNED and STORE_ALIGNED (rows of the input, or of
// the output, begin at multiples of 16 bytes and their length is a multiple of 16 bytes).
#include "vector.cuh"

constexpr int CHUNK = 16;  // bytes of a row that one thread moves
constexpr int CHUNKS = BLOCK / CHUNK;
constexpr int THREAD_ROWS = 4;
static_assert(WARPS == CHUNKS && WARP / CHUNKS * THREAD_ROWS == CHUNK);

// Reads data (e, n, k) and scale (e, n_blocks, k_blocks); writes data_out (e, k, n) and scale_out (e, k_blocks,
// n_blocks); all contiguous. Grid: e * n_blocks * k_blocks, with k_blocks running fastest.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    transpose_fp8(const u8* data, const float* scale, u8* data_out, float* scale_out, i64 n, i64 k, i64 n_blocks,
                  i64 k_blocks) {
  __shared__ alignas(16) u8 transposed[BLOCK * BLOCK];
  const u32 lane = threadIdx.x % WARP;
  const u32 warp = threadIdx.x / WARP;
  const u32 chunk = lane % CHUNKS;
  const u32 row_group = lane / CHUNKS;
  const i64 k_block = blockIdx.x % static_cast<u32>(k_blocks);
  const u32 block_row = blockIdx.x / static_cast<u32>(k_blocks);
  const i64 n_block = block_row % static_cast<u32>(n_blocks);
  const i64 expert = block_row / static_cast<u32>(n_blocks);
  const int rows = inside(n_block * BLOCK, n, BLOCK);
  const int columns = inside(k_block * BLOCK, k, BLOCK);
  const int first_row = warp * CHUNK + row_group * THREAD_ROWS;

  wait_for_previous_kernel();
  allow_next_kernel();
  const u8* source = data + (expert * n + n_block * BLOCK + first_row) * k + k_block * BLOCK + chunk * CHUNK;
  Bytes16 v[THREAD_ROWS];
#pragma unroll
  for (int r = 0; r < THREAD_ROWS; ++r) {
    const int count = first_row + r < rows ? columns - static_cast<int>(chunk) * CHUNK : 0;
    // These loads go through L1: with load_elements, which bypasses L1, this kernel takes 6% longer.
    if constexpr (LOAD_ALIGNED) v[r] = count > 0 ? load_16(source + r * k) : Bytes16{};
    if constexpr (!LOAD_ALIGNED) v[r] = load_elements<false>(source + r * k, count);
  }
  if (threadIdx.x == 0) scale_out[(expert * k_blocks + k_block) * n_blocks + n_block] = scale[blockIdx.x];

  // The chunks of an output row are permuted by the input chunk they come from, so that a warp's 32 words are in 32
  // banks.
  u32* target = reinterpret_cast<u32*>(&transposed[chunk * CHUNK * BLOCK + (warp ^ chunk) * CHUNK]) + row_group;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 words[THREAD_ROWS];
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; ++r) words[r] = v[r].words[i];
    transpose_bytes(words);
#pragma unroll
    for (int c = 0; c < 4; ++c) target[(4 * i + c) * (BLOCK / 4)] = words[c];
  }
  __syncthreads();

  u8* out = data_out + (expert * k + k_block * BLOCK) * n + n_block * BLOCK;
#pragma unroll
  for (int i = threadIdx.x; i < BLOCK * CHUNKS; i += WARPS * WARP) {
    const int row = i / CHUNKS;
    const int out_chunk = i % CHUNKS;
    const int count = row < columns ? rows - out_chunk * CHUNK : 0;
    copy_16(out + row * n + out_chunk * CHUNK, &transposed[row * BLOCK + (out_chunk ^ (row / CHUNK)) * CHUNK], count,
            STORE_ALIGNED);
  }
}
