// Finds the ranks that own the experts of a token. All ranks have equally many experts, in rank order.
//
// Compile-time constants: INDEX (int or long long, the type of the routing); PEERS (number of ranks).
#pragma once

#include "warp.cuh"

using Index = INDEX;

// Returns a mask with a bit for each rank that has one of the token's experts. index: the token's top_k experts; each:
// experts per rank. Called by all lanes of a warp.
__device__ __forceinline__ u32 owners(const Index* index, u32 top_k, u32 each) {
  u32 found = 0;
  for (u32 k = lane_id(); k < top_k; k += WARP) {
    const unsigned long long expert = static_cast<unsigned long long>(index[k]);
    if (expert < PEERS * static_cast<unsigned long long>(each)) found |= 1u << (static_cast<u32>(expert) / each);
  }
  return __reduce_or_sync(FULL_WARP, found);
}
