// Quantizes a matrix along its rows and along its columns, reading it once: rows with the bits of quantize_1x128.cu,
// and the transpose in which each group of rows is padded with zeros to a multiple of 128.
//
// A block of 8 warps has a tile of 128 rows of one group and 128 columns, a thread 8 rows of 8 columns in registers.
// Half a warp covers the 128 columns of its rows, so that loads and stores cover whole 32-byte sectors. The largest
// magnitudes meet in shared memory, where a thread makes the scale of one row or one column, and so do the transposed
// bytes.
//
// SOURCE says what the matrix is: ROWS of x, or those that `tokens` picks; SWIGLU of gate and up; or both gradients of
// SWIGLU_BACKWARD, one after the other. The last two are rounded to bfloat16 before they are quantized, so that a tile
// takes 32 registers, and their operands wait in shared memory: registers would hold too few loads in flight.
//
// Compile-time constants: those of quantize.cuh with UE8M0 = 0; SOURCE; WEIGHTED (the transposed rows are multiplied by
// a weight each); FORM of SwiGLU (1 plain, 2 clamped, 3 as in GPT-OSS).
#define ROWS 0
#define SWIGLU 1
#define SWIGLU_BACKWARD 2

#include "quantize.cuh"
#include "swiglu.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int ROW_LANES = 16;               // share 8 rows
constexpr int SIDE = BLOCK / ROW_LANES;     // rows and columns of a thread
constexpr int VECTORS = SIDE / PER_VECTOR;  // of a thread in a row
constexpr int STEP = ROW_LANES * PER_VECTOR;
constexpr int HALF = SIDE / 2;                      // rows that are quantized or loaded together
constexpr bool PAIRS = PER_WORD == 2 && !WEIGHTED;  // magnitudes of two columns in a word
constexpr int CHUNK = 16;                           // bytes of a transposed row that move as one
constexpr int CHUNKS = BLOCK / CHUNK;
constexpr u32 FULL = 0xFFFFFFFFu;
// Blocks to an SM: as many as registers and, with operands in shared memory, that allow.
constexpr int BLOCKS = SOURCE == SWIGLU ? 3 : SOURCE == ROWS && VECTOR && PER_WORD == 2 ? WEIGHTED ? 3 : 4 : 2;
static_assert(!UE8M0 && (SOURCE == ROWS || (VECTOR && VECTORS == 1 && !WEIGHTED)));

struct Arguments {
  const Element* x;      // (num_tokens, width), or gate and up (num_rows, 2 * width), or with a backward that of width
  const Element* grad;   // of a backward: (num_rows, width / 2)
  const int* tokens;     // (num_rows), or none: row r is token r
  const float* weights;  // of a backward or if WEIGHTED: (num_rows)
  const int* groups;     // (num_groups + 1), or none: one group of all rows
  u8* rows;              // (num_rows, width)
  float* row_scale;      // (num_rows, ceil(width / 128)), columns `row_scale_pitch` apart
  u8* columns;           // (width, 128 * row_tiles)
  float* column_scale;   // (width, row_tiles), columns `column_scale_pitch` apart
  int* offsets;          // (num_groups + 1)
  float* dots;           // of a backward: (width / 256, num_rows)
  i64 width, row_stride, grad_stride, row_scale_pitch, column_scale_pitch;
  u32 num_rows, num_tokens, num_groups;
  u32 row_tiles, column_tiles, strip;  // blocks walk strips of `strip` column tiles, row tile by row tile
  float limit, alpha;
};

// The transposed tile, and before it the operands of SwiGLU: a vector for each operand, row and thread.
extern __shared__ uint4 dynamic_shared[];

// The rows that a tile covers: `count` of one group from `first` on.
struct RowTile {
  u32 index;
  int first, count;
};

struct Shared {
  alignas(16) u32 column_amax[WARPS][PAIRS ? BLOCK / 2 : BLOCK];
  u32 row_amax[BLOCK];
  Divisor<> columns[BLOCK];  // see column_slot
  Divisor<> rows[BLOCK];
  float weights[BLOCK];
  u32 warp_tiles[WARPS];
  RowTile tile;
};

// From the first column of a thread to its column c.
__device__ constexpr int offset(int c) { return c / PER_VECTOR * STEP + c % PER_VECTOR; }

// Where a thread is in its tile.
struct Place {
  u32 lane, warp, column_group;
  int row;

  __device__ Place()
      : lane(threadIdx.x % WARP),
        warp(threadIdx.x / WARP),
        column_group(lane % ROW_LANES),
        row((threadIdx.x / ROW_LANES) * SIDE) {}

  __device__ int column(int c) const { return column_group * PER_VECTOR + offset(c); }
};

// ---- groups ----

struct Group {
  int start, end;

  // Whatever the offsets hold, its rows are inside.
  __device__ Group(const Arguments& a, u32 i) {
    const int rows = static_cast<int>(a.num_rows);
    start = min(max(a.groups[i], 0), rows);
    end = min(max(a.groups[i + 1], start), rows);
  }
  __device__ u32 tiles() const { return (static_cast<u32>(end - start) + BLOCK - 1) / BLOCK; }
};

// Fills s.tile for tile `index`. A thread has a contiguous part of the groups. Sums of tiles stop at a.row_tiles, which
// groups that overlap may exceed. One block writes the offsets of the padded groups.
__device__ void find_rows(const Arguments& a, Shared& s, u32 index, bool write_offsets) {
  if (!a.groups) {
    if (threadIdx.x == 0) {
      if (write_offsets) a.offsets[0] = 0, a.offsets[1] = static_cast<int>(a.row_tiles * BLOCK);
      const int first = static_cast<int>(index * BLOCK);
      s.tile = {index, first, min(BLOCK, static_cast<int>(a.num_rows) - first)};
    }
    __syncthreads();
    return;
  }
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const u32 each = (a.num_groups + THREADS - 1) / THREADS;
  const u32 begin = min(threadIdx.x * each, a.num_groups), end = min(begin + each, a.num_groups);
  u32 sum = 0;
#pragma unroll 1
  for (u32 i = begin; i < end; ++i) sum = min(sum + Group(a, i).tiles(), a.row_tiles);
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    const u32 lower = __shfl_up_sync(FULL, sum, step);
    if (lane >= step) sum = min(sum + lower, a.row_tiles);
  }
  u32 before = __shfl_up_sync(FULL, sum, 1);
  if (lane == 0) before = 0;
  if (lane == WARP - 1) s.warp_tiles[warp] = sum;
  if (threadIdx.x == 0) s.tile = {index, 0, 0};
  __syncthreads();
#pragma unroll
  for (u32 w = 0; w < WARPS; ++w) before = min(before + (w < warp ? s.warp_tiles[w] : 0), a.row_tiles);
#pragma unroll 1
  for (u32 i = begin; i < end; ++i) {
    const Group group(a, i);
    if (index >= before && index - before < group.tiles()) {
      const int first = group.start + static_cast<int>((index - before) * BLOCK);
      s.tile = {index, first, min(BLOCK, group.end - first)};
    }
    before = min(before + group.tiles(), a.row_tiles);
    if (write_offsets) a.offsets[i + 1] = static_cast<int>(before * BLOCK);
  }
  if (write_offsets && threadIdx.x == 0) a.offsets[0] = 0;
  __syncthreads();
}

// ---- reductions and scales ----

// The largest of 8 magnitudes, one for each row of a thread, over the lanes that share the rows. Lane i of those
// returns that of row i / 2.
__device__ u32 largest_of_rows(u32 (&amax)[SIDE], u32 lane) {
#pragma unroll
  for (int half = SIDE / 2; half > 0; half /= 2) {
    const bool upper = lane & 2 * half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const u32 other = __shfl_xor_sync(FULL, upper ? amax[i] : amax[i + half], 2 * half);
      amax[i] = max(upper ? amax[i + half] : amax[i], other);
    }
  }
  return max(amax[0], __shfl_xor_sync(FULL, amax[0], 1));
}

// Where the divisor of a column lies: column c of all threads of a row next to each other, in different banks.
__device__ int column_slot(int column) {
  const int c = column / STEP * PER_VECTOR + column % PER_VECTOR;
  return c * ROW_LANES + column / PER_VECTOR % ROW_LANES;
}

// ---- a tile, whatever its source ----

using Tile = Vector[SIDE][VECTORS];

// Of the magnitudes of columns.
__device__ u32 larger(u32 a, u32 b) { return WEIGHTED ? max(a, b) : Input::larger(a, b); }

// Both searches at once: a magnitude is used twice, and none has to wait in a register.
__device__ void find_amax(Shared& s, const Place& p, const Tile& tile) {
  constexpr int WORDS = PAIRS ? SIDE / 2 : SIDE;
  u32 rows[SIDE], columns[WORDS] = {};
#pragma unroll
  for (int r = 0; r < SIDE; ++r) {
    u32 row = 0;
#pragma unroll
    for (int i = 0; i < SIDE / PER_WORD; ++i) {
      const u32 word = Input::magnitude(tile[r][i / 4].words[i % 4]);
      row = Input::larger(row, word);
      if constexpr (WEIGHTED) {
#pragma unroll
        for (int j = 0; j < PER_WORD; ++j) {
          const float weighted = __fmul_rn(Input::value(Input::bits(word, j)), fabsf(s.weights[p.row + r]));
          columns[i * PER_WORD + j] = max(columns[i * PER_WORD + j], __float_as_uint(weighted));
        }
      } else {
        columns[i] = Input::larger(columns[i], word);
      }
    }
    rows[r] = Input::largest(row);
  }
  const u32 row = largest_of_rows(rows, p.lane);
  if (p.lane % 2 == 0) s.row_amax[p.row + p.column_group / 2] = row;
#pragma unroll
  for (u32& word : columns) word = larger(word, __shfl_xor_sync(FULL, word, ROW_LANES));
  if (p.lane < ROW_LANES) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      *reinterpret_cast<uint4*>(&s.column_amax[p.warp][PAIRS ? p.column(0) / 2 : p.column(i)]) =
          make_uint4(columns[i], columns[i + 1], columns[i + 2], columns[i + 3]);
    }
  }
}

// Half of the threads take a column each, the others a row.
__device__ void make_scales(const Arguments& a, Shared& s, i64 first_column) {
  const int t = threadIdx.x % BLOCK;
  const bool is_column = threadIdx.x < BLOCK;
  float amax;
  if (is_column) {
    u32 word = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) word = larger(word, s.column_amax[w][PAIRS ? t / 2 : t]);
    amax = WEIGHTED ? __uint_as_float(word) : Input::value(Input::bits(word, PAIRS ? t % 2 : 0));
  } else {
    amax = Input::value(s.row_amax[t]);
  }
  const BlockScale<> scale(amax);
  (is_column ? s.columns[column_slot(t)] : s.rows[t]) = scale.divisor;
  if (is_column) {
    if (first_column + t < a.width)
      a.column_scale[s.tile.index * a.column_scale_pitch + first_column + t] = scale.value;
  } else if (t < s.tile.count) {
    a.row_scale[first_column / BLOCK * a.row_scale_pitch + s.tile.first + t] = scale.value;
  }
}

// The first `count` of the 8 quantized elements of a row of a thread; at least one.
__device__ void store_row(u8* target, const u32 (&words)[2], int count) {
  if constexpr (VECTOR && VECTORS == 1) {
    *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  } else if constexpr (VECTOR) {
    *reinterpret_cast<u32*>(target) = words[0];
    if (count > STEP) *reinterpret_cast<u32*>(target + STEP) = words[1];
  } else {
#pragma unroll
    for (int c = 0; c < SIDE; ++c) {
      if (offset(c) < count) target[offset(c)] = static_cast<u8>(words[c / 4] >> (c % 4 * 8));
    }
  }
}

// Both quotients of each value, two rows and two columns at a time. Rows go to memory, columns to shared memory, where
// a thread has 8 bytes of each of its columns. These pieces are permuted by the column group, and the halves of every
// second one swapped: what a warp writes at once then falls in different banks.
__device__ void quantize_values(const Arguments& a, const Shared& s, const Place& p, i64 first_column,
                                const Tile& tile) {
  const auto value = [&](int r, int c) { return tile[r][c / PER_VECTOR][c % PER_VECTOR]; };
  const int group = p.row / SIDE, swapped = group % 2;
  u8* const pieces = reinterpret_cast<u8*>(dynamic_shared) + p.column(0) * BLOCK;
  u32* const piece = reinterpret_cast<u32*>(pieces + (group ^ p.column_group) * SIDE);
  const int columns = inside(first_column, a.width, BLOCK) - p.column(0);
  const int count = columns > 0 ? s.tile.count - p.row : 0;
  u8* target = a.rows + i64{s.tile.first + p.row} * a.width + first_column + p.column(0);
#pragma unroll
  for (int first = 0; first < SIDE; first += HALF) {
    Divisor<> divisors[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i) divisors[i] = s.rows[p.row + first + i];
    u32 row_words[HALF][2] = {};
#pragma unroll
    for (int c = 0; c < SIDE; c += 2) {
      const Divisor<> left = s.columns[c * ROW_LANES + p.column_group];
      const Divisor<> right = s.columns[(c + 1) * ROW_LANES + p.column_group];
      u32 left_word = 0, right_word = 0;
#pragma unroll
      for (int i = 0; i < HALF; i += 2) {
        const int r = first + i;
        float upper_left = value(r, c), upper_right = value(r, c + 1);
        float lower_left = value(r + 1, c), lower_right = value(r + 1, c + 1);
        row_words[i][c / 4] |= divisors[i].quantize(upper_left, upper_right) << (c % 4 * 8);
        row_words[i + 1][c / 4] |= divisors[i + 1].quantize(lower_left, lower_right) << (c % 4 * 8);
        if constexpr (WEIGHTED) {
          const float upper_weight = s.weights[p.row + r], lower_weight = s.weights[p.row + r + 1];
          upper_left = __fmul_rn(upper_left, upper_weight), upper_right = __fmul_rn(upper_right, upper_weight);
          lower_left = __fmul_rn(lower_left, lower_weight), lower_right = __fmul_rn(lower_right, lower_weight);
        }
        left_word |= left.quantize(upper_left, lower_left) << (i * 8);
        right_word |= right.quantize(upper_right, lower_right) << (i * 8);
      }
      u32* const transposed = piece + offset(c) * BLOCK / 4 + (first / HALF ^ swapped);
      transposed[0] = left_word;
      transposed[BLOCK / 4] = right_word;
    }
#pragma unroll
    for (int i = 0; i < HALF; ++i, target += a.width) {
      if (first + i < count) store_row(target, row_words[i], columns);
    }
    __syncwarp();  // keeps the halves apart, which would need more registers together
  }
}

__device__ void store_columns(const Arguments& a, u32 row_tile, i64 first_column) {
  const i64 pitch = i64{a.row_tiles} * BLOCK;
  const int columns = inside(first_column, a.width, BLOCK);
  const int chunk = threadIdx.x % CHUNKS;
  u8* target = a.columns + first_column * pitch + i64{row_tile} * BLOCK + chunk * CHUNK;
#pragma unroll
  for (int i = 0; i < BLOCK * CHUNKS / THREADS; ++i) {
    const int column = i * (THREADS / CHUNKS) + threadIdx.x / CHUNKS;
    const int group = column / PER_VECTOR % ROW_LANES;
    const uint4 v = dynamic_shared[column * CHUNKS + (chunk ^ group / 2)];
    if (column < columns) {
      *reinterpret_cast<uint4*>(target + column * pitch) =
          group % 2 ? make_uint4(v.z, v.w, v.y, v.x) : make_uint4(v.x, v.y, v.w, v.z);
    }
  }
}

// From a tile of rows in registers to both results, in the columns from `first_column` on.
__device__ void quantize_tile(const Arguments& a, Shared& s, const Place& p, i64 first_column, const Tile& tile) {
  find_amax(s, p, tile);
  __syncthreads();
  make_scales(a, s, first_column);
  __syncthreads();
  quantize_values(a, s, p, first_column, tile);
  __syncthreads();
  store_columns(a, s.tile.index, first_column);
}

// ---- sources ----

// Rows of x; those that are not there are zero, and so is their weight.
__device__ void load_rows(const Arguments& a, Shared& s, const Place& p, i64 first_column, Tile& tile) {
  const int lane_row = p.row + p.lane % SIDE;
  int lane_token = -1;
  float weight = 0.f;
  if (lane_row < s.tile.count) {
    const int row = s.tile.first + lane_row;
    lane_token = a.tokens ? a.tokens[row] : row;
    if (static_cast<u32>(lane_token) >= a.num_tokens) lane_token = -1;
    if (WEIGHTED && lane_token >= 0) weight = a.weights[row];
  }
  if (WEIGHTED) {
    if (p.column_group < SIDE) s.weights[lane_row] = weight;
    __syncwarp();
  }
  const int columns = inside(first_column, a.width, BLOCK) - p.column(0);
  const Element* source = a.x + first_column + p.column(0);
#pragma unroll
  for (int r = 0; r < SIDE; ++r) {
    const int token = __shfl_sync(FULL, lane_token, r, ROW_LANES);
    const int count = token >= 0 ? columns : 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      tile[r][i] = Vector::load(source + token * a.row_stride + i * STEP, count - i * STEP);
    }
  }
}

// ---- operands of SwiGLU on their way through shared memory, each thread's own ----

enum Operand { GATE, UP, GRAD };  // the transposed tile takes the place of GATE

__device__ uint4& slot(Operand operand, int r) { return dynamic_shared[(operand * SIDE + r) * THREADS + threadIdx.x]; }

__device__ Vector vector_in(Operand operand, int r) {
  const uint4 v = slot(operand, r);
  return {v.x, v.y, v.z, v.w};
}

// Zeros if `there` is false.
__device__ void copy_to_slot(Operand operand, int r, const Element* source, bool there) {
  async_copy_16(shared_address(&slot(operand, r)), source, there);
}

// Starts to load all rows, a group of copies for each half of them.
__device__ void copy_operands(const Arguments& a, const Shared& s, const Place& p, i64 column) {
  constexpr int PARTS = SOURCE == SWIGLU_BACKWARD ? 2 : 1;  // gradients, each as wide as gate and up
  const i64 offset = column + p.column(0);
#pragma unroll
  for (int r = 0; r < SIDE; ++r) {
    const bool there = p.row + r < s.tile.count;
    const i64 row = there ? s.tile.first + p.row + r : s.tile.first;
    const Element* source = a.x + row * a.row_stride + offset;
    copy_to_slot(GATE, r, source, there);
    copy_to_slot(UP, r, source + a.width / PARTS, there);
    if constexpr (SOURCE == SWIGLU_BACKWARD) copy_to_slot(GRAD, r, a.grad + row * a.grad_stride + offset, there);
    if (r % HALF == HALF - 1) async_commit();
  }
}

__device__ void wait_for_operands(int r) {
  if (r == 0) async_wait<1>();
  if (r == HALF) async_wait<0>();
}

__device__ Swiglu<FORM> swiglu(float gate, float up, const Arguments& a) { return {gate, up, a.limit, a.alpha}; }

__device__ void make_swiglu(const Arguments& a) {
#pragma unroll 1
  for (int r = 0; r < SIDE; ++r) {
    wait_for_operands(r);
    const Vector gate = vector_in(GATE, r), up = vector_in(UP, r);
    u32 h[SIDE / 2];
#pragma unroll
    for (int c = 0; c < SIDE; c += 2) {
      h[c / 2] = pack_bfloat16(swiglu(gate[c], up[c], a).value(), swiglu(gate[c + 1], up[c + 1], a).value());
    }
    slot(GATE, r) = make_uint4(h[0], h[1], h[2], h[3]);
  }
}

// The gradients in place of gate and up, and the sum of value * grad over the columns of the tile for each row.
__device__ void make_gradients(const Arguments& a, const Shared& s, const Place& p, i64 column) {
  float* dots = a.dots + column / BLOCK * a.num_rows + s.tile.first;
#pragma unroll 1
  for (int r = 0; r < SIDE; ++r) {
    const int row = p.row + r;
    const float weight = row < s.tile.count ? a.weights[s.tile.first + row] : 0.f;
    wait_for_operands(r);
    const Vector gate = vector_in(GATE, r), up = vector_in(UP, r), grad = vector_in(GRAD, r);
    u32 d_gate[SIDE / 2], d_up[SIDE / 2];
    float dot = 0.f;
#pragma unroll
    for (int c = 0; c < SIDE; c += 2) {
      const Swiglu<FORM> left = swiglu(gate[c], up[c], a), right = swiglu(gate[c + 1], up[c + 1], a);
      const float left_grad = weight * grad[c], right_grad = weight * grad[c + 1];
      dot += left.value() * grad[c] + right.value() * grad[c + 1];
      d_gate[c / 2] = pack_bfloat16(left.d_gate(left_grad), right.d_gate(right_grad));
      d_up[c / 2] = pack_bfloat16(left.d_up(left_grad), right.d_up(right_grad));
    }
    slot(GATE, r) = make_uint4(d_gate[0], d_gate[1], d_gate[2], d_gate[3]);
    slot(UP, r) = make_uint4(d_up[0], d_up[1], d_up[2], d_up[3]);
#pragma unroll
    for (int step = 1; step < ROW_LANES; step *= 2) dot += __shfl_xor_sync(FULL, dot, step);
    if (p.column_group == 0 && row < s.tile.count) dots[row] = dot;
  }
}

__device__ void load_tile(Operand operand, Tile& tile) {
#pragma unroll
  for (int r = 0; r < SIDE; ++r) tile[r][0] = vector_in(operand, r);
}

// Grid: row_tiles * column_tiles, of ceil(width / 128) columns, or width / 256 of a backward.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantize_transpose(const __grid_constant__ Arguments a) {
  __shared__ Shared s;
  wait_for_previous_kernel();
  allow_next_kernel();
  const u32 strip = blockIdx.x / (a.strip * a.row_tiles);
  const u32 within = blockIdx.x - strip * a.strip * a.row_tiles;
  const u32 strip_tiles = min(a.strip, a.column_tiles - strip * a.strip);
  const u32 row_tile = within / strip_tiles;
  const i64 column = i64{strip * a.strip + within - row_tile * strip_tiles} * BLOCK;
  find_rows(a, s, row_tile, blockIdx.x == 0);
  if (s.tile.count == 0) return;

  const Place p;
  Tile tile;
  if constexpr (SOURCE == ROWS) {
    load_rows(a, s, p, column, tile);
    quantize_tile(a, s, p, column, tile);
  } else {
    copy_operands(a, s, p, column);
    if constexpr (SOURCE == SWIGLU_BACKWARD) {
      make_gradients(a, s, p, column);
    } else {
      make_swiglu(a);
    }
    load_tile(GATE, tile);
    quantize_tile(a, s, p, column, tile);
    if constexpr (SOURCE == SWIGLU_BACKWARD) {
      load_tile(UP, tile);
      quantize_tile(a, s, p, a.width / 2 + column, tile);
    }
  }
}
