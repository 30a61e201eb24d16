// The tile of the GEMM and its layout in shared memory.
//
// More constants from kernels/gemm/source.py:
//   K, GROUPS                  the weights' K, and the number of weight matrices; 0: one matrix for all rows
//   SWAP, SPLIT_K, PARTS, PART_REGISTERS, STAGED, HALVES, BLOCKS_PER_SM, OVERLAPS    properties of the tile
//   COLUMNS, A_SCALE_BOX       columns of one wgmma; token scales of one load
//   FIRST_STAGES               stages that are loaded before everything else
//   GATED                      the weights are the gate projection followed by the up projection
//   DYNAMIC                    blocks take their tiles from a counter, see below
//   GATHERS                    rows of a group are tokens of a in any order, see below
//   PRODUCTS                   products that a math warp starts before it waits, if registers hold weights
//   PACKED, GROUP, FLOAT32_SCALES
//                              weights in four bits: their format, the values along K that share a scale, and
//                              whether scales of INT4 are float32
//   CHANNEL, BIAS              a weight scale, a bias for each output feature; BIAS = 0: none, 1: bfloat16, 2: float32
//   OUT_FLOAT32, SWIGLU_FORM   properties of the epilogue
#pragma once

#include "gemm_block.cuh"

constexpr int K_BLOCKS = ceil_div(K, BLOCK_K);
// Weights in four bits become E4M3 in registers if they are the 64-row side (gemm_packed.cuh), otherwise in their
// stage, before math warps get it (gemm_unpack.cuh).
enum Packing : int { NOT_PACKED, MXFP4, INT4, NVFP4 };
constexpr bool E2M1 = PACKED == MXFP4 || PACKED == NVFP4;
constexpr bool UNPACKS = E2M1 && !SWAP;
constexpr int UNPACK_WARPS = 3;                    // the others of the loader's warpgroup
constexpr int DEPTH = PACKED > 0 && SWAP ? 2 : 1;  // K blocks in a stage
constexpr int WEIGHT_BYTES = UNPACKS ? 64 : 128;   // bytes of an output feature that are loaded into a stage

constexpr int ROWS = SWAP ? BLOCK_N : BLOCK_M;  // the side of wgmma that is a multiple of 64 rows
constexpr int COLUMN_SLABS = SWAP ? 1 : BLOCK_N / COLUMNS;
constexpr int SLABS = ROWS / 64 * COLUMN_SLABS / WARPGROUPS;  // slabs of 64 x COLUMNS, per warpgroup
constexpr int ACCUMULATORS = COLUMNS / 2;                     // registers of one slab

// A group may end within a tile. Then tokens are loaded in pieces of 64 rows, and slabs without tokens are skipped.
constexpr bool PARTIAL = GROUPS > 0 && !SWAP;
constexpr int A_PIECE_BYTES = 64 * BLOCK_K;

// DYNAMIC: the first tile of a block is given by the block's index. The block takes each further tile from a counter in
// global memory, shortly before the tile begins: so tiles that share weights begin at almost the same time, and find
// the weights in L2. At stage ASKED of a tile the loader asks for the next tile; at stage ANNOUNCED it announces that
// tile to the math warps.
constexpr int ANNOUNCED = K_BLOCKS - 4, ASKED = ANNOUNCED - 3;

// GATHERS: `a` has at most GATHERED_TOKENS tokens, not in the order of groups; row i of the result is that of token
// token_of_row[i]. TMA loads a tile's tokens one by one, each to its row of the tile: its swizzle, like that of wgmma,
// permutes the 16-byte chunks of a 128-byte row by the bits of the shared memory address above them, so a box of one
// row lands where it would as a row of a larger box. The scales of all tokens are loaded. The previous kernel writes
// groups and rows, so everything but the setup of the block waits for it.
constexpr int GATHERED_TOKENS = 4, GATHERED_ROWS = 128;
static_assert(!GATHERS || (SWAP && GROUPS > 0));

// HALVES: tiles of 128x256 may be halved; with groups, they may also be upright (see TileShape below). An upright tile
// is 192x128: its last 64 tokens are stored where a whole tile stores its second 128 rows of weights.
constexpr bool UPRIGHTS = HALVES && PARTIAL;
constexpr int HALF_N = BLOCK_N / 2;

// Stages that the loop of the math warps is unrolled by. Small tiles are bound by memory latency, including that of
// fetching code, so their code is kept short.
constexpr int UNROLLED_STAGES = SWAP || SPLIT_K > 1 || BLOCKS_PER_SM > 1 ? 1 : 4;

// Rows of weight scales. GATED: the rows of the gate projection, then those of the up projection; each number of rows
// is rounded up separately.
constexpr int INTERMEDIATE = N / 2;
constexpr int PROJECTION_SCALE_ROWS = ceil_div(INTERMEDIATE, 128);
constexpr int SCALE_ROWS = GATED ? 2 * PROJECTION_SCALE_ROWS : ceil_div(N, 128);

// Within a tile, the weight scale changes only at columns that are multiples of GRANULE.
constexpr int GRANULE = (BLOCK_N & -BLOCK_N) < 128 ? (BLOCK_N & -BLOCK_N) : 128;

// E2M1: a row of arranged scales (quant/arranged.py): words of each feature of a projection, then one for each row of
// its weight scales, and what the kernel does not read.
constexpr int PROJECTIONS = GATED ? 2 : 1;
constexpr int FEATURE_WORDS = PACKED == NVFP4 ? 2 : 1;
constexpr int ARRANGED_WORDS = PACKED == NVFP4 ? round_up((2 * N + 2 * SCALE_ROWS) / PROJECTIONS + 1, 4)
                                               : round_up((N + SCALE_ROWS) / PROJECTIONS, 4);

constexpr int TILE_SCALE_ROWS = (128 - GRANULE + BLOCK_N - 1) / 128 + 1;  // rows of weight scales that a tile can touch

constexpr bool REDUCES = SWAP || SPLIT_K > 1;  // sums reach the epilogue through shared memory

constexpr int A_BLOCK_BYTES = BLOCK_M * BLOCK_K, A_BYTES = DEPTH * A_BLOCK_BYTES;
constexpr int B_BYTES = BLOCK_N * 128;
constexpr int A_SCALE_LOADS = ceil_div(BLOCK_M, 128), A_SCALE_STEP = BLOCK_M / A_SCALE_LOADS;
constexpr int A_SCALE_BYTES = A_SCALE_LOADS * A_SCALE_BOX * 4;  // bytes per stage; an upright tile loads twice as many
constexpr int A_SCALE_PITCH = round_up(((UPRIGHTS ? 2 * BLOCK_M : BLOCK_M) + (GROUPS ? 4 : 0)) * 4, 128) / 4;

// E2M1: how far the scales of a feature are below its weight scale, one byte each. They come with the codes, behind the
// token scales. GATED: the gate projection's, then the up projection's.
constexpr int BELOW_WORDS = E2M1 ? DEPTH * BLOCK_N * FEATURE_WORDS : 0;

constexpr int SLICE_M = ceil_div(BLOCK_M, SPLIT_K);  // tokens that each block of a split sums and stores
constexpr int SUM_PITCH = BLOCK_N + (SWAP ? 4 : 8);  // in floats; padded, so that scattered writes avoid bank conflicts

// Results go from registers to global memory through staging tiles whose rows are 128 bytes: 16 rows of a warp at a
// time or, with STAGED, a whole slab at once, which TMA writes during the products of the next tile.
constexpr int STORE_COLUMNS = 64;  // columns of bfloat16
constexpr int STORE_BYTES = 16 * 128;
constexpr int SLAB_STORE_BYTES = STAGED ? 64 * COLUMNS * 2 : 4 * STORE_BYTES;
constexpr int STAGING_BYTES = (STAGED ? SLABS : 1) * SLAB_STORE_BYTES;  // per warpgroup
constexpr int PART_SUM_BYTES = PARTS > 1 ? BLOCK_M * BLOCK_N * 4 - PART_REGISTERS * WARPGROUPS * WARPGROUP * 4 : 0;
constexpr int COLUMNS_AT =
    round_up(REDUCES ? SPLIT_K * SLICE_M * SUM_PITCH * 4 : WARPGROUPS * STAGING_BYTES, 128) + PART_SUM_BYTES;

// Scales and biases of a tile's output features, double-buffered: see Columns.
constexpr bool COLUMN_VALUES = CHANNEL || BIAS;
constexpr int SCALE_BYTES = CHANNEL ? 4 : 0, BIAS_BYTES = 2 * BIAS;  // of a feature
constexpr int COLUMN_BYTES = REDUCES ? 0 : BLOCK_N * (SCALE_BYTES + BIAS_BYTES);
constexpr int EPILOGUE_BYTES = COLUMNS_AT + 2 * COLUMN_BYTES;

// The shapes of tiles. With HALVES, a tile of 128x256 is WHOLE or one of these:
//   HALVED    128x128: used in the last wave if its whole tiles would occupy at most half of the blocks
//   UPRIGHT   192x128: two upright tiles replace the last two tiles of a group, in 256 columns, if the last tile has at
//             most 64 rows; together they load a tenth less
enum TileShape : int { WHOLE, HALVED, UPRIGHT };

struct alignas(8) Tile {
  int m, n;   // first token and first output feature
  int end;    // end of the group's tokens
  int group;  // the group whose weights to use
  int shape;  // a TileShape

  __device__ __forceinline__ bool halved() const { return HALVES && shape == HALVED; }
  __device__ __forceinline__ bool upright() const { return UPRIGHTS && shape == UPRIGHT; }
  __device__ __forceinline__ int columns() const { return HALVES && shape != WHOLE ? HALF_N : BLOCK_N; }

  // Half `which` (0 or 1) of the tile: its first or last 128 columns. Of an upright tile: its first 128 rows, or the
  // 64 rows after them.
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

// GATHERS: the token of each row.
template <bool Gathers>
struct TokensOfRows {
  u8 token_of_row[GATHERED_ROWS];
};
template <>
struct TokensOfRows<false> {};

// For each group: its rows, from `first` to `end`, and the number of tile rows before it. The total number of tile rows
// is at index [Groups]. DYNAMIC: announced[stage] is the tile that follows the one of that stage (see ANNOUNCED); its
// group is -1 if no tile is left.
template <int Groups>
struct GroupTable : TokensOfRows<GATHERS> {
  int tile_rows_before[Groups + 1], first[Groups], end[Groups];
  Tile announced[PARTIAL ? STAGES : 1];

  __device__ __forceinline__ Tile& next(u32 stage) { return announced[stage]; }
};
template <>
struct GroupTable<0> {
  __device__ Tile& next(u32) { __builtin_unreachable(); }
};

// What E2M1 needs besides. scaled: the eight magnitudes of E2M1 in E4M3, one byte each, at index i times 2^(6 - i);
// NVFP4: times 2^(5 - i / 8) and the mantissa 1 + i % 8 / 8, or 0 at index 254. The last entry is NaN.
constexpr int ENTRIES = PACKED == NVFP4 ? 256 : 32;
template <bool Table, bool Unpacks>
struct PackedShared {
  u64 scaled[round_up(ENTRIES, SWIZZLE_ALIGNMENT / 8)];
};
template <>
struct PackedShared<false, false> {};
template <>
struct PackedShared<true, true> {
  u64 scaled[ENTRIES];
  Barrier codes[STAGES];  // completed when codes have arrived, as ring.full is when they are unpacked
  u8 padding[SWIZZLE_ALIGNMENT - (sizeof(scaled) + sizeof(codes)) % SWIZZLE_ALIGNMENT];
};

struct Shared : PackedShared<E2M1, UNPACKS> {
  u8 a[STAGES][A_BYTES];
  u8 b[STAGES][B_BYTES];
  u8 epilogue[EPILOGUE_BYTES];  // staging tiles, sums of parts, Columns; or the tile's own or received sums
  float a_scale[STAGES][DEPTH * A_SCALE_PITCH + BELOW_WORDS];
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
static_assert(!PACKED || (!CHANNEL && K % GROUP == 0));
static_assert(!UNPACKS || (!HALVES && PARTS == 1 && SPLIT_K == 1 && K_BLOCKS >= 4 && BLOCK_N % 128 == 0));
static_assert(PARTS == 1 || (!REDUCES && GROUPS == 0 && PARTS <= K_BLOCKS && PART_REGISTERS % 4 == 0));
static_assert(!GATED || (BLOCK_N == 256 && GROUPS > 0 && (SWAP || SPLIT_K == 1)));
static_assert(!HALVES || (BLOCK_M == 128 && BLOCK_N == 256 && WARPGROUPS == 2 && !REDUCES && !GATED && PARTS == 1));

// EVEN: the warpgroups of a partial tile have numbers of slabs that differ by at most one.
constexpr bool EVEN = PARTIAL && !GATED && SLABS == 2 && COLUMN_SLABS == 1;

// The first row and column of a warpgroup's slab within a whole tile. SWAP: warpgroups take slabs in turns, so that the
// two slabs that are multiplied at the same time share a weight scale. EVEN: they take turns too, to share the rows of
// a partial tile evenly. Otherwise each warpgroup has consecutive slabs, which is faster.
__device__ __forceinline__ constexpr int slab_row(int warpgroup, int slab) {
  if (COLUMN_SLABS > 1) return warpgroup * 64;
  return (SWAP || EVEN ? slab * WARPGROUPS + warpgroup : warpgroup * SLABS + slab) * 64;
}
__device__ __forceinline__ constexpr int slab_column(int slab) { return COLUMN_SLABS == 1 ? 0 : slab * COLUMNS; }
