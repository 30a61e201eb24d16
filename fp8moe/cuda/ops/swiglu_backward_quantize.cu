// The gradient of gate and up of `weight * SwiGLU(gate, up)`, rounded to bfloat16 and quantized along its rows. BESIDE
// selects further results: the gradient and weight * SwiGLU, each quantized along its columns (quantize_tile.cuh), the
// latter with one scale per block; or the gradient and SwiGLU in bfloat16. Also computes the sum of SwiGLU * grad over
// each row, for the gradient of the weights.
//
// Compile-time constants: those of swiglu_operands.cuh.
#include "swiglu_operands.cuh"

struct Source {
  const Element* gate_up;  // (num_rows, width), rows `row_stride` apart; width counts gate and up
  const Element* grad;     // (num_rows, width / 2), rows `grad_stride` apart
  const float* weights;    // (num_rows)
  float* dots;             // (width / 256, num_rows), output: sums of SwiGLU * grad over 128 columns
  Element* d_gate_up;      // (num_rows, width), output
  Element* values;         // (num_rows, width / 2), output: SwiGLU without weights
  u8* columns;             // (width / 2, 128 * row_tiles), output: weight * SwiGLU, E4M3
  float* column_scale;     // (width / 256, row_tiles), output, columns `column_scale_pitch` apart
  i64 column_scale_pitch, row_stride, grad_stride;
  float limit, alpha;
};
static_assert(sizeof(Source) == SOURCE_BYTES);

// SwiGLU and its derivatives. A gate or up value that the limit clamps has gradient 0.
struct SwigluGradients : Swiglu<SWIGLU_FORM> {
  bool gate_clamped, up_clamped;

  __device__ SwigluGradients(float gate, float up, const Source& source)
      : Swiglu(gate, up, source.limit, source.alpha),
        gate_clamped(SWIGLU_FORM > 1 && gate > source.limit),
        up_clamped(SWIGLU_FORM > 1 && fabsf(up) > source.limit) {}

  __device__ float d_gate(float grad) const {
    return gate_clamped ? 0.f : grad * linear * fmaf(slope * (gate * gate_sigmoid), 1.f - gate_sigmoid, gate_sigmoid);
  }
  __device__ float d_up(float grad) const { return up_clamped ? 0.f : grad * (gate * gate_sigmoid); }
};

// Replaces gate and up by their gradients and, if BESIDE == COLUMNS, grad by weight * SwiGLU. Also sums SwiGLU * grad
// over the tile's columns, for each row.
__device__ void make_gradients(const Source& source, const Results& results, const RowTile& tile,
                               const float (&weights)[BLOCK], const ThreadPosition& p, i64 column) {
  float* dots = source.dots + column / BLOCK * results.num_rows + tile.first;
  const i64 size = results.width / 2;
  const ValuesBeside gradients = {source.d_gate_up, results.width}, values = {source.values, size};
#pragma unroll 1
  for (int r = 0; r < SIDE; ++r) {
    const int row = p.row + r;
    const float weight = weights[row];
    const Vector gate = vector_in(GATE, r), up = vector_in(UP, r), grad = vector_in(GRAD, r);
    u32 d_gate[SIDE / 2], d_up[SIDE / 2], h[SIDE / 2];
    float dot = 0.f;
#pragma unroll
    for (int c = 0; c < SIDE; c += 2) {
      const SwigluGradients left(gate[c], up[c], source), right(gate[c + 1], up[c + 1], source);
      const float left_grad = weight * grad[c], right_grad = weight * grad[c + 1];
      dot += left.value() * grad[c] + right.value() * grad[c + 1];
      const float factor = BESIDE == COLUMNS ? weight : 1.f;
      h[c / 2] = pack_bfloat16(factor * left.value(), factor * right.value());
      d_gate[c / 2] = pack_bfloat16(left.d_gate(left_grad), right.d_gate(right_grad));
      d_up[c / 2] = pack_bfloat16(left.d_up(left_grad), right.d_up(right_grad));
    }
    put_vector(GATE, r, d_gate);
    put_vector(UP, r, d_up);
    gradients.store(tile, p, column, r, d_gate);
    gradients.store(tile, p, size + column, r, d_up);
    values.store(tile, p, column, r, h);
    if constexpr (BESIDE == COLUMNS) put_vector(GRAD, r, h);
    dot = warp_reduce<ROW_LANES>(dot, [](float a, float b) { return a + b; });
    if (p.column_group == 0 && row < tile.count) dots[row] = dot;
  }
}

// Grid: as for find_strip, with column tiles of `grad`. Shared memory allows 2 thread blocks per SM. An operand of the
// next tile is loaded as soon as its place is free.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    swiglu_backward_quantize(const __grid_constant__ Results results, const __grid_constant__ Source source) {
  __shared__ Shared s;
  __shared__ float weights[BLOCK];  // each warp has loaded those of its rows
  wait_for_previous_kernel();
  allow_next_kernel();
  const Strip& strip = find_strip(results, s.tile);
  if (s.tile.count == 0) return;
  const i64 size = results.width / 2;
  const ThreadPosition p;
  const Rows gate = {source.gate_up, source.row_stride}, up = {source.gate_up + size, source.row_stride};
  const Rows grad = {source.grad, source.grad_stride};
  Results of_swiglu = results;
  of_swiglu.columns = source.columns, of_swiglu.column_scale = source.column_scale;
  of_swiglu.width = size, of_swiglu.column_scale_pitch = source.column_scale_pitch;
  const auto copy = [&](Operand operand, const Rows& rows, u32 tile) {
    if (tile < strip.end) copy_operand(operand, rows, s.tile, p, i64{tile} * BLOCK);
  };
  copy(GATE, gate, strip.begin);
  copy(UP, up, strip.begin);
  copy(GRAD, grad, strip.begin);
  const int row = p.row + p.lane % SIDE;
  weights[row] = row < s.tile.count ? source.weights[s.tile.first + row] : 0.f;
  __syncwarp();
#pragma unroll 1
  for (u32 tile = strip.begin; tile < strip.end; ++tile) {
    const i64 column = i64{tile} * BLOCK;
    async_commit();
    async_wait<0>();
    make_gradients(source, results, s.tile, weights, p, column);
    quantize(GATE, results, s, p, column, [] {});
    quantize(UP, results, s, p, size + column, [&] { copy(UP, up, tile + 1); });
    if constexpr (BESIDE == COLUMNS) {
      quantize<false, true>(GRAD, of_swiglu, s, p, column, [&] { copy(GRAD, grad, tile + 1); });
      __syncthreads();  // until the transposed tile, which lies over GATE, has been stored
    } else {
      copy(GRAD, grad, tile + 1);
    }
    copy(GATE, gate, tile + 1);
  }
}
