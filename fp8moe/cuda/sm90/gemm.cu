// FP8 GEMM for Hopper: out[m, n] = sum_i a_scale[m, i] * b_scale[n / 128, i] * sum_{k in block i} a[m, k] * b[n, k].
//
//   a (M, K) e4m3, a_scale (M, ceil(K / 128)) float32 stored MN-major                    tokens
//   b (N, K) e4m3, b_scale (ceil(N / 128), ceil(K / 128)) float32, or with CHANNEL (N)   weights
//   bias (N), with BIAS                                                                  added to the sums
//   With GROUPS, b has one (N, K) for each group of rows of a; group sizes are known only on the device.
//
// A block computes tiles of BLOCK_M x BLOCK_N. It has two roles, connected by a ring of STAGES stages in shared memory
// (docs/gemm.md):
//   produce()   one thread: TMA loads of a, b and a_scale
//   consume()   WARPGROUPS math warpgroups: wgmma over 128 along K, promotion (gemm_promotion.cuh), then the epilogue
//
// A stage holds one block of K, 128 deep, of both tiles. A slab is 64 rows of a tile, as many as one wgmma multiplies.
//
// OVERLAPS: a warpgroup starts its next wgmma before it promotes the last one.
// SWAP = 0: tokens are the 64-row side of wgmma. SWAP = 1: weights are, and a tile may have as few as 8 tokens.
// SPLIT_K > 1: the blocks of a cluster share the K of a tile (gemm_reduction.cuh).
// PARTS > 1: one block sums PARTS parts of K separately and adds them in the order of such a cluster (gemm_parts.cuh).
// The prelude (kernels/gemm/source.py) defines the constants, wgmma() and Epilogue, which is one of epilogue_*.cuh.

#include "gemm_load.cuh"
#include "gemm_parts.cuh"
#include "gemm_promotion.cuh"
#include "gemm_reduction.cuh"

struct Arguments {
  const float* b_scale;
  const void* bias;  // see Columns
  Epilogue::Output out;
  ScheduleArguments schedule;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "kernels/gemm/source.py lays it out otherwise");

// For large tiles: while the last product of a stage runs, a math warp already looks up the next stage and waits for
// its data. Then only the promotion separates two products of a warpgroup, and it is shorter than the other warpgroup's
// product.
constexpr bool AHEAD = UNROLLED_STAGES > 1 && !OVERLAPS && STAGES > 2 && K_BLOCKS > 8;

// A math warp. It has several ways to process the stages of a tile; consume() picks one for up to 32 stages at a time:
//
//   multiply<true>, then multiply_more   a whole tile; products of the first stage initialize the sums
//   multiply_one                         a tile of which this warpgroup has one slab: a halved tile, or a group's last.
//                                        The sums begin at -0, so the first stage needs no code of its own
//   multiply_overlapped                  with OVERLAPS: the product of a stage runs while the previous one is promoted
//   skip                                 a group's last tile, if this warpgroup's slabs have no rows of it
struct MathWarp {
  Shared& s;
  Pipeline<STAGES> pipeline;
  TileStart rows, columns;  // in the current stage: the 64-row side, from this warpgroup's first slab on; the other one
  WeightScales weights;
  int warpgroup;

  __device__ __forceinline__ MathWarp(Shared& s, const float* b_scale, int warpgroup)
      : s(s), pipeline(s.ring), weights(b_scale), warpgroup(warpgroup) {
    find_tiles();
  }

  __device__ __forceinline__ void find_tiles() {
    const TileStart a = TileStart(shared_address(s.a)) + static_cast<int>(pipeline.stage * BLOCK_M * ROW_STEP);
    const TileStart b = TileStart(shared_address(s.b)) + static_cast<int>(pipeline.stage * BLOCK_N * ROW_STEP);
    rows = (SWAP ? b : a) + slab_row(warpgroup, 0) * ROW_STEP;
    columns = SWAP ? a : b;
  }

  // Multiplies one stage, hands it back, and adds the products to the sums of the first `Used` slabs. Lane `source`
  // holds the stage's weight scales. Calls meanwhile() while the first product runs. AHEAD: also waits for the
  // following stage, if `more` is true.
  template <bool First, int Used, typename Meanwhile>
  __device__ __forceinline__ void multiply(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int source, bool more,
                                           const Meanwhile& meanwhile) {
    const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
    const TileScales weight_scales(weights, source, tile);
    if (First || !AHEAD) pipeline.arrived();
    if (!AHEAD) find_tiles();
    const float* a_scale = s.a_scale[pipeline.stage] + (GROUPS ? tile.m & 3 : 0);
    // SWAP: token scales are loaded before the products. Handing a stage back does not wait for loads in flight, so
    // after a late load TMA might overwrite the scales before they are read.
    float tokens[SWAP ? ACCUMULATORS / 2 : 2];
    if constexpr (SWAP) {
#pragma unroll
      for (int j = 0; j < ACCUMULATORS / 2; ++j) tokens[j] = a_scale[8 * (j / 2) + 2 * (lane % 4) + j % 2];
    }
    float partial[ACCUMULATORS];
#pragma unroll
    for (int slab = 0; slab < Used; ++slab) {
      const int row = slab_of(tile, warpgroup, slab).row;
      const bool moved = slab == 1 && tile.upright();
      start_product(partial, moved ? columns + HALF_N * ROW_STEP : rows + slab_row(0, slab) * ROW_STEP,
                    moved ? columns : columns + slab_column(slab) * ROW_STEP);
      if constexpr (!SWAP) {
        tokens[0] = a_scale[row + warp * 16 + lane / 4];
        tokens[1] = a_scale[row + warp * 16 + lane / 4 + 8];
      }
      if (slab == 0) meanwhile();
      if (slab == Used - 1) {
        const Released stage(pipeline);
        pipeline.advance();
        if (AHEAD) find_tiles();
        if (AHEAD && more) pipeline.arrived();
        wgmma_wait();
        stage.arrive();  // before the last promotion
      } else {
        wgmma_wait();
      }
      if constexpr (SWAP) {
        promote_swapped<First>(sum[slab], partial, tokens, weight_scales.at(row));
      } else {
        promote<First>(sum[slab], partial, tokens, weight_scales, slab_column(slab));
      }
    }
  }

  // A started product of the warpgroup's only slab, with the scales to promote it by.
  struct Product {
    float partial[ACCUMULATORS], tokens[2];
    TileScales weights;
  };

  // Waits for the next stage and starts its product.
  __device__ __forceinline__ void start(Product& product, const Tile& tile, int source) {
    const int lane = lane_id(), warp = threadIdx.x / WARP % 4, row = slab_row(warpgroup, 0);
    product.weights = TileScales(weights, source, tile);
    pipeline.arrived();
    const float* a_scale = s.a_scale[pipeline.stage] + (GROUPS ? tile.m & 3 : 0) + row + warp * 16 + lane / 4;
    start_product(product.partial, wgmma_descriptor(shared_address(s.a[pipeline.stage]) + row * BLOCK_K),
                  wgmma_descriptor(shared_address(s.b[pipeline.stage])));
    product.tokens[0] = a_scale[0];
    product.tokens[1] = a_scale[8];
    pipeline.advance();
  }

  // Waits for `product`, after which `Later` other products have been started, and adds it to the sums. Hands back the
  // product's stage, which `behind` points to, and advances `behind`.
  template <int Later>
  __device__ __forceinline__ void end(float (&sum)[SLABS][ACCUMULATORS], Product& product, Pipeline<STAGES>& behind) {
    wgmma_wait<Later>(product.partial);
    behind.release();
    behind.advance();
    promote<false>(sum[0], product.partial, product.tokens, product.weights, 0);
  }

  // Multiplies `count` stages; each product runs while the previous one is promoted. Lane i holds the weight scales of
  // stage i. Calls meanwhile() while the first product runs. Calls added(i) once stage i is in the sums, if a part of K
  // may end there, but not for the last stage.
  template <typename Meanwhile, typename Added>
  __device__ __forceinline__ void multiply_overlapped(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int count,
                                                      const Meanwhile& meanwhile, const Added& added) {
    // Hides the count from ptxas. If ptxas knew whether it is odd, it would complete each product before it starts the
    // next.
    asm volatile("" : "+r"(count));
    Pipeline<STAGES> behind = pipeline;
    Product even, odd;
    start(even, tile, 0);
    meanwhile();
    int i = 1;
#pragma unroll 1
    for (; i + 1 < count; i += 2) {
      start(odd, tile, i);
      end<1>(sum, even, behind);
      if (!EVEN_PARTS) added(i - 1);
      start(even, tile, i + 1);
      end<1>(sum, odd, behind);
      added(i);
    }
    if (i < count) {
      start(odd, tile, i);
      end<1>(sum, even, behind);
      if (!EVEN_PARTS) added(i - 1);
      end<0>(sum, odd, behind);
    } else {
      end<0>(sum, even, behind);
    }
  }

  // Multiplies `count` stages; lane `source` + i holds the weight scales of the i-th. `more`: the tile has stages after
  // these.
  template <int Used>
  __device__ __forceinline__ void multiply_more(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int source,
                                                int count, bool more) {
    constexpr int UNROLLED = Used == SLABS ? UNROLLED_STAGES : 1;
    // Hides the count from ptxas. If ptxas knew it, it would unroll the loop and complete each product before the next
    // begins.
    if (AHEAD) asm volatile("" : "+r"(count));
    multiply_stages<UNROLLED>(
        count, [&](int i) { multiply<false, Used>(sum, tile, source + i, i + 1 < count || more, [] {}); });
  }

  // Multiplies `count` stages of a tile of which this warpgroup has one slab. `first`: these are the tile's first
  // stages.
  __device__ __forceinline__ void multiply_one(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, bool first,
                                               int count, bool more) {
    if (first) {
#pragma unroll
      for (float& value : sum[0]) value = -0.f;  // -0 + x is x, also for x = -0
      if (AHEAD) pipeline.arrived();
    }
    multiply_more<1>(sum, tile, 0, count, more);
  }

  // Hands `count` stages back without using them.
  __device__ __forceinline__ void skip(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      pipeline.arrived();
      if (lane_id() == 0) pipeline.empty().arrive();
      pipeline.advance();
    }
    if (AHEAD) find_tiles();
  }
};

// Computes the block's tiles, one after another. find_next() looks up the next tile, during the products of a tile's
// first stage. fetch_next_scales() fetches the weight scales of the next turn, which may belong to the next tile.
__device__ __forceinline__ void consume(MathWarp& math, Schedule<GROUPS>& schedule, Epilogue& epilogue, KRange k,
                                        Split split, PartSums parts, Columns columns) {
  Tile tile;
  bool more = schedule.next(tile);
  tile = same_in_warp(tile);
  if (more) {
    math.weights.fetch(tile, 0, k.count);
  } else {  // a block without a tile passes the cluster barriers of Sums::gather() too, as leave() waits for all
    Split::await_peers();
    Split::received();
  }
  int buffer = 0;  // which buffer of Columns this tile uses
  while (more) {
    const int used = slabs_in_use(tile, math.warpgroup);
    if constexpr (COLUMN_VALUES && REDUCES) columns.prefetch(tile);
    Tile following = tile;
    float sum[SLABS][ACCUMULATORS];
    if constexpr (OVERLAPS) {
#pragma unroll
      for (float& value : sum[0]) value = 0;
    }
    int part = 0, part_end = PARTS > 1 ? part_begin(1) : k.count;  // the current part of K, and where it ends
    // Called once K block `k_block` is in the sums. If it ends a part, other than the last, keeps the sums of that
    // part.
    const auto added = [&](int k_block) {
      if (PARTS == 1 || part == PARTS - 1 || k_block + 1 < part_end) return;
      parts.keep(sum, part);
      part_end = part_begin(++part + 1);
    };
    parts.clear();
    // Stages per turn: at most 32, because each lane holds the weight scales of one stage. A turn does not extend past
    // a part of K. DYNAMIC: the last turn begins at the stage at which the next tile is announced.
    int step = WARP;
#pragma unroll 1
    for (int base = 0; base < k.count; base += step) {
      math.weights.turn();
      const bool announced = DYNAMIC && base >= ANNOUNCED;
      const int end = PARTS > 1 && !OVERLAPS ? part_end : DYNAMIC && !announced ? ANNOUNCED : k.count;
      const int count = min(WARP, end - base), begun = base == 0;
      if (PARTS > 1 || DYNAMIC) step = count;
      const auto find_next = [&] {
        if constexpr (DYNAMIC) {
          if (!announced) return;
          math.pipeline.arrived();
          following = same_in_warp(math.s.groups.next(math.pipeline.stage));
          more = following.group >= 0;
        } else {
          more = schedule.next(following);
          following = same_in_warp(following);
        }
      };
      const auto fetch_next_scales = [&] {
        if (base + count < k.count) {
          math.weights.fetch(tile, base + count, k.count);
        } else if (more) {
          math.weights.fetch(following, 0, k.count);
        }
      };
      const bool whole = !PARTIAL && !HALVES || used == SLABS;
      if (DYNAMIC || begun && !whole) find_next();
      if (used == 0) {
        fetch_next_scales();
        math.skip(count);
      } else if constexpr (OVERLAPS) {
        math.multiply_overlapped(
            sum, tile, count,
            [&] {
              if (begun) find_next();
              fetch_next_scales();
            },
            [&](int i) { added(base + i); });
      } else {
        const bool more_after = base + count < k.count;
        const auto meanwhile = [&] {
          if constexpr (!DYNAMIC) find_next();
        };
        if (begun && whole) math.multiply<true, SLABS>(sum, tile, 0, count > 1 || more_after, meanwhile);
        fetch_next_scales();
        if (whole) {
          math.multiply_more<SLABS>(sum, tile, begun, count - begun, more_after);
        } else if constexpr (EVEN || HALVES) {
          math.multiply_one(sum, tile, begun, count, more_after);
        }
      }
      added(base + count - 1);
    }
    if (PARTS > 1) parts.add(sum, part);
    if constexpr (REDUCES) {
      Sums sums{math.s, tile, split, columns};
      sums.gather(sum, math.warpgroup);
      epilogue.from_sums(sums);
      if constexpr (SPLIT_K > 1) break;  // its only tile
      sync_math_warps();                 // before the next tile overwrites the sums
    } else if (used > 0) {
      if constexpr (COLUMN_VALUES) {
        columns.apply(sum, tile, math.warpgroup, math.s.epilogue + COLUMNS_AT + buffer * COLUMN_BYTES);
      }
      epilogue.from_registers(sum, tile, math.warpgroup);
    }
    tile = following;
    buffer ^= 1;
  }
  epilogue.finish();
}

// out_map: tensor map of the result, which assumes a pitch of N.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scale,
         const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap out_map,
         const __grid_constant__ Arguments args) {
  Shared& s = aligned_shared<Shared>();
  // The order of these lines matters: otherwise ptxas does not see that a single thread loads, and wraps each load in a
  // loop over threads.
  const int warp = same_in_warp(threadIdx.x / WARP), lane = lane_id(), warpgroup = warp / 4;
  const bool loads = warp == MATH_WARPS && lane == 0;
  const Split split;
  const KRange k(split.rank);
  const Loader loader{s, a, a_scale, b, {args.b_scale, args.bias}, args.schedule.tokens_of_tile()};
  Schedule<GROUPS> schedule(args.schedule, s.groups);

  if (warp == MATH_WARPS) {
    schedule.prepare();
    schedule.ready();
  }
  if (loads) {
    s.ring.init(1, MATH_WARPS);
    if constexpr (SPLIT_K > 1) s.sums.init(1);
    mbarrier_init_fence();
    fill_ring(loader, schedule, k, split, args.schedule.early_stages);
  } else if (warp == MATH_WARPS + 1) {
    prefetch_map(b), prefetch_map(a), prefetch_map(a_scale);
    if constexpr (STAGED) prefetch_map(out_map);
  }
  __syncthreads();
  schedule.ready();
  Split::announce();
  allow_next_kernel();

  if (warpgroup == WARPGROUPS) {
    if constexpr (MATH_REGISTERS > 0) registers_decrease<PRODUCER_REGISTERS>();
    if (loads) produce(loader, schedule, k, args.schedule.early_stages);
    __syncwarp();
    Split::await_peers();
    Split::received();
  } else {
    if constexpr (MATH_REGISTERS > 0) registers_increase<MATH_REGISTERS>();
    MathWarp math(s, args.b_scale + k.first, warpgroup);
    Epilogue epilogue{s, args.out, out_map};
    consume(math, schedule, epilogue, k, split, PartSums(s), Columns{args.b_scale, args.bias});
  }
  Split::leave();
  Epilogue::leave(args.out);
}
