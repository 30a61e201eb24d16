// Dense FP8 GEMM for Hopper: out[m, n] = sum_b a_scale[m, b] * b_scale[n / 128, b] * sum_{k in block b} a[m, k] * b[n,
// k].
//
//   a (M, K) e4m3, a_scale (M, ceil(K / 128)) float32 stored MN-major      activations
//   b (N, K) e4m3, b_scale (ceil(N / 128), ceil(K / 128)) float32          weights
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
// Compile-time constants come from kernels/gemm_source.py, as does wgmma() for the chosen width.

#include "ptx.cuh"

constexpr int TILE_K = 128;
constexpr int K_BLOCKS = ceil_div(K, TILE_K);
constexpr int SCALE_ROWS = ceil_div(N, 128);

constexpr int ROWS = SWAP ? BLOCK_N : BLOCK_M;  // the 64-row side of wgmma
constexpr int COLUMNS = SWAP ? BLOCK_M : BLOCK_N;
constexpr int WAVES = ROWS / (64 * WARPGROUPS);  // 64-row slabs of one warpgroup
constexpr int ACCUMULATORS = COLUMNS / 2;        // registers of one slab
constexpr int MATH_WARPS = 4 * WARPGROUPS;
constexpr int THREADS = WARPGROUP * (WARPGROUPS + 1);

// Every GRANULE columns of b, from the start of a tile, share one weight scale.
constexpr int GRANULE = (BLOCK_N & -BLOCK_N) < 128 ? (BLOCK_N & -BLOCK_N) : 128;
constexpr int TILE_SCALE_ROWS = (128 - GRANULE + BLOCK_N - 1) / 128 + 1;  // of weight scales that a tile can touch

constexpr bool REDUCE = SWAP || SPLIT_K > 1;  // the epilogue goes through the reduction buffer

// Shared memory. Tiles come first: a 128-byte swizzle wants them 1024-byte aligned.
constexpr int A_BYTES = BLOCK_M * TILE_K;
constexpr int B_BYTES = BLOCK_N * TILE_K;
constexpr int A_SCALE_BYTES = BLOCK_M * 4;
constexpr int A_SCALE_PITCH = round_up(A_SCALE_BYTES, 128);
constexpr int STAGE_TX = A_BYTES + B_BYTES + A_SCALE_BYTES;

static_assert(SPLIT_K == 1 || BLOCK_M * (BLOCK_N + 8) * 4 <= STAGES * (A_BYTES + B_BYTES),
              "a partial tile takes the place of the ring");

constexpr int SLICE_M = ceil_div(BLOCK_M, SPLIT_K);  // tokens that one block of a split sums and stores
constexpr int SUM_PITCH = BLOCK_N + (SWAP ? 4 : 8);  // floats; keeps the scattered writes off each other's banks

// A bfloat16 tile leaves through staging tiles of 64 columns: a whole slab by TMA, under the next tile's products, or,
// where its rows or columns do not allow that, 16 rows at a time.
constexpr int STORE_COLUMNS = 64;
constexpr int STORE_BYTES = 16 * STORE_COLUMNS * 2;  // 16 rows
constexpr bool TMA_STORE = STAGED && !OUT_FLOAT32;
constexpr int SLAB_STORE_BYTES = STAGED ? 64 * COLUMNS * 2 : 4 * STORE_BYTES;
constexpr int STAGING_BYTES = (STAGED ? WAVES : 1) * SLAB_STORE_BYTES;  // of a warpgroup

constexpr int A_OFFSET = 0;
constexpr int B_OFFSET = A_OFFSET + STAGES * A_BYTES;
constexpr int EPILOGUE_OFFSET = B_OFFSET + STAGES * B_BYTES;
constexpr int EPILOGUE_BYTES = round_up(REDUCE ? SPLIT_K * SLICE_M * SUM_PITCH * 4 : WARPGROUPS * STAGING_BYTES, 128);
constexpr int A_SCALE_OFFSET = EPILOGUE_OFFSET + EPILOGUE_BYTES;
constexpr int FULL_OFFSET = A_SCALE_OFFSET + STAGES * A_SCALE_PITCH;
constexpr int EMPTY_OFFSET = FULL_OFFSET + STAGES * 8;
constexpr int SUMS_OFFSET = EMPTY_OFFSET + STAGES * 8;
constexpr int SHARED_BYTES = SUMS_OFFSET + 8;

static_assert(SHARED_BYTES + 1024 <= SHARED_LIMIT, "gemm_config.py and this file disagree about shared memory");
static_assert(ROWS % (64 * WARPGROUPS) == 0 && COLUMNS <= 256);
static_assert(COLUMNS % (SWAP ? 8 : 16) == 0, "stmatrix stores 16 columns at a time");
static_assert(SPLIT_K <= K_BLOCKS);
static_assert(!STAGED || (!REDUCE && COLUMNS % STORE_COLUMNS == 0));

struct Tile {
  int m, n;  // first token and first output feature
};

// Blocks walk groups of `group` tile rows, column by column: what runs at one time touches few rows of a and b, so that
// L2 serves most loads.
struct Schedule {
  int rows, group, tiles;

  __device__ Schedule(int m, int group)
      : rows(ceil_div(m, BLOCK_M)), group(group), tiles(rows * ceil_div(N, BLOCK_N)) {}

  __device__ Tile tile(int index) const {
    constexpr int COLS = ceil_div(N, BLOCK_N);
    const int first = group >= rows ? 0 : index / (group * COLS) * group;
    const int height = min(group, rows - first);
    const int within = index - first * COLS;
    const int column = height == 1 ? within : within / height, row = first + within - column * height;
    return {row * BLOCK_M, column * BLOCK_N};
  }
};

struct Ring {
  u32 stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ void wait_empty(u32 shared, const Ring& ring) {
  mbarrier_wait(shared + EMPTY_OFFSET + ring.stage * 8, ring.phase ^ 1);
}

__device__ __forceinline__ void load_a(u32 shared, const TensorMap& a, const TensorMap& a_scale, Tile tile, int block,
                                       u32 stage) {
  const u32 full = shared + FULL_OFFSET + stage * 8;
  tma_load(shared + A_OFFSET + stage * A_BYTES, a, full, block * TILE_K, tile.m);
  tma_load(shared + A_SCALE_OFFSET + stage * A_SCALE_PITCH, a_scale, full, tile.m, block);
}

__device__ __forceinline__ void load_b(u32 shared, const TensorMap& b, Tile tile, int block, u32 stage) {
  const u32 full = shared + FULL_OFFSET + stage * 8;
  mbarrier_arrive_expect_tx(full, STAGE_TX);
  tma_load(shared + B_OFFSET + stage * B_BYTES, b, full, block * TILE_K, tile.n);
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
  __device__ __forceinline__ void fetch(int n, int first, int blocks) {
    const int block = min(first + static_cast<int>(lane_id()), blocks - 1);
#pragma unroll
    for (int r = 0; r < TILE_SCALE_ROWS; ++r) next[r] = b_scale[min(n / 128 + r, SCALE_ROWS - 1) * K_BLOCKS + block];
  }

  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int r = 0; r < TILE_SCALE_ROWS; ++r) held[r] = next[r];
  }
};

// The scale of column `column` of a tile whose first scale row ends before column `end`.
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
                                        int end) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const float b_scale = scale_of(b_scales, 8 * j / GRANULE * GRANULE, end);
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
                                                const float* a_scales, float weight) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    const float2 token = *reinterpret_cast<const float2*>(a_scales + 8 * j + 2 * (lane_id() % 4));
    const float left = token.x * weight, right = token.y * weight;
    add<First>(sum[4 * j], left, partial[4 * j]);
    add<First>(sum[4 * j + 1], right, partial[4 * j + 1]);
    add<First>(sum[4 * j + 2], left, partial[4 * j + 2]);
    add<First>(sum[4 * j + 3], right, partial[4 * j + 3]);
  }
}

// Multiplies the stage at `ring`, hands it back to the producer, and adds the product to the sum. Lane `source` holds
// the weight scales; `end` as in scale_of().
template <bool First>
__device__ __forceinline__ void multiply(float (&sum)[WAVES][ACCUMULATORS], const char* memory, u32 shared, Ring& ring,
                                         const WeightScales& weights, int source, int end, int group) {
  const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
  const auto release = [&] {
    __syncwarp();  // all lanes have read the token scales
    if (lane == 0) mbarrier_arrive(shared + EMPTY_OFFSET + ring.stage * 8);
  };
  float b_scales[TILE_SCALE_ROWS];
#pragma unroll
  for (int r = 0; r < TILE_SCALE_ROWS; ++r) b_scales[r] = __shfl_sync(0xFFFFFFFF, weights.held[r], source);
  mbarrier_wait(shared + FULL_OFFSET + ring.stage * 8, ring.phase);
  const float* a_scales = reinterpret_cast<const float*>(memory + A_SCALE_OFFSET + ring.stage * A_SCALE_PITCH);
  const u32 a = shared + A_OFFSET + ring.stage * A_BYTES, b = shared + B_OFFSET + ring.stage * B_BYTES;
  float partial[ACCUMULATORS];
#pragma unroll
  for (int wave = 0; wave < WAVES; ++wave) {
    const int slab = group * WAVES + wave;
    const u64 rows = wgmma_descriptor((SWAP ? b : a) + slab * 64 * TILE_K);
    const u64 columns = wgmma_descriptor(SWAP ? a : b);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE_K / 32; ++k) wgmma(partial, rows + 2 * k, columns + 2 * k, k > 0);
    wgmma_commit();
    if constexpr (SWAP) {
      wgmma_wait();
      promote_swapped<First>(sum[wave], partial, a_scales, scale_of(b_scales, slab * 64, end));
      if (wave == WAVES - 1) release();
    } else {
      const int row = slab * 64 + warp * 16 + lane / 4;
      const float upper = a_scales[row], lower = a_scales[row + 8];
      wgmma_wait();
      if (wave == WAVES - 1) release();  // the next load may start under this promotion
      promote<First>(sum[wave], partial, upper, lower, b_scales, end);
    }
  }
  ring.advance();
}

__device__ __forceinline__ float bias_at(const void* bias, int n) {
  if constexpr (BIAS == 1) return bfloat16_to_float(static_cast<const u16*>(bias)[n]);
  if constexpr (BIAS == 2) return static_cast<const float*>(bias)[n];
  return 0.f;
}

__device__ __forceinline__ void add_bias(float (&sum)[ACCUMULATORS], const void* bias, int n) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j, n += 8) {
    if (n >= N) return;
    const float left = bias_at(bias, n), right = bias_at(bias, n + 1);
    sum[4 * j] += left, sum[4 * j + 1] += right, sum[4 * j + 2] += left, sum[4 * j + 3] += right;
  }
}

// float32 leaves straight from the registers, in pairs: four lanes fill a 32-byte sector.
__device__ __forceinline__ void store_float32(const float (&sum)[ACCUMULATORS], float* out, long long pitch, int row,
                                              int n, int m) {
  const int lane = lane_id();
  row += lane / 4;
  n += 2 * (lane % 4);
  float* target = out + row * pitch + n;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    if (n + 8 * j >= N) return;
    if (row < m) *reinterpret_cast<float2*>(target + 8 * j) = make_float2(sum[4 * j], sum[4 * j + 1]);
    if (row + 8 < m)
      *reinterpret_cast<float2*>(target + 8 * pitch + 8 * j) = make_float2(sum[4 * j + 2], sum[4 * j + 3]);
  }
}

// bfloat16 goes through this warp's 16 x 64 staging tile to 16-byte stores of whole 128-byte rows; those past m are
// left out.
__device__ __forceinline__ void store_bfloat16(const float (&sum)[ACCUMULATORS], u32 staging, u16* out, long long pitch,
                                               int row, int n, int m) {
  const int lane = lane_id();
  constexpr int CHUNKS = STORE_COLUMNS / 8;  // of 16 bytes in a staging row, swizzled against bank conflicts
  const int chunk = lane % CHUNKS;
#pragma unroll
  for (int piece = 0; piece < ceil_div(COLUMNS, STORE_COLUMNS); ++piece) {
    const int width = min(STORE_COLUMNS, COLUMNS - STORE_COLUMNS * piece) / 8;
#pragma unroll
    for (int j = 0; j < width; j += 2) {
      const float* s = sum + 4 * (CHUNKS * piece + j);
      stmatrix_x4(staging + lane % 16 * 128 + ((j + lane / 16) ^ lane % 8) * 16, pack_bfloat16(s[0], s[1]),
                  pack_bfloat16(s[2], s[3]), pack_bfloat16(s[4], s[5]), pack_bfloat16(s[6], s[7]));
    }
    __syncwarp();
    const int first = n + STORE_COLUMNS * piece + 8 * chunk;
    u16* target = out + (row + lane / CHUNKS) * pitch + first;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + lane / CHUNKS;
      const uint4 v = load_shared_16(staging + r * 128 + (chunk ^ r % 8) * 16);
      if (row + r < m && first < N && chunk < width) *reinterpret_cast<uint4*>(target + 4 * i * pitch) = v;
    }
    __syncwarp();
  }
}

// Hands a slab of 64 rows to TMA, which writes it while this warpgroup goes on. `staging` is free.
__device__ __forceinline__ void store_slab(const float (&sum)[ACCUMULATORS], u32 staging, const TensorMap& out, int row,
                                           int n, int group) {
  const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
  const u32 target = staging + (warp * 16 + lane % 16) * 128;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j += 2) {
    const float* s = sum + 4 * j;
    stmatrix_x4(target + j / 8 * 64 * 128 + ((j % 8 + lane / 16) ^ lane % 8) * 16, pack_bfloat16(s[0], s[1]),
                pack_bfloat16(s[2], s[3]), pack_bfloat16(s[4], s[5]), pack_bfloat16(s[6], s[7]));
  }
  fence_async_proxy();
  named_barrier(1 + group, WARPGROUP);
  if (threadIdx.x % WARPGROUP == 0) {
#pragma unroll
    for (int piece = 0; piece < COLUMNS / STORE_COLUMNS; ++piece)
      tma_store(out, staging + piece * 64 * 128, n + piece * STORE_COLUMNS, row);
    bulk_commit();
  }
}

__device__ __forceinline__ void store_tile(float (&sum)[WAVES][ACCUMULATORS], u32 shared, const TensorMap& out_map,
                                           void* out, long long pitch, const void* bias, Tile tile, int m, int group) {
  const int warp = threadIdx.x / WARP % 4, first = tile.m + group * WAVES * 64;
  const u32 staging = shared + EPILOGUE_OFFSET + group * STAGING_BYTES;
  const bool whole = TMA_STORE && pitch == N && first + WAVES * 64 <= m;
  if constexpr (TMA_STORE) {
    if (threadIdx.x % WARPGROUP == 0) bulk_wait_read();  // of the tile before
    named_barrier(1 + group, WARPGROUP);
  }
#pragma unroll
  for (int wave = 0; wave < WAVES; ++wave) {
    const int row = first + wave * 64;
    if constexpr (BIAS) add_bias(sum[wave], bias, tile.n + 2 * (lane_id() % 4));
    if constexpr (OUT_FLOAT32) {
      store_float32(sum[wave], static_cast<float*>(out), pitch, row + warp * 16, tile.n, m);
    } else if (whole) {
      store_slab(sum[wave], staging + wave * SLAB_STORE_BYTES, out_map, row, tile.n, group);
    } else {
      store_bfloat16(sum[wave], staging + warp * STORE_BYTES, static_cast<u16*>(out), pitch, row + warp * 16, tile.n,
                     m);
    }
  }
}

// Tokens of the tile that block `split` sums and stores.
__device__ __forceinline__ int slice_tokens(Tile tile, int m, int split) {
  return max(0, min(SLICE_M, min(BLOCK_M, m - tile.m) - split * SLICE_M));
}

// Lays this warpgroup's sums out as [token][output feature].
__device__ __forceinline__ void write_partial(const float (&sum)[WAVES][ACCUMULATORS], float* target, int group) {
  const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
#pragma unroll
  for (int wave = 0; wave < WAVES; ++wave) {
    const int row = (group * WAVES + wave) * 64 + warp * 16 + lane / 4, column = 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const float* s = sum[wave] + 4 * j;
      if constexpr (SWAP) {
        float* t = target + (8 * j + column) * SUM_PITCH + row;
        t[0] = s[0], t[SUM_PITCH] = s[1], t[8] = s[2], t[SUM_PITCH + 8] = s[3];
      } else {
        float* t = target + row * SUM_PITCH + 8 * j + column;
        *reinterpret_cast<float2*>(t) = make_float2(s[0], s[1]);
        *reinterpret_cast<float2*>(t + 8 * SUM_PITCH) = make_float2(s[2], s[3]);
      }
    }
  }
}

// Hands the partial tile, laid out where the ring was, to the blocks of the split that sum it, a slice of tokens each.
__device__ __forceinline__ void send_partial(u32 shared, Tile tile, int m, int split) {
  fence_async_proxy();
  named_barrier(1, WARPGROUP * WARPGROUPS);
  const int owner = threadIdx.x;
  if (owner < SPLIT_K && owner != split) {
    const u32 bytes = slice_tokens(tile, m, owner) * SUM_PITCH * 4;
    const u32 target = shared + EPILOGUE_OFFSET + split * SLICE_M * SUM_PITCH * 4;
    if (bytes > 0) {
      bulk_copy_to_block(cluster_address(target, owner), shared + owner * SLICE_M * SUM_PITCH * 4, bytes,
                         cluster_address(shared + SUMS_OFFSET, owner));
    }
  }
}

// Sums the partial tiles in rank order and stores this block's tokens.
__device__ __forceinline__ void store_sum(const char* memory, void* out, long long pitch, const void* bias, Tile tile,
                                          int m, int split) {
  constexpr int QUADS = BLOCK_N / 4;
  const float* own = reinterpret_cast<const float*>(memory);
  const float* received = reinterpret_cast<const float*>(memory + EPILOGUE_OFFSET);
  const int tokens = slice_tokens(tile, m, split);
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * QUADS; i += WARPGROUP * WARPGROUPS) {
    const int token = i / QUADS, row = tile.m + split * SLICE_M + token, n = tile.n + i % QUADS * 4;
    if (n >= N) continue;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int rank = 0; rank < SPLIT_K; ++rank) {
      const float* slice = (SPLIT_K > 1 && rank == split ? own : received) + rank * SLICE_M * SUM_PITCH;
      const float4 v = *reinterpret_cast<const float4*>(slice + token * SUM_PITCH + i % QUADS * 4);
      total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
    }
    if constexpr (BIAS) {
      total = make_float4(total.x + bias_at(bias, n), total.y + bias_at(bias, n + 1), total.z + bias_at(bias, n + 2),
                          total.w + bias_at(bias, n + 3));
    }
    if constexpr (OUT_FLOAT32) {
      *reinterpret_cast<float4*>(static_cast<float*>(out) + row * pitch + n) = total;
    } else {
      *reinterpret_cast<uint2*>(static_cast<u16*>(out) + row * pitch + n) =
          make_uint2(pack_bfloat16(total.x, total.y), pack_bfloat16(total.z, total.w));
    }
  }
}

// out is (m, N) with `pitch` elements between rows, out_map the same with N between rows; `group` is the height of a
// rasterization group in tiles.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scale,
         const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap out_map,
         const float* __restrict__ b_scale, const void* __restrict__ bias, void* __restrict__ out, long long pitch,
         int m, int group) {
  extern __shared__ char unaligned[];
  char* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const u32 shared = shared_address(memory);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP, 0), lane = lane_id();
  const int math_group = warp / 4;  // the last warpgroup is the producer
  const int split = SPLIT_K > 1 ? cluster_rank() : 0;
  const Schedule schedule(m, group);
  const int first_tile = blockIdx.x / SPLIT_K, tile_step = gridDim.x / SPLIT_K;
  const int block0 = blocks_before(split), blocks = blocks_before(split + 1) - block0;
  const int early = min(blocks, STAGES);

  const bool loader = warp == 4 * WARPGROUPS && lane == 0;
  if (loader) {
#pragma unroll 1
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(shared + FULL_OFFSET + s * 8, 1);
      mbarrier_init(shared + EMPTY_OFFSET + s * 8, MATH_WARPS);
    }
    if constexpr (SPLIT_K > 1) mbarrier_init(shared + SUMS_OFFSET, 1);
    mbarrier_init_fence();
    // Fill the ring at once. Weights never depend on the kernel before this one, so they need not wait for it.
    const Tile tile = schedule.tile(first_tile);
#pragma unroll 1
    for (int i = 0; i < early; ++i) load_b(shared, b, tile, block0 + i, i);
    wait_for_previous_kernel();
#pragma unroll 1
    for (int i = 0; i < early; ++i) load_a(shared, a, a_scale, tile, block0 + i, i);
    if constexpr (SPLIT_K > 1)
      mbarrier_arrive_expect_tx(shared + SUMS_OFFSET, slice_tokens(tile, m, split) * SUM_PITCH * (SPLIT_K - 1) * 4);
  }
  __syncthreads();
  if constexpr (SPLIT_K > 1) cluster_arrive_relaxed();  // this block's barriers are ready for its peers
  allow_next_kernel();

  if (math_group == WARPGROUPS) {
    if constexpr (MATH_REGISTERS > 0) registers_decrease<PRODUCER_REGISTERS>();
    Ring ring;
    if (loader) {
      int skip = early;
      for (int index = first_tile; index < schedule.tiles; index += tile_step) {
        const Tile tile = schedule.tile(index);
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
    Tile tile = schedule.tile(first_tile);
    scales.fetch(tile.n, 0, blocks);
    for (int index = first_tile; index < schedule.tiles; index += tile_step) {
      const Tile next = REDUCE ? tile : schedule.tile(min(index + tile_step, schedule.tiles - 1));
      const int end = 128 - (BLOCK_N % 128 == 0 ? 0 : tile.n % 128);
      float sum[WAVES][ACCUMULATORS];
#pragma unroll 1
      for (int base = 0; base < blocks; base += WARP) {
        scales.turn();
        const bool last = base + WARP >= blocks;
        if (!REDUCE || !last) scales.fetch(last ? next.n : tile.n, last ? 0 : base + WARP, blocks);
        if (base == 0) multiply<true>(sum, memory, shared, ring, scales, 0, end, math_group);
#pragma unroll 1
        for (int i = base == 0; i < min(WARP, blocks - base); ++i)
          multiply<false>(sum, memory, shared, ring, scales, i, end, math_group);
      }
      if constexpr (SPLIT_K > 1) {
        named_barrier(1, WARPGROUP * WARPGROUPS);  // all have done with the ring
        write_partial(sum, reinterpret_cast<float*>(memory), math_group);
        cluster_wait();  // peers have set up the barriers that the sums go to
        send_partial(shared, tile, m, split);
        mbarrier_wait_cluster(shared + SUMS_OFFSET, 0);
        cluster_arrive_relaxed();
      } else if constexpr (REDUCE) {
        write_partial(sum, reinterpret_cast<float*>(memory + EPILOGUE_OFFSET), math_group);
        named_barrier(1, WARPGROUP * WARPGROUPS);
      }
      if constexpr (REDUCE) {
        store_sum(memory, out, pitch, bias, tile, m, split);
        break;  // its only tile
      } else {
        store_tile(sum, shared, out_map, out, pitch, bias, tile, m, math_group);
        tile = next;
      }
    }
    if constexpr (TMA_STORE) {
      if (threadIdx.x % WARPGROUP == 0) bulk_wait();
    }
  }
  if constexpr (SPLIT_K > 1) cluster_wait();  // peers may still copy from this block's shared memory
}
