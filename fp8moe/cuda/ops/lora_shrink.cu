// Multiplies rows by the LoRA factor A of their group (A x in arXiv:2106.09685; "shrink" in Punica, arXiv:2310.18547):
// out[row] = factors[e] @ x[token of row] for each row of group e.
//
// Several thread blocks share ROWS rows: they take the groups of these rows in turns, and each computes RANKS ranks.
// The warps of a block divide K. In one step a lane loads 16 bytes of each of its rows and factors, so a step is 32
// values along K. Finally the block adds up the sums of its warps.
//
// Compile-time constants: RANK (a multiple of RANKS); RANKS = 16 (of a thread block); GATHERED (`tokens` says which row
// of x each row uses); ROWS (a multiple of 16); WARPS, BLOCKS_PER_SM.
#include "vector.cuh"
#include "warp.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int TILES = ROWS / 16;  // tiles of 16 rows
constexpr int LOADED = 8;         // values that a lane loads at once
constexpr int STEP = 4 * LOADED;  // along K, per warp
constexpr int PITCH = RANKS + 4;  // floats from one row of sums to the next: 16-byte aligned, in different banks
static_assert(RANKS == 16 && RANK % RANKS == 0 && ROWS % 16 == 0);

struct Operands {
  const u16* x;        // (rows or tokens, k) bfloat16, k a multiple of 8
  const u16* factors;  // (num_groups, RANK, k) bfloat16
  const int* groups;   // (num_groups + 1), start of each group, ascending
  const int* tokens;   // (rows), the row of x for each row, if GATHERED
  u16* out;            // (rows, RANK) bfloat16, written
};

struct Sizes {
  int k, rows, num_groups;
};

// A warp's sums of 16 rows and RANKS ranks, in the layout of mma_bfloat16().
using Sums = float[RANKS / 8][4];

// Adds one step along K. upper, lower: the lane's values of its two rows; factors: its values of the factors.
__device__ __forceinline__ void multiply(Sums& sums, const Bytes16& upper, const Bytes16& lower,
                                         const Bytes16 (&factors)[RANKS / 8]) {
#pragma unroll
  for (int half = 0; half < 4; half += 2) {
#pragma unroll
    for (int j = 0; j < RANKS / 8; ++j) {
      mma_bfloat16(sums[j], make_uint2(upper.words[half], upper.words[half + 1]),
                   make_uint2(lower.words[half], lower.words[half + 1]),
                   make_uint2(factors[j].words[half], factors[j].words[half + 1]));
    }
  }
}

// For each of a lane's rows (every eighth row of the block): the row of x; negative if there is none.
using Places = int[2 * TILES];

__device__ __forceinline__ void find_places(const Operands& o, Places& places, int first, int last) {
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    const int row = first + 8 * i + lane_id() / 4;
    places[i] = row < last ? (GATHERED ? o.tokens[row] : row) : -1;
  }
}

// Computes rows `begin` to `end`, which all belong to group e. `first`: the first of the block's ROWS rows.
__device__ void shrink(const Operands& o, const Sizes& sizes, float (&shared)[WARPS][ROWS][PITCH], const Places& places,
                       int first, int begin, int end, int e) {
  const int lane = lane_id(), warp = threadIdx.x / WARP, rank = blockIdx.y * RANKS;
  const int width = sizes.k;
  u32 there = 0;  // bit i: whether the lane's i-th row is in the range
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    const int row = first + 8 * i + lane / 4;
    there |= static_cast<u32>(row >= begin && row < end && places[i] >= 0) << i;
  }
  const u16* factors = o.factors + (i64{e} * RANK + rank + lane / 4) * width;
  Sums sums[TILES] = {};
#pragma unroll 1
  for (int base = warp * STEP; base < width; base += WARPS * STEP) {
    const int k = base + lane % 4 * LOADED;
    const auto load = [&](const u16* row, bool there) { return there && k < width ? load_16(row + k) : Bytes16{}; };
    Bytes16 values[TILES][2], columns[RANKS / 8];
#pragma unroll
    for (int j = 0; j < RANKS / 8; ++j) columns[j] = load(factors + i64{8} * j * width, true);
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) values[i / 2][i % 2] = load(o.x + i64{places[i]} * width, there >> i & 1);
#pragma unroll
    for (int t = 0; t < TILES; ++t) multiply(sums[t], values[t][0], values[t][1], columns);
  }

#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int j = 0; j < RANKS / 8; ++j) {
      float* target = &shared[warp][16 * t + lane / 4][8 * j + 2 * (lane % 4)];
      *reinterpret_cast<float2*>(target) = make_float2(sums[t][j][0], sums[t][j][1]);
      *reinterpret_cast<float2*>(target + 8 * PITCH) = make_float2(sums[t][j][2], sums[t][j][3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * RANKS / 4; i += THREADS) {
    const int within = i / (RANKS / 4), column = i % (RANKS / 4) * 4, row = first + within;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float4 v = *reinterpret_cast<const float4*>(&shared[w][within][column]);
      total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
    }
    if (row < begin || row >= end) continue;
    *reinterpret_cast<uint2*>(o.out + i64{row} * RANK + rank + column) =
        make_uint2(pack_bfloat16(total.x, total.y), pack_bfloat16(total.z, total.w));
  }
  __syncthreads();  // before the next group overwrites the sums
}

// Grid: ceil(rows / ROWS) x RANK / RANKS x the number of blocks that share the groups of these rows.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    lora_shrink(const Operands operands, const Sizes sizes) {
  __shared__ __align__(16) float shared[WARPS][ROWS][PITCH];
  __shared__ int groups_before;
  const int num_groups = sizes.num_groups, first = blockIdx.x * ROWS, last = min(first + ROWS, sizes.rows);
  if (threadIdx.x == 0) groups_before = 0;
  Places places;  // loaded concurrently with the groups
  find_places(operands, places, first, last);
  int before = 0;
  for (int e = threadIdx.x; e < num_groups; e += THREADS) before += operands.groups[e + 1] <= first;
  before = __reduce_add_sync(FULL_WARP, before);
  __syncthreads();
  if (lane_id() == 0) atomicAdd(&groups_before, before);
  __syncthreads();
#pragma unroll 1
  for (int e = groups_before + blockIdx.z; e < num_groups; e += gridDim.z) {
    const int begin = operands.groups[e], end = operands.groups[e + 1];
    if (begin >= last) break;
    if (begin < end) shrink(operands, sizes, shared, places, first, max(begin, first), min(end, last), e);
  }
}
