// Shared by the kernels gemm and gemm_k: the roles of a block, the order of its tiles, and one product.
//
// kernels/gemm/source.py defines the constants of both kernels: N, BLOCK_M, BLOCK_N, WARPGROUPS, STAGES, SHARED_BYTES,
// ARGUMENTS_BYTES, MATH_REGISTERS, PRODUCER_REGISTERS. It also generates wgmma() for the tile's width.
#pragma once

#include "pipeline.cuh"

constexpr int BLOCK_K = 128;  // depth of a tile along K: one quantization block
constexpr int MATH_WARPS = 4 * WARPGROUPS;
constexpr int THREADS = WARPGROUP * (WARPGROUPS + 1);  // the last warpgroup is the loader
constexpr int TILE_COLUMNS = ceil_div(N, BLOCK_N);

// The position of tile `index` in a grid of `rows` x TILE_COLUMNS tiles. Indices walk bands of `raster` tile rows,
// column by column within a band. So tiles that run concurrently share few rows of a and b, and L2 serves most loads.
struct RasterPosition {
  int row, column;

  __device__ __forceinline__ RasterPosition(int index, int rows, int raster) {
    const int first = raster >= rows ? 0 : index / (raster * TILE_COLUMNS) * raster;
    const int height = min(raster, rows - first);
    const int within = index - first * TILE_COLUMNS;
    column = height == 1 ? within : within / height;
    row = first + within - column * height;
  }
};

// The distance from one row of a tile to the next, in the units of wgmma descriptors (16 bytes).
constexpr int ROW_STEP = BLOCK_K / 16;

// Starts the product of a 64-row slab over one block of K, given descriptors of both tiles. wgmma_wait() completes it.
template <int Accumulators, typename Descriptor>
__device__ __forceinline__ void start_product(float (&partial)[Accumulators], Descriptor rows, Descriptor columns) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK_K / 32; ++k) wgmma(partial, rows + 2 * k, columns + 2 * k, k > 0);
  wgmma_commit();
}

// Calls multiply(i) for `count` stages, with `Unrolled` calls in the loop's body. A backward branch costs some 70
// cycles, during which the tensor cores run dry; a forward branch that is not taken costs nothing
// (docs/findings/pause-between-products.md).
template <int Unrolled, typename Multiply>
__device__ __forceinline__ void multiply_stages(int count, const Multiply& multiply) {
  int i = 0;
#pragma unroll 1
  while (i < count) {
#pragma unroll
    for (int j = 0; j < Unrolled; ++j) {
      multiply(i);
      if (++i == count) break;
    }
  }
}
