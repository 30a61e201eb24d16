// TMA loads of a block's tiles into the ring: weights, tokens and token scales. One thread issues all of them.
#pragma once

#include "gemm_reduction.cuh"

// The K blocks that this thread block multiplies, and the number of stages that hold them.
struct KRange {
  int first, blocks, count;

  __device__ __forceinline__ explicit KRange(int split)
      : first(Split::k_blocks_before(split)),
        blocks(Split::k_blocks_before(split + 1) - first),
        count(ceil_div(blocks, DEPTH)) {}

  __device__ __forceinline__ int block(int stage) const { return first + DEPTH * stage; }
};

// UNPACKS: codes lie in the second half of the stage's weights.
constexpr int CODES_AT = B_BYTES / 2;

// The barrier that the load of a stage's weights completes.
template <typename S>
__device__ __forceinline__ Barrier& weights_arrived(S& s, u32 stage) {
  if constexpr (UNPACKS) {
    return s.codes[stage];
  } else {
    return s.ring.full[stage];
  }
}

__device__ __forceinline__ u32* scales_below(Shared& s, u32 stage) {
  return reinterpret_cast<u32*>(s.a_scale[stage] + DEPTH * A_SCALE_PITCH);
}

struct Loader {
  Shared& s;
  const TensorMap &a, &a_scale, &b, &below;  // below: of E2M1, see BELOW_WORDS
  Columns columns;
  int tile_m;  // tokens per load of a tile that is not partial

  // The number of pieces of 64 tokens in a partial tile.
  static __device__ __forceinline__ int pieces(const Tile& tile) {
    return min(ceil_div(tile.end - tile.m, 64), BLOCK_M / 64 + tile.upright());
  }

  // The number of tokens that are loaded for a tile which is not partial.
  __device__ __forceinline__ int token_count(const Tile& tile) const {
    return GATHERS ? min(tile.end - tile.m, BLOCK_M) : tile_m;
  }

  // Loads scales and biases of the tile's output features, together with the tile's first stage. buffer: alternates
  // between 0 and 1.
  __device__ __forceinline__ void load_columns(const Tile& tile, int buffer, u32 stage) const {
    if constexpr (COLUMN_BYTES > 0) {
      columns.load(tile, shared_address(s.epilogue + COLUMNS_AT + buffer * COLUMN_BYTES), s.ring.full[stage].address());
    }
  }

  __device__ __forceinline__ void load_weights(const Tile& tile, int k_block, u32 stage) const {
    const int tokens = (tile.upright() ? 2 : DEPTH) * A_SCALE_BYTES +
                       (PARTIAL ? pieces(tile) * A_PIECE_BYTES : DEPTH * token_count(tile) * BLOCK_K);
    const int weights = tile.columns() * WEIGHT_BYTES;
    Barrier& full = weights_arrived(s, stage);
    if constexpr (UNPACKS) s.ring.full[stage].expect(tokens);
    full.expect((UNPACKS ? weights : tokens + weights) + BELOW_WORDS * 4);
    const u32 target = shared_address(s.b[stage]) + (UNPACKS ? CODES_AT : 0);
    const int row = tile.group * N + (GATED ? tile.n / 2 : tile.n), column = k_block * (WEIGHT_BYTES / DEPTH);
    tma_load(target, b, full.address(), column, row);
    if constexpr (GATED) {
      tma_load(target + BLOCK_N / 2 * WEIGHT_BYTES, b, full.address(), column, row + INTERMEDIATE);
    }
    if constexpr (E2M1) {
      const u32 words = shared_address(scales_below(s, stage));
#pragma unroll
      for (int i = 0; i < PROJECTIONS; ++i) {
        tma_load(words + BELOW_WORDS / PROJECTIONS * 4 * i, below, full.address(), tile.n / PROJECTIONS, k_block,
                 tile.group * PROJECTIONS + i);
      }
    }
    if constexpr (HALVES) {
      if (tile.shape == WHOLE) tma_load(target + B_BYTES / 2, b, full.address(), column, row + HALF_N);
    }
  }

  __device__ __forceinline__ void load_tokens(const Tile& tile, int k_block, u32 stage) const {
    const u32 full = s.ring.full[stage].address();
    const u32 target = shared_address(s.a[stage]);
    if constexpr (PARTIAL) {
      const int count = pieces(tile);
#pragma unroll
      for (int i = 0; i < BLOCK_M / 64; ++i) {
        if (i < count) tma_load(target + i * A_PIECE_BYTES, a, full, k_block * BLOCK_K, tile.m + i * 64);
      }
    } else if constexpr (GATHERS) {
      const int count = token_count(tile);
#pragma unroll 1
      for (int row = 0; row < count; ++row) {
        const int token = token_of(s.groups, tile, row);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
          tma_load(target + d * A_BLOCK_BYTES + row * BLOCK_K, a, full, (k_block + d) * BLOCK_K, token);
        }
      }
    } else {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        tma_load(target + d * A_BLOCK_BYTES, a, full, (k_block + d) * BLOCK_K, tile.m);
      }
    }
#pragma unroll
    for (int i = 0; i < DEPTH * A_SCALE_LOADS; ++i) {
      const int d = i / A_SCALE_LOADS, row = i % A_SCALE_LOADS * A_SCALE_STEP;
      tma_load(shared_address(s.a_scale[stage] + d * A_SCALE_PITCH + row), a_scale, full,
               GATHERS ? 0 : (GROUPS ? tile.m & ~3 : tile.m) + row, k_block + d);
    }
    if (tile.upright()) {
      const int row = tile.m + BLOCK_M;
      tma_load(shared_address(s.b[stage]) + HALF_N * BLOCK_K, a, full, k_block * BLOCK_K, row);
      tma_load(shared_address(s.a_scale[stage] + BLOCK_M), a_scale, full, row & ~3, k_block);
    }
  }
};

// The number of stages of a block's first tile that are loaded while the ring is still empty; at most `most`.
__device__ __forceinline__ int stages_to_fill(const Schedule<GROUPS>& schedule, KRange k, int most) {
  return schedule.ended() ? 0 : min(DYNAMIC ? ASKED : k.count, most);
}

// Loads the weights of these stages, and the tokens of the first FIRST_STAGES of them: then products may begin, and the
// block's threads synchronize. Weights and group sizes never come from the previous kernel, so their loads do not wait
// for it. If there is a previous kernel to wait for, `most` is large.
__device__ __forceinline__ void fill_ring(const Loader& loader, const Schedule<GROUPS>& schedule, KRange k, Split split,
                                          int most) {
  const int count = stages_to_fill(schedule, k, most);
  const Tile tile = schedule.at(count > 0 ? schedule.index : 0);
  if (count > 0) loader.load_columns(tile, 0, 0);
#pragma unroll 1
  for (int i = 0; i < count; ++i) loader.load_weights(tile, k.block(i), i);
  wait_for_previous_kernel();
#pragma unroll 1
  for (int i = 0; i < min(count, FIRST_STAGES); ++i) loader.load_tokens(tile, k.block(i), i);
  if (count > 0) Sums{loader.s, tile, split, {}}.expect();
}

// Loads all that fill_ring() has not loaded.
__device__ __forceinline__ void produce(const Loader& loader, Schedule<GROUPS>& schedule, KRange k, int most) {
  Pipeline<STAGES> pipeline(loader.s.ring);
  int i = stages_to_fill(schedule, k, most);
  if (i > FIRST_STAGES) {
    const Tile first = schedule.at(schedule.index);
#pragma unroll 1
    for (int stage = FIRST_STAGES; stage < i; ++stage) loader.load_tokens(first, k.block(stage), stage);
  }
  pipeline.advance(i);
  Tile tile;
  for (int buffer = 0; schedule.next(tile); buffer ^= 1) {
#pragma unroll 1
    for (; i < k.count; ++i) {
      pipeline.acquire();
      if constexpr (DYNAMIC) {
        if (i == ASKED) schedule.ask();
        if (i == ANNOUNCED) schedule.announce(loader.s.groups.next(pipeline.stage));
      }
      if (i == 0) loader.load_columns(tile, buffer, pipeline.stage);
      loader.load_weights(tile, k.block(i), pipeline.stage);
      loader.load_tokens(tile, k.block(i), pipeline.stage);
      pipeline.advance();
    }
    i = 0;
  }
}
