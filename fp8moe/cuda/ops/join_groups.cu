// For weight gradients: joins concatenated groups along K, for two operands. Each group is a row-major matrix (rows,
// size of the group); the result is one row-major matrix (rows, k). Also computes the offsets of the groups.
//
// A warp copies one block of 128 columns and ROWS rows, with 8 lanes per row, then goes on to its next block.
//
// Compile-time constants: GROUPS, WARPS (of a thread block), ROWS, SIZES_BYTES.
#include "units.cuh"
#include "vector.cuh"
#include "warp.cuh"

constexpr int BLOCK = 128, LANES = BLOCK / 16;

struct Sizes {
  int a_rows, b_rows, k;
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

// Computes the offsets of the groups; called by one warp. Negative sizes count as 0.
__device__ void sum_sizes(const int* sizes, int (&offsets)[GROUPS + 1]) {
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < GROUPS; first += WARP) {
    const int group = first + lane_id();
    const int end = before + warp_inclusive_sum(group < GROUPS ? max(sizes[group], 0) : 0);
    if (group < GROUPS) offsets[group + 1] = end;
    before = __shfl_sync(FULL_WARP, end, WARP - 1);
  }
  if (lane_id() == 0) offsets[0] = 0;
}

// The last group that begins at or before `column`, the only one that may contain it.
__device__ int group_of(const int (&offsets)[GROUPS + 1], int column) {
  int group = 0, beyond = GROUPS;
  while (beyond - group > 1) {
    const int middle = (group + beyond) / 2;
    if (offsets[middle] <= column) {
      group = middle;
    } else {
      beyond = middle;
    }
  }
  return group;
}

// Reads flat_a (a_rows * k), flat_b (b_rows * k), sizes (GROUPS); writes a (a_rows, k), b (b_rows, k), offsets (GROUPS
// + 1). k is a multiple of 128. Groups must begin and end at multiples of 128: blocks of columns outside such a group
// are not written. Any grid.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    join_groups(const u8* flat_a, const u8* flat_b, const int* sizes, u8* a, u8* b, int* offsets,
                const __grid_constant__ Sizes problem) {
  __shared__ int begins[GROUPS + 1];
  wait_for_previous_kernel();
  allow_next_kernel();
  if (threadIdx.x < WARP) sum_sizes(sizes, begins);
  __syncthreads();
  if (blockIdx.x == 0) {
    for (int group = threadIdx.x; group <= GROUPS; group += WARPS * WARP) offsets[group] = begins[group];
  }

  const u32 blocks = problem.k / BLOCK, a_parts = ceil_div(problem.a_rows, ROWS);
  const u32 parts = a_parts + ceil_div(problem.b_rows, ROWS);
  const Units units;
  for (u32 unit = units.first; unit < blocks * parts; unit += units.step) {
    const int column = unit % blocks * BLOCK;
    const u32 part = unit / blocks;
    const int group = group_of(begins, column), begin = begins[group], end = begins[group + 1];
    if (begin < 0 || begin % BLOCK || end % BLOCK || column >= end || end > problem.k) continue;
    const bool of_a = part < a_parts;
    const int rows = of_a ? problem.a_rows : problem.b_rows, lane = lane_id();
    const int first = (of_a ? part : part - a_parts) * ROWS + lane / LANES, inner = lane % LANES * 16;
    const u8* source = (of_a ? flat_a : flat_b) + i64{rows} * begin + (column - begin) + inner;
    u8* target = (of_a ? a : b) + column + inner;
#pragma unroll
    for (int i = 0; i < ROWS; i += WARP / LANES) {
      const i64 row = first + i;
      if (row < rows) store_16(target + row * problem.k, load_16(source + row * (end - begin)));
    }
  }
}
