// Adds up the sums that the thread blocks of latent_attention.cu have left of groups whose tiles were shared out, in
// the order of the tiles. Grid: (groups that can be shared out, rows of a group, parts of the columns). A thread has
// four columns of consecutive pieces; PARTS threads share the pieces of a column.
//
// Compile-time constants: THREADS, COLUMN_THREADS (of a thread block's columns), BLOCKS (of latent_attention.cu),
// ARGUMENTS_BYTES.
#include "vector.cuh"
#include "warp.cuh"

constexpr int VALUE = 512, ROWS = 64;
constexpr int PARTS = THREADS / COLUMN_THREADS;
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

extern "C" __global__ void __launch_bounds__(THREADS) latent_merge(const __grid_constant__ Arguments a) {
  __shared__ u32 shared_out[THREADS / WARP];  // a bit for each block whose record has a group
  __shared__ float2 statistics[BLOCKS];
  __shared__ float weights[BLOCKS];
  __shared__ float4 parts[PARTS][COLUMN_THREADS];
  const int row = blockIdx.y, thread = threadIdx.x;
  wait_for_previous_kernel();
  const u32 bits = __ballot_sync(FULL_WARP, thread < BLOCKS && a.records[min(thread, BLOCKS - 1)].group >= 0);
  if (lane_id() == 0) shared_out[thread / WARP] = bits;
  __syncthreads();
  // The block that has the first tiles of this thread block's group, the blockIdx.x-th of such blocks.
  int block = -1, before = blockIdx.x;
#pragma unroll
  for (int word = 0; word < ceil_div(BLOCKS, WARP); ++word) {
    const int count = __popc(shared_out[word]);
    if (block < 0 && before < count) block = word * WARP + static_cast<int>(__fns(shared_out[word], 0, before + 1));
    before -= count;
  }
  if (block < 0) return;
  const Record record = a.records[block];
  const int each = ceil_div(a.rows, ROWS), group_row = record.group % each * ROWS + row;
  if (group_row >= a.rows) return;
  // The first piece is this block's last, slot 1; the others are the first of the blocks that follow, slot 0.
  const int least = record.all / BLOCKS, rest = record.all % BLOCKS;
  int pieces = 1;
  for (int left = record.left; left > 0; ++pieces) left -= least + (block + pieces < rest);
  const auto place = [&](int piece) {
    const int slot = 2 * (block + piece) + (piece == 0);
    return static_cast<long long>(slot) * ROWS + row;
  };
  for (int piece = thread; piece < pieces; piece += THREADS) statistics[piece] = a.statistics[place(piece)];
  __syncthreads();
  float largest = __uint_as_float(0xFF800000u), total = 0.f;
  for (int piece = 0; piece < pieces; ++piece) largest = fmaxf(largest, statistics[piece].x);
  const float origin = largest == __uint_as_float(0xFF800000u) ? 0.f : largest;
  for (int piece = thread; piece < pieces; piece += THREADS) {
    weights[piece] = power_of_two(statistics[piece].x - origin);
  }
  __syncthreads();
  for (int piece = 0; piece < pieces; ++piece) total = __fmaf_rn(weights[piece], statistics[piece].y, total);

  const int part = thread / COLUMN_THREADS, own = thread % COLUMN_THREADS;
  const int column = blockIdx.z * COLUMN_THREADS + own;
  const int first = pieces * part / PARTS, last = pieces * (part + 1) / PARTS;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
  for (int piece = first; piece < last; ++piece) {
    const float4 value = __ldcs(reinterpret_cast<const float4*>(a.sums + place(piece) * VALUE) + column);
    const float weight = weights[piece];
    sum.x = __fmaf_rn(value.x, weight, sum.x), sum.y = __fmaf_rn(value.y, weight, sum.y);
    sum.z = __fmaf_rn(value.z, weight, sum.z), sum.w = __fmaf_rn(value.w, weight, sum.w);
  }
  parts[part][own] = sum;
  __syncthreads();
  if (part) return;
#pragma unroll
  for (int i = 1; i < PARTS; ++i) {
    const float4 more = parts[i][own];
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  const float inverse = total == 0.f ? 0.f : 1.f / total;
  const int sequence = record.group / each;
  u16* target = a.out + (static_cast<long long>(sequence) * a.rows + group_row) * VALUE + 4 * column;
  *reinterpret_cast<uint2*>(target) =
      make_uint2(pack_bfloat16(sum.x * inverse, sum.y * inverse), pack_bfloat16(sum.z * inverse, sum.w * inverse));
}
