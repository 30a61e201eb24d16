// The tile of the GEMM and its place in shared memory.
//
// Further constants from kernels/gemm/source.py: the weights' K; GROUPS of them (0: one matrix, and all rows belong to
// it); SWAP, SPLIT_K, PARTS, PART_REGISTERS, STAGED, HALVES, BLOCKS_PER_SM, OVERLAPS of the tile, COLUMNS of one wgmma,
// A_SCALE_BOX (token scales of one load); FIRST_STAGES that are loaded before all else; GATED (the weights are those of
// gate, then those of up); DYNAMIC; CHANNEL (a weight scale for each output feature); BIAS (of each of these; 0: none,
// 1: bfloat16, 2: float32); OUT_FLOAT32 and SWIGLU_FORM of the epilogue.
#pragma once

#include "gemm_block.cuh"

constexpr int K_BLOCKS = ceil_div(K, BLOCK_K);

constexpr int ROWS = SWAP ? BLOCK_N : BLOCK_M;  // the 64-row side of wgmma
constexpr int COLUMN_SLABS = SWAP ? 1 : BLOCK_N / COLUMNS;
constexpr int SLABS = ROWS / 64 * COLUMN_SLABS / WARPGROUPS;  // of 64 x COLUMNS, of one warpgroup
constexpr int ACCUMULATORS = COLUMNS / 2;                     // registers of one slab

// A group may end within a tile: then tokens are loaded 64 rows at a time, and slabs without tokens are left out.
constexpr bool PARTIAL = GROUPS > 0 && !SWAP;
constexpr int A_PIECE_BYTES = 64 * BLOCK_K;

// DYNAMIC: a block takes its first tile by its own number, and each further tile from a counter in memory shortly
// before it begins: tiles that share weights then begin at almost the same time, so that L2 has the weights. The loader
// asks for the next tile at stage ASKED of a tile, and announces it to the math warps with stage ANNOUNCED.
constexpr int ANNOUNCED = K_BLOCKS - 4, ASKED = ANNOUNCED - 3;

// HALVES: tiles of 128x256 may be halved, and those of groups upright (TileShape, below). An upright tile
// is 192x128: its last 64 tokens lie where a whole tile has the other 128 rows of weights.
constexpr bool UPRIGHTS = HALVES && PARTIAL;
constexpr int HALF_N = BLOCK_N / 2;

// Stages of one turn of the math warps' loop. Small tiles wait for memory, also for their code, which is kept short.
constexpr int UNROLLED_STAGES = SWAP || SPLIT_K > 1 || BLOCKS_PER_SM > 1 ? 1 : 4;

// Rows of weight scales. GATED: those of the gate projection, then those of the up projection, each with its own ceil.
constexpr int INTERMEDIATE = N / 2;
constexpr int PROJECTION_SCALE_ROWS = ceil_div(INTERMEDIATE, 128);
constexpr int SCALE_ROWS = GATED ? 2 * PROJECTION_SCALE_ROWS : ceil_div(N, 128);

// Every GRANULE columns of b, from the start of a tile, share one weight scale.
constexpr int GRANULE = (BLOCK_N & -BLOCK_N) < 128 ? (BLOCK_N & -BLOCK_N) : 128;
constexpr int TILE_SCALE_ROWS = (128 - GRANULE + BLOCK_N - 1) / 128 + 1;  // of weight scales that a tile can touch

constexpr bool REDUCES = SWAP || SPLIT_K > 1;  // the sums reach the epilogue through shared memory

constexpr int A_BYTES = BLOCK_M * BLOCK_K;
constexpr int B_BYTES = BLOCK_N * BLOCK_K;
constexpr int A_SCALE_LOADS = ceil_div(BLOCK_M, 128), A_SCALE_STEP = BLOCK_M / A_SCALE_LOADS;
constexpr int A_SCALE_BYTES = A_SCALE_LOADS * A_SCALE_BOX * 4;  // that arrive; an upright tile has twice as many
constexpr int A_SCALE_PITCH = round_up(((UPRIGHTS ? 2 * BLOCK_M : BLOCK_M) + (GROUPS ? 4 : 0)) * 4, 128) / 4;

constexpr int SLICE_M = ceil_div(BLOCK_M, SPLIT_K);  // tokens that one block of a split sums and stores
constexpr int SUM_PITCH = BLOCK_N + (SWAP ? 4 : 8);  // floats; keeps the scattered writes off each other's banks

// A tile leaves the registers through staging tiles with rows of 128 bytes: 16 rows of a warp at a time, or, where it
// is STAGED, a whole slab that TMA writes under the next tile's products.
constexpr int STORE_COLUMNS = 64;  // of bfloat16
constexpr int STORE_BYTES = 16 * 128;
constexpr int SLAB_STORE_BYTES = STAGED ? 64 * COLUMNS * 2 : 4 * STORE_BYTES;
constexpr int STAGING_BYTES = (STAGED ? SLABS : 1) * SLAB_STORE_BYTES;  // of a warpgroup
constexpr int PART_SUM_BYTES = PARTS > 1 ? BLOCK_M * BLOCK_N * 4 - PART_REGISTERS * WARPGROUPS * WARPGROUP * 4 : 0;
constexpr int COLUMNS_AT =
    round_up(REDUCES ? SPLIT_K * SLICE_M * SUM_PITCH * 4 : WARPGROUPS * STAGING_BYTES, 128) + PART_SUM_BYTES;

// Scales and biases of a tile's features: those of two tiles, see Columns.
constexpr bool COLUMN_VALUES = CHANNEL || BIAS;
constexpr int SCALE_BYTES = CHANNEL ? 4 : 0, BIAS_BYTES = 2 * BIAS;  // of a feature
constexpr int COLUMN_BYTES = REDUCES ? 0 : BLOCK_N * (SCALE_BYTES + BIAS_BYTES);
constexpr int EPILOGUE_BYTES = COLUMNS_AT + 2 * COLUMN_BYTES;

// With HALVES, tiles of 128x256 are WHOLE or
//   HALVED    128x128: both halves of a tile where the last wave would fill no more than half of the blocks
//   UPRIGHT   192x128: two of these replace a group's last two tiles in 256 columns if the last tile has at most 64
//             rows; they load a tenth less
enum TileShape : int { WHOLE, HALVED, UPRIGHT };

struct alignas(8) Tile {
  int m, n;   // first token and first output feature
  int end;    // end of the group's tokens
  int group;  // whose weights
  int shape;  // a TileShape

  __device__ __forceinline__ bool halved() const { return HALVES && shape == HALVED; }
  __device__ __forceinline__ bool upright() const { return UPRIGHTS && shape == UPRIGHT; }
  __device__ __forceinline__ int columns() const { return HALVES && shape != WHOLE ? HALF_N : BLOCK_N; }

  // Half 0 or 1: the tile's first or last 128 columns; of an upright tile its first 128 rows or the 64 behind them.
  __device__ __forceinline__ Tile half(int which) const {
    Tile tile = {m, n, end, group, HALVED};
    if (upright()) {
      tile.m += which * BLOCK_M;
      tile.end = min(end, tile.m + BLOCK_M);
    } else {
      tile.n += which * HALF_N;
    }
    return tile;
  }
};

// The groups' rows, from `first` to `end`, and the tile rows before each group, with their total at [Groups]. DYNAMIC:
// the tile after the current stage's tile, see ANNOUNCED; its group is -1 if there is none.
template <int Groups>
struct GroupTable {
  int tile_rows_before[Groups + 1], first[Groups], end[Groups];
  Tile announced[PARTIAL ? STAGES : 1];

  __device__ __forceinline__ Tile& next(u32 stage) { return announced[stage]; }
};
template <>
struct GroupTable<0> {
  __device__ Tile& next(u32) { __builtin_unreachable(); }
};

struct Shared {
  u8 a[STAGES][A_BYTES];
  u8 b[STAGES][B_BYTES];
  u8 epilogue[EPILOGUE_BYTES];  // staging tiles, sums of parts and Columns; or sums: of the tile, or received
  float a_scale[STAGES][A_SCALE_PITCH];
  Ring<STAGES> ring;
  Barrier sums;
  GroupTable<GROUPS> groups;
};
static_assert(sizeof(Shared) + SWIZZLE_ALIGNMENT == SHARED_BYTES, "kernels/gemm/sm90.py counts otherwise");
static_assert(A_BYTES % SWIZZLE_ALIGNMENT == 0 && B_BYTES % SWIZZLE_ALIGNMENT == 0,
              "a stage begins a swizzle's period");
static_assert(SPLIT_K == 1 || BLOCK_M * (BLOCK_N + 8) * 4 <= STAGES * (A_BYTES + B_BYTES),
              "a partial tile takes the place of the ring");
static_assert(ROWS % (64 * WARPGROUPS) == 0 && COLUMNS <= 256);
static_assert(COLUMNS % (SWAP ? 8 : 16) == 0, "stmatrix stores 16 columns at a time");
static_assert(SPLIT_K <= K_BLOCKS && (SPLIT_K == 1 || COLUMN_SLABS == 1));
static_assert(COLUMN_SLABS == 1 || COLUMN_SLABS == SLABS);
static_assert(!STAGED || (!REDUCES && COLUMNS % STORE_COLUMNS == 0));
static_assert(!DYNAMIC || (PARTIAL && K_BLOCKS > 8));
static_assert(COLUMN_BYTES == 0 || STAGES <= K_BLOCKS, "a stage of the tile before has been handed back");
static_assert(PARTS == 1 || (!REDUCES && GROUPS == 0 && PARTS <= K_BLOCKS && PART_REGISTERS % 4 == 0));
static_assert(!GATED || (BLOCK_N == 256 && GROUPS > 0 && (SWAP || SPLIT_K == 1)));
static_assert(!HALVES || (BLOCK_M == 128 && BLOCK_N == 256 && WARPGROUPS == 2 && !REDUCES && !GATED && PARTS == 1));

// EVEN: in a partial tile, the warpgroups' numbers of slabs differ by at most one.
constexpr bool EVEN = PARTIAL && !GATED && SLABS == 2 && COLUMN_SLABS == 1;

// First row and column, within a whole tile, of a warpgroup's slab. SWAP: the warpgroups take slabs in turns, so that
// the two that are multiplied at one time share a weight scale. EVEN: likewise, to share the rows of a partial tile.
// Otherwise each has slabs that follow one another, which is faster.
__device__ __forceinline__ constexpr int slab_row(int warpgroup, int slab) {
  if (COLUMN_SLABS > 1) return warpgroup * 64;
  return (SWAP || EVEN ? slab * WARPGROUPS + warpgroup : warpgroup * SLABS + slab) * 64;
}
__device__ __forceinline__ constexpr int slab_column(int slab) { return COLUMN_SLABS == 1 ? 0 : slab * COLUMNS; }
