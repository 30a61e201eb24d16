// Finds the largest key such that the weights of all keys at least as large reach a target, over a cluster of thread
// blocks. Uses radix selection, digit by digit from the highest (Knuth, The Art of Computer Programming 3, section
// 5.2.5).
//
// Weights and their sums are integers, so the order of additions does not matter.
//
// Compile-time constants: WARPS (of a thread block), CLUSTER (thread blocks), DIGIT_BITS.
#pragma once

#include "cluster.cuh"
#include "warp.cuh"

constexpr int BUCKETS = 1 << DIGIT_BITS;
constexpr int GROUPS = BUCKETS / WARP;
static_assert(GROUPS == 2 * WARP && GROUPS % WARPS == 0);

// A cluster barrier: other blocks see this block's earlier writes to shared memory.
__device__ __forceinline__ void cluster_publish() {
  cluster_arrive_release();
  cluster_wait();
}

// A cluster barrier to call between reads from other blocks and the writes that overwrite what was read. Also a barrier
// of the thread block.
__device__ __forceinline__ void cluster_done_reading() {
  __syncthreads();
  cluster_arrive_relaxed();
  cluster_wait();
}

// Reads the shared variable `value` of thread block `rank` of the cluster.
__device__ __forceinline__ u32 in_block(const u32& value, u32 rank) {
  return load_from_block(cluster_address(shared_address(&value), rank));
}

struct Weight {  // 64 bits in two halves, for atomic additions in shared memory
  u32 low, high;

  __device__ __forceinline__ u64 value() const { return u64{high} << 32 | low; }

  __device__ __forceinline__ void add(u64 weight) {
    const u32 part = static_cast<u32>(weight);
    const u32 carry = atomicAdd(&low, part) + part < part;
    const u32 rest = static_cast<u32>(weight >> 32) + carry;
    if (rest) atomicAdd(&high, rest);
  }

  __device__ __forceinline__ u64 in_block(u32 rank) const {
    return u64{::in_block(high, rank)} << 32 | ::in_block(low, rank);
  }

  // Returns the sum over the cluster.
  __device__ __forceinline__ u64 in_cluster() const {
    u64 sum = 0;
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) sum += in_block(rank);
    return sum;
  }
};

struct Histogram {
  Weight buckets[BUCKETS];  // by digit, the largest digit first
  Weight groups[GROUPS];    // sums of WARP consecutive buckets

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < BUCKETS; i += WARPS * WARP) buckets[i + threadIdx.x] = {};
  }

  __device__ void sum_groups() {
    const u32 lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < GROUPS; i += WARPS) {
      const int group = i + threadIdx.x / WARP;
      const u64 sum = warp_reduce(buckets[group * WARP + lane].value(), [](u64 a, u64 b) { return a + b; });
      if (lane == 0) groups[group] = {static_cast<u32>(sum), static_cast<u32>(sum >> 32)};
    }
  }
};

// Adds the weight of a key to the histogram of the current digit, if the key's higher digits are `prefix`.
struct Count {
  Histogram& histogram;
  u32 prefix, digits;
  int known, shift;  // the digit is bits `shift` to `known` - 1 of a key

  // Calls weight() only if the key counts.
  template <class WeightOf>
  __device__ void operator()(u32 key, const WeightOf& weight) const {
    if (static_cast<u32>(u64{key} >> known) != prefix) return;
    histogram.buckets[BUCKETS - 1 - (key >> shift & digits)].add(weight());
  }
};

// The keys at which the weights reach the target: those with the digits selected so far.
struct Selected {
  u64 rest;    // the target minus the weights of all larger keys
  u64 inside;  // the weights of these keys; at least `rest`
};

struct Digit {
  u32 value;
  Selected selected;
};

// Finds the digit at which the weights, added from the largest digit down, reach target_of(sum of all weights). Called
// by one warp.
template <class Target>
__device__ Digit find_digit(const Histogram& histogram, const Target& target_of) {
  const u32 lane = threadIdx.x % WARP;
  const u64 first = histogram.groups[2 * lane].in_cluster();
  const u64 both = first + histogram.groups[2 * lane + 1].in_cluster();
  u64 end = warp_inclusive_sum(both, lane);
  const u64 target = target_of(__shfl_sync(FULL_WARP, end, WARP - 1));
  const int pair = __ffs(__ballot_sync(FULL_WARP, end >= target)) - 1;
  u64 above = __shfl_sync(FULL_WARP, end - both, pair);
  const u64 half = __shfl_sync(FULL_WARP, first, pair);
  const bool second = above + half < target;
  if (second) above += half;

  const int begin = (2 * pair + second) * WARP;
  const u64 weight = histogram.buckets[begin + lane].in_cluster();
  end = above + warp_inclusive_sum(weight, lane);
  const int place = __ffs(__ballot_sync(FULL_WARP, end >= target)) - 1;
  above = __shfl_sync(FULL_WARP, end - weight, place);
  return {static_cast<u32>(BUCKETS - 1 - begin - place), {target - above, __shfl_sync(FULL_WARP, weight, place)}};
}

// Raises `bound` to the largest key such that the weights of all keys >= `bound` reach target_of(sum of all weights).
// If keys just below have no weight, `bound` may end up at a smaller key.
//
// bits: the number of bits in a key. each(Count): calls Count with key and weight for all keys of this thread. `each`
// is called once per digit and may omit keys below the current `bound`. The target must be between 1 and the sum.
template <class Each, class Target>
__device__ Selected radix_select(Histogram& histogram, int bits, u32& bound, const Each& each,
                                 const Target& target_of) {
  __shared__ Digit found;
  u32 prefix = 0;
  Selected selected = {};
  for (int shift = bits; shift > 0;) {
    const int known = shift;
    shift = max(shift - DIGIT_BITS, 0);
    const u32 digits = (1u << (known - shift)) - 1;
    histogram.clear();
    __syncthreads();
    each(Count{histogram, prefix, digits, known, shift});
    __syncthreads();
    histogram.sum_groups();
    cluster_publish();
    if (threadIdx.x < WARP) {
      const Digit digit =
          find_digit(histogram, [&](u64 sum) { return known == bits ? target_of(sum) : selected.rest; });
      if (threadIdx.x == 0) found = digit;
    }
    cluster_done_reading();
    prefix = prefix << (known - shift) | found.value;
    selected = found.selected;
    bound = max(bound, prefix << shift);
    if (selected.rest == selected.inside) break;
  }
  return selected;
}
