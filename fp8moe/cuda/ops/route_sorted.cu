// route.cu and sort_by_expert.cu in one thread block, for few tokens: bits are those of the two kernels.
//
// A warp takes TOKENS neighbouring tokens, whose choices stay in its registers until they have rows.
//
// Compile-time constants: those of route.cuh; those of sort.cuh, for a sort without MASKED by one thread block; TOKENS.
#include "route.cuh"
#include "sort.cuh"

static_assert(CLUSTER == 1 && !MASKED && COUNTERS >= EXPERTS);

// The arguments of route.cu; groups (EXPERTS + 1), rows (tokens, TOP_K). tokens: up to WARPS * TOKENS, perhaps none.
// Grid: one thread block.
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

  const int first = static_cast<int>(sort.warp) * TOKENS;
  u32 expert[TOKENS], rank[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    if (first + t >= tokens) continue;
    const Choice choice = choose(logits + (first + t) * EXPERTS, bias, scale);
    expert[t] = sort.lane < TOP_K ? choice.expert : NO_EXPERT;
    rank[t] = sort.rank(expert[t]);
    const int at = (first + t) * TOP_K + sort.lane;
    if (sort.lane >= TOP_K) continue;
    index[at] = choice.expert;
    weights[at] = to_output(choice.weight);
  }
  __syncthreads();
  sort.add_up(groups);
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    if (first + t >= tokens) continue;
    const int row = sort.row(expert[t], rank[t]);
    if (sort.lane < TOP_K) rows[(first + t) * TOP_K + sort.lane] = row;
  }
}
