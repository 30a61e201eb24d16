// FP8 GEMM for Hopper: out[m, n] = sum_i a_scale[m, i] * b_scale[n / 128, i] * sum_{k in block i} a[m, k] * b[n, k].
//
//   a (M, K) e4m3, a_scale (M, ceil(K / 128)) float32 stored MN-major                    activations
//   b (N, K) e4m3, b_scale (ceil(N / 128), ceil(K / 128)) float32                        weights
//   or, with GROUPS, one (N, K) for each group of rows of a, and sizes of groups that only the device knows
//
// With SWIGLU the weights are those of gate and up, one after the other, and the result is silu(gate) * up in E4M3 with
// 1x128 scales: a tile has 128 columns of gate and the same of up, a slab of each, so that both meet in one thread.
//
// One block computes a BLOCK_M x BLOCK_N tile. Roles:
//   a thread of the producer group TMA loads of a, b and a_scale into a ring of STAGES stages
//   WARPGROUPS math warpgroups     wgmma over one 128-deep block into `partial`, then sum += scales * partial in
//                                  float32: the tensor cores keep about 14 bits while they sum FP8 products
//                                  (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)
//
// SWAP = 0: tokens are the 64-row side of wgmma. SWAP = 1: weights are, and a tile may have as few as 8 tokens.
// The SPLIT_K blocks of a cluster share the K of a tile. Their partial tiles meet in distributed shared memory and are
// summed in rank order, so that the result never depends on timing.
//
// kernels/gemm_source.py generates wgmma() for the chosen width.

#include "gemm_epilogue.cuh"
#include "gemm_layout.cuh"
#include "gemm_schedule.cuh"
#include "ptx.cuh"

__device__ __forceinline__ void wait_empty(u32 shared, const Ring& ring) {
  mbarrier_wait(shared + EMPTY_OFFSET + ring.stage * 8, ring.phase ^ 1);
}

__device__ __forceinline__ void load_a(u32 shared, const TensorMap& a, const TensorMap& a_scale, Tile tile, int block,
                                       u32 stage) {
  const u32 full = shared + FULL_OFFSET + stage * 8;
  tma_load(shared + A_OFFSET + stage * A_BYTES, a, full, block * TILE_K, tile.m);
#pragma unroll
  for (int i = 0; i < A_SCALE_LOADS; ++i) {
    tma_load(shared + A_SCALE_OFFSET + stage * A_SCALE_PITCH + i * 128 * 4, a_scale, full,
             (GROUPS ? tile.m & ~3 : tile.m) + i * 128, block);
  }
}

__device__ __forceinline__ void load_b(u32 shared, const TensorMap& b, Tile tile, int block, u32 stage) {
  const u32 full = shared + FULL_OFFSET + stage * 8;
  mbarrier_arrive_expect_tx(full, STAGE_TX);
  const u32 target = shared + B_OFFSET + stage * B_BYTES;
  const int row = tile.group * N + (SWIGLU ? tile.n / 2 : tile.n);
  tma_load(target, b, full, block * TILE_K, row);
  if constexpr (SWIGLU) tma_load(target + B_BYTES / 2, b, full, block * TILE_K, row + INTERMEDIATE);
}

// Blocks of 128 along K before those of block `split`.
__device__ __forceinline__ int blocks_before(int split) { return split * K_BLOCKS / SPLIT_K; }

// The weight scales of a tile, held by every math warp: 32 blocks along K at a time, a lane each. They are fetched one
// turn ahead, so that nothing waits for them.
struct WeightScales {
  const float* b_scale;
  float held[TILE_SCALE_ROWS], next[TILE_SCALE_ROWS];

  __device__ __forceinline__ explicit WeightScales(const float* b_scale) : b_scale(b_scale) {}

  // Fetches those of blocks `first` to `first` + 31, as far as there are `blocks`.
  __device__ __forceinline__ void fetch(Tile tile, int first, int blocks) {
    const int block = min(first + static_cast<int>(lane_id()), blocks - 1);
#pragma unroll
    for (int r = 0; r < TILE_SCALE_ROWS; ++r) {
      const int row = SWIGLU ? r * PROJECTION_SCALE_ROWS + tile.n / 256 : min(tile.n / 128 + r, SCALE_ROWS - 1);
      next[r] = b_scale[(static_cast<long long>(tile.group) * SCALE_ROWS + row) * K_BLOCKS + block];
    }
  }

  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int r = 0; r < TILE_SCALE_ROWS; ++r) held[r] = next[r];
  }
};

// The scale of output feature `column` of a tile whose first scale row ends before feature `end`.
__device__ __forceinline__ float scale_of(const float (&scales)[TILE_SCALE_ROWS], int column, int end) {
  if constexpr (TILE_SCALE_ROWS == 1) return scales[0];
  const float later = TILE_SCALE_ROWS == 2 || column < end + 128 ? scales[1] : scales[TILE_SCALE_ROWS - 1];
  return column < end ? scales[0] : later;
}

// scale * product, added to `sum` unless it is the first.
template <bool First>
__device__ __forceinline__ void add(float& sum, float scale, float product) {
  sum = First ? scale * product : fmaf(scale, product, sum);
}

// Adds row scale * column scale * partial to one 64-row slab of this warpgroup, of which two rows of this lane are
// tokens.
template <bool First>
__device__ __forceinline__ void promote(float (&sum)[ACCUMULATORS], const float (&partial)[ACCUMULATORS],
                                        float upper_scale, float lower_scale, const float (&b_scales)[TILE_SCALE_ROWS],
                                        int column, int end) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const float b_scale = scale_of(b_scales, column + 8 * j / GRANULE * GRANULE, end);
    const float upper = upper_scale * b_scale, lower = lower_scale * b_scale;
    add<First>(sum[4 * j], upper, partial[4 * j]);
    add<First>(sum[4 * j + 1], upper, partial[4 * j + 1]);
    add<First>(sum[4 * j + 2], lower, partial[4 * j + 2]);
    add<First>(sum[4 * j + 3], lower, partial[4 * j + 3]);
  }
}

// The same where rows are output features, all with one weight scale, and columns are tokens.
template <bool First>
__device__ __forceinline__ void promote_swapped(float (&sum)[ACCUMULATORS], const float (&partial)[ACCUMULATORS],
                                                const float (&a_scales)[ACCUMULATORS / 2], float weight) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const float left = a_scales[2 * j] * weight, right = a_scales[2 * j + 1] * weight;
    add<First>(sum[4 * j], left, partial[4 * j]);
    add<First>(sum[4 * j + 1], right, partial[4 * j + 1]);
    add<First>(sum[4 * j + 2], left, partial[4 * j + 2]);
    add<First>(sum[4 * j + 3], right, partial[4 * j + 3]);
  }
}

// Multiplies the stage at `ring`, hands it back to the producer, and adds the products to the sums. Lane `source` holds
// the weight scales; `end` as in scale_of().
template <bool First>
__device__ __forceinline__ void multiply(float (&sum)[WAVES][ACCUMULATORS], const char* memory, u32 shared, Ring& ring,
                                         const WeightScales& weights, int source, Tile tile, int end, int group) {
  const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared + EMPTY_OFFSET + ring.stage * 8);
  };
  float b_scales[TILE_SCALE_ROWS];
#pragma unroll
  for (int r = 0; r < TILE_SCALE_ROWS; ++r) b_scales[r] = __shfl_sync(0xFFFFFFFF, weights.held[r], source);
  mbarrier_wait(shared + FULL_OFFSET + ring.stage * 8, ring.phase);
  const float* a_scales =
      reinterpret_cast<const float*>(memory + A_SCALE_OFFSET + ring.stage * A_SCALE_PITCH) + (GROUPS ? tile.m & 3 : 0);
  const u32 a = shared + A_OFFSET + ring.stage * A_BYTES, b = shared + B_OFFSET + ring.stage * B_BYTES;
  // The scales of the tokens are loaded ahead of the products: handing the stage back does not wait for loads in
  // flight, and the next scales may be there sooner than a load that was issued last.
  float tokens[SWAP ? ACCUMULATORS / 2 : 2];
  if constexpr (SWAP) {
#pragma unroll
    for (int j = 0; j < ACCUMULATORS / 2; ++j) tokens[j] = a_scales[8 * (j / 2) + 2 * (lane % 4) + j % 2];
  }
  float partial[ACCUMULATORS];
#pragma unroll
  for (int wave = 0; wave < WAVES; ++wave) {
    const int row = slab_row(group, wave), column = slab_column(wave);
    const u64 rows = wgmma_descriptor((SWAP ? b : a) + row * TILE_K);
    const u64 columns = wgmma_descriptor((SWAP ? a : b) + column * TILE_K);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE_K / 32; ++k) wgmma(partial, rows + 2 * k, columns + 2 * k, k > 0);
    wgmma_commit();
    if constexpr (!SWAP) {
      tokens[0] = a_scales[row + warp * 16 + lane / 4];
      tokens[1] = a_scales[row + warp * 16 + lane / 4 + 8];
    }
    wgmma_wait();
    if (wave == WAVES - 1) release();  // before the last promotion
    if constexpr (SWAP) {
      promote_swapped<First>(sum[wave], partial, tokens, scale_of(b_scales, row, end));
    } else {
      promote<First>(sum[wave], partial, tokens[0], tokens[1], b_scales, column, end);
    }
  }
  ring.advance();
}

// The same over `count` stages, of which the first begins the sums if `first`.
__device__ __forceinline__ void multiply_all(float (&sum)[WAVES][ACCUMULATORS], const char* memory, u32 shared,
                                             Ring& ring, const WeightScales& weights, bool first, int count, Tile tile,
                                             int end, int group) {
  if (first) multiply<true>(sum, memory, shared, ring, weights, 0, tile, end, group);
#pragma unroll 1
  for (int i = first; i < count; ++i) multiply<false>(sum, memory, shared, ring, weights, i, tile, end, group);
}

// Hands the stage at `ring` back unused.
__device__ __forceinline__ void skip(u32 shared, Ring& ring) {
  mbarrier_wait(shared + FULL_OFFSET + ring.stage * 8, ring.phase);
  if (lane_id() == 0) mbarrier_arrive(shared + EMPTY_OFFSET + ring.stage * 8);
  ring.advance();
}

// m: rows of a and of the result. groups: see GroupedSchedule. out_map: the result as if its pitch were N.
// raster: height of a rasterization group in tiles.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scale,
         const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap out_map,
         const float* __restrict__ b_scale, const int* __restrict__ groups, const __grid_constant__ Output out, int m,
         int max_m, int raster) {
  extern __shared__ char unaligned[];
  char* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const u32 shared = shared_address(memory);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP, 0), lane = lane_id();
  const int math_group = warp / 4;  // the last warpgroup is the producer
  const int split = SPLIT_K > 1 ? cluster_rank() : 0;
  Schedule schedule(m, max_m, raster);
  const int first_tile = blockIdx.x / SPLIT_K, tile_step = gridDim.x / SPLIT_K;
  const int block0 = blocks_before(split), blocks = blocks_before(split + 1) - block0;
  const int early = min(blocks, STAGES);

  if (warp == 4 * WARPGROUPS) {
    schedule.prepare(memory, groups);
    schedule.ready(memory);
  }
  const bool loader = warp == 4 * WARPGROUPS && lane == 0;
  if (loader) {
#pragma unroll 1
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(shared + FULL_OFFSET + s * 8, 1);
      mbarrier_init(shared + EMPTY_OFFSET + s * 8, MATH_WARPS);
    }
    if constexpr (SPLIT_K > 1) mbarrier_init(shared + SUMS_OFFSET, 1);
    mbarrier_init_fence();
    // Fill the ring at once. Weights and group sizes never come from the kernel before this one, so they need not wait.
    const bool any = first_tile < schedule.tiles;
    const Tile tile = schedule.tile(memory, any ? first_tile : 0);
    if (any) {
#pragma unroll 1
      for (int i = 0; i < early; ++i) load_b(shared, b, tile, block0 + i, i);
    }
    wait_for_previous_kernel();
    if (any) {
#pragma unroll 1
      for (int i = 0; i < early; ++i) load_a(shared, a, a_scale, tile, block0 + i, i);
      if constexpr (SPLIT_K > 1)
        mbarrier_arrive_expect_tx(shared + SUMS_OFFSET, slice_tokens(tile, split) * SUM_PITCH * (SPLIT_K - 1) * 4);
    }
  }
  __syncthreads();
  schedule.ready(memory);
  if constexpr (SPLIT_K > 1) cluster_arrive_relaxed();  // this block's barriers are ready for its peers
  allow_next_kernel();

  if (math_group == WARPGROUPS) {
    if constexpr (MATH_REGISTERS > 0) registers_decrease<PRODUCER_REGISTERS>();
    Ring ring;
    if (loader) {
      int skip = early;
      for (int index = first_tile; index < schedule.tiles; index += tile_step) {
        const Tile tile = schedule.tile(memory, index);
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
          if (skip > 0) {
            --skip;
          } else {
            wait_empty(shared, ring);
            load_b(shared, b, tile, block0 + i, ring.stage);
            load_a(shared, a, a_scale, tile, block0 + i, ring.stage);
          }
          ring.advance();
        }
      }
    }
    __syncwarp();
    if constexpr (SPLIT_K > 1) {
      cluster_wait();
      cluster_arrive_relaxed();
    }
  } else {
    if constexpr (MATH_REGISTERS > 0) registers_increase<MATH_REGISTERS>();
    Ring ring;
    WeightScales scales(b_scale + block0);
    const int tiles = same_in_warp(schedule.tiles);
    if (first_tile < tiles) scales.fetch(same_in_warp(schedule.tile(memory, first_tile)), 0, blocks);
    for (int index = first_tile; index < tiles; index += tile_step) {
      const Tile tile = same_in_warp(schedule.tile(memory, index));
      const int end = 128 - (BLOCK_N % 128 == 0 ? 0 : tile.n % 128);
      // What a group leaves of its last tile may be all of the other warpgroup's.
      const bool idle = GROUPS > 0 && !SWAP && tile.m + slab_row(math_group, 0) >= tile.end;
      float sum[WAVES][ACCUMULATORS];
#pragma unroll 1
      for (int base = 0; base < blocks; base += WARP) {
        scales.turn();
        if (base + WARP < blocks) {
          scales.fetch(tile, base + WARP, blocks);
        } else if (index + tile_step < tiles) {
          scales.fetch(same_in_warp(schedule.tile(memory, index + tile_step)), 0, blocks);
        }
        const int count = min(WARP, blocks - base);
        if (idle) {
#pragma unroll 1
          for (int i = 0; i < count; ++i) skip(shared, ring);
        } else {
          multiply_all(sum, memory, shared, ring, scales, base == 0, count, tile, end, math_group);
        }
      }
      if constexpr (SPLIT_K > 1) {
        named_barrier(1, WARPGROUP * WARPGROUPS);  // all have done with the ring
        write_partial(sum, reinterpret_cast<float*>(memory), math_group);
        cluster_wait();  // peers have set up the barriers that the sums go to
        send_partial(shared, tile, split);
        mbarrier_wait_cluster(shared + SUMS_OFFSET, 0);
        cluster_arrive_relaxed();
      } else if constexpr (REDUCE) {
        write_partial(sum, reinterpret_cast<float*>(memory + EPILOGUE_OFFSET), math_group);
        named_barrier(1, WARPGROUP * WARPGROUPS);
      }
      if constexpr (REDUCE) {
        if constexpr (SWIGLU) {
          store_sum_swiglu(memory, out, tile, split);
        } else {
          store_sum(memory, out, tile, split);
        }
        if constexpr (SPLIT_K > 1) break;          // its only tile
        named_barrier(1, WARPGROUP * WARPGROUPS);  // the buffer is free again
      } else if (!idle) {
        store_tile(sum, memory, shared, out_map, out, tile, math_group);
      }
    }
    if constexpr (TMA_STORE) {
      if (threadIdx.x % WARPGROUP == 0) bulk_wait();
    }
  }
  if constexpr (SPLIT_K > 1) cluster_wait();  // peers may still copy from this block's shared memory
}
