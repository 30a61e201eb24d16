// The steps between the sums and the epilogue: scales and biases of output features, and sums that go through shared
// memory. They go there to be transposed, if weights are the 64-row side of the tile, or to be added up over the blocks
// of a split.
#pragma once

#include "gemm_schedule.cuh"

constexpr int MATH_BARRIER = 1;  // named barrier of all math warps; the next ids are for single warpgroups
__device__ __forceinline__ void sync_math_warps() { named_barrier(MATH_BARRIER, WARPGROUP * WARPGROUPS); }
__device__ __forceinline__ void sync_warpgroup(int warpgroup) { named_barrier(MATH_BARRIER + warpgroup, WARPGROUP); }

// The blocks of a cluster split the K of one tile, their only tile. Each block adds up a slice of the tile's tokens, in
// rank order so that the result does not depend on timing, and stores the slice. Every thread of the cluster passes two
// cluster barriers:
//   announce(), await_peers()   every block has initialized the mbarrier that its peers signal
//   received(), leave()         every block has received its data, so that the senders may exit and free their shared
//                               memory
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

  // The number of K blocks before those of block `rank`.
  static __device__ __forceinline__ int k_blocks_before(int rank) { return rank * K_BLOCKS / SPLIT_K; }
  // The number of the tile's tokens that block `rank` sums and stores.
  static __device__ __forceinline__ int tokens(const Tile& tile, int rank) {
    return max(0, min(SLICE_M, min(BLOCK_M, tile.end - tile.m) - rank * SLICE_M));
  }
};

// Scales and biases of output features, applied to the sums before the epilogue. CHANNEL multiplies each sum by the
// weight scale of its feature, in place of 128x128 block scales; BIAS adds a bias. If sums stay in registers, a tile's
// scales and biases are loaded to shared memory with its first stage and stay there until the tile ends; the next tile
// uses the other buffer.
struct Columns {
  const float* scales;  // (N), or (groups, N)
  const void* bias;     // the same shape; bfloat16 or float32

  // The scales and biases of two consecutive features.
  struct Pair {
    float2 scale, bias;

    // Loads them, given the addresses of the first feature's scale and bias.
    __device__ __forceinline__ Pair(const void* scales, const void* biases) : scale{}, bias{} {
      if constexpr (CHANNEL) scale = *static_cast<const float2*>(scales);
      if constexpr (BIAS == 1) {
        const u32 two = *static_cast<const u32*>(biases);
        bias = make_float2(bfloat16_to_float(two & 0xFFFF), bfloat16_to_float(two >> 16));
      }
      if constexpr (BIAS == 2) bias = *static_cast<const float2*>(biases);
    }

    __device__ __forceinline__ void apply(float& left, float& right) const {
      if constexpr (CHANNEL && BIAS) {  // explicit fma, so that all kernels round alike
        left = fmaf(left, scale.x, bias.x), right = fmaf(right, scale.y, bias.y);
      } else if constexpr (CHANNEL) {
        left *= scale.x, right *= scale.y;
      } else if constexpr (BIAS) {
        left += bias.x, right += bias.y;
      }
    }
  };

  // The number of features from a tile's column on; GATED: features of that projection, gate or up.
  static __device__ __forceinline__ int left(const Tile& tile, int column) {
    return GATED ? INTERMEDIATE - tile.n / 2 - column % 128 : N - tile.n - column;
  }

  // The addresses of the scale and the bias of a tile's column.
  __device__ __forceinline__ const u8* scale_at(const Tile& tile, int column) const {
    return reinterpret_cast<const u8*>(scales) + feature(tile, column) * SCALE_BYTES;
  }
  __device__ __forceinline__ const u8* bias_at(const Tile& tile, int column) const {
    return static_cast<const u8*>(bias) + feature(tile, column) * BIAS_BYTES;
  }

  // Prefetches the scales and biases of a tile whose sums go through shared memory. Called by a warp; each lane
  // prefetches 8 columns.
  __device__ __forceinline__ void prefetch(const Tile& tile) const {
    const int column = 8 * lane_id();
    if (column >= BLOCK_N || left(tile, column) <= 0) return;
    if constexpr (CHANNEL) prefetch_near(scale_at(tile, column));
    if constexpr (BIAS) prefetch_near(bias_at(tile, column));
  }

  // Loads the scales and biases of a tile to `target`. Adds their bytes to the count that `barrier` waits for; the
  // calling thread must not have arrived at the barrier yet.
  __device__ __forceinline__ void load(const Tile& tile, u32 target, u32 barrier) const {
#pragma unroll
    for (int column = 0; column < (GATED ? 256 : 1); column += 128) {
      const int count = min(GATED ? 128 : tile.columns(), left(tile, column));
      if (HALVES && count <= 0) return;  // half a tile may have no features
      mbarrier_expect_more(barrier, count * (SCALE_BYTES + BIAS_BYTES));
      if constexpr (CHANNEL) bulk_load(target + column * 4, scale_at(tile, column), count * 4, barrier);
      if constexpr (BIAS) {
        bulk_load(target + BLOCK_N * SCALE_BYTES + column * BIAS_BYTES, bias_at(tile, column), count * BIAS_BYTES,
                  barrier);
      }
    }
  }

  // Applies scales and biases, loaded by load(), to sums in registers, whose rows are tokens. Columns past the last
  // feature get arbitrary values.
  static __device__ __forceinline__ void apply(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int warpgroup,
                                               const u8* values) {
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      const int column = slab_of(tile, warpgroup, slab).column + 2 * (lane_id() % 4);
      const u8 *scales = values + column * SCALE_BYTES, *biases = values + BLOCK_N * SCALE_BYTES + column * BIAS_BYTES;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const Pair pair(scales + 8 * j * SCALE_BYTES, biases + 8 * j * BIAS_BYTES);
        float* v = sum[slab] + 4 * j;
        pair.apply(v[0], v[1]);
        pair.apply(v[2], v[3]);
      }
    }
  }

  // Applies scales and biases to the sums of four consecutive features of a token.
  __device__ __forceinline__ float4 apply(float4 sum, const Tile& tile, int column) const {
    if (left(tile, column) <= 0) return sum;
    const u8 *scales = scale_at(tile, column), *biases = bias_at(tile, column);
    Pair(scales, biases).apply(sum.x, sum.y);
    Pair(scales + 2 * SCALE_BYTES, biases + 2 * BIAS_BYTES).apply(sum.z, sum.w);
    return sum;
  }

 private:
  // The index of a tile's column among the features of all groups.
  static __device__ __forceinline__ long long feature(const Tile& tile, int column) {
    const int n = GATED ? tile.n / 2 + column % 128 + (column < 128 ? 0 : INTERMEDIATE) : tile.n + column;
    return static_cast<long long>(tile.group) * N + n;
  }
};

// The end of the tile's group. Read again from shared memory after the products, so that it needs no register during
// them.
template <int Groups>
__device__ __forceinline__ int group_end(const GroupTable<Groups>& groups, const Tile& tile) {
  if constexpr (Groups > 0) return groups.end[tile.group];
  return tile.end;
}

// The sums of a tile in shared memory, by token. In a split, this block finishes a slice of the tokens.
struct Sums {
  Shared& s;
  Tile tile;
  Split split;
  Columns columns;

  // The number of this block's tokens, and the row of the first one.
  __device__ __forceinline__ int tokens() const { return Split::tokens(tile, split.rank); }
  __device__ __forceinline__ long long first_row() const { return tile.m + split.rank * SLICE_M; }

  // Prepares s.sums to receive the peers' sums. Called by the thread that initialized s.sums.
  __device__ __forceinline__ void expect() {
    if constexpr (SPLIT_K > 1) s.sums.expect(tokens() * SUM_PITCH * (SPLIT_K - 1) * 4);
  }

  // Moves sums from registers to shared memory, where at() reads them. Called by all math warps; in a split it
  // overwrites the ring, so all products must have finished.
  __device__ __forceinline__ void gather(const float (&sum)[SLABS][ACCUMULATORS], int warpgroup) {
    if constexpr (BIAS) tile.end = group_end(s.groups, tile);
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

  // The sums of four output features of one of this block's tokens, added in rank order.
  __device__ __forceinline__ float4 at(int token, int feature) const {
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int rank = 0; rank < SPLIT_K; ++rank) {
      const float* slice = (SPLIT_K > 1 && rank == split.rank ? own() : gathered()) + rank * SLICE_M * SUM_PITCH;
      const float4 v = *reinterpret_cast<const float4*>(slice + token * SUM_PITCH + feature);
      total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
    }
    if constexpr (COLUMN_VALUES) return columns.apply(total, tile, feature);
    return total;
  }

 private:
  // In a split, the block's own partial tile overwrites the ring. The slices received from peers come after the ring,
  // one for each rank.
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

  // Sends each peer the slice that it sums; one thread for each peer.
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
