// FP8 GEMM for Hopper: out[m, n] = sum_i a_scale[m, i] * b_scale[n / 128, i] * sum_{k in block i} a[m, k] * b[n, k].
//
//   a (M, K) e4m3, a_scale (M, ceil(K / 128)) float32 stored MN-major                    tokens
//   b (N, K) e4m3, b_scale (ceil(N / 128), ceil(K / 128)) float32, or with CHANNEL (N)   weights
//   bias (N), with BIAS                                                                  added to the sums
//   With GROUPS, b has one (N, K) for each group of rows of a; group sizes are known only on the device. With GATHERS
//   the rows of a group are tokens of a by index.
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
// The prelude (kernels/gemm/source.py) defines the constants, wgmma(), Math, which is MathWarp or PackedMathWarp,
// Helpers, which is Idle or Unpacker, and Epilogue, which is one of epilogue_*.cuh.

#include "gemm_codes.cuh"
#include "gemm_load.cuh"
#include "gemm_math.cuh"
#include "gemm_parts.cuh"
#include "gemm_reduction.cuh"

struct Arguments {
  const float* b_scale;
  const void* bias;  // see Columns
  Epilogue::Output out;
  ScheduleArguments schedule;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "kernels/gemm/source.py lays it out otherwise");

// Computes the block's tiles, one after another. find_next() looks up the next tile, during the products of a tile's
// first stage. fetch_next_scales() fetches the weight scales of the next turn, which may belong to the next tile.
__device__ __forceinline__ void consume(Math& math, Schedule<GROUPS>& schedule, Epilogue& epilogue, KRange k,
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
    math.column_scales.find(math.s, tile);
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
    // Stages per turn: at most TURN, because each lane holds the weight scales of one stage. A turn does not extend
    // past a part of K. DYNAMIC: the last turn begins at the stage at which the next tile is announced.
    int step = Math::TURN;
#pragma unroll 1
    for (int base = 0; base < k.count; base += step) {
      math.weights.turn();
      const bool announced = DYNAMIC && base >= ANNOUNCED;
      const int end = PARTS > 1 && !OVERLAPS ? part_end : DYNAMIC && !announced ? ANNOUNCED : k.count;
      const int count = min(Math::TURN, end - base), begun = base == 0;
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

__device__ __forceinline__ void init_barriers(Shared& s) {
  s.ring.init(UNPACKS ? 1 + UNPACK_WARPS : 1, MATH_WARPS);
  init_codes(s);
  if constexpr (SPLIT_K > 1) s.sums.init(1);
  mbarrier_init_fence();
}

// below: tensor map of arranged scales, only of E2M1. out_map: that of the result, which assumes a pitch of N.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scale,
         const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap below,
         const __grid_constant__ TensorMap out_map, const __grid_constant__ Arguments args) {
  Shared& s = aligned_shared<Shared>();
  // The order of these lines matters: otherwise ptxas does not see that a single thread loads, and wraps each load in a
  // loop over threads.
  const int warp = same_in_warp(threadIdx.x / WARP), lane = lane_id(), warpgroup = warp / 4;
  const bool loads = warp == MATH_WARPS && lane == 0;
  const Split split;
  const KRange k(split.rank);
  const Loader loader{s, a, a_scale, b, below, {args.b_scale, args.bias}, args.schedule.tokens_of_tile()};
  Schedule<GROUPS> schedule(args.schedule, s.groups);

  if constexpr (GATHERS) {
    if (loads) init_barriers(s);
    if (warp == MATH_WARPS) wait_for_previous_kernel();
  }
  if (warp == MATH_WARPS) {
    schedule.prepare();
    schedule.ready();
  }
  fill_magnitudes(s);
  if (loads) {
    if constexpr (!GATHERS) init_barriers(s);
    fill_ring(loader, schedule, k, split, args.schedule.early_stages);
  } else if (warp == MATH_WARPS + 1) {
    prefetch_map(b), prefetch_map(a), prefetch_map(a_scale);
    if constexpr (E2M1) prefetch_map(below);
    if constexpr (STAGED) prefetch_map(out_map);
  }
  __syncthreads();
  schedule.ready();
  Split::announce();
  allow_next_kernel();

  if (warpgroup == WARPGROUPS) {
    if constexpr (MATH_REGISTERS > 0) registers_decrease<PRODUCER_REGISTERS>();
    if (loads) produce(loader, schedule, k, args.schedule.early_stages);
    if (warp > MATH_WARPS) Helpers::run(s, schedule);
    __syncwarp();
    Split::await_peers();
    Split::received();
  } else {
    if constexpr (MATH_REGISTERS > 0) registers_increase<MATH_REGISTERS>();
    Math math(s, args.b_scale, k, warpgroup);
    Epilogue epilogue{s, args.out, out_map};
    consume(math, schedule, epilogue, k, split, PartSums(s), Columns{args.b_scale, args.bias});
  }
  Split::leave();
  Epilogue::leave(args.out);
}
