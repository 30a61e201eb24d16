// Sorts the assignments of tokens to experts by the counting sort of sort.cuh: finds the start of each expert's rows
// and the row of every assignment. A warp handles 32 assignments at a time, STEPS times in a row.
//
// Between counting and writing, ranks stay in registers if there is one thread block, otherwise in `rows`.
//
// Compile-time constants: those of sort.cuh (CLUSTER = 1 for at most 32 * WARPS * STEPS assignments, or 8 for any
// number); INDEX (int or long long); STEPS (assignments per lane at a time); SIZES_BYTES.
#include "sort.cuh"

using Index = INDEX;
using UnsignedIndex = unsigned INDEX;

constexpr bool IN_REGISTERS = CLUSTER == 1;
static_assert(sizeof(SortSizes) == SIZES_BYTES);

// Returns the expert of assignment i. NO_EXPERT if i is past the end, or the expert is not on this rank.
__device__ u32 expert_of(const Index* index, u32 i, u32 end, const SortSizes& sizes) {
  if (i >= end) return NO_EXPERT;
  // Unsigned arithmetic: an index below first_expert wraps to a very large number.
  const UnsignedIndex expert = static_cast<UnsignedIndex>(index[i]) - sizes.first_expert;
  return expert < sizes.experts ? static_cast<u32>(expert) : NO_EXPERT;
}

// index, rows (count,). groups: as for Sort::add_up, followed by a 0. Grid: one cluster.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    sort_by_expert(const Index* index, int* groups, int* rows, const __grid_constant__ SortSizes sizes) {
  extern __shared__ uint4 dynamic_shared[];
  Sort sort(*reinterpret_cast<Shared*>(dynamic_shared), sizes);
  sort.clear();

  const u32 chunk = ((sizes.count + WARP - 1) / WARP + CLUSTER * WARPS - 1) / (CLUSTER * WARPS) * WARP;
  const u32 begin = min((sort.block * WARPS + sort.warp) * chunk, sizes.count);
  const u32 end = min(begin + chunk, sizes.count);
  u32 expert[STEPS], rank[STEPS];

  wait_for_previous_kernel();
  allow_next_kernel();

  u32 first = begin;
  do {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) expert[s] = expert_of(index, first + s * WARP + sort.lane, end, sizes);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (first + s * WARP >= end) continue;
      rank[s] = sort.rank(expert[s]);
      if (!IN_REGISTERS && expert[s] != NO_EXPERT) rows[first + s * WARP + sort.lane] = static_cast<int>(rank[s]);
    }
    first += STEPS * WARP;
  } while (!IN_REGISTERS && first < end);
  __syncthreads();
  sort.add_up(groups);
  if (sort.block == 0 && threadIdx.x == 0) groups[sizes.experts + !MASKED] = 0;

  first = begin;
  do {
    if constexpr (!IN_REGISTERS) {
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const u32 i = first + s * WARP + sort.lane;
        expert[s] = expert_of(index, i, end, sizes);
        if (expert[s] != NO_EXPERT) rank[s] = static_cast<u32>(rows[i]);
      }
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const u32 i = first + s * WARP + sort.lane;
      if (first + s * WARP >= end) continue;
      const int row = sort.row(expert[s], rank[s]);
      if (i < end) rows[i] = row;
    }
    first += STEPS * WARP;
  } while (!IN_REGISTERS && first < end);
  if constexpr (CLUSTER > 1) cluster_wait();
}
