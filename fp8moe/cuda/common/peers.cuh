// Kernels that store to the memory of peers: GPUs of one node, each with its own process.
//
// Compile-time constants: PEERS, this GPU among them; MEETING_BYTES.
#pragma once

#include "vector.cuh"

constexpr int MAX_PEERS = 8;

// Words on each GPU, zero at first. All peers run the same kernels in the same order, so their counts agree.
struct Signals {
  u32 arrived[MAX_PEERS];  // by rank: how many meetings a peer has reached, written by that peer
  u32 met;                 // how many meetings this GPU has left
  u32 blocks;              // finished blocks of the running kernel
};

struct Meeting {
  u32* here[PEERS];  // the words of the peers' Signals that this GPU writes
  Signals* own;      // null: no meeting
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

// The end of a kernel that all peers run: the kernel ends on no peer before all stores have arrived on all peers. All
// threads of all blocks call it. The last block to call it signals the peers and waits for their last blocks. The wait
// ends, because all blocks of this grid have been scheduled by then, and a peer waits for nothing else of this GPU.
__device__ __forceinline__ void meet(const Meeting& meeting) {
  if (!meeting.own) return;
  bool last = false;
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    last = atomicAdd(&meeting.own->blocks, 1) == gridDim.x - 1;
    fence_system();
  }
  if (!__syncthreads_or(last)) return;  // it uses no shared memory, all of which a GEMM may have
  const u32 count = meeting.own->met + 1;
  if (threadIdx.x < PEERS) {
    store_release_system(meeting.here[threadIdx.x], count);
    // A peer may be a meeting ahead; counts wrap around.
    while (static_cast<int>(load_acquire_system(&meeting.own->arrived[threadIdx.x]) - count) < 0) continue;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    meeting.own->met = count;
    meeting.own->blocks = 0;
  }
}
