// FP8 GEMM along the rows of groups, for weight gradients on Hopper:
//   out[e, m, n] (+)= sum_i a_scale[m, i] * b_scale[n, i] * sum_{k in block i} a[m, k] * b[n, k],  blocks i of group e
//
//   a (M, K), b (N, K) e4m3, a_scale (M, K / 128), b_scale (N, K / 128) float32 stored MN-major
//   offsets (groups + 1): group e has the columns offsets[e] to offsets[e + 1], which only the device knows
//
// Constants: N, BLOCK_M, BLOCK_N, STAGES, OUT_FLOAT32, ACCUMULATE, MATH_REGISTERS, PRODUCER_REGISTERS. Roles as in gemm.cu: one thread
// loads, two warpgroups multiply and add each 128-deep product to a float32 sum (DeepSeek-V3, arXiv:2412.19437, section
// 3.3.2). Here both operands have a scale for each row, so that every product takes its own.

#include "ring.cuh"
#include "tiles.cuh"

template <bool Float32>
struct ChooseOut {
  using Type = float;
};
template <>
struct ChooseOut<false> {
  using Type = u16;  // bfloat16
};
using Out = ChooseOut<OUT_FLOAT32>::Type;
static_assert(OUT_FLOAT32 || !ACCUMULATE);

constexpr int TILE_K = 128;
constexpr int WARPGROUPS = 2;
constexpr int WAVES = BLOCK_M / (64 * WARPGROUPS);  // slabs of 64 rows of one warpgroup
constexpr int ACCUMULATORS = BLOCK_N / 2;           // registers of one slab
constexpr int EARLY = BLOCK_N / 16;                  // columns of 8 whose scales are multiplied under the wgmma
constexpr int MATH_WARPS = 4 * WARPGROUPS;
constexpr int THREADS = WARPGROUP * (WARPGROUPS + 1);

constexpr int A_BYTES = BLOCK_M * TILE_K;
constexpr int B_BYTES = BLOCK_N * TILE_K;
constexpr int SCALE_BYTES = (BLOCK_M + BLOCK_N) * 4;  // those of a, then those of b
constexpr int SCALE_PITCH = round_up(SCALE_BYTES, 128);
constexpr int STAGE_TX = A_BYTES + B_BYTES + SCALE_BYTES;

constexpr int A_OFFSET = 0;
constexpr int B_OFFSET = A_OFFSET + STAGES * A_BYTES;
constexpr int SCALE_OFFSET = B_OFFSET + STAGES * B_BYTES;
constexpr int FULL_OFFSET = SCALE_OFFSET + STAGES * SCALE_PITCH;
constexpr int EMPTY_OFFSET = FULL_OFFSET + STAGES * 8;
static_assert(EMPTY_OFFSET + STAGES * 8 + 1024 == SHARED_BYTES, "grouped_k_cuda.py and this file disagree");

struct Tile {
  int group, m, n;
  int first, blocks;  // of 128 columns
  bool aligned;       // whether the group begins and ends with a block

  __device__ __forceinline__ Tile(int index, const int* offsets, int m, int k, int raster) {
    const int rows = ceil_div(m, BLOCK_M);
    group = index / (rows * TILE_COLUMNS);
    const Place place(index - group * rows * TILE_COLUMNS, rows, raster);
    this->m = place.row * BLOCK_M;
    n = place.column * BLOCK_N;
    const int start = min(max(offsets[group], 0), k), end = min(max(offsets[group + 1], start), k);
    first = start / TILE_K;
    blocks = (end - start) / TILE_K;
    aligned = start == end || (start % TILE_K == 0 && end % TILE_K == 0);
  }
};

// Multiplies the stage at `ring`, hands it back to the producer, and adds the products to the sums.
__device__ __forceinline__ void multiply(float (&sum)[WAVES][ACCUMULATORS], const char* memory, u32 shared, Ring& ring,
                                         int group) {
  const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
  mbarrier_wait(shared + FULL_OFFSET + ring.stage * 8, ring.phase);
  const float* scales = reinterpret_cast<const float*>(memory + SCALE_OFFSET + ring.stage * SCALE_PITCH);
  const u32 a = shared + A_OFFSET + ring.stage * A_BYTES, b = shared + B_OFFSET + ring.stage * B_BYTES;
  const u64 columns = wgmma_descriptor(b);
  // All scales are loaded ahead of the products: handing the stage back does not wait for loads in flight.
  float rows[2 * WAVES];
#pragma unroll
  for (int i = 0; i < 2 * WAVES; ++i) {
    rows[i] = scales[(group * WAVES + i / 2) * 64 + warp * 16 + lane / 4 + i % 2 * 8];
  }
  float2 features[BLOCK_N / 8];
#pragma unroll
  for (int j = 0; j < BLOCK_N / 8; ++j) {
    features[j] = *reinterpret_cast<const float2*>(scales + BLOCK_M + 8 * j + 2 * (lane % 4));
  }
  float partial[ACCUMULATORS];
#pragma unroll
  for (int wave = 0; wave < WAVES; ++wave) {
    const u64 slab = wgmma_descriptor(a + (group * WAVES + wave) * 64 * TILE_K);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE_K / 32; ++k) wgmma(partial, slab + 2 * k, columns + 2 * k, k > 0);
    wgmma_commit();
    // Half of the products of scales: after the wgmma they would hold up the next one, all of them would need registers
    // that it has.
    const float upper = rows[2 * wave], lower = rows[2 * wave + 1];
    float early[4 * EARLY];
#pragma unroll
    for (int j = 0; j < EARLY; ++j) {
      float* scale = early + 4 * j;
      scale[0] = upper * features[j].x, scale[1] = upper * features[j].y;
      scale[2] = lower * features[j].x, scale[3] = lower * features[j].y;
      asm volatile("" : "+f"(scale[0]), "+f"(scale[1]), "+f"(scale[2]), "+f"(scale[3]));  // here, not later
    }
    wgmma_wait();
    if (wave == WAVES - 1) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared + EMPTY_OFFSET + ring.stage * 8);
    }
#pragma unroll
    for (int i = 0; i < 4 * EARLY; ++i) sum[wave][i] = fmaf(early[i], partial[i], sum[wave][i]);
#pragma unroll
    for (int j = EARLY; j < BLOCK_N / 8; ++j) {
      float* s = sum[wave] + 4 * j;
      s[0] = fmaf(upper * features[j].x, partial[4 * j], s[0]);
      s[1] = fmaf(upper * features[j].y, partial[4 * j + 1], s[1]);
      s[2] = fmaf(lower * features[j].x, partial[4 * j + 2], s[2]);
      s[3] = fmaf(lower * features[j].y, partial[4 * j + 3], s[3]);
    }
  }
  ring.advance();
}

__device__ __forceinline__ void fill(float (&sum)[WAVES][ACCUMULATORS], float value) {
#pragma unroll
  for (int wave = 0; wave < WAVES; ++wave) {
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; ++i) sum[wave][i] = value;
  }
}

// Two neighbours, which no other thread writes: the order of additions is that of the calls.
__device__ __forceinline__ void store(float* target, float left, float right) {
  if constexpr (ACCUMULATE) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(left), "f"(right) : "memory");
  } else {
    *reinterpret_cast<float2*>(target) = make_float2(left, right);
  }
}

// Straight from the registers: four lanes fill a 32-byte sector.
__device__ __forceinline__ void store_tile(const float (&sum)[WAVES][ACCUMULATORS], float* out, const Tile& tile, int m,
                                           int group) {
  const int lane = lane_id(), warp = threadIdx.x / WARP % 4, n = tile.n + 2 * (lane % 4);
#pragma unroll
  for (int wave = 0; wave < WAVES; ++wave) {
    const int row = tile.m + (group * WAVES + wave) * 64 + warp * 16 + lane / 4;
    float* target = out + (static_cast<long long>(tile.group) * m + row) * N + n;
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; ++j) {
      if (n + 8 * j >= N) break;
      const float* s = sum[wave] + 4 * j;
      if (row < m) store(target + 8 * j, s[0], s[1]);
      if (row + 8 < m) store(target + 8 * N + 8 * j, s[2], s[3]);
    }
  }
}

// first where the mask is set: no branch, behind which the compiler would no longer take a warp to be in step.
__device__ __forceinline__ u32 select(u32 mask, u32 first, u32 second) { return (first & mask) | (second & ~mask); }

// In bfloat16 four lanes have two columns each of two pieces of 8; after two exchanges each has four columns of one
// piece. All exchanges come before the first store, which is a branch.
__device__ __forceinline__ void store_tile(const float (&sum)[WAVES][ACCUMULATORS], u16* out, const Tile& tile, int m,
                                           int group) {
  const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
  const u32 later_piece = 0u - (lane >> 1 & 1), later_columns = 0u - (lane & 1);  // masks
  uint2 columns[2 * WAVES][BLOCK_N / 16];
#pragma unroll
  for (int i = 0; i < 2 * WAVES; ++i) {
#pragma unroll
    for (int j = 0; j < BLOCK_N / 16; ++j) {
      const float* s = sum[i / 2] + 8 * j + i % 2 * 2;
      const u32 first = pack_bfloat16(s[0], s[1]), second = pack_bfloat16(s[4], s[5]);
      const u32 other = __shfl_xor_sync(0xFFFFFFFF, select(later_piece, first, second), 2);
      const u32 left = select(later_piece, other, first), right = select(later_piece, second, other);
      const u32 next = __shfl_xor_sync(0xFFFFFFFF, select(later_columns, left, right), 1);
      columns[i][j] = make_uint2(select(later_columns, next, left), select(later_columns, right, next));
    }
  }
  const int n = tile.n + (later_piece & 8) + (later_columns & 4);
#pragma unroll
  for (int i = 0; i < 2 * WAVES; ++i) {
    const int row = tile.m + (group * WAVES + i / 2) * 64 + warp * 16 + lane / 4 + i % 2 * 8;
    u16* target = out + (static_cast<long long>(tile.group) * m + row) * N + n;
#pragma unroll
    for (int j = 0; j < BLOCK_N / 16; ++j) {
      if (row < m && n + 16 * j < N) *reinterpret_cast<uint2*>(target + 16 * j) = columns[i][j];
    }
  }
}

// raster: height of a rasterization group in tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_k(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scale,
           const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap b_scale,
           const int* __restrict__ offsets, Out* __restrict__ out, int groups, int m, int k, int raster) {
  extern __shared__ char unaligned[];
  char* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const u32 shared = shared_address(memory);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP, 0), lane = lane_id();
  const int math_group = warp / 4;  // the last warpgroup is the producer
  const int tiles = groups * ceil_div(m, BLOCK_M) * TILE_COLUMNS;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(shared + FULL_OFFSET + s * 8, 1);
      mbarrier_init(shared + EMPTY_OFFSET + s * 8, MATH_WARPS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  Ring ring;
  if (math_group == WARPGROUPS) {
    registers_decrease<PRODUCER_REGISTERS>();
    if (warp == MATH_WARPS && lane == 0) {
      for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile(index, offsets, m, k, raster);
#pragma unroll 1
        for (int i = tile.first; i < tile.first + tile.blocks; ++i) {
          mbarrier_wait(shared + EMPTY_OFFSET + ring.stage * 8, ring.phase ^ 1);
          const u32 full = shared + FULL_OFFSET + ring.stage * 8;
          const u32 scales = shared + SCALE_OFFSET + ring.stage * SCALE_PITCH;
          mbarrier_arrive_expect_tx(full, STAGE_TX);
          tma_load(shared + A_OFFSET + ring.stage * A_BYTES, a, full, i * TILE_K, tile.m);
          tma_load(shared + B_OFFSET + ring.stage * B_BYTES, b, full, i * TILE_K, tile.n);
          tma_load(scales, a_scale, full, tile.m, i);
          tma_load(scales + BLOCK_M * 4, b_scale, full, tile.n, i);
          ring.advance();
        }
      }
    }
  } else {
    registers_increase<MATH_REGISTERS>();
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      const Tile tile(index, offsets, m, k, raster);
      if (ACCUMULATE && tile.blocks == 0 && tile.aligned) continue;
      float sum[WAVES][ACCUMULATORS];
      fill(sum, tile.aligned ? 0.f : __int_as_float(0x7FFFFFFF));  // NaN stays, whatever is added
#pragma unroll 1
      for (int i = 0; i < tile.blocks; ++i) multiply(sum, memory, shared, ring, math_group);
      store_tile(sum, out, tile, m, math_group);
    }
  }
}
