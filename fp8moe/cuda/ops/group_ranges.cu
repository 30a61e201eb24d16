// Converts a layout of groups to the row range of each group, which the schedule of grouped GEMMs reads.
//
// Compile-time constants: GROUPS, THREADS (of the one thread block).
#include "ptx.cuh"

constexpr int EACH = 4;  // rows that a thread reads at a time

// layout (rows), aligned to 16 bytes: the group of each row; values outside [0, GROUPS) mean no group. A range extends
// from the first to the last row of a group. Threads update ranges only where runs of equal values begin and end.
__device__ void ranges_of_rows(const int* layout, int (&first)[GROUPS], int (&end)[GROUPS], int rows) {
  for (int group = threadIdx.x; group < GROUPS; group += THREADS) {
    first[group] = rows;
    end[group] = 0;
  }
  __syncthreads();
#pragma unroll 2
  for (int row = EACH * threadIdx.x; row < rows; row += EACH * THREADS) {
    int groups[EACH];
    if (row + EACH <= rows) {
      const int4 v = *reinterpret_cast<const int4*>(layout + row);
      groups[0] = v.x, groups[1] = v.y, groups[2] = v.z, groups[3] = v.w;
    } else {
#pragma unroll
      for (int i = 0; i < EACH; ++i) groups[i] = row + i < rows ? layout[row + i] : -1;
    }
    int before = row > 0 ? layout[row - 1] : -1;
    const int after = row + EACH < rows ? layout[row + EACH] : -1;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int group = groups[i], next = i + 1 < EACH ? groups[i + 1] : after;
      if (static_cast<u32>(group) < GROUPS) {
        if (group != before) atomicMin(&first[group], row + i);
        if (group != next) atomicMax(&end[group], row + i + 1);
      }
      before = group;
    }
  }
  __syncthreads();
}

// layout (GROUPS): the end row of each group. A group begins at the end of the previous one, rounded up to `alignment`.
__device__ void ranges_of_ends(const int* layout, int (&first)[GROUPS], int (&end)[GROUPS], u32 alignment) {
  for (int group = threadIdx.x; group < GROUPS; group += THREADS) {
    const u32 before = group > 0 ? max(layout[group - 1], 0) : 0;
    first[group] = static_cast<int>((before + alignment - 1) / alignment * alignment);
    end[group] = layout[group];
  }
}

// ranges (GROUPS, 2): first row and end of each group. alignment: 0 if `layout` has the group of each row; otherwise
// `layout` has the ends of groups, and groups begin at multiples of `alignment`.
extern "C" __global__ void __launch_bounds__(THREADS)
    group_ranges(const int* layout, int* ranges, int rows, int alignment) {
  __shared__ int first[GROUPS], end[GROUPS];
  wait_for_previous_kernel();
  allow_next_kernel();
  if (alignment > 0) {
    ranges_of_ends(layout, first, end, alignment);
  } else {
    ranges_of_rows(layout, first, end, rows);
  }
  for (int group = threadIdx.x; group < GROUPS; group += THREADS) {
    ranges[2 * group] = first[group];
    ranges[2 * group + 1] = end[group];
  }
}
