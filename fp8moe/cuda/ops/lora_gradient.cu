// The gradient of LoRA factors (arXiv:2106.09685): out[e] is the sum, over the rows of group e, of the outer product of
// ranks[row] and the row's input x[token of row], as a (RANK, n) matrix. Zeros for a group without rows.
//
// A thread block computes RANKS x COLUMNS values of one group. It processes the group's rows in stages of ROWS, and
// loads the next stage while it multiplies.
//
// Compile-time constants: RANK (a multiple of RANKS); RANKS = 16 and COLUMNS = 256 (of a thread block; a warp copies a
// row of COLUMNS at once); GATHERED (`tokens` says which row of x each row uses); WARPS.
#include "vector.cuh"
#include "warp.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int ROWS = 32;                    // rows of a stage; one lane looks up each
constexpr int CHUNK = 8;                    // values in 16 bytes
constexpr int TILES = COLUMNS / WARPS / 8;  // tiles of 8 columns per warp
static_assert(RANKS == 16 && RANK % RANKS == 0 && COLUMNS == WARP * CHUNK && TILES % 2 == 0 && ROWS % WARPS == 0);

struct Operands {
  const u16* x;       // (rows or tokens, n) bfloat16, n a multiple of 8
  const u16* ranks;   // (rows, RANK) bfloat16
  const int* groups;  // (num_groups + 1), start of each group, ascending
  const int* tokens;  // (rows), the row of x for each row, if GATHERED
  u16* out;           // (num_groups, RANK, n) bfloat16, written
};

struct Shared {
  u16 x[2][ROWS][COLUMNS];  // chunks are swizzled by row: 8 rows of a column are in different banks
  u16 ranks[2][ROWS][RANKS];
};

// The shared address of chunk `chunk` of a row, swizzled.
__device__ __forceinline__ u32 place(const Shared& s, int stage, int row, int chunk) {
  return shared_address(&s.x[stage][row][(chunk ^ row % 8) * CHUNK]);
}

// Returns to each lane the row of x for row `base` + lane, or -1 past the end.
__device__ __forceinline__ int token_of(const Operands& o, int base, int end) {
  const int row = base + static_cast<int>(lane_id());
  return row < end ? (GATHERED ? o.tokens[row] : row) : -1;
}

// Starts to copy the stage that begins at row `base`. Rows from `end` on become zeros. token: this lane's token_of().
__device__ __forceinline__ void copy(const Operands& o, Shared& s, int stage, int base, int end, int token, i64 n) {
  const int lane = lane_id(), warp = threadIdx.x / WARP;
  const i64 column = i64{blockIdx.x} * COLUMNS + lane * CHUNK;
#pragma unroll
  for (int i = 0; i < ROWS / WARPS; ++i) {
    const int row = i * WARPS + warp, source = __shfl_sync(FULL_WARP, token, row);
    const bool there = source >= 0 && column < n;
    async_copy_16(place(s, stage, row, lane), there ? o.x + source * n + column : o.x, there);
  }
  if (threadIdx.x < ROWS * RANKS / CHUNK) {
    const int row = threadIdx.x / (RANKS / CHUNK), chunk = threadIdx.x % (RANKS / CHUNK) * CHUNK;
    const bool there = base + row < end;
    const u16* source = o.ranks + i64{base + row} * RANK + blockIdx.z * RANKS + chunk;
    async_copy_16(shared_address(&s.ranks[stage][row][chunk]), there ? source : o.ranks, there);
  }
  async_commit();
}

// Adds the products of a stage. The sum runs over rows, so both operands are transposed when loaded.
__device__ __forceinline__ void multiply(const Shared& s, int stage, float (&sums)[TILES][4]) {
  const int lane = lane_id(), warp = threadIdx.x / WARP;
#pragma unroll
  for (int k = 0; k < ROWS; k += 16) {
    u32 ranks[4];
    load_transposed(shared_address(&s.ranks[stage][k + lane % 8 + lane / 16 * 8][lane / 8 % 2 * CHUNK]), ranks);
#pragma unroll
    for (int j = 0; j < TILES; j += 2) {
      u32 x[4];
      load_transposed(place(s, stage, k + lane % 16, warp * TILES + j + lane / 16), x);
      const uint2 upper = make_uint2(ranks[0], ranks[2]), lower = make_uint2(ranks[1], ranks[3]);
      mma_bfloat16(sums[j], upper, lower, make_uint2(x[0], x[1]));
      mma_bfloat16(sums[j + 1], upper, lower, make_uint2(x[2], x[3]));
    }
  }
}

// Grid: ceil(n / COLUMNS) x groups x RANK / RANKS.
extern "C" __global__ void __launch_bounds__(THREADS) lora_gradient(const Operands operands, const i64 n) {
  __shared__ __align__(128) Shared s;
  const int begin = operands.groups[blockIdx.y], end = operands.groups[blockIdx.y + 1];
  float sums[TILES][4] = {};
  int token = token_of(operands, begin, end), stage = 0;
  if (begin < end) copy(operands, s, stage, begin, end, token, n);
  token = token_of(operands, begin + ROWS, end);
#pragma unroll 1
  for (int base = begin; base < end; base += ROWS, stage ^= 1) {
    const bool more = base + ROWS < end;
    if (more) {
      copy(operands, s, stage ^ 1, base + ROWS, end, token, n);
      token = token_of(operands, base + 2 * ROWS, end);
      async_wait<1>();
    } else {
      async_wait<0>();
    }
    __syncthreads();
    multiply(s, stage, sums);
    __syncthreads();
  }

  const int lane = lane_id(), rank = blockIdx.z * RANKS + lane / 4;
  u16* out = operands.out + (i64{blockIdx.y} * RANK + rank) * n;
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    const i64 column = i64{blockIdx.x} * COLUMNS + (threadIdx.x / WARP * TILES + j) * 8 + 2 * (lane % 4);
    if (column >= n) continue;
    *reinterpret_cast<u32*>(out + column) = pack_bfloat16(sums[j][0], sums[j][1]);
    *reinterpret_cast<u32*>(out + 8 * n + column) = pack_bfloat16(sums[j][2], sums[j][3]);
  }
}
