// Attention of latent_attention.cu for groups of few rows over latents in FP8, which no thread copies or rescales: they
// come as they are, 656 bytes apart, and each thread converts its part of the first operand of both products in
// registers, E4M3 to float16, exactly.
//
//   scores (latents, rows) = sum_g scale[latent, g] * (codes . queries)[g] + rest . queries
//   sums (values, rows) = unit[g] * sum (codes^T . (weights * scale[latent, g] / unit[g]))
//
// g: the 128 values that share a scale. unit[g]: the largest scale so far, so that float16 holds the weights. Queries
// are float16 too, divided by a power of two of each row's own.
//
// Each warpgroup has every other tile of a segment, all columns of the values, and a softmax of its own; in the end
// they exchange half of their sums. The order of K is the same in both operands, and such that a thread's codes lie
// together: a lane has 32 of the 128 codes of a scale, and at 656 bytes from latent to latent no two lanes meet in a
// bank.
#pragma once

constexpr float SMALLEST = 1.17549435e-38f;  // that is normal, of float
constexpr int GROUPS = VALUE / 128,
              REST = VALUE + GROUPS * 4;  // scales of a latent, and the byte where the rest begins

struct alignas(SWIZZLE_ALIGNMENT) Shared {
  Queries q;  // float16, the last panel bfloat16; K in the order of the codes
  union {
    TileSums sums;                      // before the first tile
    u8 weights[2][GROUPS][ROWS * 128];  // of the softmax, float16: of each warpgroup, multiplied by each scale
  };
  u8 latents[STAGES][TILE * CODED];
  float sent[2][VALUE_PANELS / 2 * ROWS / 2][WARPGROUP];  // sums that a warpgroup has for the other
  float2 statistics[2][ROWS];
  float power[ROWS];                       // by which a row's queries are divided
  alignas(8) float exchanged[2][4][ROWS];  // between the warps of each warpgroup
  float4 scales[2][4];                     // the largest of each warp's latents
  u64 there[STAGES];                       // CHOSEN: bits of the latents of a tile that there are
  WorkRange work;
  int all;  // tiles of all groups
  Ring<STAGES> ring;
  Barrier meeting;  // of all math threads
};
static_assert(sizeof(Shared) + SWIZZLE_ALIGNMENT <= SHARED_BYTES, "kernels/latent/sm90.py counts otherwise");

__device__ __forceinline__ u32 pack_float16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ void store_shared_4(u32 address, u32 value) {
  asm volatile("st.shared::cta.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void zero_latent(u32 address) {
  for (int i = 0; i < CODED / 16; ++i) store_shared_16(address + i * 16, make_uint4(0, 0, 0, 0));
}

// Called by the four warps that load, of which one does. Latents of a tile that there are not are zeros.
__device__ __forceinline__ void produce(Shared& shared, const TensorMap&, const TensorMap&, const Arguments& a,
                                        const Groups& groups, WorkRange work, int warp) {
  if (warp > 0) return;
  const int lane = lane_id();
  Pipeline<STAGES> ring(shared.ring);
  const u8* latents = reinterpret_cast<const u8*>(a.latents);
#pragma unroll 1
  while (true) {
    const Segment segment = work.next(groups);
    if (segment.count == 0) return;
    const Group group = groups.group(segment.group);
    const int sequence = CHOSEN ? group.sequence / a.queries : group.sequence;
    const int length = CHOSEN ? groups.length_of(sequence) : group.seen(a, ROWS);
    const int* ids = a.table + static_cast<long long>(sequence) * a.pitch;
#pragma unroll 1
    for (int first = segment.first * TILE; first < (segment.first + segment.count) * TILE; first += TILE) {
      const u32 full = ring.full().address(), target = shared_address(shared.latents[ring.stage]);
      const auto block = [&](int number) { return min(max(__ldg(ids + number), 0), a.table_blocks - 1) * TILE; };
#if CHOSEN
      const int* indices = a.indices + static_cast<long long>(group.sequence) * a.chosen;
      int index[2];
      u32 found[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int number = first + i * WARP + lane;
        index[i] = number < a.chosen ? __ldg(indices + number) : -1;
        found[i] = __ballot_sync(FULL_WARP, index[i] >= 0 && index[i] < length);
      }
      ring.acquire();
      fence_async_proxy();  // zeros may have been where latents are copied to
      if (lane == 0) {
        shared.there[ring.stage] = found[0] | u64{found[1]} << 32;
        mbarrier_expect_more(full, (__popc(found[0]) + __popc(found[1])) * CODED);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 place = target + (i * WARP + lane) * CODED;
        if (found[i] >> lane & 1) {
          const int row = a.table ? block(index[i] / TILE) + index[i] % TILE : sequence * a.stride + index[i];
          bulk_load(place, latents + static_cast<long long>(row) * CODED, CODED, full);
        } else {
          zero_latent(place);
        }
      }
      ring.full().arrive();  // by each lane, of its zeros
#else
      const int row = a.table ? block(first / TILE) : sequence * a.stride + group.begin + first;
      ring.acquire();
      if (lane == 0) {
        const u32 bytes = min(TILE, length - first) * CODED;
        ring.full().expect(bytes);
        bulk_load(target, latents + static_cast<long long>(row) * CODED, bytes, full);
      }
#endif
      ring.advance();
      __syncwarp();
    }
  }
}

// The math of one warpgroup.
struct Math : Softmax {
  static constexpr int HALF = VALUE_PANELS / 2;
  static constexpr int IN_FLIGHT = 1;  // panels that are multiplied while codes of the next are converted
  using Rows4 = u32[4][4];             // a thread's part of the first operand of four products

  Shared& shared;
  const Arguments& a;
  const Groups& groups;
  Pipeline<STAGES> ring;
  int turn = 0;                     // tiles before the segment
  u32 met = 0;                      // the phase of shared.meeting
  float out[VALUE_PANELS][SCORES];  // values 16 * warp + lane / 4 * 2 and the next, of each panel
  float unit[GROUPS];

  __device__ __forceinline__ Math(Shared& shared, const Arguments& a, const Groups& groups, int warp)
      : Softmax(shared.exchanged, warp), shared(shared), a(a), groups(groups), ring(shared.ring) {}

  __device__ __forceinline__ static void keep(Rows4& values) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(values[i / 4][i % 4]));
  }

  // Waits until at most the last `Later` groups of products are in flight.
  template <int Later>
  __device__ __forceinline__ static void wgmma_wait_until() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Later) : "memory");
  }

  // Waits for all math threads. They meet at an mbarrier, which each arrives at: racecheck loses what threads have
  // stored before a named barrier of some warps, now and then.
  __device__ __forceinline__ void meet() {
    shared.meeting.arrive();
    shared.meeting.wait(met);
    met ^= 1;
  }

  // Puts a group's queries into shared memory. Called by both warpgroups, each warp with every eighth row.
  __device__ __forceinline__ void load_queries(const Group& group) {
    named_barrier(3, MATH_THREADS);  // the segment before has been computed
#pragma unroll 1
    for (int row = half * 4 + warp; row < ROWS; row += MATH_WARPS) {
      const long long place = static_cast<long long>(group.sequence) * a.rows + group.first_row + row;
      const uint2* source = reinterpret_cast<const uint2*>(a.q + place * WIDTH);
      uint2 fours[GROUPS], rest = make_uint2(0, 0);  // of the codes' values, one of each scale
      float most = 0.f;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        fours[g] = row < group.rows ? __ldg(source + g * WARP + lane) : rest;
        const u32 both = fours[g].x & 0x7FFF7FFF, others = fours[g].y & 0x7FFF7FFF;
        most = fmaxf(most, fmaxf(__uint_as_float(both << 16), __uint_as_float(both & 0x7FFF0000)));
        most = fmaxf(most, fmaxf(__uint_as_float(others << 16), __uint_as_float(others & 0x7FFF0000)));
      }
      if (row < group.rows && lane < 16) rest = __ldg(source + VALUE / 4 + lane);
      most = warp_reduce(most, [](float p, float q) { return fmaxf(p, q); });
      const int exponent = __float_as_int(most) >> 23;
      const bool usual = exponent > 0 && exponent < 254;  // neither zero nor infinite
      const float power = usual ? __int_as_float(exponent << 23) : 1.f;
      const float inverse = usual ? __int_as_float((254 - exponent) << 23) : 1.f;
      if (lane == 0) shared.power[row] = power;
      // Two words of four values: where the first product's operand has columns 2 * t and the next, and the eighth
      // after these.
      const auto put = [&](int panel, int step, int t, u32 low, u32 high) {
        const u32 target = shared_address(shared.q[panel]) + row * 128 + t * 4;
        store_shared_4(target + ((2 * step) ^ row % 8) * 16, low);
        store_shared_4(target + ((2 * step + 1) ^ row % 8) * 16, high);
      };
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const auto halves = [&](u32 pair) {
          return pack_float16(__uint_as_float(pair << 16) * inverse, __uint_as_float(pair & 0xFFFF0000) * inverse);
        };
        put(2 * g + lane / 4 % 2, lane % 4, lane / 8, halves(fours[g].x), halves(fours[g].y));
      }
      if (lane < 16) put(VALUE_PANELS, lane % 4, lane / 4, rest.x, rest.y);
    }
    fence_async_proxy();
    named_barrier(3, MATH_THREADS);
  }

  // Scores the latents of a tile. scales: of the thread's two latents.
  __device__ __forceinline__ void score(float (&scores)[SCORES], u32 tile, const float (&scales)[2][GROUPS]) {
    const u32 mine = tile + (16 * warp + lane / 4) * CODED + lane % 4 * 32;
    const u64 rows = wgmma_descriptor<128>(shared_address(shared.q));
    const auto panel = [&](int of) { return rows + of * (ROWS * 128 >> 4); };
    constexpr int PARTIALS = 2;  // sums of one scale, in turns
    float partial[PARTIALS][SCORES];
    Rows4 values[IN_FLIGHT + 1];
#pragma unroll
    for (int i = 0; i < VALUE_PANELS + IN_FLIGHT; ++i) {
      if (i < VALUE_PANELS) {
        const int g = i / 2;
        Rows4& next = values[i % (IN_FLIGHT + 1)];
        const u32 codes = mine + g * 128 + i % 2 * 16;
        const uint4 upper = load_shared_16(codes), lower = load_shared_16(codes + 8 * CODED);
        const u32 words[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint2 pairs = unpack_e4m3(words[j % 2][j / 2]);
          next[j / 2][j % 2] = pairs.x, next[j / 2][2 + j % 2] = pairs.y;
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          wgmma_scores(partial[g % PARTIALS], next[step], panel(i) + 2 * step, i % 2 > 0 || step > 0);
        }
        wgmma_commit();
      }
      const int ended = i - IN_FLIGHT;
      if (ended < 0) continue;
      if (ended % 2 == 0) {
        wgmma_wait_until<IN_FLIGHT>();
      } else if (i < VALUE_PANELS) {
        wgmma_wait<IN_FLIGHT>(partial[ended / 2 % PARTIALS]);
      } else {
        wgmma_wait<0>(partial[ended / 2 % PARTIALS]);
      }
      keep(values[ended % (IN_FLIGHT + 1)]);
      if (ended % 2) scale_partial(scores, partial[ended / 2 % PARTIALS], scales, ended / 2);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const float2 power = *reinterpret_cast<const float2*>(&shared.power[row(j, 0)]);
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[4 * j + i] *= i % 2 ? power.y : power.x;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 upper = load_shared_16(mine + REST + i * 16),
                  lower = load_shared_16(mine + 8 * CODED + REST + i * 16);
      const u32 words[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
#pragma unroll
      for (int j = 0; j < 8; ++j) values[0][2 * i + j / 4][j % 4] = words[j % 2][j / 4 * 2 + j % 4 / 2];
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_rest(scores, values[0][step], panel(VALUE_PANELS) + 2 * step, true);
    wgmma_commit();
    wgmma_wait<0>(scores);
    keep(values[0]);
  }

  __device__ __forceinline__ static void scale_partial(float (&sum)[SCORES], const float (&partial)[SCORES],
                                                       const float (&scales)[2][GROUPS], int g) {
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
      const float product = partial[i] * scales[i / 2 % 2][g];
      sum[i] = g == 0 ? product : sum[i] + product;
    }
  }

  // Puts the weights, multiplied by each scale, into shared memory, and rescales the sums.
  __device__ __forceinline__ void put(const float (&scores)[SCORES], const float (&scales)[2][GROUPS],
                                      const Of& shrink) {
    float most[GROUPS] = {};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float4 found = shared.scales[half][w];
      most[0] = fmaxf(most[0], found.x), most[1] = fmaxf(most[1], found.y);
      most[2] = fmaxf(most[2], found.z), most[3] = fmaxf(most[3], found.w);
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const float now = fmaxf(unit[g], most[g]), inverse = 1.f / now, smaller = unit[g] * inverse;
      const float factors[2] = {scales[0][g] * inverse, scales[1][g] * inverse};
      unit[g] = now;
      const u32 weights = shared_address(shared.weights[half][g]);
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        store_weights(weights, j, pack_float16(scores[4 * j] * factors[0], scores[4 * j + 1] * factors[0]),
                      pack_float16(scores[4 * j + 2] * factors[1], scores[4 * j + 3] * factors[1]));
        const float shrinks[2] = {shrink[j][0] * smaller, shrink[j][1] * smaller};
#pragma unroll
        for (int i = 0; i < 8; ++i) out[2 * g + i / 4][4 * j + i % 4] *= shrinks[i % 2];
      }
    }
  }

  __device__ __forceinline__ void add_values(u32 tile) {
    const u64 weights = wgmma_descriptor<128>(shared_address(shared.weights[half]));
    Rows4 values[IN_FLIGHT + 1];
#pragma unroll
    for (int i = 0; i < VALUE_PANELS + IN_FLIGHT; ++i) {
      if (i < VALUE_PANELS) {
        Rows4& next = values[i % (IN_FLIGHT + 1)];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          u32 found[4];  // of eight latents each: the codes of two values, of two latents
          load_transposed(tile + (32 * j + lane) * CODED + i * PANEL_COLUMNS + 16 * warp, found);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const uint2 pairs = unpack_e4m3(select_bytes(found[k], 0, 0x3120));
            next[2 * j + k / 2][k % 2 * 2] = pairs.x, next[2 * j + k / 2][k % 2 * 2 + 1] = pairs.y;
          }
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          wgmma_values(out[i], next[step], weights + i / 2 * (ROWS * 128 >> 4) + 2 * step, true);
        }
        wgmma_commit();
      }
      const int ended = i - IN_FLIGHT;
      if (ended < 0) continue;
      if (i < VALUE_PANELS) {
        wgmma_wait<IN_FLIGHT>(out[ended]);
      } else {
        wgmma_wait<0>(out[ended]);
      }
      keep(values[ended % (IN_FLIGHT + 1)]);
    }
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
      reset();
#pragma unroll
      for (float& of : unit) of = SMALLEST;
#pragma unroll
      for (int i = 0; i < VALUE_PANELS * SCORES; ++i) out[i / SCORES][i % SCORES] = 0.f;
      load_queries(group);
#pragma unroll 1
      for (int i = 0; i < segment.count; ++i) {
        if ((turn + i) % 2 == half) add_tile((segment.first + i) * TILE, group, least, most, factor);
        ring.advance();
      }
      turn += segment.count;
      store(segment, group);
    }
  }

  // Adds a tile's latents, from the group's latent `first` on. least, most: how many the rows see that see fewest and
  // most.
  __device__ __forceinline__ void add_tile(int first, const Group& group, int least, int most, float factor) {
    const u32 tile = shared_address(shared.latents[ring.stage]);
    ring.arrived();
#if !CHOSEN
    if (first + TILE > most) {
      // What was there before times a weight of 0 may be NaN.
      for (int i = most - first + threadIdx.x % WARPGROUP; i < TILE; i += WARPGROUP) zero_latent(tile + i * CODED);
      fence_async_proxy();  // other latents will be copied there
      sync();
    }
#endif
    float scales[2][GROUPS], largest_scale[GROUPS];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 found = load_shared_16(tile + (16 * warp + lane / 4 + 8 * i) * CODED + VALUE);
      scales[i][0] = __uint_as_float(found.x), scales[i][1] = __uint_as_float(found.y);
      scales[i][2] = __uint_as_float(found.z), scales[i][3] = __uint_as_float(found.w);
    }
    float scores[SCORES];
    score(scores, tile, scales);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      largest_scale[g] =
          warp_reduce<8, 4>(fmaxf(scales[0][g], scales[1][g]), [](float p, float q) { return fmaxf(p, q); });
    }
    if (lane == 0) {
      shared.scales[half][warp] = make_float4(largest_scale[0], largest_scale[1], largest_scale[2], largest_scale[3]);
    }
    Of shrink;
    weigh(scores, shrink, factor, [&](float (&scores)[SCORES]) {
#if CHOSEN
      const u64 there = shared.there[ring.stage];
      if (there != ~u64{0}) hide(scores, [&](int, int, int latent) { return !(there >> latent & 1); });
#else
      if (first + TILE > least) {
        hide(scores, [&](int j, int k, int latent) { return latent >= group.seen(a, row(j, k)) - first; });
      }
#endif
    });
    put(scores, scales, shrink);
    fence_async_proxy();
    sync();
    add_values(tile);
    ring.release();
  }

  __device__ __forceinline__ void store(const Segment& segment, const Group& group) {
    over_latents(total, [](float p, float q) { return p + q; });
    if (warp == 0 && lane < 4) {
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) shared.statistics[half][row(j, k)] = make_float2(largest[j][k], total[j][k]);
      }
    }
    meet();
    Of share;  // what a warpgroup's sums are multiplied by
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float2 first = shared.statistics[0][row(j, k)], second = shared.statistics[1][row(j, k)];
        const float both = fmaxf(first.x, second.x), origin = both == minus_infinity() ? 0.f : both;
        share[j][k] = power_of_two(largest[j][k] - origin);
        total[j][k] = __fmaf_rn(first.y, power_of_two(first.x - origin), second.y * power_of_two(second.x - origin));
        largest[j][k] = both;
      }
    }
    const int thread = threadIdx.x % WARPGROUP;
#pragma unroll
    for (int i = 0; i < VALUE_PANELS; ++i) {
#pragma unroll
      for (int e = 0; e < SCORES; ++e) {
        out[i][e] *= unit[i / 2] * share[e / 4][e % 2];
        if (i / HALF != half) shared.sent[half][i % HALF * SCORES + e][thread] = out[i][e];
      }
    }
    meet();
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
        for (int i = 0; i < HALF; ++i) {
          float sums[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int of = 4 * j + 2 * e + k;
            sums[e] = (half ? out[HALF + i][of] : out[i][of]) + shared.sent[1 - half][i * SCORES + of][thread];
          }
          const int column = (half * HALF + i) * PANEL_COLUMNS + 16 * warp + lane / 4 * 2;
          if (all) {
            *reinterpret_cast<u32*>(a.out + place * VALUE + column) =
                pack_bfloat16(sums[0] * inverse, sums[1] * inverse);
          } else {
            *reinterpret_cast<float2*>(a.sums + kept * VALUE + column) = make_float2(sums[0], sums[1]);
          }
        }
      }
    }
  }
};
