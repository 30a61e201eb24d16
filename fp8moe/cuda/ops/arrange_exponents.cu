// Arranges the exponents of MXFP4 weights, one for each feature and 32 values along K, for the GEMM kernels: by blocks
// of 128 along K, one word for each feature, so that those of a tile are contiguous. They become 8 times
// what they are below the largest exponent of a block of 128 features and 128 along K, at most 240. These largest
// exponents follow behind the words of all features of a projection. An exponent of 255, which is NaN, becomes 248 and
// does not count.
//
// Compile-time constants: BLOCK; BLOCKS (along K, that a thread block of BLOCK threads arranges).
#include "ptx.cuh"

// exponents (projections, size, groups), aligned to 4 bytes; arranged (projections, k_blocks, words).
// Grid: (ceil(size / BLOCK), ceil(k_blocks / BLOCKS), projections).
extern "C" __global__ void __launch_bounds__(BLOCK)
    arrange_exponents(const u8* exponents, u32* arranged, long long size, long long groups, long long k_blocks,
                      long long words) {
  __shared__ u32 largest[2][BLOCK / WARP];
  const long long feature = static_cast<long long>(blockIdx.x) * BLOCK + threadIdx.x, projection = blockIdx.z;
  const bool valid = feature < size;
  const u8* mine = exponents + (projection * size + feature) * groups;
#pragma unroll 1
  for (int i = 0; i < BLOCKS; ++i) {
    const long long k_block = static_cast<long long>(blockIdx.y) * BLOCKS + i;
    if (k_block >= k_blocks) break;
    u32 word = 0;
    if (groups % 4 == 0) {
      if (valid) word = reinterpret_cast<const u32*>(mine)[k_block];
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (valid && 4 * k_block + j < groups) word |= u32{mine[4 * k_block + j]} << 8 * j;
      }
    }
    const u32 not_number = __vcmpeq4(word, 0xFFFFFFFF), numbers = word & ~not_number;
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) most = max(most, numbers >> 8 * j & 0xFF);
    most = __reduce_max_sync(0xFFFFFFFF, most);
    if (threadIdx.x % WARP == 0) largest[i % 2][threadIdx.x / WARP] = most;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < BLOCK / WARP; ++warp) most = max(most, largest[i % 2][warp]);
    u32* row = arranged + (projection * k_blocks + k_block) * words;
    if (valid) row[feature] = __vminu4(most * 0x01010101 - numbers, 0x1E1E1E1E) << 3 | not_number & 0xF8F8F8F8;
    if (threadIdx.x == 0) row[size + blockIdx.x] = most;
    const long long behind = size + gridDim.x + threadIdx.x;
    if (blockIdx.x == gridDim.x - 1 && behind < words) row[behind] = 0;
  }
}
