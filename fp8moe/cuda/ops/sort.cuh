// A counting sort of assignments by expert, in one thread block or one cluster. It is stable and deterministic: every
// warp counts a contiguous part of the assignments on its own, without atomics.
//
// 1. Lanes with the same expert find each other. An assignment's rank within its warp is the warp's count of that
//    expert so far, plus the number of lower lanes with the same expert.
// 2. One thread per expert adds up the counts of the warps, then those of the cluster's thread blocks, through
//    distributed shared memory. A scan over experts gives the start of each.
// 3. Row = start of the expert + assignments in earlier thread blocks + in earlier warps + rank within the warp.
//
// Compile-time constants: COUNTERS (of experts; a power of two from 32 to 1024), WARPS (of a thread block; 32 * WARPS
// >= COUNTERS), CLUSTER (thread blocks), MASKED (every expert has `capacity` rows), PITCH (counters per warp),
// SHARED_BYTES.
#pragma once

#include "cluster.cuh"
#include "warp.cuh"

constexpr u32 NO_EXPERT = COUNTERS;  // has a counter of its own, like an expert
constexpr u32 NO_ROW = 0xFFFFFFFFu;
static_assert(WARPS * WARP >= COUNTERS && PITCH > NO_EXPERT && PITCH % 4 == 0);

struct Shared {
  u32 counts[WARPS * PITCH];  // of each warp, PITCH apart, a multiple of 16 bytes
  u32 starts[COUNTERS];       // start of each expert within its section
  u32 section_counts[WARP];   // total of each section: the 32 experts of one warp
  u32 block_counts[COUNTERS];
};
static_assert(sizeof(Shared) == SHARED_BYTES);

struct SortSizes {
  u32 count, experts, capacity;
  u32 first_expert;         // index of the first of `experts`
  u32 first_row, num_rows;  // the range of packed rows that is kept
};

// One thread's part of the sort. Call clear(), rank() for its assignments in order, a barrier, add_up(), row().
struct Sort {
  Shared& shared;
  const SortSizes& sizes;
  u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  u32 block = CLUSTER == 1 ? 0 : cluster_rank();
  u32* own = shared.counts + warp * PITCH;  // counters of this warp
  u32 section_start = 0;                    // lane i: start of section i

  __device__ __forceinline__ Sort(Shared& shared, const SortSizes& sizes) : shared(shared), sizes(sizes) {}

  __device__ __forceinline__ void clear() const {
    for (u32 i = lane; i < PITCH / 4; i += WARP) reinterpret_cast<uint4*>(own)[i] = uint4{};
    __syncwarp();
  }

  // Counts an assignment to `expert`, one per lane, and returns its rank within the warp. Lower lanes come first.
  __device__ __forceinline__ u32 rank(u32 expert) const {
    const u32 alike = __match_any_sync(FULL_WARP, expert);
    const u32 lower = __popc(alike & ((1u << lane) - 1));
    const u32 counted = own[expert];
    __syncwarp();
    if (lower == 0) own[expert] = counted + __popc(alike);
    __syncwarp();
    return counted + lower;
  }

  // Turns the counts of the warps into the starts of the experts, and writes `groups`. Without MASKED: the first row of
  // each expert and the end of the last, (experts + 1,), relative to the window. With MASKED: the number of used rows
  // of each expert, (experts,).
  __device__ __forceinline__ void add_up(int* groups) {
    // Replace each warp's count by the sum of the counts of the warps before it.
    u32 in_block = 0;
    if (threadIdx.x < COUNTERS) {
#pragma unroll 8
      for (int w = 0; w < WARPS; ++w) {
        const u32 counted = shared.counts[w * PITCH + threadIdx.x];
        shared.counts[w * PITCH + threadIdx.x] = in_block;
        in_block += counted;
      }
    }
    u32 in_earlier_blocks = 0, total = in_block;
    if constexpr (CLUSTER > 1) {
      if (threadIdx.x < COUNTERS) shared.block_counts[threadIdx.x] = in_block;
      cluster_arrive_release();
      cluster_wait();
      if (threadIdx.x < COUNTERS) {
        const u32 address = shared_address(&shared.block_counts[threadIdx.x]);
        total = 0;
#pragma unroll
        for (int b = 0; b < CLUSTER; ++b) {
          const u32 counted = load_from_block(cluster_address(address, b));
          if (b < static_cast<int>(block)) in_earlier_blocks += counted;
          total += counted;
        }
      }
      cluster_arrive_release();  // cluster_wait() is at the end: no block may exit while another reads its counts
    }

    u32 section_end = 0;
    if (threadIdx.x < COUNTERS) {
      if constexpr (MASKED) {
        shared.starts[threadIdx.x] = in_earlier_blocks;
      } else {
        section_end = warp_inclusive_sum(total, lane);
        shared.starts[threadIdx.x] = section_end - total + in_earlier_blocks;
        if (lane == WARP - 1) shared.section_counts[warp] = section_end;
      }
    }
    __syncthreads();
    if constexpr (!MASKED) {
      const u32 counted = lane < COUNTERS / WARP ? shared.section_counts[lane] : 0;
      section_start = warp_inclusive_sum(counted, lane) - counted;
    }
    if (block > 0) return;
    const u32 group_end = section_end + __shfl_sync(FULL_WARP, section_start, warp);
    if (threadIdx.x >= sizes.experts) return;
    if constexpr (MASKED) {
      groups[threadIdx.x] = static_cast<int>(min(total, sizes.capacity));
    } else {
      groups[threadIdx.x + 1] =
          static_cast<int>(min(max(group_end, sizes.first_row) - sizes.first_row, sizes.num_rows));
      if (threadIdx.x == 0) groups[0] = 0;
    }
  }

  // Returns the row of an assignment, one per lane, given its rank; -1 if it has none.
  __device__ __forceinline__ int row(u32 expert, u32 rank) const {
    const u32 start = __shfl_sync(FULL_WARP, section_start, expert / WARP);
    u32 row = NO_ROW;
    if (expert != NO_EXPERT) {
      row = start + shared.starts[expert] + own[expert] + rank;
      if constexpr (MASKED) {
        row = row < sizes.capacity ? expert * sizes.capacity + row : NO_ROW;
      } else {
        row = row - sizes.first_row < sizes.num_rows ? row - sizes.first_row : NO_ROW;
      }
    }
    return static_cast<int>(row);
  }
};
