// The ranks that have an expert of a token: all ranks have equally many experts, in the order of ranks.
//
// Compile-time constants: INDEX (int or long long), the type of the routing; PEERS.
#pragma once

#include "warp.cuh"

using Index = INDEX;

// A bit for each of PEERS ranks. index: the top_k experts of the token; each: experts of a rank. By all lanes of a
// warp.
__device__ __forceinline__ u32 owners(const Index* index, u32 top_k, u32 each) {
  u32 found = 0;
  for (u32 k = lane_id(); k < top_k; k += WARP) {
    const unsigned long long expert = static_cast<unsigned long long>(index[k]);
    if (expert < PEERS * static_cast<unsigned long long>(each)) found |= 1u << (static_cast<u32>(expert) / each);
  }
  return __reduce_or_sync(FULL_WARP, found);
}
