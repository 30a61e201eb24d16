// rms_norm.cu with a residual, followed by router_logits.cu and route_sorted.cu, in one kernel for few tokens; bitwise
// equal to the three kernels.
//
// One cluster of BLOCKS thread blocks shares the router's weight. Each block adds the residual to all tokens and
// normalizes them, as its rows of the weight are multiplied by all of them, and sends its logits to the shared memory
// of the first block. That block then chooses the experts and sorts the assignments, while the others write the sums,
// the norms and the quantized norms.
//
// A block has TEAMS teams of ROW_THREADS threads. A team normalizes a token, or multiplies EXPERTS rows of the weight
// by TOKENS tokens, at a time; the order of its sums is that of a thread block of router_logits.cu.
//
//   cluster barrier      arrives                      waits
//   1                    at the start                 before the first logit is sent: all blocks are running
//   2                    once the logits are sent     the first block before it reads them; the others at their end
//
// Compile-time constants: those of rms_norm.cuh; those of router_logits.cuh; those of route_sorted.cuh; LOGITS
// (BFloat16, Float16 or Float32: the type that logits are rounded to); MAX_TOKENS (a multiple of TOKENS); BLOCKS;
// TEAMS; BLOCK_BYTES.
#include "cluster.cuh"
#include "rms_norm.cuh"
#include "route_sorted.cuh"
#include "router_logits.cuh"

using Logits = LOGITS;

constexpr int THREADS = TEAMS * ROW_THREADS;
constexpr int BATCHES = MAX_TOKENS / TOKENS;
constexpr int PARTS = ceil_div(NUM_EXPERTS, EXPERTS);       // of the weight, EXPERTS rows each
constexpr int TEAM_PARTS = ceil_div(PARTS, BLOCKS* TEAMS);  // most parts of a team
constexpr int BLOCK_EXPERTS = TEAM_PARTS * TEAMS * EXPERTS;
constexpr int SHARE = ceil_div(MAX_TOKENS, TEAMS);  // most tokens that a team normalizes
// Tokens of a team that are loaded together, with their residuals: as many as registers can hold.
constexpr int LOADED = VECTORS >= 4 ? 1 : SHARE < 4 / VECTORS ? SHARE : 4 / VECTORS;
static_assert(MAX_TOKENS % TOKENS == 0 && MAX_TOKENS <= WARPS && WARPS * WARP <= THREADS && BLOCKS > 1);

// The shared memory of a block. Only the first block uses `sort` and `logits`.
struct Block {
  Vector values[MAX_TOKENS][VECTORS][ROW_THREADS];  // the norms
  Shared sort;
  float sums[TEAM_PARTS][BATCHES][TEAMS][ROW_WARPS][SUMS];
  float logits[MAX_TOKENS * NUM_EXPERTS];  // as rounded
};
static_assert(sizeof(Block) == BLOCK_BYTES && sizeof(Shared) % 16 == 0);

// x, residual (tokens, HIDDEN); norm_weight (HIDDEN); weight (NUM_EXPERTS, HIDDEN); bias (NUM_EXPERTS), may be null;
// choice_bias (NUM_EXPERTS): unused without BIAS.
struct Inputs {
  const Element *x, *residual, *norm_weight, *weight, *bias;
  const float* choice_bias;
};

// sum: x + residual; values: its norm; data: the quantized norm; all (tokens, HIDDEN). scale (tokens, ceil(HIDDEN /
// 128)), columns `round_up(tokens, 4)` apart. data and scale may be null.
struct Results {
  Element *sum, *values;
  u8* data;
  float* scale;
  Chosen chosen;
};

// The team of a thread, and its place in it.
struct Team {
  u32 index = threadIdx.x / ROW_THREADS, thread = threadIdx.x % ROW_THREADS, warp = thread / WARP;
  int first = thread * PER_VECTOR;  // column

  __device__ __forceinline__ int columns(int i) const { return HIDDEN - first - i * STEP; }
  __device__ __forceinline__ i64 at(int token, int i) const { return i64{token} * HIDDEN + first + i * STEP; }
  // Which EXPERTS rows of the weight are the team's `i`-th.
  __device__ __forceinline__ u32 part(u32 block, int i) const { return (i * BLOCKS + block) * TEAMS + index; }
};

// Normalizes all tokens into shared memory; those that do not exist become zeros.
__device__ __forceinline__ void normalize(Block& s, const Team& team, const Inputs& inputs, int tokens, float eps) {
  const auto weight_at = [&](int i) { return load_parameter(inputs.norm_weight + team.at(0, i), team.columns(i)); };
  Vector w[EARLY ? VECTORS : 1];
#pragma unroll
  for (int i = 0; i < (EARLY ? VECTORS : 0); ++i) w[i] = weight_at(i);
#pragma unroll 1
  for (int first = 0; first < SHARE; first += LOADED) {
    const auto token = [&](int l) { return (first + l) * TEAMS + static_cast<int>(team.index); };
    const auto count = [&](int l, int i) { return token(l) < tokens ? team.columns(i) : 0; };
    Vector v[LOADED][VECTORS], r[LOADED][VECTORS];
#pragma unroll
    for (int l = 0; l < LOADED; ++l) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        v[l][i] = Vector::load(inputs.x + team.at(token(l), i), count(l, i));
        r[l][i] = Vector::load(inputs.residual + team.at(token(l), i), count(l, i));
      }
    }
    float squares[LOADED];
#pragma unroll
    for (int l = 0; l < LOADED; ++l) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) v[l][i] = v[l][i] + r[l][i];
      squares[l] = sum_of_squares(v[l]);
    }
    sum_rows<TEAMS>(squares);
#pragma unroll
    for (int l = 0; l < LOADED; ++l) {
      if (token(l) >= MAX_TOKENS) continue;
      const float factor = norm_factor(squares[l], eps);
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        s.values[token(l)][i][team.thread] = {normalized(v[l][i], factor, EARLY ? w[i] : weight_at(i), count(l, i))};
      }
    }
    __syncthreads();
  }
}

// Multiplies the team's rows of the weight by all tokens. row: the first part of them.
__device__ __forceinline__ void multiply(Block& s, const Team& team, const Element* weight, u32 block,
                                         Vector (&row)[VECTORS][EXPERTS], int tokens) {
  const u32 lane = threadIdx.x % WARP;
#pragma unroll 1
  for (int part = 0;;) {
#pragma unroll 1
    for (int batch = 0; batch * TOKENS < tokens; ++batch) {
      float sum[SUMS] = {};
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        Vector x[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) x[t] = s.values[batch * TOKENS + t][i][team.thread];
        add_products(sum, x, row[i]);
      }
      const float total = sum_in_lanes(sum, lane);
      if (lane < SUMS) s.sums[part][batch][team.index][team.warp][lane] = total;
    }
    if (++part == TEAM_PARTS) return;
    const WeightRows rows(weight, team.part(block, part), team.thread);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
      for (int e = 0; e < EXPERTS; ++e) row[i][e] = rows.load(e, i);
    }
  }
}

// Adds up the sums of the warps and the bias, as store_logits() does, and sends the rounded logits to the first block.
__device__ __forceinline__ void send_logits(Block& s, const Element* bias, u32 block, int tokens) {
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * BLOCK_EXPERTS; i += THREADS) {
    const int token = i / BLOCK_EXPERTS, row = i % BLOCK_EXPERTS;
    const int part = row / (TEAMS * EXPERTS), team = row / EXPERTS % TEAMS, e = row % EXPERTS;
    const int expert = ((part * BLOCKS + static_cast<int>(block)) * TEAMS + team) * EXPERTS + e;
    if (expert >= NUM_EXPERTS) continue;
    const int sum = token % TOKENS * EXPERTS + e;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < ROW_WARPS; ++warp) total += s.sums[part][token / TOKENS][team][warp][sum];
    if (bias) total += Input::value(bias[expert]);
    const u32 target = shared_address(&s.logits[token * NUM_EXPERTS + expert]);
    store_to_block(cluster_address(target, 0), Logits::value(to_output<Logits>(total)));
  }
}

// Writes sums, norms and quantized norms; a team of the blocks after the first writes a token at a time.
__device__ __forceinline__ void write(const Block& s, const Team& team, const Inputs& inputs, const Results& results,
                                      u32 block, int tokens) {
  const auto columns = [&](int i) { return team.columns(i); };
#pragma unroll 1
  for (int token = (block - 1) * TEAMS + team.index; token < tokens; token += (BLOCKS - 1) * TEAMS) {
    Vector v[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const i64 at = team.at(token, i);
      const Vector x = Vector::load(inputs.x + at, columns(i));
      store(results.sum + at, x + Vector::load(inputs.residual + at, columns(i)), columns(i));
      v[i] = s.values[token][i][team.thread];
      store(results.values + at, v[i], columns(i));
    }
    if (results.data) {
      store_quantized(results.data + team.at(token, 0), results.scale + token, round_up(tokens, 4), v, team.thread,
                      columns);
    }
  }
}

// tokens: 1 to MAX_TOKENS. Grid: one cluster of BLOCKS.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    norm_route(const __grid_constant__ Inputs inputs, const __grid_constant__ Results results, int tokens, float eps,
               float scale) {
  extern __shared__ uint4 dynamic_shared[];
  Block& s = *reinterpret_cast<Block*>(dynamic_shared);
  const u32 block = blockIdx.x;
  const Team team;
  const SortSizes sizes = sort_sizes(tokens);
  Sort sort(s.sort, sizes);

  cluster_arrive_relaxed();
  Vector row[VECTORS][EXPERTS];
#pragma unroll 1
  for (int part = TEAM_PARTS - 1; part > 0; --part) {
    WeightRows(inputs.weight, team.part(block, part), team.thread).prefetch();
  }
  const WeightRows rows(inputs.weight, team.part(block, 0), team.thread);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
    for (int e = 0; e < EXPERTS; ++e) row[i][e] = rows.load(e, i);
  }
  if (block == 0 && sort.warp < WARPS) sort.clear();
  wait_for_previous_kernel();
  allow_next_kernel();

  normalize(s, team, inputs, tokens, eps);
  multiply(s, team, inputs.weight, block, row, tokens);
  __syncthreads();
  cluster_wait();
  send_logits(s, inputs.bias, block, tokens);
  cluster_arrive_release();
  if (block > 0) {
    write(s, team, inputs, results, block, tokens);
    cluster_wait();
    return;
  }
  cluster_wait();
  route_and_sort<Float32>(sort, reinterpret_cast<const u32*>(s.logits), inputs.choice_bias, results.chosen, tokens,
                          scale);
}
