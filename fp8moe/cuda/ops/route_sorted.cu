// route.cu followed by sort_by_expert.cu in one thread block, for few tokens; bitwise equal to the two kernels.
//
// Compile-time constants: those of route_sorted.cuh.
#include "route_sorted.cuh"

// logits (tokens, NUM_EXPERTS); bias (NUM_EXPERTS), unused without BIAS. tokens: 0 to WARPS. Grid: one thread block.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, 1)
    route_sorted(const Element* logits, const float* bias, const __grid_constant__ Chosen chosen, int tokens,
                 float scale) {
  extern __shared__ uint4 dynamic_shared[];
  const SortSizes sizes = sort_sizes(tokens);
  Sort sort(*reinterpret_cast<Shared*>(dynamic_shared), sizes);
  sort.clear();

  wait_for_previous_kernel();
  allow_next_kernel();
  route_and_sort(sort, logits, bias, chosen, tokens, scale);
}
