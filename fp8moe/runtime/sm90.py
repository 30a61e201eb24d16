"""Limits of Hopper GPUs (compute capability 9.0), and their tensor core instruction wgmma."""

USUAL_SMS = 132  # number of SMs of H100 and H200 SXM
WARP = 32
WARPGROUP = 128
# CUDA C++ Programming Guide, "Compute Capabilities", table of technical specifications.
SHARED_LIMIT = 227 * 1024  # bytes of shared memory one block may use
SHARED_PER_SM = 228 * 1024  # bytes of shared memory of an SM; each resident block takes what it requests plus 1 KB
REGISTERS_PER_SM = 65536
MAX_BLOCKS_PER_PORTABLE_CLUSTER = 8
SWIZZLE_ALIGNMENT = 1024  # bytes; alignment of a tile in shared memory with a 128-byte swizzle


def wgmma_source(
    columns: int,
    *,
    rows_in_registers: bool = False,
    name: str = "wgmma",
    kind: str = "e4m3",
    rows_across: bool = False,
    across: bool = False,
) -> str:
    """Return the CUDA source of ``name(d, a, b, accumulate)``: one product m64nNk32 of "e4m3", k16 of "bf16" or "f16".

    columns: N. rows_in_registers: ``a`` is four registers of each thread instead of a descriptor of shared memory.
    rows_across, across: not K but rows lie along the memory of a 16-bit ``a``, columns along that of ``b``.

    PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async".
    """
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if rows_in_registers:
        a, rows, used = "const unsigned int (&a)[4]", ", ".join(f'"r"(a[{i}])' for i in range(4)), 4
        rows_operand = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        flags = "p, 1, 1"
    else:
        a, rows, used, rows_operand, flags = "unsigned long long a", '"l"(a)', 1, f"%{count}", "p, 1, 1"
    depth = 32
    if kind != "e4m3":
        depth, flags = 16, f"{flags}, {'' if rows_in_registers else f'{int(rows_across)}, '}{int(across)}"
    operands = f"{{{registers}}}, {rows_operand}, %{count + used}, {flags}"
    return f"""
__device__ __forceinline__ void {name}(float (&d)[{count}], {a}, unsigned long long b, bool accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + used + 1}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind} {operands};\\n}}\\n"
               : {outputs}
               : {rows}, "l"(b), "r"(static_cast<int>(accumulate)));
}}
"""  # noqa: E501
