// SwiGLU of gate and up, rounded to bfloat16 and quantized along its rows. BESIDE selects a second result: none, or the
// values in bfloat16.
//
// Compile-time constants: those of swiglu_operands.cuh.
#include "swiglu_operands.cuh"

struct Source {
  const Element* gate_up;  // (num_rows, 2 * width), rows `row_stride` apart
  Element* values;         // (num_rows, width)
  i64 row_stride;
  float limit, alpha;
};
static_assert(sizeof(Source) == SOURCE_BYTES && BESIDE != COLUMNS);

// Replaces gate by SwiGLU.
__device__ void make_swiglu(const Source& source, const Results& results, const RowTile& tile, const ThreadPosition& p,
                            i64 column) {
  const ValuesBeside values = {source.values, results.width};
  const auto swiglu = [&](float gate, float up) {
    return Swiglu<SWIGLU_FORM>(gate, up, source.limit, source.alpha).value();
  };
#pragma unroll 1
  for (int r = 0; r < SIDE; ++r) {
    const Vector gate = vector_in(GATE, r), up = vector_in(UP, r);
    u32 h[SIDE / 2];
#pragma unroll
    for (int c = 0; c < SIDE; c += 2) {
      h[c / 2] = pack_bfloat16(swiglu(gate[c], up[c]), swiglu(gate[c + 1], up[c + 1]));
    }
    put_vector(GATE, r, h);
    values.store(tile, p, column, r, h);
  }
}

// Grid: as for find_strip. Shared memory allows 3 thread blocks per SM.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    swiglu_quantize(const __grid_constant__ Results results, const __grid_constant__ Source source) {
  __shared__ Shared s;
  wait_for_previous_kernel();
  allow_next_kernel();
  const Strip& strip = find_strip(results, s.tile);
  if (s.tile.count == 0) return;
  const ThreadPosition p;
  const Rows gate = {source.gate_up, source.row_stride}, up = {source.gate_up + results.width, source.row_stride};
  const auto copy = [&](u32 tile) {
    if (tile >= strip.end) return;
    const i64 column = i64{tile} * BLOCK;
    copy_operand(GATE, gate, s.tile, p, column);
    copy_operand(UP, up, s.tile, p, column);
    async_commit();
  };
  copy(strip.begin);
#pragma unroll 1
  for (u32 tile = strip.begin; tile < strip.end; ++tile) {
    const i64 column = i64{tile} * BLOCK;
    async_wait<0>();
    make_swiglu(source, results, s.tile, p, column);
    quantize(GATE, results, s, p, column, [&] { copy(tile + 1); });
  }
}
