// The ring buffer between a loader and the math warps of a block: stages in shared memory, with two barriers for each.
//
//   loader      acquire()  waits until the stage is free; then expect(bytes), and copies that signal full()
//   math warps  arrived()  waits until these bytes have arrived; then products read the stage
//               release()  hands the stage back; it is free once every reader has done so
//   both        advance()  moves to the next stage; the phase flips each time around (PTX ISA 9.0, "mbarrier")
#pragma once

#include "ptx.cuh"

struct Barrier {
  u64 state;

  __device__ __forceinline__ u32 address() const { return shared_address(this); }
  __device__ __forceinline__ void init(u32 arrivals) { mbarrier_init(address(), arrivals); }
  __device__ __forceinline__ void expect(u32 bytes) { mbarrier_arrive_expect_tx(address(), bytes); }
  __device__ __forceinline__ void arrive() { mbarrier_arrive(address()); }
  __device__ __forceinline__ void wait(u32 phase) const { mbarrier_wait(address(), phase); }
  __device__ __forceinline__ void wait_cluster(u32 phase) const { mbarrier_wait_cluster(address(), phase); }
};

// The barriers of a ring; a member of each kernel's Shared.
template <int Stages>
struct Ring {
  Barrier full[Stages], empty[Stages];

  // Called by one thread, before mbarrier_init_fence(). writers, readers: the number of arrivals that fill and that
  // free a stage.
  __device__ __forceinline__ void init(u32 writers, u32 readers) {
#pragma unroll 1
    for (int s = 0; s < Stages; ++s) {
      full[s].init(writers);
      empty[s].init(readers);
    }
  }
};

// The current stage and phase of one role, loader or reader, in a ring.
template <int Stages>
struct Pipeline {
  Ring<Stages>& ring;
  u32 stage = 0, phase = 0;

  __device__ __forceinline__ explicit Pipeline(Ring<Stages>& ring, u32 stage = 0) : ring(ring), stage(stage) {}

  __device__ __forceinline__ Barrier& full() const { return ring.full[stage]; }
  __device__ __forceinline__ Barrier& empty() const { return ring.empty[stage]; }

  __device__ __forceinline__ void acquire() const { empty().wait(phase ^ 1); }
  __device__ __forceinline__ void arrived() const { full().wait(phase); }
  // Hands the stage back. Called by a whole warp, which counts as one reader, after its last read of the stage.
  __device__ __forceinline__ void release() const {
    const u32 empty = full().address() + sizeof(ring.full);  // from the address that arrived() has computed
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(empty);
  }
  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  // Advances by `steps` stages, at most once around the ring.
  __device__ __forceinline__ void advance(u32 steps) {
    stage += steps;
    if (stage >= Stages) {
      stage -= Stages;
      phase ^= 1;
    }
  }
};

// A stage that is handed back once a product has read it. The address of its barrier is computed ahead of time.
struct Released {
  u32 empty;

  template <int Stages>
  __device__ __forceinline__ explicit Released(const Pipeline<Stages>& pipeline) : empty(pipeline.empty().address()) {
    asm volatile("" : "+r"(empty));
  }
  // Hands the stage back; called by a whole warp, like Pipeline::release().
  __device__ __forceinline__ void arrive() const {
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(empty);
  }
};

// Returns the block's dynamic shared memory as the kernel's Shared, aligned to 1024 bytes for swizzled tiles. The host
// allocates SWIZZLE_ALIGNMENT bytes more than sizeof(Shared).
constexpr int SWIZZLE_ALIGNMENT = 1024;
template <typename Shared>
__device__ __forceinline__ Shared& aligned_shared() {
  extern __shared__ char unaligned[];
  u32 address = round_up(shared_address(unaligned), SWIZZLE_ALIGNMENT);
  asm volatile("" : "+r"(address));  // keeps the compiler from computing the address again in every loop
  return *reinterpret_cast<Shared*>(__cvta_shared_to_generic(address));
}
