// What the parts of the GEMM share: the shape of a tile, its layout in shared memory, the ring of stages.
//
// Compile-time constants come from kernels/gemm_source.py: the weights' N and K, GROUPS of them (0: one matrix, and all
// rows belong to it), the tile, and SWIGLU (0: none, 1: plain, 2: clamped, 3: clamped with alpha).
#pragma once

#include "ring.cuh"
#include "tiles.cuh"

constexpr int TILE_K = 128;
constexpr int K_BLOCKS = ceil_div(K, TILE_K);

constexpr int ROWS = SWAP ? BLOCK_N : BLOCK_M;                            // the 64-row side of wgmma
constexpr int COLUMNS = SWAP ? BLOCK_M : BLOCK_N == 256 ? 128 : BLOCK_N;  // of one wgmma
constexpr int COLUMN_SLABS = SWAP ? 1 : BLOCK_N / COLUMNS;
constexpr int WAVES = ROWS / 64 * COLUMN_SLABS / WARPGROUPS;  // 64 x COLUMNS slabs of one warpgroup
constexpr int ACCUMULATORS = COLUMNS / 2;                     // registers of one slab
constexpr int MATH_WARPS = 4 * WARPGROUPS;
constexpr int THREADS = WARPGROUP * (WARPGROUPS + 1);

// Rows of weight scales. SwiGLU: those of the gate projection, then those of the up projection, each with its own ceil.
constexpr int INTERMEDIATE = N / 2;
constexpr int PROJECTION_SCALE_ROWS = ceil_div(INTERMEDIATE, 128);
constexpr int SCALE_ROWS = SWIGLU ? 2 * PROJECTION_SCALE_ROWS : ceil_div(N, 128);

// Every GRANULE columns of b, from the start of a tile, share one weight scale.
constexpr int GRANULE = (BLOCK_N & -BLOCK_N) < 128 ? (BLOCK_N & -BLOCK_N) : 128;
constexpr int TILE_SCALE_ROWS = (128 - GRANULE + BLOCK_N - 1) / 128 + 1;  // of weight scales that a tile can touch

constexpr bool REDUCE = SWAP || SPLIT_K > 1;  // the epilogue goes through the reduction buffer

// Shared memory. Tiles come first: a 128-byte swizzle wants them 1024-byte aligned.
constexpr int A_BYTES = BLOCK_M * TILE_K;
constexpr int B_BYTES = BLOCK_N * TILE_K;
// TMA loads floats from multiples of 16 bytes on, and a group may begin at any row: up to three more come in front.
constexpr int A_SCALE_BOX = (BLOCK_M < 128 ? BLOCK_M : 128) + (GROUPS ? 4 : 0);
constexpr int A_SCALE_LOADS = ceil_div(BLOCK_M, 128);
constexpr int A_SCALE_BYTES = A_SCALE_LOADS * A_SCALE_BOX * 4;
constexpr int STAGE_TX = A_BYTES + B_BYTES + A_SCALE_BYTES;
constexpr int A_SCALE_PITCH = round_up((BLOCK_M + (GROUPS ? 4 : 0)) * 4, 128);

constexpr int SLICE_M = ceil_div(BLOCK_M, SPLIT_K);  // tokens that one block of a split sums and stores
constexpr int SUM_PITCH = BLOCK_N + (SWAP ? 4 : 8);  // floats; keeps the scattered writes off each other's banks

// A bfloat16 tile leaves through staging tiles of 64 columns: a whole slab by TMA, under the next tile's products, or,
// where its rows or columns do not allow that, 16 rows at a time. An E4M3 tile is 128 columns wide: rows as long.
constexpr int STORE_COLUMNS = 64;
constexpr int STORE_BYTES = 16 * STORE_COLUMNS * 2;  // 16 rows
constexpr bool TMA_STORE = STAGED && !OUT_FLOAT32;
constexpr int SLAB_STORE_BYTES = STAGED ? 64 * COLUMNS * 2 : 4 * STORE_BYTES;
constexpr int STAGING_BYTES = (STAGED ? WAVES : 1) * SLAB_STORE_BYTES;  // of a warpgroup

constexpr int A_OFFSET = 0;
constexpr int B_OFFSET = A_OFFSET + STAGES * A_BYTES;
constexpr int EPILOGUE_OFFSET = B_OFFSET + STAGES * B_BYTES;
constexpr int EPILOGUE_BYTES = round_up(REDUCE ? SPLIT_K * SLICE_M * SUM_PITCH * 4 : WARPGROUPS * STAGING_BYTES, 128);
constexpr int A_SCALE_OFFSET = EPILOGUE_OFFSET + EPILOGUE_BYTES;
constexpr int FULL_OFFSET = A_SCALE_OFFSET + STAGES * A_SCALE_PITCH;
constexpr int EMPTY_OFFSET = FULL_OFFSET + STAGES * 8;
constexpr int SUMS_OFFSET = EMPTY_OFFSET + STAGES * 8;
constexpr int TABLE_OFFSET = SUMS_OFFSET + 8;
constexpr int SHARED_BYTES = TABLE_OFFSET + (GROUPS ? (3 * GROUPS + 1) * 4 : 0);

static_assert(SHARED_BYTES + 1024 <= SHARED_LIMIT, "gemm_config.py and this file disagree about shared memory");
static_assert(SPLIT_K == 1 || BLOCK_M * (BLOCK_N + 8) * 4 <= STAGES * (A_BYTES + B_BYTES),
              "a partial tile takes the place of the ring");
static_assert(ROWS % (64 * WARPGROUPS) == 0 && COLUMNS <= 256);
static_assert(COLUMNS % (SWAP ? 8 : 16) == 0, "stmatrix stores 16 columns at a time");
static_assert(SPLIT_K <= K_BLOCKS && (SPLIT_K == 1 || COLUMN_SLABS == 1));
static_assert(COLUMN_SLABS == 1 || COLUMN_SLABS == WAVES);
static_assert(!STAGED || (!REDUCE && COLUMNS % STORE_COLUMNS == 0));
static_assert(!SWIGLU || (BLOCK_N == 256 && GROUPS > 0 && !STAGED && (SWAP || SPLIT_K == 1)),
              "a tile is a quantization block of 128 columns, gate and up");

// First row and column, within the tile, of slab `wave` of a warpgroup. Weights are taken in turns, so that slabs of one
// wave share a weight scale; tokens are not, which is faster.
__device__ __forceinline__ constexpr int slab_row(int group, int wave) {
  if (COLUMN_SLABS > 1) return group * 64;
  return (SWAP ? wave * WARPGROUPS + group : group * WAVES + wave) * 64;
}
__device__ __forceinline__ constexpr int slab_column(int wave) { return COLUMN_SLABS == 1 ? 0 : wave * COLUMNS; }
