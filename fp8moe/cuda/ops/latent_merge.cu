// Adds up the sums that the thread blocks of latent_attention.cu have left of groups whose tiles were shared out, in
// the order of the tiles. Grid: (groups that can be shared out, thread blocks for the rows and columns of a group).
//
// An item is WARP_COLUMNS columns of a row. With PARTS = 1 each warp has items of its own; otherwise PARTS warps, all
// of the thread block, share the pieces of one.
//
// Compile-time constants: THREADS, PARTS, BLOCKS, ROWS and FEWEST_TILES (of latent_attention.cu), ARGUMENTS_BYTES.
#include "vector.cuh"
#include "warp.cuh"

constexpr int VALUE = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int WARP_COLUMNS = 4 * WARP, CHUNKS = VALUE / WARP_COLUMNS;
constexpr int LANE_PIECES = ceil_div(BLOCKS, WARP);  // pieces of which a lane holds the weight
static_assert(PARTS == 1 || PARTS == WARPS);
static_assert(BLOCKS <= THREADS);

// As latent_attention.cu writes them.
struct Record {
  int group, left, all, unused;
};

struct Arguments {
  u16* out;
  const float* sums;
  const float2* statistics;
  const Record* records;
  int rows;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES);

__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ void add(float4& sum, const float4& value, float weight) {
  sum.x = __fmaf_rn(value.x, weight, sum.x), sum.y = __fmaf_rn(value.y, weight, sum.y);
  sum.z = __fmaf_rn(value.z, weight, sum.z), sum.w = __fmaf_rn(value.w, weight, sum.w);
}

// The block whose record is the blockIdx.x-th that has a group, -1 if there are fewer. Called by all threads.
__device__ __forceinline__ int find_block(const Arguments& a) {
  __shared__ u32 found[WARPS];  // a bit for each block whose record has a group
  const int thread = threadIdx.x;
  const u32 bits = __ballot_sync(FULL_WARP, thread < BLOCKS && a.records[min(thread, BLOCKS - 1)].group >= 0);
  if (lane_id() == 0) found[thread / WARP] = bits;
  __syncthreads();
  int block = -1, before = blockIdx.x;
#pragma unroll
  for (int word = 0; word < LANE_PIECES; ++word) {
    const int count = __popc(found[word]);
    if (block < 0 && before < count) block = word * WARP + static_cast<int>(__fns(found[word], 0, before + 1));
    before -= count;
  }
  return block;
}

extern "C" __global__ void __launch_bounds__(THREADS) latent_merge(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel();
  const int block = find_block(a), warp = threadIdx.x / WARP, lane = lane_id();
  if (block < 0) return;
  const Record record = a.records[block];
  const int each = ceil_div(a.rows, ROWS), sequence = record.group / each, first_row = record.group % each * ROWS;
  const int items = min(a.rows - first_row, ROWS) * CHUNKS;
  // The first piece is the block's last, slot 1; the others are the first of the blocks that follow, slot 0.
  const int blocks = min(BLOCKS, ceil_div(record.all, FEWEST_TILES));
  const int least = record.all / blocks, rest = record.all % blocks;
  int pieces = 1;
  for (int left = record.left; left > 0; ++pieces) left -= least + (block + pieces < rest);
  const int part = PARTS == 1 ? 0 : warp, first = pieces * part / PARTS, last = pieces * (part + 1) / PARTS;

#pragma unroll 1
  for (int item = PARTS == 1 ? blockIdx.y * WARPS + warp : blockIdx.y; item < items;
       item += PARTS == 1 ? gridDim.y * WARPS : gridDim.y) {
    const int row = item / CHUNKS, column = item % CHUNKS * WARP_COLUMNS + 4 * lane;
    const auto place = [&](int piece) {
      const int slot = 2 * (block + piece) + (piece == 0);
      return static_cast<long long>(slot) * ROWS + row;
    };
    float2 statistics[LANE_PIECES];  // largest score and sum of weights
    float largest = __uint_as_float(0xFF800000u), total = 0.f;
#pragma unroll
    for (int k = 0; k < LANE_PIECES; ++k) {
      const int piece = k * WARP + lane;
      statistics[k] = make_float2(__uint_as_float(0xFF800000u), 0.f);
      if (piece < pieces) statistics[k] = a.statistics[place(piece)];
      largest = fmaxf(largest, statistics[k].x);
    }
    largest = warp_reduce(largest, [](float p, float q) { return fmaxf(p, q); });
    const float origin = largest == __uint_as_float(0xFF800000u) ? 0.f : largest;
    float weights[LANE_PIECES];
#pragma unroll
    for (int k = 0; k < LANE_PIECES; ++k) {
      weights[k] = power_of_two(statistics[k].x - origin);
      total = __fmaf_rn(weights[k], statistics[k].y, total);
    }
    total = warp_reduce(total, [](float p, float q) { return p + q; });

    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int k = 0; k < LANE_PIECES; ++k) {
#pragma unroll 4
      for (int piece = max(first, k * WARP); piece < min(last, (k + 1) * WARP); ++piece) {
        const float4 value = __ldcs(reinterpret_cast<const float4*>(a.sums + place(piece) * VALUE + column));
        add(sum, value, __shfl_sync(FULL_WARP, weights[k], piece % WARP));
      }
    }
    if constexpr (PARTS > 1) {
      __shared__ float4 parts[PARTS][WARP];
      parts[warp][lane] = sum;
      __syncthreads();
      if (warp > 0) return;  // the thread block has one item
#pragma unroll
      for (int i = 1; i < PARTS; ++i) add(sum, parts[i][lane], 1.f);
    }
    const float inverse = total == 0.f ? 0.f : 1.f / total;
    u16* target = a.out + (static_cast<long long>(sequence) * a.rows + first_row + row) * VALUE + column;
    *reinterpret_cast<uint2*>(target) =
        make_uint2(pack_bfloat16(sum.x * inverse, sum.y * inverse), pack_bfloat16(sum.z * inverse, sum.w * inverse));
  }
}
