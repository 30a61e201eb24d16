// The math of latent_attention.cu for groups of few rows: the latents are the first operand of both products, whose 64
// rows they fill, and the group's ROWS queries and heads the second.
//
//   scores (latents, rows) = latents . queries    latents along memory
//   sums (values, rows) = latents^T . weights     latents across memory, the descriptor's "MN-major"
//
// Both warpgroups score all latents of a tile, and each sums one half of the values' columns. So they meet nowhere but
// in the ring. A thread's columns of both products are the same rows of the group.
#pragma once

// The math of one warpgroup.
struct Math : Softmax {
  static constexpr int PARTS = VALUE_PANELS / 2;  // panels of a half

  Shared& shared;
  const Arguments& a;
  const Groups& groups;
  Pipeline<STAGES> ring;
  Pipeline<1> queries;
  float out[PARTS][SCORES];  // values 16 * warp + lane / 4 and the eighth after it, of each panel

  __device__ __forceinline__ Math(Shared& shared, const Arguments& a, const Groups& groups, int warp)
      : Softmax(shared.exchanged, warp),
        shared(shared),
        a(a),
        groups(groups),
        ring(shared.ring),
        queries(shared.query_ring) {}

  // Starts to score the latents of a tile.
  __device__ __forceinline__ void score(float (&scores)[SCORES], u32 stage) {
    const u64 latents = wgmma_descriptor<128>(shared_address(shared.latents[stage]));
    const u64 rows = wgmma_descriptor<128>(shared_address(shared.q));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
      wgmma_scores(scores, latents + step / 4 * (PANEL_BYTES >> 4) + step % 4 * 2,
                   rows + step / 4 * (ROWS * 128 >> 4) + step % 4 * 2, step > 0);
    }
    wgmma_commit();
  }

  // Puts the weights into shared memory, and rescales the sums.
  __device__ __forceinline__ void put(const float (&scores)[SCORES], const Of& shrink) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      store_weights(shared_address(shared.weights[half]), j, pack_bfloat16(scores[4 * j], scores[4 * j + 1]),
                    pack_bfloat16(scores[4 * j + 2], scores[4 * j + 3]));
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[part][4 * j + i] *= shrink[j][i % 2];
      }
    }
  }

  // Zeros the half's values of latents that no row sees: a NaN there, times a weight of 0, would reach the sums.
  __device__ __forceinline__ void clear(u32 stage, int from) {
    for (int i = from * 8 + threadIdx.x % WARPGROUP; i < TILE * 8; i += WARPGROUP) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        store_shared_16(shared_address(shared.latents[stage][half * PARTS + part]) + i * 16, make_uint4(0, 0, 0, 0));
      }
    }
  }

  __device__ __forceinline__ void add_values(u32 stage) {
    const u64 weights = wgmma_descriptor<128>(shared_address(shared.weights[half]));
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const u64 values = values_descriptor(shared_address(shared.latents[stage][half * PARTS + part]));
#pragma unroll
      for (int step = 0; step < TILE / 16; ++step) {
        wgmma_values(out[part], values + step * (16 * 128 >> 4), weights + 2 * step, true);
      }
    }
    wgmma_commit();
  }

  // Waits until at most the last `Later` groups of products are in flight, so that the sums may be read.
  template <int Later>
  __device__ __forceinline__ void wait_for_sums() {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) wgmma_wait<Later>(out[part]);
  }

  // Weighs a tile's latents, whose scores have been computed, and starts to add its values. first: the tile's first
  // latent. seen: how many latents a row sees; those that see fewest and most. Returns its stage.
  __device__ __forceinline__ Released add(float (&scores)[SCORES], int first, const int (&seen)[COLUMNS][2], int least,
                                          int most, float factor) {
    Of shrink;
    weigh(scores, shrink, factor, [&](float (&scores)[SCORES]) {
#if CHOSEN
      const u64 there = shared.there[ring.stage];
      if (there != ~u64{0}) hide(scores, [&](int, int, int latent) { return !(there >> latent & 1); });
#else
      if (first + TILE > least) {
        hide(scores, [&](int j, int k, int latent) { return latent >= seen[j][k] - first; });
      }
#endif
    });
    put(scores, shrink);
#if !CHOSEN
    if (first + TILE > most) clear(ring.stage, most - first);
#endif
    fence_async_proxy();
    sync();
    add_values(ring.stage);
    const Released stage(ring);
    ring.advance();
    return stage;
  }

  // Waits for the next tile, and starts to score it.
  __device__ __forceinline__ void next(float (&scores)[SCORES]) {
    ring.arrived();
    if constexpr (CHOSEN) fence_async_proxy();  // wgmma reads what ordinary copies wrote
    score(scores, ring.stage);
  }

  __device__ __forceinline__ void run(WorkRange work) {
    const float factor = a.scale * LOG2_E;
#pragma unroll 1
    while (true) {
      Segment segment = work.next(groups);
      segment = {same_in_warp(segment.group), same_in_warp(segment.first), same_in_warp(segment.count)};
      if (segment.count == 0) return;
      const Group group = groups.group(segment.group);
      const int least = same_in_warp(group.seen(a, 0)), most = same_in_warp(group.seen(a, ROWS));
      int seen[COLUMNS][2];
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) seen[j][0] = group.seen(a, row(j, 0)), seen[j][1] = group.seen(a, row(j, 1));
      reset();
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (float& sum : out[part]) sum = 0.f;
      }

      queries.arrived();
      float scores[SCORES];
      next(scores);
      wgmma_wait<0>(scores);
      int first = segment.first * TILE;
#pragma unroll 1
      for (int later = segment.count - 1; later > 0; --later) {
        const Released stage = add(scores, first, seen, least, most, factor);
        next(scores);
        wait_for_sums<1>();
        stage.arrive();
        wgmma_wait<0>(scores);
        first += TILE;
      }
      queries.release();
      queries.advance();
      const Released stage = add(scores, first, seen, least, most, factor);
      wait_for_sums<0>();
      stage.arrive();
      store(segment, group);
    }
  }

  __device__ __forceinline__ void store(const Segment& segment, const Group& group) {
    over_latents(total, [](float p, float q) { return p + q; });
    const bool all = segment.first == 0 && segment.count == groups.tiles(segment.group).size();
    const int slot = 2 * blockIdx.x + (segment.first == 0);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int stored = row(j, k);
        if (stored >= group.rows) continue;
        const float inverse = total[j][k] == 0.f ? 0.f : 1.f / total[j][k];
        const long long place = static_cast<long long>(group.sequence) * a.rows + group.first_row + stored;
        const long long kept = static_cast<long long>(slot) * ROWS + stored;
        if (!all && half == 0 && warp == 0 && lane < 4) a.statistics[kept] = make_float2(largest[j][k], total[j][k]);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = (half * PARTS + part) * PANEL_COLUMNS + 16 * warp + lane / 4 + 8 * i;
            const float sum = out[part][4 * j + 2 * i + k];
            if (all) {
              a.out[place * VALUE + column] = static_cast<u16>(pack_bfloat16(sum * inverse, 0.f));
            } else {
              a.sums[kept * VALUE + column] = sum;
            }
          }
        }
      }
    }
    sync();  // the next segment's largest scores go where the totals were exchanged
  }
};
