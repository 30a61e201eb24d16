// Distributed shared memory: loads from and stores to other blocks of a cluster, and the barrier that orders them (PTX
// ISA 9.0, "Data Movement and Conversion Instructions: ld" and "barrier.cluster").
#pragma once

#include "ptx.cuh"

// Orders this thread's earlier memory accesses before all accesses that any block of the cluster makes after
// cluster_wait().
__device__ __forceinline__ void cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// Loads from another block's shared memory. `address` is a result of cluster_address().
__device__ __forceinline__ u32 load_from_block(u32 address) {
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// Stores to another block's shared memory, at a cluster_address(). That block must still be running.
__device__ __forceinline__ void store_to_block(u32 address, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_to_block(u32 address, float2 v) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ void store_to_block(u32 address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
