// A counting sort of assignments by expert, by one thread block or one cluster. It is stable and deterministic: every
// warp counts a contiguous part of the assignments by itself, without atomics.
//
// 1. Lanes with the same expert find each other. An assignment's rank inside its warp is the warp's count of that
//    expert so far, plus the lower lanes with the same expert.
// 2. A thread per expert adds up the counts of the warps, then the counts of the cluster's thread blocks through
//    distributed shared memory; a scan over the experts gives the beginning of each.
// 3. Row = start of the expert + assignments in earlier thread blocks + in earlier warps + rank inside the warp.
//
// Compile-time constants: COUNTERS (of experts, a power of two from 32 to 1024), WARPS (of a thread block, 32 * WARPS
// >= COUNTERS), CLUSTER (thread blocks), MASKED (every expert has `capacity` rows), PITCH (counters of a warp),
// SHARED_BYTES.
#pragma once

#include "cluster.cuh"
#include "warp.cuh"

constexpr u32 NO_EXPERT = COUNTERS;  // counted like an expert, in a counter of its own
constexpr u32 NO_ROW = 0xFFFFFFFFu;
static_assert(WARPS * WARP >= COUNTERS && PITCH > NO_EXPERT && PITCH % 4 == 0);

struct Shared {
  u32 counts[WARPS * PITCH];  // counts of each warp, PITCH apart: whole 16-byte vectors
  u32 starts[COUNTERS];       // beginning of each expert in its section
  u32 section_counts[WARP];   // counts of sections: a section is the 32 experts of one warp
  u32 block_counts[COUNTERS];
};
static_assert(sizeof(Shared) == SHARED_BYTES);

struct SortSizes {
  u32 count, experts, capacity;
  u32 first_expert;         // the index of the first of `experts`
  u32 first_row, num_rows;  // the window of packed rows that is kept
};

// A thread's part of the sort: clear(), rank() of its assignments in their order, a barrier, add_up(), row().
struct Sort {
  Shared& shared;
  const SortSizes& sizes;
  u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  u32 block = CLUSTER == 1 ? 0 : cluster_rank();
  u32* own = shared.counts + warp * PITCH;  // counters of this warp
  u32 section_start = 0;                    // lane i: beginning of section i

  __device__ __forceinline__ Sort(Shared& shared, const SortSizes& sizes) : shared(shared), sizes(sizes) {}

  __device__ __forceinline__ void clear() const {
    for (u32 i = lane; i < PITCH / 4; i += WARP) reinterpret_cast<uint4*>(own)[i] = uint4{};
    __syncwarp();
  }

  // The rank inside its warp of an assignment to this expert, one per lane: lower lanes come first.
  __device__ __forceinline__ u32 rank(u32 expert) const {
    const u32 alike = __match_any_sync(FULL_WARP, expert);
    const u32 lower = __popc(alike & ((1u << lane) - 1));
    const u32 counted = own[expert];
    __syncwarp();
    if (lower == 0) own[expert] = counted + __popc(alike);
    __syncwarp();
    return counted + lower;
  }

  // Turns the counts of the warps into the beginnings of the experts. groups: the first row of each expert and the end
  // of the last, (experts + 1,), in the window; or with MASKED the rows in use of each expert, (experts,).
  __device__ __forceinline__ void add_up(int* groups) {
    // The counts of a warp become those of the warps before it.
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
      cluster_arrive_release();  // the wait is at the end: no block exits while another reads its counts
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

  // The row of an assignment with this rank, one per lane; -1 for none.
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
