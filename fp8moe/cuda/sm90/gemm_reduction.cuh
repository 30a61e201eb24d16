// From the sums to the epilogue: weight scales of output features, and sums that pass through shared memory: those of a
// tile whose weights are the 64-row side, to be laid out by token, and those of a split.
#pragma once

#include "gemm_schedule.cuh"

constexpr int MATH_BARRIER = 1;  // the named barrier of all math warps; a warpgroup has one of its own behind it
__device__ __forceinline__ void sync_math_warps() { named_barrier(MATH_BARRIER, WARPGROUP * WARPGROUPS); }
__device__ __forceinline__ void sync_warpgroup(int warpgroup) { named_barrier(MATH_BARRIER + warpgroup, WARPGROUP); }

// The blocks of a cluster share the K of one tile, which is their only one: each sums and stores a slice of its tokens,
// in rank order, so that the result never depends on timing. Every thread of the cluster meets the others twice:
//   announce(), await_peers()   every block has set up the barrier that its peers send to
//   received(), leave()         every block has what was sent to it, so that the sender's shared memory may go
struct Split {
  int rank;

  __device__ __forceinline__ Split() : rank(SPLIT_K > 1 ? cluster_rank() : 0) {}

  static __device__ __forceinline__ void announce() {
    if constexpr (SPLIT_K > 1) cluster_arrive_relaxed();
  }
  static __device__ __forceinline__ void await_peers() {
    if constexpr (SPLIT_K > 1) cluster_wait();
  }
  static __device__ __forceinline__ void received() {
    if constexpr (SPLIT_K > 1) cluster_arrive_relaxed();
  }
  static __device__ __forceinline__ void leave() {
    if constexpr (SPLIT_K > 1) cluster_wait();
  }

  // Blocks along K before those of block `rank`.
  static __device__ __forceinline__ int k_blocks_before(int rank) { return rank * K_BLOCKS / SPLIT_K; }
  // Tokens of the tile that block `rank` sums and stores.
  static __device__ __forceinline__ int tokens(const Tile& tile, int rank) {
    return max(0, min(SLICE_M, min(BLOCK_M, tile.end - tile.m) - rank * SLICE_M));
  }
};

// CHANNEL: a weight scale for each output feature of each group, (groups, N), in place of one for 128x128.
struct ChannelScales {
  const float* scales;

  // From the scale of a tile's column on; and how many columns, of gate or of up, there are from it on.
  __device__ __forceinline__ const float* at(const Tile& tile, int column) const {
    const int n = GATED ? tile.n / 2 + column % 128 + (column < 128 ? 0 : INTERMEDIATE) : tile.n + column;
    return scales + static_cast<long long>(tile.group) * N + n;
  }
  static __device__ __forceinline__ int left(const Tile& tile, int column) {
    return GATED ? INTERMEDIATE - tile.n / 2 - column % 128 : N - tile.n - column;
  }

  // Asks for those of a tile, so that they are near when its sums are complete. By a warp: each lane for 8 columns.
  __device__ __forceinline__ void prefetch(const Tile& tile) const {
    const int column = 8 * lane_id();
    if (column < BLOCK_N && left(tile, column) > 0) prefetch_near(at(tile, column));
  }

  // To the sums in the registers, whose rows are tokens.
  __device__ __forceinline__ void multiply(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int warpgroup) const {
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      const int column = slab_of(tile, warpgroup, slab).column + 2 * (lane_id() % 4);
      const float* scale = at(tile, column);
      const int last = left(tile, column) - 2;  // columns behind it get any scale. No branch: all loads go at once
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        if (j == 8) asm volatile("" ::: "memory");  // the rest later, or there are too few registers
        const int i = (GATED ? INTERMEDIATE % 128 : N % BLOCK_N) == 0 ? 8 * j : min(8 * j, last);
        const float first = scale[i], second = scale[i + 1];
        float* v = sum[slab] + 4 * j;
        v[0] *= first, v[1] *= second, v[2] *= first, v[3] *= second;
      }
    }
  }

  // To four output features of a token.
  __device__ __forceinline__ float4 multiply(float4 sum, const Tile& tile, int column) const {
    if (left(tile, column) <= 0) return sum;
    const float* scale = at(tile, column);
    return make_float4(sum.x * scale[0], sum.y * scale[1], sum.z * scale[2], sum.w * scale[3]);
  }
};

// The sums of a tile by token, a slice of which is this block's.
struct Sums {
  Shared& s;
  Tile tile;
  Split split;
  ChannelScales channels;

  // Tokens of this block, and the first.
  __device__ __forceinline__ int tokens() const { return Split::tokens(tile, split.rank); }
  __device__ __forceinline__ long long first_row() const { return tile.m + split.rank * SLICE_M; }

  // Prepares for what the peers send; by the thread that has set up s.sums.
  __device__ __forceinline__ void expect() {
    if constexpr (SPLIT_K > 1) s.sums.expect(tokens() * SUM_PITCH * (SPLIT_K - 1) * 4);
  }

  // From the registers to where at() finds them. By all math warps, whose last use of the ring has ended if it is
  // split.
  __device__ __forceinline__ void gather(const float (&sum)[SLABS][ACCUMULATORS], int warpgroup) {
    if constexpr (SPLIT_K > 1) {
      sync_math_warps();
      write(sum, own(), warpgroup);
      Split::await_peers();
      fence_async_proxy();
      sync_math_warps();
      send();
      s.sums.wait_cluster(0);
      Split::received();
    } else {
      write(sum, gathered(), warpgroup);
      sync_math_warps();
    }
  }

  // Four output features of one of this block's tokens, summed in rank order.
  __device__ __forceinline__ float4 at(int token, int feature) const {
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int rank = 0; rank < SPLIT_K; ++rank) {
      const float* slice = (SPLIT_K > 1 && rank == split.rank ? own() : gathered()) + rank * SLICE_M * SUM_PITCH;
      const float4 v = *reinterpret_cast<const float4*>(slice + token * SUM_PITCH + feature);
      total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
    }
    if constexpr (CHANNEL) return channels.multiply(total, tile, feature);
    return total;
  }

 private:
  // The block's own partial tile takes the place of the ring; what it receives lies behind it, a slice for each rank.
  __device__ __forceinline__ float* own() const { return reinterpret_cast<float*>(s.a); }
  __device__ __forceinline__ float* gathered() const { return reinterpret_cast<float*>(s.epilogue); }

  static __device__ __forceinline__ void write(const float (&sum)[SLABS][ACCUMULATORS], float* target, int warpgroup) {
    const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      const int row = slab_row(warpgroup, slab) + warp * 16 + lane / 4, column = 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const float* v = sum[slab] + 4 * j;
        if constexpr (SWAP) {
          float* t = target + (8 * j + column) * SUM_PITCH + row;
          t[0] = v[0], t[SUM_PITCH] = v[1], t[8] = v[2], t[SUM_PITCH + 8] = v[3];
        } else {
          float* t = target + row * SUM_PITCH + 8 * j + column;
          *reinterpret_cast<float2*>(t) = make_float2(v[0], v[1]);
          *reinterpret_cast<float2*>(t + 8 * SUM_PITCH) = make_float2(v[2], v[3]);
        }
      }
    }
  }

  // A thread for each peer sends it the slice that it sums.
  __device__ __forceinline__ void send() const {
    const int peer = threadIdx.x;
    if (peer >= SPLIT_K || peer == split.rank) return;
    const u32 bytes = Split::tokens(tile, peer) * SUM_PITCH * 4;
    if (bytes > 0) {
      const u32 target = shared_address(gathered() + split.rank * SLICE_M * SUM_PITCH);
      bulk_copy_to_block(cluster_address(target, peer), shared_address(own() + peer * SLICE_M * SUM_PITCH), bytes,
                         cluster_address(s.sums.address(), peer));
    }
  }
};
