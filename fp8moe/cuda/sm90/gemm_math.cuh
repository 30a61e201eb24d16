// The work of a math warp: wgmma over the stages of a tile, and promotion (gemm_promotion.cuh).
#pragma once

#include "gemm_load.cuh"
#include "gemm_parts.cuh"
#include "gemm_promotion.cuh"
#include "gemm_reduction.cuh"

// For large tiles: while the last product of a stage runs, a math warp already looks up the next stage and waits for
// its data. Then only the promotion separates two products of a warpgroup, and it is shorter than the other warpgroup's
// product.
constexpr bool AHEAD = UNROLLED_STAGES > 1 && !OVERLAPS && STAGES > 2 && K_BLOCKS > 8;

// Where the token scales of a tile begin in those of a stage.
__device__ __forceinline__ int first_token_scale(const Tile& tile) { return GROUPS && !GATHERS ? tile.m & 3 : 0; }

// SWAP: which of these scales belong to a lane's columns of wgmma.
struct ColumnScales {
  int places[GATHERS ? ACCUMULATORS / 2 : 1];

  __device__ __forceinline__ void find(const Shared& s, const Tile& tile) {
    if constexpr (GATHERS) {
#pragma unroll
      for (int j = 0; j < ACCUMULATORS / 2; ++j) {
        places[j] = token_of(s.groups, tile, 8 * (j / 2) + 2 * (lane_id() % 4) + j % 2);
      }
    }
  }
  // The place of scale j, beyond first_of_lane().
  __device__ __forceinline__ int operator[](int j) const {
    return GATHERS ? places[GATHERS ? j : 0] : 8 * (j / 2) + j % 2;
  }
  static __device__ __forceinline__ int first_of_lane() { return GATHERS ? 0 : 2 * (lane_id() % 4); }
};

// A math warp. It has several ways to process the stages of a tile; consume() picks one for up to 32 stages at a time:
//
//   multiply<true>, then multiply_more   a whole tile; products of the first stage initialize the sums
//   multiply_one                         a tile of which this warpgroup has one slab: a halved tile, or a group's last.
//                                        The sums begin at -0, so the first stage needs no code of its own
//   multiply_overlapped                  with OVERLAPS: the product of a stage runs while the previous one is promoted
//   skip                                 a group's last tile, if this warpgroup's slabs have no rows of it
struct MathWarp {
  static constexpr int TURN = WARP;  // stages whose weight scales the lanes of a warp hold

  Shared& s;
  Pipeline<STAGES> pipeline;
  TileStart rows, columns;  // in the current stage: the 64-row side, from this warpgroup's first slab on; the other one
  WeightScales weights;
  ColumnScales column_scales;
  int warpgroup;

  __device__ __forceinline__ MathWarp(Shared& s, const float* b_scale, KRange k, int warpgroup)
      : s(s), pipeline(s.ring), weights(first_scale(b_scale, k.first)), warpgroup(warpgroup) {
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
    const float* a_scale = s.a_scale[pipeline.stage] + first_token_scale(tile);
    // SWAP: token scales are loaded before the products. Handing a stage back does not wait for loads in flight, so
    // after a late load TMA might overwrite the scales before they are read.
    float tokens[SWAP ? ACCUMULATORS / 2 : 2];
    if constexpr (SWAP) {
#pragma unroll
      for (int j = 0; j < ACCUMULATORS / 2; ++j) tokens[j] = a_scale[ColumnScales::first_of_lane() + column_scales[j]];
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
    const float* a_scale = s.a_scale[pipeline.stage] + first_token_scale(tile) + row + warp * 16 + lane / 4;
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

// What the other warps of the loader's warpgroup do: nothing, or see gemm_unpack.cuh.
struct Idle {
  static __device__ __forceinline__ void run(Shared&, Schedule<GROUPS>&) {}
};
