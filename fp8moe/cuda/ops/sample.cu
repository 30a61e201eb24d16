// Samples the next token of each row of logits, and appends it to the generated tokens of the row's sequence.
//
// A cluster of thread blocks handles one row, which stays in L2 between passes:
//
// 1. One pass finds the largest raw logit, the largest penalized logit, and the sum for the log-softmax. Greedy rows
//    are done.
// 2. top_k and top_p raise `floor`, the smallest key that is kept, by radix selection (radix_select.cuh): top_k by
//    counts, top_p by probability mass in fixed point. Of tokens whose key equals `floor`, top_p keeps those with an
//    index from `cut` on.
// 3. The token with the largest sum of scaled logit and noise is chosen.
//
// For top_k, a first bound is the k-th largest of the threads' largest logits. Once a thread block's candidates fit
// into its list, it reads the list instead of the row. The order of the list is arbitrary and does not affect the
// result.
//
// Compile-time constants: those of input.cuh, gumbel.cuh and radix_select.cuh; CAPACITY (of a list); MASS_BITS;
// IN_PROMPT and GENERATED (bits of `seen`); OPERANDS_BYTES.
#include "gumbel.cuh"
#include "input.cuh"
#include "ordered.cuh"
#include "radix_select.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr u32 EVERYTHING = THREADS * CLUSTER * PER_VECTOR;  // tokens that a cluster processes per step
constexpr float LOWEST = -0x1.FFFFFEp127f;

// State of the sequences, for sample_next; null pointers for sample.
struct Sequences {
  i64 *tokens, *generated;  // last token of each sequence; (rows, longest)
  float* logprobs;          // (rows, longest)
  i64* count;
  u8 *finished, *failed;
  const i64* limit;
  const u8* ends;  // (rows, vocab)
  const i64* pad;
};

struct Operands {
  const Element* logits;  // (rows, vocab), rows logits_stride apart
  const float* temperature;
  const int* top_k;
  const float *top_p, *min_p, *repetition_penalty, *presence_penalty;
  const i64* seed;
  i64* step;
  u8* seen;     // (rows, vocab)
  i64* tokens;  // results of sample; so is `logprobs`
  float* logprobs;
  Sequences sequences;
  i64 logits_stride;
  u32 vocab, longest;
};
static_assert(sizeof(Operands) == OPERANDS_BYTES);

__device__ bool is_finite(float x) { return fabsf(x) <= -LOWEST; }

__device__ float fast_exp(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * LOG2_E));
  return power;
}

// Packs a value and its token into an integer. Larger values give larger integers; of equal values, lower tokens do. 0
// is smaller than every result.
__device__ u64 pack(float value, u32 token) { return u64{to_ordered(value)} << 32 | ~token; }
__device__ float packed_value(u64 packed) { return from_ordered(static_cast<u32>(packed >> 32)); }
__device__ u32 packed_token(u64 packed) { return ~static_cast<u32>(packed); }

struct Parameters {
  float temperature;
  int top_k;
  float top_p, min_p, repetition, presence;

  __device__ Parameters(const Operands& operands, u32 row)
      : temperature(operands.temperature[row]),
        top_k(operands.top_k[row]),
        top_p(operands.top_p[row]),
        min_p(operands.min_p[row]),
        repetition(operands.repetition_penalty[row]),
        presence(operands.presence_penalty[row]) {}

  __device__ bool valid() const {
    return temperature >= 0.0f && is_finite(temperature) && top_k >= 0 && top_p >= 0.0f && top_p <= 1.0f &&
           min_p >= 0.0f && min_p <= 1.0f && repetition > 0.0f && is_finite(repetition) && is_finite(presence);
  }

  __device__ bool penalizes() const { return repetition != 1.0f || presence != 0.0f; }

  __device__ float penalized(float logit, u32 seen) const {
    if (!(seen & (IN_PROMPT | GENERATED))) return logit;
    const float repeated = logit < 0.0f ? __fmul_rn(logit, repetition) : __fdiv_rn(logit, repetition);
    return seen & GENERATED ? __fsub_rn(repeated, presence) : repeated;
  }
};

struct Row {
  const Element* logits;
  const u8* seen;
  u32 vocab;

  // Returns the marks in `seen` of the first `count` tokens of a vector, one byte each.
  __device__ u64 marks(u32 token, int count) const {
    if constexpr (VECTOR && PER_VECTOR == 8) {
      const uint2 v = *reinterpret_cast<const uint2*>(seen + token);
      return u64{v.y} << 32 | v.x;
    } else if constexpr (VECTOR) {
      return *reinterpret_cast<const u32*>(seen + token);
    } else {
      u64 marks = 0;
#pragma unroll
      for (int i = 0; i < PER_VECTOR; ++i) {
        if (i < count) marks |= u64{seen[token + i]} << 8 * i;
      }
      return marks;
    }
  }

  // Calls f(first token, number of tokens, logits, penalized logits) for each vector of this thread.
  template <class F>
  __device__ void each_vector(const Parameters& parameters, const F& f) const {
    const bool penalizes = parameters.penalizes();
#pragma unroll 1
    for (u32 token = (cluster_rank() * THREADS + threadIdx.x) * PER_VECTOR; token < vocab; token += EVERYTHING) {
      const int count = static_cast<int>(min(vocab - token, PER_VECTOR));
      const Vector v = Vector::load(logits + token, count);
      const u64 seen_here = penalizes ? marks(token, count) : 0;
      float raw[PER_VECTOR], penalized[PER_VECTOR];
#pragma unroll
      for (int i = 0; i < PER_VECTOR; ++i) raw[i] = penalized[i] = v[i];
      if (seen_here) {
#pragma unroll
        for (int i = 0; i < PER_VECTOR; ++i) {
          penalized[i] = parameters.penalized(raw[i], static_cast<u32>(seen_here >> 8 * i));
        }
      }
      f(token, VECTOR ? PER_VECTOR : count, raw, penalized);
    }
  }
};

// What is known of a set of tokens: the largest logit, the softmax's sum, the best token.
struct Summary {
  float largest;  // raw logit
  float sum;      // of e^(raw logit - largest)
  u64 best;       // packed: penalized logit (or score) and its token

  static __device__ Summary of_nothing() { return {LOWEST, 0.0f, 0}; }

  __device__ void raise(float to) {
    sum *= fast_exp(largest - to);
    largest = to;
  }

  __device__ Summary over_warp() const {
    Summary whole = *this;
    whole.raise(warp_reduce(largest, max_or_nan));
    whole.sum = warp_reduce(whole.sum, [](float a, float b) { return __fadd_rn(a, b); });
    whole.best = warp_reduce(best, [](u64 a, u64 b) { return max(a, b); });
    return whole;
  }
};

// A summary in shared memory that other thread blocks can read.
struct Published {
  u32 largest, sum;
  Weight best;

  __device__ void set(const Summary& from) {
    largest = __float_as_uint(from.largest);
    sum = __float_as_uint(from.sum);
    best = {static_cast<u32>(from.best), static_cast<u32>(from.best >> 32)};
  }

  __device__ Summary in_block(u32 rank) const {
    return {__uint_as_float(::in_block(largest, rank)), __uint_as_float(::in_block(sum, rank)), best.in_block(rank)};
  }
};

struct Candidate {
  u32 key, token;
};

struct Shared {
  Histogram histogram;
  Candidate list[CAPACITY];
  u32 listed;  // number of candidates for the list; it holds them all if this is at most CAPACITY
  Summary warps[WARPS];
  Published block;
};

// Merges the summaries of all threads of the cluster into `whole`, which is in shared memory.
__device__ void summarize_row(Shared& shared, const Summary& mine, Summary& whole) {
  const u32 lane = threadIdx.x % WARP;
  const Summary warp = mine.over_warp();
  if (lane == 0) shared.warps[threadIdx.x / WARP] = warp;
  __syncthreads();
  if (threadIdx.x < WARP) {
    const Summary block = (lane < WARPS ? shared.warps[lane] : Summary::of_nothing()).over_warp();
    if (lane == 0) shared.block.set(block);
  }
  cluster_publish();
  if (threadIdx.x < WARP) {
    const Summary row = (lane < CLUSTER ? shared.block.in_block(lane) : Summary::of_nothing()).over_warp();
    if (lane == 0) whole = row;
  }
  cluster_done_reading();
}

__device__ Summary summarize(const Row& row, const Parameters& parameters) {
  Summary mine = Summary::of_nothing();
  float best = -__int_as_float(0x7F800000);
  u32 best_token = 0;
  row.each_vector(parameters, [&](u32 token, int count, const float* raw, const float* penalized) {
    float largest = mine.largest;
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      if (i < count) largest = max_or_nan(largest, raw[i]);
    }
    mine.raise(largest);
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      if (i >= count) continue;
      mine.sum += fast_exp(raw[i] - largest);
      if (penalized[i] > best) {
        best = penalized[i];
        best_token = token + i;
      }
    }
  });
  mine.best = pack(best, best_token);
  return mine;
}

// The tokens that are kept so far, and the list of them if it fits.
class Candidates {
 public:
  u32 floor = 0;  // the smallest key that is kept
  u32 cut = 0;    // of tokens with the key `floor`, the first that is kept

  __device__ Candidates(Shared& shared, const Row& row, const Parameters& parameters)
      : shared(shared), row(row), parameters(parameters) {}

  // Calls f(key, token) for this thread's kept tokens. Called by all threads of the block; ends with a barrier.
  template <class F>
  __device__ void each(const F& f) {
    if (in_list) {
      for (u32 i = threadIdx.x; i < shared.listed; i += THREADS) {
        const Candidate candidate = shared.list[i];
        if (keeps(candidate)) f(candidate.key, candidate.token);
      }
      return;
    }
    if (threadIdx.x == 0) shared.listed = 0;
    __syncthreads();
    // Saves the division: a logit below this bound stays below the floor after it. The margin exceeds the rounding of
    // the product and the quotient, for normal and for subnormal numbers. Without a floor the bound is NaN.
    const float product = __fmul_rn(from_ordered(floor), parameters.temperature);
    const float limit = product - fabsf(product) * 0x1p-21f - parameters.temperature * 0x1p-148f - 0x1p-146f;
    u32 place = floor ? 0 : CAPACITY;
    row.each_vector(parameters, [&](u32 token, int count, const float*, const float* penalized) {
#pragma unroll
      for (int i = 0; i < PER_VECTOR; ++i) {
        if (i >= count || penalized[i] < limit) continue;
        const Candidate candidate = {to_ordered(__fdiv_rn(penalized[i], parameters.temperature)), token + i};
        if (!keeps(candidate)) continue;
        f(candidate.key, candidate.token);
        if (place < CAPACITY) place = atomicAdd(&shared.listed, 1);
        if (place < CAPACITY) shared.list[place] = candidate;
      }
    });
    __syncthreads();
    in_list = floor && shared.listed <= CAPACITY;
  }

 private:
  __device__ bool keeps(const Candidate& candidate) const {
    return candidate.key > floor || (candidate.key == floor && candidate.token >= cut);
  }

  Shared& shared;
  const Row& row;
  const Parameters& parameters;
  bool in_list = false;
};

struct One {
  __device__ u64 operator()() const { return 1; }
};

// Raises the floor to the top_k-th largest key. own: this thread's largest key.
__device__ void keep_top_k(Shared& shared, Candidates& candidates, u64 top_k, u32 own) {
  const auto target = [&](u64) { return top_k; };
  if (top_k <= CLUSTER * THREADS) {
    radix_select(shared.histogram, 32, candidates.floor, [&](const Count& count) { count(own, One()); }, target);
  }
  const auto each = [&](const Count& count) { candidates.each([&](u32 key, u32) { count(key, One()); }); };
  radix_select(shared.histogram, 32, candidates.floor, each, target);
}

// e^(scaled logit - largest), as a fixed-point number.
__device__ u64 mass(u32 key, float largest) {
  const float weight = rounded_exp(__fsub_rn(from_ordered(key), largest));
  return __float2ull_rz(__fmul_rn(weight, static_cast<float>(1ull << MASS_BITS)));
}

__device__ void keep_top_p(Shared& shared, Candidates& candidates, float top_p, float largest, u32 vocab) {
  const auto target = [&](u64 sum) {
    const double share = ceil(__dmul_rn(static_cast<double>(top_p), __ull2double_rn(sum)));
    return max(static_cast<u64>(share), 1ull);
  };
  const auto each = [&](const Count& count) {
    candidates.each([&](u32 key, u32) { count(key, [&] { return mass(key, largest); }); });
  };
  const Selected last = radix_select(shared.histogram, 32, candidates.floor, each, target);
  const u32 floor = candidates.floor;
  const u64 share = mass(floor, largest);
  if (last.rest == last.inside || last.rest + share > last.inside) return;
  // Of the tokens with the smallest kept key, keep those with the largest indices, until the mass suffices.
  const auto equal = [&](const Count& count) {
    candidates.each([&](u32 key, u32 token) { count(token, [&] { return key == floor ? share : 0; }); });
  };
  radix_select(shared.histogram, 32 - __clz(vocab - 1), candidates.cut, equal, [&](u64) { return last.rest; });
}

// Returns this thread's best candidate: score and token, packed.
__device__ u64 draw(Candidates& candidates, float min_p, float largest, GumbelNoise noise) {
  u64 best = 0;
  candidates.each([&](u32 key, u32 token) {
    const float scaled = from_ordered(key);
    if (min_p > 0.0f && rounded_exp(__fsub_rn(scaled, largest)) < min_p) return;
    best = max(best, pack(__fadd_rn(scaled, noise(token)), token));
  });
  return best;
}

// Appends a token to its sequence. token is -1 if none could be chosen.
__device__ void note(const Operands& operands, u32 index, i64 token, float logprob) {
  const Sequences& sequences = operands.sequences;
  if (sequences.count == nullptr) {
    operands.tokens[index] = token;
    operands.logprobs[index] = logprob;
    return;
  }
  const bool finished = sequences.finished[index];
  const bool stopped = finished || token < 0;
  if (stopped != finished) sequences.failed[index] = 1;
  const i64 noted = stopped ? *sequences.pad : token;
  i64 count = sequences.count[index];
  sequences.tokens[index] = noted;
  if (count < operands.longest) {
    sequences.generated[index * i64{operands.longest} + count] = noted;
    sequences.logprobs[index * i64{operands.longest} + count] = stopped ? 0.0f : logprob;
  }
  if (!stopped) ++count;
  sequences.count[index] = count;
  sequences.finished[index] =
      stopped || sequences.ends[i64{index} * operands.vocab + token] || count >= sequences.limit[index];
}

// Stores the logprob of the chosen token and marks the token as generated. Called by one thread.
__device__ void finish(const Operands& operands, u32 index, const Summary& raw, u32 token) {
  const float logit = Input::value(operands.logits[index * operands.logits_stride + token]);
  operands.seen[i64{index} * operands.vocab + token] |= GENERATED;
  operands.step[index] += 1;
  note(operands, index, token, (logit - raw.largest) - rounded_log(raw.sum));
}

// Grid: a cluster for each row.
extern "C" __global__ void __launch_bounds__(THREADS, VECTOR ? 2 : 1)
    sample(const __grid_constant__ Operands operands) {
  __shared__ Shared shared;
  __shared__ Summary whole, drawn;
  const u32 index = blockIdx.x / CLUSTER;
  const bool finishes = threadIdx.x == 0 && cluster_rank() == 0;
  wait_for_previous_kernel();
  allow_next_kernel();

  const Parameters parameters(operands, index);
  const Row row = {operands.logits + index * operands.logits_stride, operands.seen + i64{index} * operands.vocab,
                   operands.vocab};
  const Summary mine = summarize(row, parameters);
  summarize_row(shared, mine, whole);
  const float penalized = packed_value(whole.best);
  if (!(parameters.valid() && is_finite(whole.largest) && is_finite(penalized))) {
    if (finishes) note(operands, index, -1, __int_as_float(0x7FC00000));
    return;
  }
  const float largest = __fdiv_rn(penalized, parameters.temperature);
  if (parameters.temperature == 0.0f || parameters.top_k == 1 || !is_finite(largest)) {
    if (finishes) finish(operands, index, whole, packed_token(whole.best));
    return;
  }

  Candidates candidates(shared, row, parameters);
  const u64 top_k = static_cast<u64>(parameters.top_k);
  if (top_k > 0 && top_k < row.vocab) {
    const float own = __fdiv_rn(packed_value(mine.best), parameters.temperature);
    keep_top_k(shared, candidates, top_k, to_ordered(own));
  }
  if (parameters.top_p < 1.0f) keep_top_p(shared, candidates, parameters.top_p, largest, row.vocab);
  Summary scores = Summary::of_nothing();
  scores.best = draw(candidates, operands.min_p[index], largest, {operands.seed[index], operands.step[index]});
  summarize_row(shared, scores, drawn);
  if (finishes) finish(operands, index, whole, packed_token(drawn.best));
}
