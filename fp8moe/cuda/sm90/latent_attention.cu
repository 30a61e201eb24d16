// Attention over latents, of which all query heads share each (multi-head latent attention, DeepSeek-V2,
// arXiv:2405.04434, section 2.1, with the key's up-projection absorbed into the query): a latent is a key of WIDTH
// values, whose first VALUE are the value. Softmax tile by tile: FlashAttention, arXiv:2205.14135. The keys of long
// sequences are shared out over thread blocks (Flash-Decoding), whose sums latent_merge.cu adds up in order.
//
//   out[b, t, h] = sum_j softmax_j(scale * q[b, t, h] . latent[b, j]) * latent[b, j, :VALUE]
//                  over j < length[b] - T + 1 + t
//
// A group is up to ROWS rows, queries and heads, of one sequence: 64, of which latent_few.cuh computes up to 32 another
// way, FEW. Two math warpgroups work on a tile of 64 latents: each
// scores 32 of them for all rows, hands the weights of the softmax to the other through shared memory, and sums one
// half of the values' columns. Of the four products that a tile could be, the latents are the second operand of both:
// keys lie along memory, values across (the descriptor's "MN-major").
//
// With CHOSEN (DeepSeek-V3.2, arXiv:2512.02556, section 2) each query reads only the latents that its row of `indices`
// names, so a group has rows of one query. Four warps gather them by asynchronous copies, in place of one thread's TMA.
//
// With CODES the latents are in FP8: CODED bytes each, of VALUE E4M3 codes, a float32 scale for each 128 of them, and
// the rest in bfloat16. Four warps copy them as they are, and write tiles of bfloat16 values; of few rows,
// latent_codes.cuh computes with the codes themselves.
//
// kernels/latent/sm90.py defines the macros CHOSEN, FEW and CODES, and the constants ROWS, THREADS, STAGES,
// FEWEST_TILES, registers, SHARED_BYTES, ARGUMENTS_BYTES.
#include "pipeline.cuh"
#include "tile_schedule.cuh"

constexpr int WIDTH = 576, VALUE = 512;
constexpr int TILE = 64;
constexpr int PANEL_COLUMNS = 64;  // of 16 bits: 128 bytes, as wide as the swizzle
constexpr int PANELS = WIDTH / PANEL_COLUMNS, VALUE_PANELS = VALUE / PANEL_COLUMNS;
constexpr int PANEL_BYTES = TILE * 128;
constexpr int CODED = VALUE + VALUE / 128 * 4 + (WIDTH - VALUE) * 2;  // bytes of a latent in FP8
constexpr int MATH_WARPS = 8, MATH_THREADS = MATH_WARPS * WARP;
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(THREADS == MATH_THREADS + WARPGROUP && (FEW ? ROWS <= 32 && ROWS % 8 == 0 : ROWS == 64));

using Queries = u8[PANELS][ROWS * 128];  // ROWS of them

// What a thread block leaves for latent_merge.cu: the group whose first tiles, but not all, are the block's last
// segment (-1 for none), how many tiles of it other blocks have, and how many tiles all groups have.
struct Record {
  int group, left, all, unused;
};

struct Arguments {
  const int *lengths, *begins, *table;
  u16* out;
  float* sums;         // (2 * blocks, ROWS, VALUE): of segments that are part of a group
  float2* statistics;  // (2 * blocks, ROWS): largest score, sum of weights
  Record* records;     // (blocks,)
  const int* indices;  // (queries of all sequences, chosen)
  const u16 *latents, *q;
  int sequences, rows, heads, queries, limit, pitch, table_blocks, stride, chosen;
  float scale;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "kernels/latent/sm90.py lays it out otherwise");

// Has the mbarrier count one arrival of this thread when the copies that it has issued are complete.
__device__ __forceinline__ void async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Rows of one sequence, or with CHOSEN of one query, that are computed together, and the latents that they see:
// `length` from `begin` on. All other code takes such a query for a sequence, of which `length` latents are chosen.
struct Group {
  int sequence, first_row, rows, begin, length;

  // The number of latents that a row sees, not positive for none. Rows past the last, of which nothing is kept, see
  // what the last sees.
  __device__ __forceinline__ int seen(const Arguments& a, int row) const {
    if constexpr (CHOSEN) return length;
    return length - a.queries + 1 + (first_row + min(row, rows - 1)) / a.heads;
  }
};

struct Groups {
  const Arguments& a;
  int each;  // groups of a sequence

  __device__ __forceinline__ explicit Groups(const Arguments& a) : a(a), each(ceil_div(a.rows, ROWS)) {}
  __device__ __forceinline__ int count() const { return a.sequences * each; }
  __device__ __forceinline__ int length_of(int sequence) const {
    return min(max(__ldg(a.lengths + sequence), 0), a.limit);
  }
  __device__ __forceinline__ Group group(int index) const {
    const int sequence = index / each, first = index % each * ROWS, rows = min(a.rows - first, ROWS);
    if constexpr (CHOSEN) return {sequence, first, rows, 0, a.chosen};
    const int length = length_of(sequence), begin = a.begins ? min(max(__ldg(a.begins + sequence), 0), length) : 0;
    return {sequence, first, rows, begin, length - begin};
  }
  __device__ __forceinline__ Range tiles(int index) const {
    const Group of = group(index);
    return {0, ceil_div(max(of.seen(a, ROWS), 0), TILE)};
  }
  // Spread over the tiles: sequences that lie equally far apart have equal offsets in the same channels of the memory.
  __device__ __forceinline__ int turn(int index) const {
    return static_cast<int>(static_cast<long long>(index / each) * tiles(index).size() / a.sequences);
  }
};

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The descriptor of 16 rows of latents, as rows of the second operand that lie across its columns: panels are
// PANEL_BYTES apart, groups of 8 latents 1024 bytes.
__device__ __forceinline__ u64 values_descriptor(u32 address) {
  return wgmma_descriptor<128>(address) | (u64{PANEL_BYTES >> 4} << 16);
}

#if FEW
#include "latent_softmax.cuh"
#endif
#if FEW && CODES
#include "latent_codes.cuh"
#else
constexpr int PIECE = 8;               // such latents that a warp copies at a time
constexpr int SCORED = TILE / 2;       // latents that a warpgroup scores
using Rows = u8[PANELS][PANEL_BYTES];  // 64 rows of WIDTH values, swizzled

struct alignas(SWIZZLE_ALIGNMENT) Shared {
  Queries q;
  Rows latents[STAGES];
  union {
    TileSums sums;  // before the first tile
#if FEW
    u8 weights[2][ROWS * 128];  // of the softmax, bfloat16: of each warpgroup
#else
    u8 weights[PANEL_BYTES];
#endif
  };
#if FEW
  alignas(8) float exchanged[2][4][ROWS];  // between the warps of each warpgroup
#else
  float exchanged[2][2][ROWS];  // between the warpgroups, in turns
#endif
#if CHOSEN
  u64 there[STAGES];  // bits of the latents of a tile that there are
#endif
#if CODES
  alignas(16) u8 coded[4][2][PIECE * CODED];  // of each warp, in turns
#endif
  WorkRange work;
  int all;  // tiles of all groups
  Ring<STAGES> ring;
  Ring<1> query_ring;
};
static_assert(sizeof(Shared) + SWIZZLE_ALIGNMENT <= SHARED_BYTES, "kernels/latent/sm90.py counts otherwise");

// Loads a group's queries, called by one thread.
__device__ __forceinline__ void load_queries(Shared& shared, Pipeline<1>& queries, const TensorMap& q, int row) {
  queries.acquire();
  queries.full().expect(sizeof(Queries));
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel) {
    tma_load(shared_address(shared.q[panel]), q, queries.full().address(), panel * PANEL_COLUMNS, row);
  }
  queries.advance();
}

#if CODES
// Converts four E4M3 codes, exactly.
__device__ __forceinline__ float4 e4m3_to_float(u32 codes) {
  const uint2 halves = unpack_e4m3(codes);
  float4 values;
  asm("{\n.reg .b16 a, b, c, d;\n"
      "mov.b32 {a, b}, %4;\n"
      "mov.b32 {c, d}, %5;\n"
      "cvt.f32.f16 %0, a;\n"
      "cvt.f32.f16 %1, b;\n"
      "cvt.f32.f16 %2, c;\n"
      "cvt.f32.f16 %3, d;\n}\n"
      : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
      : "r"(halves.x), "r"(halves.y));
  return values;
}

// Writes a warp's PIECE latents, from `stored` on, into a tile: eight lanes read the same scale.
__device__ __forceinline__ void write_values(Rows& tile, const u8* coded, int stored) {
  const int lane = lane_id(), panel = lane / 4, last = panel % 2;  // odd panels store the other half first
#pragma unroll(STAGES > 1 ? 4 : 1)
  for (int r = 0; r < PIECE; ++r) {
    const uint4 codes = load_shared_16(shared_address(coded) + r * CODED + lane * 16);
    const float scale = load_shared_float(reinterpret_cast<const float*>(coded + r * CODED + VALUE) + lane / 8);
    uint4 halves[2];
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    u32* values = reinterpret_cast<u32*>(halves);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = e4m3_to_float(words[i]);
      values[2 * i] = pack_bfloat16(four.x * scale, four.y * scale);
      values[2 * i + 1] = pack_bfloat16(four.z * scale, four.w * scale);
    }
    const u32 target = shared_address(tile[panel]) + (stored + r) * 128;
    const int chunk = lane % 4 * 2, swizzle = (stored + r) % 8;
    store_shared_16(target + ((chunk + last) ^ swizzle) * 16, last ? halves[1] : halves[0]);
    store_shared_16(target + ((chunk + 1 - last) ^ swizzle) * 16, last ? halves[0] : halves[1]);
  }
#pragma unroll
  for (int r = lane / 8; r < PIECE; r += 4) {
    const uint4 values = load_shared_16(shared_address(coded) + r * CODED + VALUE + VALUE / 128 * 4 + lane % 8 * 16);
    store_shared_16(shared_address(tile[VALUE_PANELS]) + (stored + r) * 128 + (lane % 8 ^ (stored + r) % 8) * 16,
                    values);
  }
}

// Called by the four warps that copy: each has PIECE latents of each half of a tile, and copies those of the next half
// while it writes the values of one. Latents that no row sees are zeros.
__device__ __forceinline__ void produce(Shared& shared, const TensorMap& q, const TensorMap&, const Arguments& a,
                                        const Groups& groups, WorkRange work, int warp) {
  const int lane = lane_id();
  Pipeline<STAGES> ring(shared.ring);
  Pipeline<1> queries(shared.query_ring);
  const u8* latents = reinterpret_cast<const u8*>(a.latents);
#pragma unroll 1
  while (true) {
    const Segment segment = work.next(groups);
    if (segment.count == 0) return;
    const Group group = groups.group(segment.group);
    const int sequence = CHOSEN ? group.sequence / a.queries : group.sequence;
    const int length = CHOSEN ? groups.length_of(sequence) : group.seen(a, ROWS);
    const int* indices = a.indices + static_cast<long long>(group.sequence) * a.chosen;
    const int* ids = a.table + static_cast<long long>(sequence) * a.pitch;
    // Starts to copy the warp's latents of a half of a tile; returns a bit for each that there is.
    const auto copy = [&](int piece, int tile) {
      const int number = tile * TILE + piece % 2 * (TILE / 2) + warp * PIECE + lane % PIECE;
      int index = number;
      if constexpr (CHOSEN) index = number < a.chosen ? __ldg(indices + number) : -1;
      const bool there = index >= 0 && index < length;
      int row = sequence * a.stride + group.begin + index;
      if (a.table && there) row = min(max(__ldg(ids + index / TILE), 0), a.table_blocks - 1) * TILE + index % TILE;
      const u32 found = __ballot_sync(FULL_WARP, there) & ((1 << PIECE) - 1);
      const u32 target = shared_address(shared.coded[warp][piece % 2]);
      const auto copy_chunk = [&](int of, int chunk, bool wanted) {
        const int from = __shfl_sync(FULL_WARP, row, of);
        const bool real = found >> of & 1;
        const u8* source = latents + (real ? static_cast<long long>(from) * CODED + chunk * 16 : 0);
        if (wanted) async_copy_16(target + of * CODED + chunk * 16, source, real);
      };
#pragma unroll(STAGES > 1 ? PIECE : 2)
      for (int of = 0; of < PIECE; ++of) copy_chunk(of, lane, true);
      constexpr int REST = CODED / 16 - WARP;  // chunks of 16 bytes that a warp has not copied of a latent
#pragma unroll 1
      for (int i = lane; i < round_up(PIECE * REST, WARP); i += WARP) {
        copy_chunk(min(i / REST, PIECE - 1), WARP + i % REST, i < PIECE * REST);
      }
      async_commit();
      return found;
    };
    int tile = segment.first + segment.turn;
    u32 bits = copy(0, tile);
#pragma unroll 1
    for (int piece = 0; piece < 2 * segment.count; ++piece) {
      u32 later = 0;
      if (piece + 1 < 2 * segment.count) {
        if (piece % 2) tile = segment.after(tile);
        later = copy(piece + 1, tile);
        async_wait<1>();
      } else {
        async_wait<0>();
      }
      if (piece % 2 == 0) ring.acquire();
      __syncwarp();
      write_values(shared.latents[ring.stage], shared.coded[warp][piece % 2], piece % 2 * (TILE / 2) + warp * PIECE);
#if CHOSEN
      if (lane == 0) {
        reinterpret_cast<u8*>(&shared.there[ring.stage])[piece % 2 * 4 + warp] = static_cast<u8>(bits);
      }
#endif
      __syncwarp();
      bits = later;
      if (piece % 2 == 0) continue;
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) ring.full().arrive();
      ring.advance();
      if (piece == 1 && warp == 0 && lane == 0) {
        load_queries(shared, queries, q, group.sequence * a.rows + group.first_row);
      }
      __syncwarp();
    }
  }
}
#elif CHOSEN
// Called by the four warps that gather: each has 16 latents of a tile, of which eight lanes copy one, 128 bytes at a
// time.
__device__ __forceinline__ void produce(Shared& shared, const TensorMap& q, const TensorMap&, const Arguments& a,
                                        const Groups& groups, WorkRange work, int warp) {
  const int lane = lane_id();
  Pipeline<STAGES> ring(shared.ring);
  Pipeline<1> queries(shared.query_ring);
#pragma unroll 1
  while (true) {
    const Segment segment = work.next(groups);
    if (segment.count == 0) return;
    const Group group = groups.group(segment.group);
    const int sequence = group.sequence / a.queries, length = groups.length_of(sequence);
    const int* indices = a.indices + static_cast<long long>(group.sequence) * a.chosen;
    const int* ids = a.table + static_cast<long long>(sequence) * a.pitch;
    int tile = segment.first + segment.turn;
#pragma unroll 1
    for (int i = 0; i < segment.count; ++i) {
      const int number = tile * TILE + warp * 16 + lane % 16;
      const int index = number < a.chosen ? __ldg(indices + number) : -1;
      const bool there = index >= 0 && index < length;
      int row = sequence * a.stride + index;
      if (a.table && there) row = min(max(__ldg(ids + index / TILE), 0), a.table_blocks - 1) * TILE + index % TILE;
      const u32 bits = __ballot_sync(FULL_WARP, there) & 0xFFFF;
      ring.acquire();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int of = lane / 8 + 4 * k, stored = warp * 16 + of;
        const int from = __shfl_sync(FULL_WARP, row, of);
        const bool real = bits >> of & 1;
        const u32 target = shared_address(shared.latents[ring.stage]) + stored * 128 + (lane % 8 ^ stored % 8) * 16;
        const u16* source = a.latents + (real ? static_cast<long long>(from) * WIDTH : 0) + lane % 8 * 8;
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
          async_copy_16(target + panel * PANEL_BYTES, source + panel * PANEL_COLUMNS, real);
        }
      }
      if (lane == 0) {
        reinterpret_cast<u16*>(&shared.there[ring.stage])[warp] = static_cast<u16>(bits);
        ring.full().arrive();
      }
      async_arrive(ring.full().address());
      tile = segment.after(tile);
      ring.advance();
      if (i == 0 && warp == 0 && lane == 0) {
        load_queries(shared, queries, q, group.sequence * a.rows + group.first_row);
      }
      __syncwarp();
    }
  }
}
#else
// Called by four warps, of which one thread loads.
__device__ __forceinline__ void produce(Shared& shared, const TensorMap& q, const TensorMap& latents,
                                        const Arguments& a, const Groups& groups, WorkRange work, int warp) {
  if (warp > 0 || lane_id() > 0) return;
  Pipeline<STAGES> ring(shared.ring);
  Pipeline<1> queries(shared.query_ring);
#pragma unroll 1
  while (true) {
    const Segment segment = work.next(groups);
    if (segment.count == 0) return;
    const Group group = groups.group(segment.group);
    const int* ids = a.table + static_cast<long long>(group.sequence) * a.pitch;
    int tile = segment.first + segment.turn;
    int id = a.table ? __ldg(ids + tile) : 0;
#pragma unroll 1
    for (int i = 0; i < segment.count; ++i) {
      const int row =
          a.table ? min(max(id, 0), a.table_blocks - 1) * TILE : group.sequence * a.stride + group.begin + tile * TILE;
      if (a.table && i + 1 < segment.count) id = __ldg(ids + segment.after(tile));
      ring.acquire();
      ring.full().expect(sizeof(Rows));
#pragma unroll
      for (int panel = 0; panel < PANELS; ++panel) {
        tma_load(shared_address(shared.latents[ring.stage][panel]), latents, ring.full().address(),
                 panel * PANEL_COLUMNS, row);
      }
      tile = segment.after(tile);
      ring.advance();
      if (i == 0) load_queries(shared, queries, q, group.sequence * a.rows + group.first_row);
    }
  }
}
#endif

#if FEW
#include "latent_few.cuh"
#else
// Which latents of a tile a row does not see.
struct Hidden {
#if CHOSEN
  u64 there;  // a bit for each

  __device__ __forceinline__ bool none() const { return there == ~u64{0}; }
  __device__ __forceinline__ bool has(int, int latent) const { return !(there >> latent & 1); }
#else
  int seen[2], least;  // how many of the tile's: by two rows, and by the row that sees fewest

  __device__ __forceinline__ bool none() const { return least >= TILE; }
  __device__ __forceinline__ bool has(int i, int latent) const { return latent >= seen[i]; }
#endif
};

// How many latents the rows of a group see: a thread's two, and those that see fewest and most.
struct Seen {
  int rows[2], least, most;
};

// The math of one warpgroup.
struct Math {
  Shared& shared;
  const Arguments& a;
  const Groups& groups;
  const int half, warp, lane;  // half: the warpgroup; warp: in it
  Pipeline<STAGES> ring;
  Pipeline<1> queries;
  int turn = 0;
  float out[VALUE / 4] = {};  // rows lane / 4 and lane / 4 + 8 of the warp's 16
  float largest[2], total[2];

  __device__ __forceinline__ Math(Shared& shared, const Arguments& a, const Groups& groups, int warp)
      : shared(shared),
        a(a),
        groups(groups),
        half(warp / 4),
        warp(warp % 4),
        lane(lane_id()),
        ring(shared.ring),
        queries(shared.query_ring) {}

  __device__ __forceinline__ int row(int i) const { return warp * 16 + lane / 4 + 8 * i; }

  // Exchanges a value of each row with the other warpgroup. All threads of a quad pass the same; each warpgroup has
  // finished the products that it issued.
  __device__ __forceinline__ void exchange(float (&values)[2]) {
    if (lane % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) shared.exchanged[turn][half][row(i)] = values[i];
    }
    named_barrier(1, MATH_THREADS);
#pragma unroll
    for (int i = 0; i < 2; ++i) values[i] = shared.exchanged[turn][1 - half][row(i)];
    turn ^= 1;
  }

  // Starts to score the warpgroup's latents of the tile that comes next, and waits for it to arrive.
  __device__ __forceinline__ void score(float (&scores)[SCORED / 2], u32 stage) {
    const u64 rows = wgmma_descriptor<128>(shared_address(shared.q));
    const u64 keys = wgmma_descriptor<128>(shared_address(shared.latents[stage]) + half * SCORED * 128);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step) {
      const int offset = step / 4 * (PANEL_BYTES >> 4) + step % 4 * 2;
      wgmma_scores(scores, rows + offset, keys + offset, step > 0);
    }
    wgmma_commit();
  }

  // Turns scores into weights, in shared memory, and rescales the sums.
  __device__ __forceinline__ void weigh(float (&scores)[SCORED / 2], const Hidden& hidden, float factor) {
    const bool none = hidden.none();
    float most[2], others[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = minus_infinity();
#pragma unroll
      for (int j = 0; j < SCORED / 8; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& score = scores[4 * j + 2 * i + k];
          score *= factor;
          const int latent = half * SCORED + 8 * j + 2 * (lane % 4) + k;
          if (!none && hidden.has(i, latent)) score = minus_infinity();
          most[i] = fmaxf(most[i], score);
        }
      }
      most[i] = warp_reduce<4>(most[i], [](float p, float q) { return fmaxf(p, q); });
      others[i] = most[i];
    }
    exchange(others);
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float now = fmaxf(largest[i], fmaxf(most[i], others[i]));
      const float origin = now == minus_infinity() ? 0.f : now;  // a row that has seen nothing yet
      shrink[i] = power_of_two(largest[i] - origin);
      largest[i] = now;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < SCORED / 8; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& score = scores[4 * j + 2 * i + k];
          score = power_of_two(score - origin);
          sum += score;
        }
      }
      total[i] = __fmaf_rn(total[i], shrink[i], sum);
    }
#pragma unroll
    for (int j = 0; j < SCORED / 8; j += 2) {
      const int stored = warp * 16 + lane % 16, chunk = half * (SCORED / 8) + j + lane / 16;
      const u32 target = shared_address(shared.weights) + stored * 128 + (chunk ^ stored % 8) * 16;
      stmatrix_x4(
          target, pack_bfloat16(scores[4 * j], scores[4 * j + 1]), pack_bfloat16(scores[4 * j + 2], scores[4 * j + 3]),
          pack_bfloat16(scores[4 * j + 4], scores[4 * j + 5]), pack_bfloat16(scores[4 * j + 6], scores[4 * j + 7]));
    }
#pragma unroll
    for (int i = 0; i < VALUE / 4; ++i) out[i] *= shrink[i / 2 % 2];
  }

  // Zeros the values of latents that no row sees: a NaN there, times a weight of 0, would reach the sums.
  __device__ __forceinline__ void clear(u32 stage, int from) {
    const int thread = threadIdx.x;
    for (int i = from * 8 + thread; i < TILE * 8; i += MATH_THREADS) {
#pragma unroll
      for (int panel = 0; panel < VALUE_PANELS; ++panel) {
        store_shared_16(shared_address(shared.latents[stage][panel]) + i * 16, make_uint4(0, 0, 0, 0));
      }
    }
  }

  __device__ __forceinline__ void add_values(u32 stage) {
    const u64 weights = wgmma_descriptor<128>(shared_address(shared.weights));
    const u64 values = values_descriptor(shared_address(shared.latents[stage][half * VALUE_PANELS / 2]));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < TILE / 16; ++step) {
      wgmma_values(out, weights + 2 * step, values + step * (16 * 128 >> 4), true);
    }
    wgmma_commit();
  }

  // Weighs a tile's latents, whose scores have been computed, and starts to add its values. first: the tile's first
  // latent. Returns its stage.
  __device__ __forceinline__ Released add(float (&scores)[SCORED / 2], int first, const Seen& seen, float factor) {
#if CHOSEN
    weigh(scores, Hidden{shared.there[ring.stage]}, factor);
#else
    weigh(scores, Hidden{{seen.rows[0] - first, seen.rows[1] - first}, seen.least - first}, factor);
    if (!CODES && first + TILE > seen.most) clear(ring.stage, seen.most - first);
#endif
    fence_async_proxy();
    named_barrier(2, MATH_THREADS);
    add_values(ring.stage);
    const Released stage(ring);
    ring.advance();
    return stage;
  }

  // Waits for the next tile, and starts to score it.
  __device__ __forceinline__ void next(float (&scores)[SCORED / 2]) {
    ring.arrived();
    if constexpr (CHOSEN && !CODES) fence_async_proxy();  // wgmma reads what ordinary copies wrote
    score(scores, ring.stage);
  }

  __device__ __forceinline__ void run(WorkRange work) {
    const float factor = a.scale * LOG2_E;
#pragma unroll 1
    while (true) {
      Segment segment = work.next(groups);
      segment = {same_in_warp(segment.group), same_in_warp(segment.first), same_in_warp(segment.count),
                 same_in_warp(segment.turn)};
      if (segment.count == 0) return;
      const Group group = groups.group(segment.group);
      const Seen seen = {{group.seen(a, row(0)), group.seen(a, row(1))},
                         same_in_warp(group.seen(a, 0)),
                         same_in_warp(group.seen(a, ROWS))};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        largest[i] = minus_infinity();
        total[i] = 0.f;
      }
#pragma unroll
      for (float& sum : out) sum = 0.f;

      queries.arrived();
      float scores[SCORED / 2];
      next(scores);
      wgmma_wait<0>(scores);
      int tile = segment.first + segment.turn;
#pragma unroll 1
      for (int later = segment.count - 1; later > 0; --later) {
        const Released stage = add(scores, tile * TILE, seen, factor);
        if constexpr (STAGES > 1) next(scores);  // otherwise the next tile takes this one's place
        wgmma_wait<STAGES - 1>(out);
        stage.arrive();
        if constexpr (STAGES == 1) next(scores);
        wgmma_wait<0>(scores);
        tile = segment.after(tile);
      }
      queries.release();
      queries.advance();
      const Released stage = add(scores, tile * TILE, seen, factor);
      wgmma_wait<0>(out);
      stage.arrive();
      store(segment, group);
    }
  }

  __device__ __forceinline__ void store(const Segment& segment, const Group& group) {
    float others[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total[i] = warp_reduce<4>(total[i], [](float p, float q) { return p + q; });
      others[i] = total[i];
    }
    exchange(others);
    const bool all = segment.first == 0 && segment.count == groups.tiles(segment.group).size();
    const int slot = 2 * blockIdx.x + (segment.first == 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int stored = row(i);
      if (stored >= group.rows) continue;
      // In the order of the halves, so that both warpgroups have the same sum.
      const float sum = half ? others[i] + total[i] : total[i] + others[i];
      const int column = half * VALUE / 2 + 2 * (lane % 4);
      if (all) {
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;
        const long long place = static_cast<long long>(group.sequence) * a.rows + group.first_row + stored;
        u32* target = reinterpret_cast<u32*>(a.out + place * VALUE + column);
#pragma unroll
        for (int j = 0; j < VALUE / 16; ++j) {
          target[4 * j] = pack_bfloat16(out[4 * j + 2 * i] * inverse, out[4 * j + 2 * i + 1] * inverse);
        }
      } else {
        const long long place = static_cast<long long>(slot) * ROWS + stored;
        float2* target = reinterpret_cast<float2*>(a.sums + place * VALUE + column);
#pragma unroll
        for (int j = 0; j < VALUE / 16; ++j) target[4 * j] = make_float2(out[4 * j + 2 * i], out[4 * j + 2 * i + 1]);
        if (half == 0 && lane % 4 == 0) a.statistics[place] = make_float2(largest[i], sum);
      }
    }
  }
};

#endif
#endif

// Writes zeros for groups that see no latent, and the block's record.
__device__ __forceinline__ void finish(const Arguments& a, const Groups& groups, WorkRange work, int all) {
  const int lane = lane_id();
#pragma unroll 1
  for (int index = blockIdx.x; index < groups.count(); index += gridDim.x) {
    if (groups.tiles(index).size() > 0) continue;
    const Group group = groups.group(index);
    u16* out = a.out + (static_cast<long long>(group.sequence) * a.rows + group.first_row) * VALUE;
    for (int i = lane; i < group.rows * VALUE / 8; i += WARP) reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
  }
  Record record = {-1, 0, all, 0};
#pragma unroll 1
  while (true) {
    const Segment segment = work.next(groups);
    if (segment.count == 0) break;
    const int tiles = groups.tiles(segment.group).size();
    record.group = segment.first == 0 && segment.count < tiles ? segment.group : -1;
    record.left = tiles - segment.count;
  }
  if (lane == 0) a.records[blockIdx.x] = record;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    latent_attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap latents,
                     const __grid_constant__ Arguments arguments) {
  Shared& shared = aligned_shared<Shared>();
  const int warp = same_in_warp(threadIdx.x / WARP);
  if (threadIdx.x == THREADS - 1) {
    prefetch_map(q);
    prefetch_map(latents);
    // CODES: the values that each warp writes. CHOSEN: the copies of each thread, and each warp's bits.
#if FEW && CODES
    shared.ring.init(CHOSEN ? WARP : 1, 4);
    shared.meeting.init(MATH_THREADS);
#else
    shared.ring.init(CODES ? 4 : CHOSEN ? WARPGROUP + 4 : 1, MATH_WARPS);
    shared.query_ring.init(1, MATH_WARPS);
#endif
    mbarrier_init_fence();
  }
  const Groups groups(arguments);
  sum_tiles(groups, shared.sums);
  __syncthreads();
  if (warp == 0) {
    const WorkRange work = find_work_range<!FEW>(groups, shared.sums);
    const int all = all_tiles(shared.sums);
    if (threadIdx.x == 0) shared.work = work, shared.all = all;
  }
  __syncthreads();  // the weights overwrite the sums
  if (warp >= MATH_WARPS) {
    registers_decrease<PRODUCER_REGISTERS>();
    produce(shared, q, latents, arguments, groups, shared.work, warp - MATH_WARPS);
    __syncwarp();
    if (warp == MATH_WARPS + 1) finish(arguments, groups, shared.work, shared.all);
  } else {
    registers_increase<MATH_REGISTERS>();
    Math(shared, arguments, groups, warp).run(shared.work);
  }
}
