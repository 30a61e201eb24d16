// route.cu followed by sort_by_expert.cu in one thread block, for few tokens; bitwise equal to the two kernels.
//
// A warp handles one token; its choices stay in registers until their rows are known.
//
// Compile-time constants: those of route.cuh; those of sort.cuh for a sort by one thread block, without MASKED.
#include "route.cuh"
#include "sort.cuh"

static_assert(CLUSTER == 1 && !MASKED && COUNTERS >= EXPERTS);

// Arguments as for route.cu, and groups (EXPERTS + 1), rows (tokens, TOP_K). tokens: 0 to WARPS. Grid: one thread
// block.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, 1)
    route_sorted(const Element* logits, const float* bias, i64* index, Output::Element* weights, int* groups, int* rows,
                 int tokens, float scale) {
  extern __shared__ uint4 dynamic_shared[];
  const u32 count = tokens * TOP_K;
  const SortSizes sizes{count, EXPERTS, 0, 0, 0, count};
  Sort sort(*reinterpret_cast<Shared*>(dynamic_shared), sizes);
  sort.clear();

  wait_for_previous_kernel();
  allow_next_kernel();

  const int token = static_cast<int>(sort.warp), at = token * TOP_K + sort.lane;
  const bool writes = token < tokens && sort.lane < TOP_K;
  u32 expert = NO_EXPERT, rank = 0;
  if (token < tokens) {
    const Choice choice = choose(logits + token * EXPERTS, bias, scale);
    if (writes) {
      expert = choice.expert;
      index[at] = choice.expert;
      weights[at] = to_output(choice.weight);
    }
    rank = sort.rank(expert);
  }
  __syncthreads();
  sort.add_up(groups);
  const int row = sort.row(expert, rank);
  if (writes) rows[at] = row;
}
