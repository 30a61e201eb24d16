// Chooses the experts of each token from router logits, and computes their weights, in float32.
//
// A warp handles one token. Every group of experts has equally many lanes; a lane holds consecutive experts. The value
// that decides the choice is mapped to a key, an unsigned integer of the same order, with NaN above all others. Each
// round chooses the largest key, and the lowest expert that has it.
//
// Compile-time constants: those of router.cuh, with INPUT for logits and OUTPUT for weights; NUM_EXPERTS; GROUPS (of
// equal size); TOP_GROUPS; TOP_K; SIGMOID (scores are sigmoid, otherwise softmax); BIAS (there is a bias); NORMALIZE.
#pragma once

#include "ordered.cuh"
#include "router.cuh"

__host__ __device__ constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }

constexpr int GROUP_EXPERTS = NUM_EXPERTS / GROUPS;
constexpr int GROUP_LANES = WARP / power_of_two_from(GROUPS);
constexpr int EACH = ceil_div(GROUP_EXPERTS, GROUP_LANES);  // experts per lane
// If possible, choose by logits: scores have the same order, but rounding may make different scores equal.
constexpr bool BY_LOGITS = !BIAS && GROUPS == 1;
static_assert(NUM_EXPERTS % GROUPS == 0 && GROUPS <= WARP && TOP_K <= WARP && TOP_K <= TOP_GROUPS * GROUP_EXPERTS);

constexpr u32 NONE = 0;  // the key of no expert; below all others

__device__ u32 key_of(float x) { return x == x ? to_ordered(x) : 0xFFFFFFFF; }

__device__ u32 largest_in_warp(u32 x) {
  u32 result;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(x));
  return result;
}

// The range of a lane's experts. `count` may exceed EACH; the existing experts come first.
struct Experts {
  int first, count;

  explicit __device__ Experts(u32 lane) {
    const int in_group = static_cast<int>(lane) % GROUP_LANES * EACH;
    first = static_cast<int>(lane) / GROUP_LANES * GROUP_EXPERTS + in_group;
    count = static_cast<int>(lane) / GROUP_LANES < GROUPS ? GROUP_EXPERTS - in_group : 0;
  }
};

// The score of a logit. For softmax, e^(logit - largest), which is not yet divided by the sum.
__device__ float score_of(float logit, float largest) {
  return SIGMOID ? 1.0f / (1.0f + expf(-logit)) : expf(logit - largest);
}

// Returns the key of a group's score, which is the sum of its two largest values, to all lanes of the group.
__device__ u32 group_key(const u32 (&keys)[EACH]) {
  u32 largest = NONE, second = NONE;
  const auto add = [&](u32 key, u32 smaller) {
    second = max(min(largest, key), max(second, smaller));
    largest = max(largest, key);
  };
#pragma unroll
  for (u32 key : keys) add(key, NONE);
#pragma unroll
  for (int distance = 1; distance < GROUP_LANES; distance *= 2) {
    const u32 key = __shfl_xor_sync(FULL_WARP, largest, distance);
    add(key, __shfl_xor_sync(FULL_WARP, second, distance));
  }
  return key_of(from_ordered(largest) + from_ordered(second));
}

// Whether this lane's group is among the TOP_GROUPS groups with the largest keys. Of equal keys, the lower group wins.
__device__ bool group_stays(u32 key, u32 lane) {
  const int group = static_cast<int>(lane) / GROUP_LANES;
  int before = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const u32 other = __shfl_sync(FULL_WARP, key, g * GROUP_LANES);
    before += other > key || (other == key && g < group);
  }
  return before < TOP_GROUPS;
}

// In lane k: the k-th chosen expert of a token, and its weight. Undefined in lanes from TOP_K on.
struct Choice {
  int expert;
  float weight;
};

// Chooses the experts of one token; called by a warp. logits (NUM_EXPERTS): of the token; bias (NUM_EXPERTS): unused
// without BIAS.
template <class Logits = Input>
__device__ __forceinline__ Choice choose(const typename Logits::Element* logits, const float* bias, float scale) {
  const u32 lane = lane_id();
  const Experts experts(lane);

  float value[EACH];  // the logit; later the score, which becomes the weight
  u32 key[EACH], lane_largest = NONE;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const bool exists = i < experts.count;
    value[i] = exists ? Logits::value(logits[experts.first + i]) : 0.0f;
    key[i] = exists ? key_of(value[i]) : NONE;
    lane_largest = max(lane_largest, key[i]);
  }
  const float largest = SIGMOID ? 0.0f : from_ordered(largest_in_warp(lane_largest));
  float total = 1.0f;
  if constexpr (!SIGMOID && !(BY_LOGITS && NORMALIZE)) {
    float lane_total = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) lane_total += i < experts.count ? score_of(value[i], largest) : 0.0f;
    total = sum_in_warp(lane_total);
  }
  if constexpr (!BY_LOGITS) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      value[i] = score_of(value[i], largest) / total;
      if (i < experts.count) key[i] = key_of(BIAS ? value[i] + bias[experts.first + i] : value[i]);
    }
  }
  if constexpr (GROUPS > 1) {
    const bool stays = group_stays(group_key(key), lane);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (!stays && i < experts.count) key[i] = key_of(__int_as_float(0xFF800000));
    }
  }

  // Lane k keeps the k-th choice.
  int chosen = 0;
  float weight = 0.0f;
#pragma unroll 1
  for (u32 k = 0; k < TOP_K; ++k) {
    u32 best = key[0];
    int at = 0;
    float best_value = value[0];
#pragma unroll
    for (int i = 1; i < EACH; ++i) {
      if (key[i] <= best) continue;
      best = key[i];
      at = i;
      best_value = value[i];
    }
    const u32 owner = __ffs(__ballot_sync(FULL_WARP, best == largest_in_warp(best))) - 1;
    const int expert = __shfl_sync(FULL_WARP, experts.first + at, owner);
    best_value = __shfl_sync(FULL_WARP, best_value, owner);
    if (lane == k) {
      chosen = expert;
      weight = best_value;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (lane == owner && i == at) key[i] = NONE;
    }
  }

  if constexpr (BY_LOGITS) weight = lane < TOP_K ? score_of(weight, largest) / total : 0.0f;
  // 1e-20 as in DeepSeek-V3's modules. Softmax needs none: its scores are not all 0.
  if constexpr (NORMALIZE) weight /= sum_in_warp(weight) + (SIGMOID ? 1e-20f : 0.0f);
  return {chosen, weight * scale};
}
