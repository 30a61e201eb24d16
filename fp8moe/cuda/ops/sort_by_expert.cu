// Sorts the assignments of tokens to experts: where each expert's rows begin, and the row of every assignment. Stable
// and deterministic: a counting sort in which every warp counts a contiguous part of the assignments by itself, so that
// no atomics are needed and the order of arrival cannot show.
//
// 1. A warp takes 32 assignments at a time. Lanes with the same expert find each other; what the warp has counted of
//    that expert, plus the lower lanes among them, is an assignment's rank inside its warp.
// 2. A thread per expert adds up the counts of the warps, then those of the cluster's thread blocks through distributed
//    shared memory; a scan over the experts gives where each begins.
// 3. Row = start of the expert + assignments in earlier thread blocks + in earlier warps + rank inside the warp.
//
// Between 1 and 3, ranks stay in registers where there is one thread block, and lie in `rows` otherwise.
//
// Compile-time constants: INDEX (int or long long), EXPERTS (a power of two from 32 to 1024), WARPS (of a thread block,
// 32 * WARPS >= EXPERTS), STEPS (assignments that a lane takes at a time), CLUSTER (1 thread block for at most
// 32 * WARPS * STEPS assignments, or 8 for any number), MASKED (every expert has `capacity` rows), PITCH (counters of
// a warp), SHARED_BYTES, SIZES_BYTES.
#include "cluster.cuh"
#include "warp.cuh"

using Index = INDEX;
using UnsignedIndex = unsigned INDEX;

constexpr bool IN_REGISTERS = CLUSTER == 1;
constexpr u32 NO_EXPERT = EXPERTS;  // counted like one, in a place of its own
constexpr u32 NO_ROW = 0xFFFFFFFFu;
static_assert(WARPS * WARP >= EXPERTS && PITCH > NO_EXPERT && PITCH % 4 == 0);

struct Shared {
  u32 counts[WARPS * PITCH];  // what each warp has counted, PITCH apart: whole 16-byte vectors
};
static_assert(sizeof(Shared) == SHARED_BYTES);

struct Sizes {
  u32 count, experts, capacity;
  u32 first_expert;         // the index of the first of `experts`
  u32 first_row, num_rows;  // the window of packed rows that is kept
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

// The expert of assignment i, NO_EXPERT for one that is not of this rank or past the end.
__device__ u32 expert_of(const Index* index, u32 i, u32 end, const Sizes& sizes) {
  if (i >= end) return NO_EXPERT;
  // Unsigned: what lies before the first is far behind the last.
  const UnsignedIndex expert = static_cast<UnsignedIndex>(index[i]) - sizes.first_expert;
  return expert < sizes.experts ? static_cast<u32>(expert) : NO_EXPERT;
}

// index, rows (count,). groups: the first row of each expert and the end of the last, (experts + 1,), in the window; or
// with MASKED the number of rows in use of each, (experts,). A 0 behind them. Grid: one cluster.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    sort_by_expert(const Index* index, int* groups, int* rows, const __grid_constant__ Sizes sizes) {
  extern __shared__ uint4 dynamic_shared[];
  __shared__ u32 starts[EXPERTS];
  __shared__ u32 section_counts[WARP];  // a section: 32 experts, those of one warp
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const u32 lane = threadIdx.x % WARP;
  const u32 warp = threadIdx.x / WARP;
  const u32 block = CLUSTER == 1 ? 0 : cluster_rank();
  u32* const own = shared.counts + warp * PITCH;
  for (u32 i = lane; i < PITCH / 4; i += WARP) reinterpret_cast<uint4*>(own)[i] = uint4{};
  __syncwarp();

  const u32 chunk = ((sizes.count + WARP - 1) / WARP + CLUSTER * WARPS - 1) / (CLUSTER * WARPS) * WARP;
  const u32 begin = min((block * WARPS + warp) * chunk, sizes.count);
  const u32 end = min(begin + chunk, sizes.count);
  u32 expert[STEPS], rank[STEPS];

  wait_for_previous_kernel();
  allow_next_kernel();

  u32 first = begin;
  do {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) expert[s] = expert_of(index, first + s * WARP + lane, end, sizes);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (first + s * WARP >= end) continue;
      const u32 alike = __match_any_sync(FULL_WARP, expert[s]);
      const u32 lower = __popc(alike & ((1u << lane) - 1));
      const u32 counted = own[expert[s]];
      __syncwarp();
      if (lower == 0) own[expert[s]] = counted + __popc(alike);
      __syncwarp();
      rank[s] = counted + lower;
      if (!IN_REGISTERS && expert[s] != NO_EXPERT) rows[first + s * WARP + lane] = static_cast<int>(rank[s]);
    }
    first += STEPS * WARP;
  } while (!IN_REGISTERS && first < end);
  __syncthreads();

  // The counts of a warp become those of the warps before it.
  u32 in_block = 0;
  if (threadIdx.x < EXPERTS) {
#pragma unroll 8
    for (int w = 0; w < WARPS; ++w) {
      const u32 counted = shared.counts[w * PITCH + threadIdx.x];
      shared.counts[w * PITCH + threadIdx.x] = in_block;
      in_block += counted;
    }
  }
  u32 in_earlier_blocks = 0, total = in_block;
  if constexpr (CLUSTER > 1) {
    __shared__ u32 block_counts[EXPERTS];
    if (threadIdx.x < EXPERTS) block_counts[threadIdx.x] = in_block;
    cluster_arrive_release();
    cluster_wait();
    if (threadIdx.x < EXPERTS) {
      const u32 address = shared_address(&block_counts[threadIdx.x]);
      total = 0;
#pragma unroll
      for (int b = 0; b < CLUSTER; ++b) {
        const u32 counted = load_from_block(cluster_address(address, b));
        if (b < static_cast<int>(block)) in_earlier_blocks += counted;
        total += counted;
      }
    }
    cluster_arrive_release();  // waited for at the end: no block leaves while another reads its counts
  }

  u32 section_end = 0;
  if (threadIdx.x < EXPERTS) {
    if constexpr (MASKED) {
      starts[threadIdx.x] = in_earlier_blocks;
    } else {
      section_end = warp_inclusive_sum(total, lane);
      starts[threadIdx.x] = section_end - total + in_earlier_blocks;
      if (lane == WARP - 1) section_counts[warp] = section_end;
    }
  }
  __syncthreads();
  // Lane i: where section i starts.
  u32 section_start = 0;
  if constexpr (!MASKED) {
    const u32 counted = lane < EXPERTS / WARP ? section_counts[lane] : 0;
    section_start = warp_inclusive_sum(counted, lane) - counted;
  }
  if (block == 0) {
    if (threadIdx.x == 0) groups[sizes.experts + !MASKED] = 0;
    const u32 group_end = section_end + __shfl_sync(FULL_WARP, section_start, warp);
    if (threadIdx.x < sizes.experts) {
      if constexpr (MASKED) {
        groups[threadIdx.x] = static_cast<int>(min(total, sizes.capacity));
      } else {
        groups[threadIdx.x + 1] =
            static_cast<int>(min(max(group_end, sizes.first_row) - sizes.first_row, sizes.num_rows));
        if (threadIdx.x == 0) groups[0] = 0;
      }
    }
  }

  first = begin;
  do {
    if constexpr (!IN_REGISTERS) {
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const u32 i = first + s * WARP + lane;
        expert[s] = expert_of(index, i, end, sizes);
        if (expert[s] != NO_EXPERT) rank[s] = static_cast<u32>(rows[i]);
      }
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const u32 i = first + s * WARP + lane;
      if (first + s * WARP >= end) continue;
      const u32 start = __shfl_sync(FULL_WARP, section_start, expert[s] / WARP);
      u32 row = NO_ROW;
      if (expert[s] != NO_EXPERT) {
        row = start + starts[expert[s]] + own[expert[s]] + rank[s];
        if constexpr (MASKED) {
          row = row < sizes.capacity ? expert[s] * sizes.capacity + row : NO_ROW;
        } else {
          row = row - sizes.first_row < sizes.num_rows ? row - sizes.first_row : NO_ROW;
        }
      }
      if (i < end) rows[i] = static_cast<int>(row);
    }
    first += STEPS * WARP;
  } while (!IN_REGISTERS && first < end);
  if constexpr (CLUSTER > 1) cluster_wait();
}
