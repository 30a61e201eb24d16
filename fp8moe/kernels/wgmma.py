"""The FP8 tensor core instruction as CUDA text, for the width that a kernel variant needs.

PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async".
"""


def wgmma_source(columns: int) -> str:
    """CUDA text of ``wgmma(d, a, b, accumulate)``: one m64nNk32 FP8 product with N = ``columns``."""
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
