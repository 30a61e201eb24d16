"""The two compilers of CUDA C++: NVRTC (a library, the default) and nvcc (FP8MOE_COMPILER=nvcc)."""

import functools
import io
import os
import re
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from fp8moe.runtime.driver import cuda_core

STD = "c++17"
PTXAS_OPTIONS = ("-v",)

_NVRTC_MISSING = "NVRTC, the CUDA run-time compiler, was not found: pip install nvidia-cuda-nvrtc"


class CompileError(RuntimeError):
    """The compiler rejected the source; the message ends with its log."""


def compile_source(text: str, name: str, compiler: str, arch: str) -> tuple[bytes, str]:
    """Return the cubin of CUDA C++, and the compiler's log with the report of ``ptxas -v``.

    text: the whole translation unit. name: its name in error messages. compiler: "nvrtc" or "nvcc". arch: the flag of
    an `Architecture`.
    Raises CompileError if the source does not compile, RuntimeError if the compiler is not installed.
    """
    return _run_nvcc(text, name, "cubin", arch) if compiler == "nvcc" else _compile_nvrtc(text, name, arch)


def ptx_of(text: str, name: str, compiler: str, arch: str) -> bytes:
    """Return the PTX of a source that compiles. Arguments and errors as for `compile_source`."""
    return _run_nvcc(text, name, "ptx", arch)[0] if compiler == "nvcc" else _ptx_nvrtc(text, name, arch)


@functools.cache
def identity(compiler: str) -> str:
    """Return name and version of a compiler, for the cache key. Raises RuntimeError if it is not installed."""
    if compiler == "nvcc":
        return "nvcc " + _run([_nvcc(), "--version"]).stdout.strip()
    try:
        # Read the version from the wheel's metadata: loading the library takes longer than loading a cached kernel.
        return "nvrtc " + metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        return "nvrtc " + _nvrtc_version()


def find_tool(name: str) -> str | None:
    """Return the path of a CUDA toolkit program on PATH, or under CUDA_HOME or CUDA_PATH."""
    places = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
    found = (shutil.which(name, path=os.path.join(place, "bin")) for place in places if place)
    return shutil.which(name) or next((path for path in found if path), None)


def _nvrtc_version() -> str:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise RuntimeError("cuda-python is not installed: pip install cuda-python nvidia-cuda-nvrtc") from error
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the library, or this function in it, cannot be loaded
        raise RuntimeError(_NVRTC_MISSING) from error
    return f"{major}.{minor}"


def _compile_nvrtc(text: str, name: str, arch: str) -> tuple[bytes, str]:
    version = _nvrtc_version()
    core = cuda_core()
    log = io.StringIO()
    # Disable NVRTC's own cache: a result from it has no log with the numbers of registers and spills.
    options = core.ProgramOptions(name=name, arch=arch, std=STD, ptxas_options=list(PTXAS_OPTIONS), no_cache=True)
    program = core.Program(text, "c++", options)
    try:
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core's error classes are private
        raise CompileError(f"NVRTC {version} could not compile {name}: {error}") from error
    finally:
        program.close()
    return cubin, log.getvalue().replace("\0", "").strip()


def _ptx_nvrtc(text: str, name: str, arch: str) -> bytes:
    """Compile to PTX with the NVRTC bindings: `Program.compile("ptx")` needs a driver, which not every machine has."""
    _nvrtc_version()
    from cuda.bindings import nvrtc

    def check(status: nvrtc.nvrtcResult, value: Any = None) -> Any:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC could not make the PTX of {name}: {status.name}")
        return value

    program = check(*nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    try:
        check(*nvrtc.nvrtcCompileProgram(program, 2, [f"-arch={arch}".encode(), f"-std={STD}".encode()]))
        ptx = b" " * check(*nvrtc.nvrtcGetPTXSize(program))
        check(*nvrtc.nvrtcGetPTX(program, ptx))  # fills `ptx`
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return ptx.rstrip(b"\0")


def _nvcc() -> str:
    path = find_tool("nvcc")
    if path is None:
        raise RuntimeError(
            "FP8MOE_COMPILER=nvcc, but nvcc is neither on PATH nor under CUDA_HOME: "
            "install the CUDA toolkit, or unset FP8MOE_COMPILER to compile with NVRTC"
        )
    return path


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _run_nvcc(text: str, name: str, target: str, arch: str) -> tuple[bytes, str]:
    virtual = arch.replace("sm_", "compute_")
    code = arch if target == "cubin" else virtual
    with tempfile.TemporaryDirectory(prefix="fp8moe-") as directory:
        source = Path(directory) / (re.sub(r"\W", "_", name) + ".cu")
        output = source.with_suffix("." + target)
        source.write_text(text)
        ptxas = ["-Xptxas", ",".join(PTXAS_OPTIONS)] if target == "cubin" else []
        command = [_nvcc(), f"-{target}", f"-gencode=arch={virtual},code={code}", f"-std={STD}", *ptxas]
        done = _run([*command, "-o", str(output), str(source)])
        log = (done.stdout + done.stderr).strip()
        if done.returncode != 0 or not output.exists():
            raise CompileError(f"nvcc could not compile {name} (exit status {done.returncode}):\n{log}")
        return output.read_bytes(), log
