// Splits of K, and sums that reach the epilogue by token, because their tile's weights are the 64-row side.
#pragma once

#include "gemm_schedule.cuh"

constexpr int MATH_BARRIER = 1;  // the named barrier of all math warps; a warpgroup has one of its own behind it
__device__ __forceinline__ void sync_math_warps() { named_barrier(MATH_BARRIER, WARPGROUP * WARPGROUPS); }
__device__ __forceinline__ void sync_warpgroup(int warpgroup) { named_barrier(MATH_BARRIER + warpgroup, WARPGROUP); }

// The blocks of a cluster share the K of one tile, which is their only one: each adds up and stores portions of it.
struct Split {
  int rank;

  __device__ __forceinline__ Split() : rank(SPLIT_K > 1 ? cluster_rank() : 0) {}

  // All threads of the cluster meet once: every block has set up the barrier that its peers send to. None of them ends
  // before it has what it was sent, so that its shared memory is there.
  static __device__ __forceinline__ void announce() {
    if constexpr (SPLIT_K > 1) cluster_arrive_relaxed();
  }
  static __device__ __forceinline__ void await_peers() {
    if constexpr (SPLIT_K > 1) cluster_wait();
  }

  // Blocks along K before those of block `rank`.
  static __device__ __forceinline__ int k_blocks_before(int rank) { return rank * K_BLOCKS / SPLIT_K; }

  // The first of the portions of block `rank`, and whose a portion is.
  static __device__ __forceinline__ constexpr int begin(int rank) { return rank * PORTIONS / SPLIT_K; }
  static __device__ __forceinline__ constexpr int owner(int portion) {
    return ((portion + 1) * SPLIT_K - 1) / PORTIONS;
  }
  __device__ __forceinline__ bool owns(int portion) const { return SPLIT_K == 1 || owner(portion) == rank; }

  // This block's columns of a slab whose rows are tokens.
  __device__ __forceinline__ Pieces pieces(int slab) const {
    if constexpr (SPLIT_K == 1) return {0, COLUMNS / 8};
    const int first = slab_column(slab) / 8;
    return {begin(rank) - first, begin(rank + 1) - first};
  }
};

// Tokens of a tile.
__device__ __forceinline__ int tokens_of(const Tile& tile) { return min(BLOCK_M, tile.end - tile.m); }

// The blocks of a split add up their tile. Thread t of each has sums of the same places: it sends those of another's
// portions to thread t there, out of its registers, and adds what it gets to its own in rank order, so that the result
// never depends on timing. Rows of a warp and pairs of columns that are no tokens of the tile are left out.
struct Exchange {
  Shared& s;
  const Tile& tile;
  int rank;

  // Prepares for what the peers send; by the thread that has set up s.sums.
  __device__ __forceinline__ void expect() const {
    const int begin = Split::begin(rank), portions = Split::begin(rank + 1) - begin, tokens = tokens_of(tile);
    const int sums = SWAP ? max(0, min(portions, ceil_div(tokens, 2) - begin)) * ROW_SLABS * PORTION_THREADS
                          : portions * ceil_div(tokens, 16) * WARP;
    s.sums.expect((SPLIT_K - 1) * sums * 16);
  }

  // Leaves the sums of this block's portions in the registers. By all math warps.
  __device__ __forceinline__ void add_up(float (&sum)[SLABS][ACCUMULATORS], int warpgroup) const {
    Split::await_peers();
    each(warpgroup, [&](int slab, int piece, int portion, int owner) {
      if (owner == rank) return;
      const float* target = received(place(rank, owner, portion, slab));
      store_to_block(cluster_address(shared_address(target), owner), sum[slab] + 4 * piece,
                     cluster_address(s.sums.address(), owner));
    });
    s.sums.wait_cluster(0);
    each(warpgroup, [&](int slab, int piece, int portion, int owner) {
      if (owner != rank) return;
      float* own = sum[slab] + 4 * piece;
      float total[4];
#pragma unroll
      for (int sender = 0; sender < SPLIT_K; ++sender) {
        const bool here = sender == owner;
        const float* sent = received(place(here ? !sender : sender, owner, portion, slab));
        const float4 v = *reinterpret_cast<const float4*>(sent);
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = here ? own[i] : values[i];
          total[i] = sender == 0 ? value : __fadd_rn(total[i], value);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) own[i] = total[i];
    });
  }

 private:
  // Calls visit(slab, piece, portion, owner) for each four sums of this thread that count.
  template <typename Visit>
  __device__ __forceinline__ void each(int warpgroup, const Visit& visit) const {
    const int tokens = tokens_of(tile), first_row = threadIdx.x / WARP % 4 * 16;
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll
      for (int piece = 0; piece < COLUMNS / 8; ++piece) {
        const int portion = SWAP ? 4 * piece + lane_id() % 4 : slab_column(slab) / 8 + piece;
        const bool counts = SWAP ? 2 * portion < tokens : slab_row(warpgroup, slab) + first_row < tokens;
        if (counts) visit(slab, piece, portion, Split::owner(portion));
      }
    }
  }

  __device__ __forceinline__ float* received(int place) const { return reinterpret_cast<float*>(s.epilogue) + 4 * place; }

  // Of the four sums of a portion that another block sends to block `receiver`, among what it receives.
  __device__ __forceinline__ int place(int sender, int receiver, int portion, int slab) const {
    const int slot = sender - (sender > receiver), row_slab = COLUMN_SLABS > 1 ? 0 : slab;
    const int sums = (slot * MOST_PORTIONS + portion - Split::begin(receiver)) * ROW_SLABS + row_slab;
    const int thread = SWAP ? threadIdx.x / 4 : threadIdx.x;
    return sums * PORTION_THREADS + thread;
  }
};

// The sums of a tile by token: of all its tokens, or of those that are this block's.
struct Sums {
  Shared& s;
  Tile tile;
  Split split;

  // Tokens of this block, and the first.
  __device__ __forceinline__ int tokens() const {
    return max(0, min(2 * Split::begin(split.rank + 1), tokens_of(tile)) - first());
  }
  __device__ __forceinline__ long long first_row() const { return tile.m + first(); }

  // From the registers to where at() finds them. By all math warps.
  __device__ __forceinline__ void gather(const float (&sum)[SLABS][ACCUMULATORS], int warpgroup) const {
    const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const int pair = 4 * j + lane % 4;
        if (!split.owns(pair)) continue;
        float* t = by_token() + (2 * pair - first()) * SUM_PITCH + slab_row(warpgroup, slab) + warp * 16 + lane / 4;
        const float* v = sum[slab] + 4 * j;
        t[0] = v[0], t[SUM_PITCH] = v[1], t[8] = v[2], t[SUM_PITCH + 8] = v[3];
      }
    }
    sync_math_warps();
  }

  // Four output features of one of this block's tokens.
  __device__ __forceinline__ float4 at(int token, int feature) const {
    return *reinterpret_cast<const float4*>(by_token() + token * SUM_PITCH + feature);
  }

 private:
  __device__ __forceinline__ int first() const { return 2 * Split::begin(split.rank); }
  __device__ __forceinline__ float* by_token() const { return reinterpret_cast<float*>(s.epilogue + RECEIVED_BYTES); }
};
