"""Launching on a GPU: tensor maps, streams, graphs, clusters, programmatic launch, shared memory, several devices."""

import ctypes
import threading
from dataclasses import replace

import pytest
import torch

from fp8moe.runtime import backend, config, jit, launch
from fp8moe.runtime.architectures import SM90

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 64, 128  # the tile: 64 rows of 128 bytes

SOURCE = r"""
struct alignas(64) TensorMap { unsigned long long opaque[16]; };

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Copies the tile at (row, col), whose 16-byte chunks TMA has swizzled with a 128-byte pattern, to a contiguous out.
extern "C" __global__ void copy_tile(const __grid_constant__ TensorMap map, unsigned char* out, int row, int col) {
    __shared__ alignas(1024) unsigned char tile[64 * 128];
    __shared__ alignas(8) unsigned long long barrier;
    const unsigned bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(64 * 128) : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3}], [%4];"
            :
            : "r"(shared_address(tile)), "l"(&map), "r"(col), "r"(row), "r"(bar)
            : "memory");
    }
    unsigned done = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(bar)
            : "memory");
    }
    for (int i = threadIdx.x; i < 64 * 128; i += blockDim.x) {
        const int r = i / 128, c = i % 128;
        out[i] = tile[r * 128 + (c ^ ((r % 8) * 16))];
    }
}

// out[block] = the peer's block index, read through distributed shared memory, + 1000 * cluster size.
extern "C" __global__ void ask_peer(int* out) {
    __shared__ int mine;
    unsigned rank, size, peer;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    if (threadIdx.x == 0) mine = blockIdx.x;
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(shared_address(&mine)), "r"(rank ^ 1));
    int value;
    asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(peer) : "memory");
    if (threadIdx.x == 0) out[blockIdx.x] = value + 1000 * size;
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// y = x + 1 element by element; may start before the kernel ahead has finished, and reads x only after it has.
extern "C" __global__ void add_one(const float* x, float* y, int n) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] + 1.0f;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Writes all of its dynamic shared memory and reads it back in reverse.
extern "C" __global__ void fill_shared(int* out, int n) {
    extern __shared__ int buffer[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) buffer[i] = i;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = buffer[n - 1 - i];
}

extern "C" __global__ void scalars(double* out, int a, unsigned b, long long c, float d, double e) {
    out[0] = a;
    out[1] = b;
    out[2] = static_cast<double>(c);
    out[3] = d;
    out[4] = e;
}
"""


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch):
    (tmp_path / "launch_test.cu").write_text(SOURCE)
    monkeypatch.setitem(jit.SOURCE_DIRS, "sm90", (tmp_path,))


def kernel(name, **spec):
    return jit.load(jit.KernelSpec("launch_test.cu", name, **spec))


def bytes_like(rows=256, cols=512, device="cuda", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=generator).to(device)


def matrix_map(x, shape=None, **options):
    options = {"box": (ROWS, WIDTH // x.element_size()), "swizzle": 128} | options
    return launch.tensor_map(x, shape=shape or tuple(x.shape), strides=tuple(x.stride()), **options)


def copy(tma, row, col, device=0, spec=None):
    out = torch.full((ROWS, WIDTH), 0xEE, dtype=torch.uint8, device=f"cuda:{device}")
    args = (tma, ctypes.c_int64(out.data_ptr()), ctypes.c_int32(row), ctypes.c_int32(col))
    with launch.device_guard(device):
        copier = kernel("copy_tile") if spec is None else jit.load(spec)
        launch.Launcher(copier, grid=1, block=128, args=args).launch(launch.current_stream(device))
    return out


def expected(x, row, col):
    """The tile at (row, col) of a byte matrix, zero outside of it."""
    padded = torch.zeros(x.shape[0] + 2 * ROWS, x.shape[1] + 2 * WIDTH, dtype=torch.uint8, device=x.device)
    padded[ROWS : ROWS + x.shape[0], WIDTH : WIDTH + x.shape[1]] = x
    return padded[row + ROWS : row + 2 * ROWS, col + WIDTH : col + 2 * WIDTH]


@pytest.mark.parametrize(("row", "col"), [(0, 0), (64, 128), (37, 0), (200, 384), (230, 448), (-10, 0), (256, 512)])
def test_a_tile_at_any_row_with_zeros_outside(row, col):
    x = bytes_like()
    assert torch.equal(copy(matrix_map(x), row, col), expected(x, row, col))


def test_a_map_smaller_than_the_tensor_and_the_box():
    x = bytes_like()
    part = x[16:, 32:]
    tma = matrix_map(part, shape=(50, 100))
    assert torch.equal(copy(tma, 0, 0), expected(part[:50, :100], 0, 0))


def test_one_row():
    x = bytes_like(1, 512)
    assert torch.equal(copy(matrix_map(x), 0, 128), expected(x, 0, 128))


def test_one_column_of_scales():
    x = torch.arange(40, dtype=torch.float32, device="cuda")
    tma = launch.tensor_map(x, shape=(10, 1), strides=(4, 1), box=(ROWS, 32), swizzle=128)
    out = copy(tma, 0, 0).view(torch.float32)
    want = torch.zeros(ROWS, 32, device="cuda")
    want[:10, 0] = x[::4]
    assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32])
def test_every_type(dtype):
    data = bytes_like(128, 512)
    x = data.view(dtype)
    columns = WIDTH // x.element_size()
    tma = matrix_map(x)
    assert torch.equal(copy(tma, 64, columns), data[64:128, WIDTH : 2 * WIDTH])
    other = bytes_like(128, 512, seed=1)
    tma.replace_address(other.data_ptr())
    assert torch.equal(copy(tma, 64, columns), other[64:128, WIDTH : 2 * WIDTH])


def test_arguments_are_changed_from_launch_to_launch():
    inputs = [bytes_like(seed=seed) for seed in range(8)]
    outputs = [torch.empty(ROWS, WIDTH, dtype=torch.uint8, device="cuda") for _ in inputs]
    tma, pointer, row = matrix_map(inputs[0]), ctypes.c_int64(), ctypes.c_int32()
    with launch.device_guard(0):
        launcher = launch.Launcher(
            kernel("copy_tile"), grid=1, block=128, args=(tma, pointer, row, ctypes.c_int32(128))
        )
        torch.cuda._sleep(20_000_000)  # the changes are made while all launches wait
        for i, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
            tma.replace_address(x.data_ptr())
            pointer.value = out.data_ptr()
            row.value = 8 * i
            launcher.launch(launch.current_stream(0))
    for i, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
        assert torch.equal(out, expected(x, 8 * i, 128))


def test_a_map_keeps_no_memory():
    before = torch.cuda.memory_allocated()
    x = torch.zeros(4096, 4096, dtype=torch.uint8, device="cuda")
    tma = matrix_map(x)
    del x
    assert torch.cuda.memory_allocated() == before
    other = bytes_like(4096, 4096)
    tma.replace_address(other.data_ptr())
    assert torch.equal(copy(tma, 0, 0), expected(other, 0, 0))


def test_addresses_that_tma_does_not_take():
    x = bytes_like()
    tma = matrix_map(x)
    with pytest.raises(RuntimeError, match="cuTensorMapReplaceAddress failed"):
        tma.replace_address(x.data_ptr() + 8)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        matrix_map(x.flatten()[8:-504].view(255, 512))


def test_launches_follow_the_current_stream():
    inputs = [bytes_like(seed=seed) for seed in range(2)]
    targets = [torch.zeros_like(inputs[0]) for _ in range(2)]
    maps = [matrix_map(target) for target in targets]
    streams = [torch.cuda.Stream() for _ in range(2)]
    copy(maps[0], 0, 0)  # loads the kernel
    torch.cuda.synchronize()
    outputs = []
    for stream, source, target, tma in zip(streams, inputs, targets, maps, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # a launch on another stream would find zeros
            target.copy_(source)
            outputs.append(copy(tma, 0, 0))
    assert launch.current_stream(0) == torch.cuda.current_stream().cuda_stream
    torch.cuda.synchronize()
    for source, out in zip(inputs, outputs, strict=True):
        assert torch.equal(out, expected(source, 0, 0))


def test_a_graph_may_capture_the_first_use_of_a_kernel():
    x = bytes_like()
    torch.cuda.synchronize()
    spec = jit.KernelSpec("launch_test.cu", "copy_tile", defines=(("FIRST_USE_UNDER_CAPTURE", 1),))
    assert spec not in jit._kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = copy(matrix_map(x), 64, 128, spec=spec)
    for seed in range(3):
        x.copy_(bytes_like(seed=seed))
        graph.replay()
        assert torch.equal(out, expected(x, 64, 128))


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_clusters(size):
    blocks = 4 * size
    out = torch.zeros(blocks, dtype=torch.int32, device="cuda")
    with launch.device_guard(0):
        args = (ctypes.c_int64(out.data_ptr()),)
        launcher = launch.Launcher(kernel("ask_peer"), grid=blocks, block=32, cluster=size, args=args)
        launcher.launch(launch.current_stream(0))
    assert out.tolist() == [(block ^ 1) + 1000 * size for block in range(blocks)]


@pytest.mark.parametrize("captured", [False, True])
def test_programmatic_dependent_launch(captured):
    n, steps = 1 << 20, 60
    buffers = [torch.zeros(n, device="cuda") for _ in range(2)]
    x, y = ctypes.c_int64(), ctypes.c_int64()
    with launch.device_guard(0):
        args = (x, y, ctypes.c_int32(n))
        launcher = launch.Launcher(kernel("add_one"), grid=n // 256, block=256, pdl=True, args=args)

    def chain():
        stream = launch.current_stream(0)
        for step in range(steps):
            x.value, y.value = buffers[step % 2].data_ptr(), buffers[1 - step % 2].data_ptr()
            launcher.launch(stream)

    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        graph.replay()
    else:
        chain()
    assert torch.equal(buffers[steps % 2], torch.full((n,), float(steps), device="cuda"))


def test_shared_memory_over_48_kb_and_launchers_that_share_a_kernel():
    sizes = (200 << 10, 100 << 10, 4 << 10)
    with launch.device_guard(0):
        shared = kernel("fill_shared")
        pointer, count = args = (ctypes.c_int64(), ctypes.c_int32())
        launchers = [launch.Launcher(shared, grid=1, block=256, smem=size, args=args) for size in sizes]
        for size, launcher in zip(sizes, launchers, strict=True):
            n = size // 4
            out = torch.zeros(n, dtype=torch.int32, device="cuda")
            pointer.value, count.value = out.data_ptr(), n
            launcher.launch(launch.current_stream(0))
            assert torch.equal(out, torch.arange(n - 1, -1, -1, dtype=torch.int32, device="cuda"))


def test_more_shared_memory_than_there_is():
    with launch.device_guard(0), pytest.raises(RuntimeError, match="cuKernelSetAttribute failed"):
        launch.Launcher(kernel("fill_shared"), grid=1, block=256, smem=1 << 20)


def test_argument_types():
    out = torch.zeros(5, dtype=torch.float64, device="cuda")
    with launch.device_guard(0):
        args = (
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int32(-5),
            ctypes.c_uint32(4_000_000_000),
            ctypes.c_int64(1 << 40),
            ctypes.c_float(0.5),
            ctypes.c_double(0.1),
        )
        launch.Launcher(kernel("scalars"), grid=1, block=1, args=args).launch(launch.current_stream(0))
    assert out.tolist() == [-5.0, 4_000_000_000.0, float(1 << 40), 0.5, 0.1]


def test_a_new_thread_has_a_context():
    x, results = bytes_like(), []

    def work():
        try:
            with launch.device_guard(0):
                results.append(copy(matrix_map(x), 64, 128))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(results[0], torch.Tensor), results
    assert torch.equal(results[0], expected(x, 64, 128))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several GPUs")
def test_every_gpu_of_the_process():
    shared = kernel("fill_shared")
    n = (100 << 10) // 4
    for index in range(torch.cuda.device_count()):
        assert backend.use_cuda(torch.empty(1, device=f"cuda:{index}"))
        x = bytes_like(device=f"cuda:{index}", seed=index)
        with launch.device_guard(index):
            tma = matrix_map(x)
            assert torch.equal(copy(tma, 64, 128, index), expected(x, 64, 128))
            out = torch.zeros(n, dtype=torch.int32, device=f"cuda:{index}")
            args = (ctypes.c_int64(out.data_ptr()), ctypes.c_int32(n))
            launcher = launch.Launcher(shared, grid=1, block=256, smem=4 * n, args=args)
            launcher.launch(launch.current_stream(index))
            assert out[0].item() == n - 1
        assert torch.cuda.current_device() == 0


def test_a_launch_that_fails_is_an_error():
    with launch.device_guard(0):
        launcher = launch.Launcher(kernel("ask_peer"), grid=1, block=2048, args=(ctypes.c_int64(),))
        with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE"):
            launcher.launch(launch.current_stream(0))


def test_the_device_guard_is_free_on_the_current_device():
    with launch.device_guard(0):
        pass
    assert launch.device_guard(0) is launch.device_guard(0)


def test_num_sms():
    assert launch.num_sms(0) == torch.cuda.get_device_properties(0).multi_processor_count


def test_auto_takes_the_kernels_here():
    assert config.settings.backend == "reference" or backend.use_cuda(torch.empty(1, device="cuda"))


def test_code_for_another_gpu_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "settings", replace(config.settings, cache_dir=tmp_path / "cache"))
    spec = jit.KernelSpec("other_gpu.cu", "idle", architecture=SM90._replace(flag="sm_100a"))
    (tmp_path / "other_gpu.cu").write_text('extern "C" __global__ void idle() {}\n')
    with launch.device_guard(0), pytest.raises(RuntimeError, match="driver .* cannot load the compiled kernels"):
        launch.Launcher(jit.load(spec), grid=1, block=1)
