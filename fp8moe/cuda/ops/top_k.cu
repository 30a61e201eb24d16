// Finds the columns of the largest values of each row, within a range of columns of its own, the largest first. Of
// equal values the lowest columns come first; NaN is the largest value, as for torch.topk.
//
// A thread block reads a row once. It holds values that may be among the `top` largest, and once it has many, keeps the
// `top` largest of those: every value below them is passed over from then on. Which they are is found by radix
// selection (Knuth, The Art of Computer Programming 3, section 5.2.5), and those that are left in the end are sorted by
// a bitonic network (Batcher, Sorting networks and their applications, 1968).
//
// Grid: rows. Compile-time constants: THREADS, CAPACITY (entries that a thread block holds), MOST (the largest `top`),
// SHARED_BYTES.
#include "vector.cuh"
#include "warp.cuh"

constexpr int WARPS = THREADS / WARP;
constexpr int EACH = CAPACITY / THREADS;       // entries of a thread
constexpr int STEP = 4 * THREADS;              // columns that a thread block looks at together
constexpr int AHEAD = 3;                       // steps whose values are on their way
constexpr int BITS = 11, BUCKETS = 1 << BITS;  // of a digit
static_assert(WARPS <= WARP && CAPACITY % THREADS == 0 && BUCKETS == 4 * THREADS);
static_assert(MOST == 4 * THREADS && 2 * MOST <= CAPACITY && MOST <= CAPACITY - STEP);

// A value's rank in the upper half, the complement of its column in the lower one, so that of two entries the larger
// one comes first. No value's entry is 0.
using Entry = u64;

struct Shared {
  alignas(16) Entry entries[CAPACITY];
  alignas(16) u32 buckets[BUCKETS];  // entries with each digit, the largest digit first
  u32 sums[2][2][WARPS];             // in turns
  int found, above, inside;          // a digit's bucket, the entries of those before it, and its own
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

// Returns a number that is larger for larger values, the same for both zeros, and never 0.
__device__ __forceinline__ u32 rank_of(u32 bits) {
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0xFFFFFFFFu;
  if (bits == 0x80000000u) bits = 0;
  return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ u32 upper(Entry entry) { return static_cast<u32>(entry >> 32); }

// What a thread block holds of a row. All threads call its functions together.
struct Held {
  Shared& shared;
  const int top;
  const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
  int count = 0;  // entries
  u32 least = 0;  // rank below which no value is among the largest
  int turn = 0;

  __device__ __forceinline__ Held(Shared& shared, int top) : shared(shared), top(top) {}

  // Returns the sum over the threads before this one; all: over all threads.
  __device__ __forceinline__ int sum_before(int mine, int& all) {
    int before = 0, warps = 0;
    if (__any_sync(FULL_WARP, mine)) {
      before = warp_inclusive_sum(mine);
      warps = __shfl_sync(FULL_WARP, before, WARP - 1);
      before -= mine;
    }
    if (lane == 0) shared.sums[turn][0][warp] = warps;
    __syncthreads();
    const int found = lane < WARPS ? shared.sums[turn][0][lane] : 0;
    turn ^= 1;
    all = __reduce_add_sync(FULL_WARP, found);
    return before + __reduce_add_sync(FULL_WARP, lane < warp ? found : 0);
  }

  // Appends each thread's entries that are wanted.
  template <int N, class Wanted>
  __device__ __forceinline__ void append(const Entry (&entries)[N], const Wanted& wanted) {
    int mine = 0, all;
#pragma unroll
    for (int i = 0; i < N; ++i) mine += wanted(i);
    int place = count + sum_before(mine, all);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (wanted(i)) shared.entries[place++] = entries[i];
    }
    count += all;
  }

  // One of the thread's entries; 0 for none.
  __device__ __forceinline__ Entry entry(int i) const {
    const int place = i * THREADS + thread;
    return place < count ? shared.entries[place] : 0;
  }

  // Returns how many low bits the entries do not all have in common, and the bits that they do.
  __device__ __forceinline__ int differing_bits(Entry& common) {
    u32 all = 0xFFFFFFFFu, any = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const u32 rank = upper(entry(i));
      if (rank) all &= rank;
      any |= rank;
    }
    all = __reduce_and_sync(FULL_WARP, all), any = __reduce_or_sync(FULL_WARP, any);
    if (lane == 0) shared.sums[turn][0][warp] = all, shared.sums[turn][1][warp] = any;
    __syncthreads();
    all = __reduce_and_sync(FULL_WARP, lane < WARPS ? shared.sums[turn][0][lane] : 0xFFFFFFFFu);
    any = __reduce_or_sync(FULL_WARP, lane < WARPS ? shared.sums[turn][1][lane] : 0);
    turn ^= 1;
    const int bits = WARP - __clz(all ^ any);
    common = bits < WARP ? Entry{all >> bits << bits} << 32 : 0;
    return 32 + bits;
  }

  // Keeps the `top` largest entries, of which there are more.
  __device__ __forceinline__ void keep_largest() {
    __syncthreads();
    // The largest entries are those from `bound` on. Of its bits those of `known` are right; `wanted` entries are to
    // be taken of the `inside` that have them.
    Entry bound;
    int bits = differing_bits(bound), wanted = top, inside = count;
    Entry known = bits < 64 ? ~Entry{0} << bits : 0;
#pragma unroll 1
    while (wanted < inside) {
      const int shift = max(bits - BITS, 0), digits = (1 << (bits - shift)) - 1;
      *reinterpret_cast<uint4*>(shared.buckets + 4 * thread) = make_uint4(0, 0, 0, 0);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const Entry mine = entry(i);
        const bool counts = mine != 0 && ((mine ^ bound) & known) == 0;
        if (counts) atomicAdd(&shared.buckets[BUCKETS - 1 - (static_cast<int>(mine >> shift) & digits)], 1);
      }
      __syncthreads();
      const uint4 four = *reinterpret_cast<const uint4*>(shared.buckets + 4 * thread);
      const int buckets[4] = {static_cast<int>(four.x), static_cast<int>(four.y), static_cast<int>(four.z),
                              static_cast<int>(four.w)};
      int all;
      int above = sum_before(buckets[0] + buckets[1] + buckets[2] + buckets[3], all);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (above < wanted && wanted <= above + buckets[i]) {
          shared.found = 4 * thread + i, shared.above = above, shared.inside = buckets[i];
        }
        above += buckets[i];
      }
      __syncthreads();
      bound |= Entry(BUCKETS - 1 - shared.found) << shift;
      wanted -= shared.above, inside = shared.inside;
      known |= Entry(digits) << shift, bits = shift;
    }
    Entry mine[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) mine[i] = entry(i);
    count = 0, least = upper(bound);
    append(mine, [&](int i) { return mine[i] != 0 && mine[i] >= bound; });
  }

  // Sorts the entries, at most MOST, the largest first. mine: of each thread four that follow each other.
  __device__ __forceinline__ void sort(Entry (&mine)[4]) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[i] = 4 * thread + i < count ? shared.entries[4 * thread + i] : 0;
    __syncthreads();
    const auto order = [&](int low, int high, bool down) {
      const Entry a = mine[low], b = mine[high];
      if ((a < b) == down) mine[low] = b, mine[high] = a;
    };
    int size = 4;
    while (size < count) size *= 2;
    order(0, 1, true), order(2, 3, false);
    int half = 0;  // of the shared memory, in turns
#pragma unroll 1
    for (int span = 4; span <= size; span *= 2) {
      const bool down = (4 * thread & span) == 0;
#pragma unroll 1
      for (int gap = span / 2; gap >= 4; gap /= 2) {
        Entry others[4];
        if (gap >= 4 * WARP) {
          Entry* entries = shared.entries + half;
          ulonglong2* stored = reinterpret_cast<ulonglong2*>(entries + 4 * thread);
          stored[0] = make_ulonglong2(mine[0], mine[1]), stored[1] = make_ulonglong2(mine[2], mine[3]);
          __syncthreads();
          const ulonglong2* loaded = reinterpret_cast<const ulonglong2*>(entries + (4 * thread ^ gap));
          others[0] = loaded[0].x, others[1] = loaded[0].y, others[2] = loaded[1].x, others[3] = loaded[1].y;
          half ^= MOST;
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) others[i] = __shfl_xor_sync(FULL_WARP, mine[i], gap / 4);
        }
        const bool larger = ((4 * thread & gap) == 0) == down;
#pragma unroll
        for (int i = 0; i < 4; ++i) mine[i] = (mine[i] < others[i]) == larger ? others[i] : mine[i];
      }
      order(0, 2, down), order(1, 3, down);
      order(0, 1, down), order(2, 3, down);
    }
  }
};

// starts, ends: of each row's range, clamped to its columns; null for the first column, and for the one past the last.
// out: (rows, top), columns from the row's start on, -1 past the last.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    top_k(const float* logits, const int* starts, const int* ends, int* out, i64 pitch, int columns, int top) {
  extern __shared__ __align__(16) u8 memory[];
  Held held(*reinterpret_cast<Shared*>(memory), top);
  const int thread = held.thread;
  const int row = gridDim.x - 1 - blockIdx.x;  // of causal attention, the longest first
  const int start = starts ? min(max(__ldg(starts + row), 0), columns) : 0;
  const int end = ends ? min(max(__ldg(ends + row), start), columns) : columns;
  const float* values = logits + row * pitch + start;
  const int shift =
      reinterpret_cast<u64>(values) / sizeof(float) % 4;  // columns before, from a multiple of 16 bytes on
  values -= shift;
  const int last = end > start ? end - start + shift : 0, steps = ceil_div(last, STEP);
  // The last columns, often the highest, come first.
  const auto column_of = [&](int step) { return (steps - 1 - step) * STEP + 4 * static_cast<int>(threadIdx.x); };
  const auto load = [&](int step) {
    const int column = column_of(step);
    return load_elements<true>(reinterpret_cast<const u32*>(values + column), step < steps ? last - column : 0);
  };
  Bytes16 queue[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) queue[i] = load(i);
#pragma unroll 1
  for (int step = 0;; ++step) {
    if (held.count > (step < steps ? CAPACITY - STEP : top)) held.keep_largest();
    if (step >= steps) break;
    const Bytes16 four = queue[0];
#pragma unroll
    for (int i = 1; i < AHEAD; ++i) queue[i - 1] = queue[i];
    queue[AHEAD - 1] = load(step + AHEAD);
    const int column = column_of(step);
    Entry found[4];
    bool wanted[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 rank = rank_of(four.words[i]);
      found[i] = Entry{rank} << 32 | static_cast<u32>(~(column + i - shift));
      wanted[i] = column + i >= shift && column + i < last && rank >= held.least;
    }
    held.append(found, [&](int i) { return wanted[i]; });
  }
  Entry sorted[4];
  held.sort(sorted);
  int* target = out + static_cast<i64>(row) * top;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int place = 4 * thread + i;
    if (place < top) target[place] = place < held.count ? static_cast<int>(~static_cast<u32>(sorted[i])) : -1;
  }
}
