"""Turn CUDA source into a loaded kernel: inline the includes, compile or read from the cache, and load."""

import hashlib
import os
import re
import subprocess
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fp8moe.runtime import compilers, config
from fp8moe.runtime.architectures import ARCHITECTURES, SHARED_FOLDERS, SM90, Architecture
from fp8moe.runtime.cubin_cache import open_cache
from fp8moe.runtime.driver import cuda_core

if TYPE_CHECKING:
    from cuda.core import Kernel

_CUDA = Path(__file__).resolve().parent.parent / "cuda"

# Name of an architecture's folder -> directories to search for the sources of its kernels.
SOURCE_DIRS = {name: tuple(_CUDA / folder for folder in (*SHARED_FOLDERS, name)) for name, *_ in ARCHITECTURES}

# Increase this when the meaning of a cache key or of a cache entry changes.
_KEY_VERSION = b"1"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>).*$', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once.*$", re.MULTILINE)
_IF = re.compile(r"^[ \t]*#[ \t]*(?:el)?if[ \t]+!?([A-Za-z]\w*)[ \t]*$", re.MULTILINE)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to build.

    source: the name of a file in the architecture's SOURCE_DIRS, such as "gemm.cu". name: the extern "C" name of the
    kernel in that file.
    defines: macros defined before the source, such as (("BLOCK_N", 128),).
    prelude: CUDA text placed between the macros and the source; it may include files of SOURCE_DIRS.
    """

    source: str
    name: str
    defines: tuple[tuple[str, int | str], ...] = ()
    prelude: str = ""
    architecture: Architecture = SM90


class Compiled(NamedTuple):
    """A compiled kernel, and the compiler's log with the report of ptxas."""

    cubin: bytes
    log: str


def full_source(spec: KernelSpec) -> str:
    """Return the whole translation unit: macros, prelude and source, with includes inlined, each file once.

    Raises ValueError if a file is missing, or includes a header that is in none of the architecture's SOURCE_DIRS.
    """
    directories = SOURCE_DIRS[spec.architecture.folder]
    defines = "".join(f"#define {name} {value}\n" for name, value in spec.defines)
    seen: set[str] = set()
    prelude = _inline_includes(spec.prelude, "prelude", directories, seen)
    return f"{defines}{prelude}\n{_inline(spec.source, directories, seen)}"


def constants(values: Mapping[str, int]) -> str:
    """Return CUDA text that defines integer constants, for a prelude."""
    return "".join(f"constexpr int {name} = {value};\n" for name, value in values.items())


def _inline(name: str, directories: tuple[Path, ...], seen: set[str]) -> str:
    seen.add(name)
    text = _PRAGMA_ONCE.sub("", _read(name, directories))
    return f'#line 1 "{name}"\n' + _inline_includes(text, name, directories, seen)


def _read(name: str, directories: tuple[Path, ...]) -> str:
    for directory in directories:
        try:
            return (directory / name).read_text()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ValueError(f"CUDA source {name!r} in {directory}/ cannot be read: {error.strerror}") from error
    raise ValueError(f"no CUDA source {name!r} in {', '.join(f'{directory.name}/' for directory in directories)}")


def _inline_includes(text: str, name: str, directories: tuple[Path, ...], seen: set[str]) -> str:
    def replace(match: re.Match[str]) -> str:
        header, system_header = match.groups()
        if system_header:
            raise ValueError(f"{name} includes <{system_header}>, but the sources use no toolkit headers")
        body = "" if header in seen else _inline(header, directories, seen)
        # With #line, compiler messages have the names and line numbers of the original files.
        return f'{body}\n#line {match.string.count(chr(10), 0, match.start()) + 2} "{name}"'

    return _INCLUDE.sub(replace, text)


def compile_spec(spec: KernelSpec) -> Compiled:
    """Compile a kernel without using the cache. Needs no GPU.

    Raises ValueError as `full_source` does, and if an #if names no macro: the preprocessor takes it for 0, whatever
    constant of a prelude has this name. Raises RuntimeError if the source does not compile (the message holds the log)
    or has no kernel of that name, or the compiler is not installed.
    """
    text, compiler = full_source(spec), config.settings.compiler
    if unknown := set(_IF.findall(text)) - set(_DEFINE.findall(text)):
        raise ValueError(f"{spec.source}: #if reads {', '.join(sorted(unknown))}, which no macro defines")
    cubin, log = compilers.compile_source(text, _unit_name(spec), compiler, spec.architecture.flag)
    names = kernel_names(log)
    if spec.name not in names:
        found = ", ".join(sorted(names)) or "none"
        raise RuntimeError(f'the source has no extern "C" kernel {spec.name!r}; its kernels: {found}')
    return Compiled(cubin, log)


def kernel_names(log: str) -> set[str]:
    """Return the names of a source's kernels, read from the compiler's log."""
    return set(re.findall(r"Compiling entry function '(\w+)'", log))


def _unit_name(spec: KernelSpec) -> str:
    return f"{spec.name}.cu"


def cache_key(spec: KernelSpec) -> bytes:
    """Return a digest of everything that determines the cubin: the whole source text, options, compiler, cuda.core."""
    compiler = config.settings.compiler
    options = f"{spec.architecture.flag} {compilers.STD} {compilers.PTXAS_OPTIONS}"
    parts = (compilers.identity(compiler), cuda_core().__version__, options, spec.name, full_source(spec))
    digest = hashlib.sha256(_KEY_VERSION)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def cubin(spec: KernelSpec) -> bytes:
    """Return a kernel's cubin from the disk cache, or compile and store it. Needs no GPU.

    With FP8MOE_PRINT_COMPILER or FP8MOE_DUMP_DIR the kernel is always compiled, so that there is a log to print.
    Raises what `compile_spec` raises, and ValueError if FP8MOE_DUMP_DIR is not a writable directory.
    """
    settings = config.settings
    key = cache_key(spec)
    cache = open_cache(settings.cache_dir)
    always_compile = settings.print_compiler or settings.dump_dir is not None
    code = None if always_compile else cache.get(key)
    if code is None:
        code, log = compile_spec(spec)
        cache.put(key, code)
        if settings.print_compiler:
            config.log.info("compiled %s of %s, defines %s\n%s", spec.name, spec.source, dict(spec.defines), log)
        if settings.dump_dir is not None:
            _dump(spec, key, code, settings.dump_dir)
    return code


def _dump(spec: KernelSpec, key: bytes, code: bytes, directory: Path) -> None:
    """Write NAME-HASH.cu, .ptx and .cubin, and .sass if a disassembler of the CUDA toolkit is installed."""
    stem = directory / f"{spec.name}-{key.hex()[:12]}"
    text = full_source(spec)
    ptx = compilers.ptx_of(text, _unit_name(spec), config.settings.compiler, spec.architecture.flag)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for suffix, data in ((".cu", text.encode()), (".ptx", ptx), (".cubin", code)):
            stem.with_name(stem.name + suffix).write_bytes(data)
    except OSError as error:
        raise ValueError(
            f"FP8MOE_DUMP_DIR is {str(directory)!r}; it must be a directory that can be written: {error.strerror}"
        ) from error
    for tool, option in (("cuobjdump", "-sass"), ("nvdisasm", "-c")):
        path = compilers.find_tool(tool)
        if path:
            sass = subprocess.run([path, option, f"{stem}.cubin"], capture_output=True, check=True).stdout
            stem.with_name(stem.name + ".sass").write_bytes(sass)
            break


_lock = threading.Lock()
_kernels: dict[KernelSpec, "Kernel"] = {}


def load(spec: KernelSpec) -> "Kernel":
    """Return a kernel that can be launched on any GPU of this process.

    The first call takes the cubin from the disk cache, or compiles it, and loads it; later calls reuse the kernel.

    Safe to call from several threads, and while a CUDA graph is being captured. Raises what `compile_spec` raises, and
    RuntimeError if the driver is missing or too old for the compiled code.
    """
    kernel = _kernels.get(spec)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(spec)
            if kernel is None:
                kernel = _kernels[spec] = _load_cubin(cubin(spec), spec.name)
    return kernel


def is_cached(spec: KernelSpec) -> bool:
    """Return whether the disk cache holds a valid entry for a kernel."""
    return open_cache(config.settings.cache_dir).get(cache_key(spec)) is not None


def compile_all(specs: Iterable[KernelSpec]) -> dict[KernelSpec, bytes]:
    """Return the cubin of every kernel, compiling several in parallel."""
    specs = list(specs)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(specs, pool.map(cubin, specs), strict=True))


def load_all(specs: Iterable[KernelSpec]) -> None:
    """Load every kernel that is not loaded yet, compiling several in parallel."""
    for spec, code in compile_all(spec for spec in specs if spec not in _kernels).items():
        with _lock:
            if spec not in _kernels:
                _kernels[spec] = _load_cubin(code, spec.name)


def _load_cubin(code: bytes, name: str) -> "Kernel":
    from fp8moe.runtime.driver import loading_code

    with loading_code():
        return cuda_core().ObjectCode.from_cubin(code, name=name).get_kernel(name)
