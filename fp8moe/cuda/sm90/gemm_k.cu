// FP8 GEMM for weight gradients on Hopper, where K (tokens) is divided into groups:
//   out[e, m, n] (+)= sum_i a_scale[m, i] * b_scale[n, i] * sum_{k in block i} a[m, k] * b[n, k],  blocks i of group e
//
//   a (M, K), b (N, K) e4m3, a_scale (M, K / 128), b_scale (N, K / 128) float32 stored MN-major; or, with BLOCK_SCALES,
//   b_scale (ceil(N / 128), K / 128): one for each 128x128 block of b
//   offsets (groups + 1): group e has columns offsets[e] to offsets[e + 1]; known only on the device
//
// Roles as in gemm.cu: produce() is one thread that loads, consume() two warpgroups that multiply, and promote each
// 128-deep product to float32 sums (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). If both operands have one scale per
// row, every element of a product has a different factor; with BLOCK_SCALES, every row has one. TMA writes the sums, or
// adds them to the result, while the next tile is multiplied (struct Output).
//
// The prelude (kernels/gemm/source.py) defines the constants of gemm_block.cuh, wgmma(), the result's type Out (float,
// or u16 for bfloat16), ACCUMULATE (only with float), BLOCK_SCALES, PIECES and PIECE_PITCH.

#include "gemm_block.cuh"
#include "warp.cuh"

constexpr int SLABS = BLOCK_M / (64 * WARPGROUPS);  // slabs of 64 rows, per warpgroup
constexpr int ACCUMULATORS = BLOCK_N / 2;           // registers of one slab
constexpr int EARLY = BLOCK_N / 16;                 // groups of 8 columns; see their use in multiply()

constexpr int UNROLLED_STAGES = 4;

// Scales of b in a stage. BLOCK_SCALES: TMA loads no fewer than 4, of blocks from a multiple of 4 on.
constexpr int B_SCALES = BLOCK_SCALES ? 4 : BLOCK_N;
static_assert(!BLOCK_SCALES || BLOCK_N == 128, "a tile has one scale of b for each block of K");

struct Arguments {
  const int* offsets;
  int groups, m, k;
  int raster;  // tile rows in a band, see RasterPosition
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "kernels/gemm/source.py lays it out otherwise");

struct alignas(128) StageScales {
  float a[BLOCK_M], b[B_SCALES];
};

// A piece: the part of a warp's sums that TMA writes at once, 16 rows of PIECE_PITCH bytes (128, or 64).
constexpr int PIECE_ROWS = 16, PIECE_COLUMNS = PIECE_PITCH / sizeof(Out), PIECE_BYTES = PIECE_ROWS * PIECE_PITCH;

struct Shared {
  u8 a[STAGES][BLOCK_M * BLOCK_K];
  u8 b[STAGES][BLOCK_N * BLOCK_K];
  u8 pieces[MATH_WARPS][PIECES][PIECE_BYTES];
  u8 scales[STAGES][sizeof(StageScales)];
  Ring<STAGES> ring;

  __device__ __forceinline__ StageScales& stage_scales(u32 stage) {
    return *reinterpret_cast<StageScales*>(scales[stage]);
  }
};
constexpr int STAGE_BYTES = (BLOCK_M + BLOCK_N) * BLOCK_K + (BLOCK_M + B_SCALES) * 4;  // loaded per stage
static_assert(sizeof(Shared) + SWIZZLE_ALIGNMENT == SHARED_BYTES, "kernels/gemm/sm90.py counts otherwise");

struct Tile {
  int group, m, n;
  int first, count;  // K blocks of the group
  bool aligned;      // whether the group begins and ends at multiples of 128

  // With BLOCK_SCALES: the index of the tile's scale of b among those of its stage.
  __device__ __forceinline__ int block() const { return n / BLOCK_N % B_SCALES; }
};

// The tiles of all groups; blocks take them in turns.
struct Schedule {
  const Arguments& args;
  int index = blockIdx.x;

  // Gets the next tile; returns false if none is left.
  __device__ __forceinline__ bool next(Tile& tile) {
    const int rows = ceil_div(args.m, BLOCK_M);
    if (index >= args.groups * rows * TILE_COLUMNS) return false;
    tile.group = index / (rows * TILE_COLUMNS);
    const RasterPosition position(index - tile.group * rows * TILE_COLUMNS, rows, args.raster);
    tile.m = position.row * BLOCK_M;
    tile.n = position.column * BLOCK_N;
    const int* offsets = args.offsets + tile.group;
    const int start = min(max(offsets[0], 0), args.k), end = min(max(offsets[1], start), args.k);
    tile.first = start / BLOCK_K;
    tile.count = (end - start) / BLOCK_K;
    tile.aligned = start == end || (start % BLOCK_K == 0 && end % BLOCK_K == 0);
    index += gridDim.x;
    return true;
  }
};

struct Loader {
  Shared& s;
  const TensorMap &a, &a_scale, &b, &b_scale;

  __device__ __forceinline__ void load(const Tile& tile, int k_block, u32 stage) const {
    Barrier& full = s.ring.full[stage];
    const StageScales& scales = s.stage_scales(stage);
    full.expect(STAGE_BYTES);
    tma_load(shared_address(s.a[stage]), a, full.address(), k_block * BLOCK_K, tile.m);
    tma_load(shared_address(s.b[stage]), b, full.address(), k_block * BLOCK_K, tile.n);
    tma_load(shared_address(scales.a), a_scale, full.address(), tile.m, k_block);
    const int first = BLOCK_SCALES ? tile.n / BLOCK_N - tile.block() : tile.n;
    tma_load(shared_address(scales.b), b_scale, full.address(), first, k_block);
  }
};

__device__ __forceinline__ void produce(const Loader& loader, Schedule schedule) {
  Pipeline<STAGES> pipeline(loader.s.ring);
  Tile tile;
  while (schedule.next(tile)) {
#pragma unroll 1
    for (int i = 0; i < tile.count; ++i) {
      pipeline.acquire();
      loader.load(tile, tile.first + i, pipeline.stage);
      pipeline.advance();
    }
  }
}

// Adds a scaled product to a sum; of the first stage, it is the sum.
template <bool First>
__device__ __forceinline__ void add_product(float& sum, float scale, float product) {
  sum = First ? scale * product : fmaf(scale, product, sum);
}

// Multiplies the next stage, hands it back, and adds the products, times `factor`, to the sums. block: Tile::block().
// Calls meanwhile() while the first product runs.
template <bool First, typename Meanwhile>
__device__ __forceinline__ void multiply(float (&sum)[SLABS][ACCUMULATORS], Shared& s, Pipeline<STAGES>& pipeline,
                                         int warpgroup, int block, float factor, const Meanwhile& meanwhile) {
  const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
  pipeline.arrived();
  const StageScales& scales = s.stage_scales(pipeline.stage);
  const TileStart a(shared_address(s.a[pipeline.stage])), columns(shared_address(s.b[pipeline.stage]));
  // All scales are loaded before the products: handing a stage back does not wait for loads in flight, so after a late
  // load TMA might overwrite them.
  float rows[2 * SLABS];
#pragma unroll
  for (int i = 0; i < 2 * SLABS; ++i) {
    rows[i] = scales.a[(warpgroup * SLABS + i / 2) * 64 + warp * 16 + lane / 4 + i % 2 * 8];
  }
  if constexpr (First) {
#pragma unroll
    for (float& row : rows) row *= factor;
  }
  float2 features[BLOCK_SCALES ? 1 : BLOCK_N / 8];
  if constexpr (BLOCK_SCALES) {
    const float of_block = scales.b[block];
#pragma unroll
    for (float& row : rows) row *= of_block;
  } else {
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; ++j) {
      features[j] = *reinterpret_cast<const float2*>(scales.b + 8 * j + 2 * (lane % 4));
    }
  }
  float partial[ACCUMULATORS];
#pragma unroll
  for (int slab = 0; slab < SLABS; ++slab) {
    start_product(partial, a + (warpgroup * SLABS + slab) * 64 * ROW_STEP, columns);
    const float upper = rows[2 * slab], lower = rows[2 * slab + 1];
    if constexpr (BLOCK_SCALES) {
      if (slab == 0) meanwhile();
      wgmma_wait();
      if (slab == SLABS - 1) pipeline.release();
#pragma unroll
      for (int i = 0; i < ACCUMULATORS; ++i) add_product<First>(sum[slab][i], i % 4 < 2 ? upper : lower, partial[i]);
      continue;
    }
    // The scales of rows and columns are multiplied with each other, for half of the columns while the wgmma runs. All
    // of them after it would delay the next wgmma; all of them during it would need registers that the wgmma uses.
    float early[4 * EARLY];
#pragma unroll
    for (int j = 0; j < EARLY; ++j) {
      float* scale = early + 4 * j;
      scale[0] = upper * features[j].x, scale[1] = upper * features[j].y;
      scale[2] = lower * features[j].x, scale[3] = lower * features[j].y;
      asm volatile("" : "+f"(scale[0]), "+f"(scale[1]), "+f"(scale[2]), "+f"(scale[3]));  // before the wgmma ends
    }
    if (slab == 0) meanwhile();
    wgmma_wait();
    if (slab == SLABS - 1) pipeline.release();
#pragma unroll
    for (int i = 0; i < 4 * EARLY; ++i) add_product<First>(sum[slab][i], early[i], partial[i]);
#pragma unroll
    for (int j = EARLY; j < BLOCK_N / 8; ++j) {
      float* v = sum[slab] + 4 * j;
      add_product<First>(v[0], upper * features[j].x, partial[4 * j]);
      add_product<First>(v[1], upper * features[j].y, partial[4 * j + 1]);
      add_product<First>(v[2], lower * features[j].x, partial[4 * j + 2]);
      add_product<First>(v[3], lower * features[j].y, partial[4 * j + 3]);
    }
  }
  pipeline.advance();
}

// Hands the sums of a warp to TMA in pieces of 16 rows and up to PIECE_PITCH bytes, through PIECES buffers in shared
// memory. In one call, a single thread block writes or adds to each element, so the order of additions is the order of
// calls.
struct Output {
  static constexpr int LAST = BLOCK_N % PIECE_COLUMNS;  // columns of the last piece if it is narrower; else 0

  Shared& s;
  const TensorMap &map, &last;  // tensor maps for pieces of PIECE_COLUMNS and of LAST columns
  int warpgroup;
  int turn = 0;

  __device__ __forceinline__ void store(const float (&sum)[SLABS][ACCUMULATORS], const Tile& tile) {
    const int warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      const int row = tile.m + (warpgroup * SLABS + slab) * 64 + warp * PIECE_ROWS;
#pragma unroll
      for (int first = 0; first < BLOCK_N; first += PIECE_COLUMNS) {
        if (first + PIECE_COLUMNS <= BLOCK_N) {
          store_piece<PIECE_COLUMNS>(sum[slab], first, map, row, tile);
        } else {
          store_piece<LAST>(sum[slab], first, last, row, tile);
        }
      }
    }
  }

  // Waits for all TMA stores; called after the last tile.
  __device__ __forceinline__ void finish() const {
    if (lane_id() == 0) bulk_wait();
  }

 private:
  // Stores `Columns` columns of a slab, from `first` on. First waits until TMA has read this buffer's previous piece.
  template <int Columns>
  __device__ __forceinline__ void store_piece(const float (&sum)[ACCUMULATORS], int first, const TensorMap& target,
                                              int row, const Tile& tile) {
    u8* piece = s.pieces[threadIdx.x / WARP][turn];
    turn = (turn + 1) % PIECES;
    if (lane_id() == 0) bulk_wait_read<PIECES - 1>();
    __syncwarp();
    stage<Columns>(sum, first, piece);
    fence_async_proxy();
    __syncwarp();
    if (lane_id() == 0) {
      if constexpr (ACCUMULATE) {
        tma_add(target, shared_address(piece), tile.n + first, row, tile.group);
      } else {
        tma_store(target, shared_address(piece), tile.n + first, row, tile.group);
      }
      bulk_commit();
    }
  }

  // Writes a piece in the layout that TMA expects: whole rows are swizzled in 16-byte chunks, shorter rows are not.
  template <int Columns>
  __device__ __forceinline__ void stage(const float (&sum)[ACCUMULATORS], int first, u8* piece) const {
    constexpr int PITCH = Columns * sizeof(Out);
    const int lane = lane_id();
    const auto place = [](int row, int chunk) {
      if constexpr (Columns == PIECE_COLUMNS) chunk ^= PITCH == 128 ? row % 8 : row / 2 % 4;
      return row * PITCH + chunk * 16;
    };
    const float* v = sum + first / 2;
    if constexpr (sizeof(Out) == 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < Columns / 8; ++j) {
          const int at = place(half * 8 + lane / 4, 2 * j + lane % 4 / 2) + lane % 2 * 8;
          *reinterpret_cast<float2*>(piece + at) = make_float2(v[4 * j + 2 * half], v[4 * j + 2 * half + 1]);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < Columns / 8; j += 2) {
        const u32 at = shared_address(piece) + place(lane % 16, j + lane / 16);
        stmatrix_x4(at, pack_bfloat16(v[4 * j], v[4 * j + 1]), pack_bfloat16(v[4 * j + 2], v[4 * j + 3]),
                    pack_bfloat16(v[4 * j + 4], v[4 * j + 5]), pack_bfloat16(v[4 * j + 6], v[4 * j + 7]));
      }
    }
  }
};

__device__ __forceinline__ void consume(Shared& s, Schedule schedule, Output& output) {
  Pipeline<STAGES> pipeline(s.ring);
  Tile tile;
  bool more = schedule.next(tile);
  while (more) {
    Tile following = tile;
    const auto find_next = [&] { more = schedule.next(following); };
    if (tile.count == 0) find_next();
    if (!ACCUMULATE || tile.count > 0 || !tile.aligned) {
      // A group that does not begin and end at multiples of 128 gets NaN.
      const float not_a_number = __int_as_float(0x7FFFFFFF);
      float sum[SLABS][ACCUMULATORS];
      if (tile.count > 0) {
        const int block = tile.block();
        const float factor = tile.aligned ? 1.f : not_a_number;
        multiply<true>(sum, s, pipeline, output.warpgroup, block, factor, find_next);
        multiply_stages<UNROLLED_STAGES>(
            tile.count - 1, [&](int) { multiply<false>(sum, s, pipeline, output.warpgroup, block, 1.f, [] {}); });
      } else {
#pragma unroll
        for (int i = 0; i < SLABS * ACCUMULATORS; ++i) {
          sum[i / ACCUMULATORS][i % ACCUMULATORS] = tile.aligned ? 0.f : not_a_number;
        }
      }
      output.store(sum, tile);
    }
    tile = following;
  }
  output.finish();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_k(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scale,
           const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap b_scale,
           const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap out_last,
           const __grid_constant__ Arguments args) {
  Shared& s = aligned_shared<Shared>();
  const int warp = same_in_warp(threadIdx.x / WARP), lane = lane_id(), warpgroup = warp / 4;  // this order: see gemm.cu
  if (threadIdx.x == 0) {
    s.ring.init(1, MATH_WARPS);
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == WARPGROUPS) {
    registers_decrease<PRODUCER_REGISTERS>();
    if (warp == MATH_WARPS && lane == 0) produce({s, a, a_scale, b, b_scale}, {args});
  } else {
    registers_increase<MATH_REGISTERS>();
    Output output{s, out, out_last, warpgroup};
    consume(s, {args}, output);
  }
}
