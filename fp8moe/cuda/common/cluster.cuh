// Distributed shared memory: ordinary loads from the other blocks of a cluster, and the barrier that orders them
// (PTX ISA 9.0, "Data Movement and Conversion Instructions: ld" and "barrier.cluster").
#pragma once

#include "ptx.cuh"

// Orders this thread's memory accesses before those that follow cluster_wait() in any block of the cluster.
__device__ __forceinline__ void cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// `address` as cluster_address() gives it.
__device__ __forceinline__ u32 load_from_block(u32 address) {
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
