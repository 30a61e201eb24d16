// The choice of experts for few tokens, and the sort of the assignments by expert, in one thread block.
//
// A warp handles one token; its choices stay in registers until their rows are known.
//
// Compile-time constants: those of route.cuh; those of sort.cuh for a sort by one thread block, without MASKED. Of a
// block with more warps than WARPS, the first WARPS sort.
#pragma once

#include "route.cuh"
#include "sort.cuh"

static_assert(CLUSTER == 1 && !MASKED && COUNTERS >= NUM_EXPERTS);

// index, weights, rows (tokens, TOP_K); groups (NUM_EXPERTS + 1).
struct Chosen {
  i64* index;
  Output::Element* weights;
  int *groups, *rows;
};

__device__ __forceinline__ SortSizes sort_sizes(int tokens) {
  const u32 count = tokens * TOP_K;
  return {count, NUM_EXPERTS, 0, 0, 0, count};
}

// Called by the whole thread block, in which clear() of the first WARPS warps comes before. logits (tokens,
// NUM_EXPERTS); tokens: 0 to WARPS; bias, scale: as for choose().
template <class Logits = Input>
__device__ __forceinline__ void route_and_sort(Sort& sort, const typename Logits::Element* logits, const float* bias,
                                               const Chosen& chosen, int tokens, float scale) {
  const int token = static_cast<int>(sort.warp), at = token * TOP_K + sort.lane;
  const bool writes = token < tokens && sort.lane < TOP_K;
  u32 expert = NO_EXPERT, rank = 0;
  if (token < tokens) {
    const Choice choice = choose<Logits>(logits + token * NUM_EXPERTS, bias, scale);
    if (writes) {
      expert = choice.expert;
      chosen.index[at] = choice.expert;
      chosen.weights[at] = to_output(choice.weight);
    }
    rank = sort.rank(expert);
  }
  __syncthreads();
  sort.add_up(chosen.groups);
  const int row = sort.row(expert, rank);
  if (writes) chosen.rows[at] = row;
}
