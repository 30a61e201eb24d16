// Kernels that store to the memory of peers: the GPUs of one node, one process for each.
//
// Compile-time constants: PEERS (number of peers, including this GPU); MEETING_BYTES.
#pragma once

#include "vector.cuh"

constexpr int MAX_PEERS = 8;

// Counters on each GPU, initially zero. A "meeting" is a barrier of all peers. All peers run the same kernels in the
// same order, so their counts of meetings agree.
struct Signals {
  u32 arrived[MAX_PEERS];  // for each rank: the number of meetings that peer has reached; written by the peer
  u32 met;                 // the number of meetings that this GPU has completed
  u32 blocks;              // the number of finished thread blocks of the running kernel
};

struct Meeting {
  u32* here[PEERS];  // in each peer's Signals::arrived, the element of this GPU
  Signals* own;      // this GPU's Signals; null: no meeting
};
static_assert(PEERS <= MAX_PEERS && sizeof(Meeting) == MEETING_BYTES);

__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ void store_release_system(u32* target, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_acquire_system(const u32* source) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

// The end of a kernel that all peers run: a barrier after which the stores of all peers are visible on all peers.
// Called by all threads of all blocks. The last block that calls it signals the peers and waits for their last blocks.
// This cannot deadlock: by then all blocks of this grid have been scheduled, and no peer waits for anything else from
// this GPU.
__device__ __forceinline__ void meet(const Meeting& meeting) {
  if (!meeting.own) return;
  bool last = false;
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    last = atomicAdd(&meeting.own->blocks, 1) == gridDim.x - 1;
    fence_system();
  }
  if (!__syncthreads_or(last)) return;  // needs no shared memory: a GEMM may use all of it
  const u32 count = meeting.own->met + 1;
  if (threadIdx.x < PEERS) {
    store_release_system(meeting.here[threadIdx.x], count);
    // A peer may already be one meeting ahead. Counts wrap around, so compare differences.
    while (static_cast<int>(load_acquire_system(&meeting.own->arrived[threadIdx.x]) - count) < 0) continue;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    meeting.own->met = count;
    meeting.own->blocks = 0;
  }
}
