// Attention of one token a sequence from the attentions of the parts that its keys were split into, weighted by their
// softmax sums, and its quantization, bit for bit that of quantize_1x128.cu.
//
// A thread block takes 128 columns of a sequence: COLUMN_LANES lanes hold them, 16 bytes each, and each of GROUPS such
// groups of lanes takes every GROUPS-th part; the groups' sums are added in their order.
//
// Compile-time constants: those of quantize.cuh with VECTOR = 1; HEADS, KEY_HEADS, SIZE (of a head); GROUPS;
// SIZES_BYTES.
#include "output.cuh"
#include "quantize.cuh"

constexpr int COLUMNS = HEADS * SIZE;
constexpr int COLUMN_LANES = BLOCK / PER_VECTOR;
constexpr int SHARED_HEADS = HEADS / KEY_HEADS;  // of a key head
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(VECTOR && SIZE % PER_VECTOR == 0 && HEADS % KEY_HEADS == 0 && COLUMN_LANES <= WARP);

struct Sizes {
  i64 lse_part, lse_head, scale_pitch;  // strides of lse between parts and between heads
  int splits;
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

__device__ float minus_infinity() { return __int_as_float(0xFF800000); }

// A sum of vectors with weights exp(lse), as exp(lse - largest).
struct Sum {
  float largest = minus_infinity(), total = 0.0f, v[PER_VECTOR] = {};

  __device__ void add(float lse, float weight, const float (&x)[PER_VECTOR]) {
    const float now = fmaxf(largest, lse);
    const float before = largest == minus_infinity() ? 0.0f : exp2f((largest - now) * LOG2_E);
    const float after = exp2f((lse - now) * LOG2_E);
    largest = now;
    total = __fmaf_rn(total, before, weight * after);
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) v[i] = __fmaf_rn(v[i], before, x[i] * after);
  }
};

// parts (rows, KEY_HEADS, splits, SHARED_HEADS, SIZE); lse: the logarithms of their softmax sums; counts (rows,
// KEY_HEADS, splits): keys of each part, one of none is not read. values, data (rows, COLUMNS), scale: as of
// quantize_1x128.cu; values, or data and scale, may be null. Grid: (128 columns, row).
extern "C" __global__ void __launch_bounds__(GROUPS* COLUMN_LANES)
    merge_splits(const Element* parts, const float* lse, const int* counts, Element* values, u8* data, float* scale,
                 const __grid_constant__ Sizes sizes) {
  __shared__ Sum sums[GROUPS][COLUMN_LANES];
  const u32 lane = threadIdx.x % COLUMN_LANES, group = threadIdx.x / COLUMN_LANES;
  const int column = static_cast<int>(blockIdx.x) * BLOCK + lane * PER_VECTOR;
  const int head = column / SIZE, key_head = head / SHARED_HEADS;
  const i64 row = blockIdx.y;
  const i64 first = (row * KEY_HEADS + key_head) * sizes.splits;

  wait_for_previous_kernel();
  allow_next_kernel();

  Sum sum;
  if (column < COLUMNS) {
#pragma unroll 4
    for (int split = group; split < sizes.splits; split += GROUPS) {
      const i64 part = first + split;
      const int count = counts[part];
      const float part_lse = lse[part * sizes.lse_part + head % SHARED_HEADS * sizes.lse_head];
      const Vector x = Vector::load(parts + (part * SHARED_HEADS + head % SHARED_HEADS) * SIZE + column % SIZE, 1);
      if (count <= 0) continue;
      float v[PER_VECTOR];
#pragma unroll
      for (int i = 0; i < PER_VECTOR; ++i) v[i] = x[i];
      sum.add(part_lse, 1.0f, v);
    }
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group > 0) return;

#pragma unroll
  for (int g = 1; g < GROUPS; ++g) {
    const Sum& other = sums[g][lane];
    if (other.total != 0.0f) sum.add(other.largest, other.total, other.v);
  }
  const float factor = sum.total == 0.0f ? 0.0f : 1.0f / sum.total;
#pragma unroll
  for (float& v : sum.v) v *= factor;
  const Vector result = to_vector(sum.v);
  const int count = COLUMNS - column;
  if (values && count > 0) store_16(values + row * COLUMNS + column, result);
  if (!data) return;
  const u32 lanes = COLUMN_LANES == WARP ? FULL_WARP : (1u << COLUMN_LANES % WARP) - 1;
  u32 amax = result.larger_magnitude(0);
#pragma unroll
  for (int distance = 1; distance < COLUMN_LANES; distance *= 2) {
    amax = Input::larger(amax, __shfl_xor_sync(lanes, amax, distance));
  }
  const Scale block_scale(Input::largest(amax));
  store(data + row * COLUMNS + column, result, block_scale, count);
  if (lane == 0) scale[i64{blockIdx.x} * sizes.scale_pitch + row] = block_scale.value;
}
