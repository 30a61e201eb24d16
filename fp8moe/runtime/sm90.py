"""Hopper (compute capability 9.0): its limits, and its tensor core instruction."""

USUAL_SMS = 132  # of H100 and H200 SXM
WARP = 32
WARPGROUP = 128
# CUDA C++ Programming Guide, "Compute Capabilities", table of technical specifications.
SHARED_LIMIT = 227 * 1024  # bytes of shared memory one block may use
SHARED_PER_SM = 228 * 1024  # of which every resident block costs 1 KB more
REGISTERS_PER_SM = 65536
MAX_BLOCKS_PER_PORTABLE_CLUSTER = 8
SWIZZLE_ALIGNMENT = 1024  # bytes: of a tile in shared memory under a 128-byte swizzle


def wgmma_source(columns: int) -> str:
    """CUDA text of ``wgmma(d, a, b, accumulate)``: one m64nNk32 FP8 product with N = ``columns``.

    PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async".
    """
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    operands = f"{{{registers}}}, %{count}, %{count + 1}, p, 1, 1"
    return f"""
__device__ __forceinline__ void wgmma(float (&d)[{count}], unsigned long long a, unsigned long long b, bool accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {operands};\\n}}\\n"
               : {outputs}
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}}
"""  # noqa: E501
