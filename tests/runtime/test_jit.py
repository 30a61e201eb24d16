"""The JIT without a GPU: sources, compiling for real, the compiler's report, the disk cache and its faults."""

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import fp8moe
from fp8moe.runtime import compilers, config, cubin_cache, jit
from fp8moe.runtime.architectures import SM90
from tests.errors import refused
from tests.ptxas import compile_report, read_report

COMMON = """\
#pragma once
__device__ __forceinline__ int twice(int x) { return 2 * x; }
"""

MAIN = """\
#include "common.cuh"
#include "more.cuh"
extern "C" __global__ void scale(int* x) { x[threadIdx.x] = FACTOR * twice(x[threadIdx.x]) + EXTRA; }
extern "C" __global__ void shared(int* x) {
    __shared__ int buffer[256];
    buffer[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = buffer[255 - threadIdx.x];
}
"""

MORE = '#include "common.cuh"\n__device__ constexpr int EXTRA = 3;\n'

# 64 values live at once within 24 registers: they must spill.
SPILLS = """\
extern "C" __global__ void __maxnreg__(24) spills(float* x) {
    float v[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = x[i * 32 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i * 32 + threadIdx.x] = v[63 - i] * v[(i * 7) % 64];
}
__device__ __noinline__ int far(int a, int* p) { return p[a] + 1; }
extern "C" __global__ void calls(int* p) { p[0] = far(p[1], p); }
"""

SCALE = jit.KernelSpec("main.cu", "scale", (("FACTOR", 3),))
SHARED = replace(SCALE, name="shared")


def use(**changes):
    """Change settings for this test; the fixture below puts them back."""
    config.settings = replace(config.settings, **changes)


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch):
    """A source directory and an empty cache of this test's own."""
    directory = tmp_path / "cuda"
    directory.mkdir()
    for name, text in (("main.cu", MAIN), ("common.cuh", COMMON), ("more.cuh", MORE), ("spills.cu", SPILLS)):
        (directory / name).write_text(text)
    monkeypatch.setitem(jit.SOURCE_DIRS, "sm90", (directory,))
    monkeypatch.setattr(config, "settings", config.settings)
    use(cache_dir=tmp_path / "cache", compiler="nvrtc", print_compiler=False, dump_dir=None)
    return directory


@pytest.fixture
def compiles(monkeypatch):
    """Counts how often the compiler runs."""
    calls = []
    original = compilers.compile_source

    def counted(text, name, *options):
        calls.append(name)
        return original(text, name, *options)

    monkeypatch.setattr(compilers, "compile_source", counted)
    return calls


def new_process_cache():
    """What a new process starts with: nothing but the disk."""
    cubin_cache.open_cache.cache_clear()


def entries():
    return [path for path in (config.settings.cache_dir / "kernels" / "entries").rglob("*") if path.is_file()]


# --- sources


def test_includes_are_inlined_once_with_the_names_and_lines_of_their_files():
    text = jit.full_source(SCALE)
    assert text.startswith("#define FACTOR 3\n")
    assert text.count("int twice(int x)") == 1
    assert "#include" not in text and "#pragma once" not in text
    assert '#line 3 "main.cu"\nextern "C"' in text


def test_compiler_messages_name_the_file_and_its_line(sources):
    (sources / "more.cuh").write_text('#include "common.cuh"\n\n__device__ int broken = undeclared;\n')
    refused(RuntimeError, r"more\.cuh\(3\): error.*undeclared", jit.compile_spec, SCALE)


@pytest.mark.parametrize("header", ['"absent.cuh"', "<cuda_fp8.h>"])
def test_a_header_from_elsewhere_is_refused(sources, header):
    (sources / "main.cu").write_text(f"#include {header}\n")
    refused(ValueError, header.strip('"<>'), jit.full_source, SCALE)


def test_an_if_of_what_is_no_macro_is_refused(sources):
    text = (sources / "main.cu").read_text()
    (sources / "main.cu").write_text(f"#if WIDE\n#endif\n{text}")
    for prelude in ("", "constexpr int WIDE = 1;\n"):
        spec = replace(SCALE, prelude=prelude)
        refused(ValueError, "^main.cu: #if reads WIDE, which no macro defines", jit.compile_spec, spec)
    jit.compile_spec(replace(SCALE, defines=(*SCALE.defines, ("WIDE", 1))))


def test_a_missing_source_is_named():
    refused(ValueError, "nothing.cu", jit.full_source, jit.KernelSpec("nothing.cu", "k"))


def test_files_include_those_of_other_folders_by_name(sources, tmp_path, monkeypatch):
    before = jit.full_source(SCALE)
    other = tmp_path / "other"
    other.mkdir()
    (sources / "common.cuh").rename(other / "common.cuh")
    refused(ValueError, r"no CUDA source 'common\.cuh' in cuda/", jit.full_source, SCALE)
    monkeypatch.setitem(jit.SOURCE_DIRS, "sm90", (sources, other))
    assert jit.full_source(SCALE) == before


def test_a_source_that_cannot_be_read_is_named(sources):
    (sources / "more.cuh").unlink()
    (sources / "more.cuh").mkdir()
    refused(ValueError, r"'more\.cuh' in .*cuda/ cannot be read: Is a directory", jit.full_source, SCALE)


# --- compiling


def test_report():
    compiled = jit.compile_spec(SHARED)
    assert compiled.cubin[:4] == b"\x7fELF"
    report = read_report("shared", compiled.log)
    assert 0 < report.registers < 64
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.static_smem == 1024
    assert "Compiling entry function 'shared' for 'sm_90a'" in compiled.log
    assert compile_report(SCALE).static_smem == 0


def test_report_of_spills():
    report = compile_report(jit.KernelSpec("spills.cu", "spills"))
    assert report.registers <= 24
    assert report.spill_stores > 0 and report.spill_loads > 0
    calls = compile_report(jit.KernelSpec("spills.cu", "calls"))
    assert calls.spill_stores == 0


def test_spills_of_a_function_that_is_not_inlined_count_for_its_kernels():
    log = textwrap.dedent("""\
        ptxas info    : Compiling entry function 'k' for 'sm_90a'
        ptxas info    : Function properties for k
        ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
        ptxas info    : Used 40 registers, used 2 barriers, 160 bytes cumulative stack size, 512 bytes smem
        ptxas info    : Compiling entry function 'other' for 'sm_90a'
        ptxas info    : Function properties for other
        ptxas         .     0 bytes stack frame, 1000 bytes spill stores, 1000 bytes spill loads
        ptxas info    : Used 255 registers, used 1 barriers
        ptxas info    : Function properties for _Z3farv
            8 bytes stack frame, 20 bytes spill stores, 30 bytes spill loads
        """)
    report = read_report("k", log)
    assert (report.registers, report.static_smem, report.stack) == (40, 512, 16)
    assert (report.spill_stores, report.spill_loads) == (24, 38)


def test_a_report_that_cannot_be_read_is_an_error():
    with pytest.raises(RuntimeError, match="could not read the ptxas report"):
        read_report("k", "ptxas info : Compiling entry function 'k' for 'sm_90a'")


def test_a_kernel_name_that_is_not_there_lists_those_that_are():
    refused(RuntimeError, "'absent'.*scale, shared", jit.compile_spec, replace(SCALE, name="absent"))


def test_a_compile_error_holds_the_log():
    with pytest.raises(RuntimeError, match=r'scale\.cu[\s\S]*identifier "FACTOR" is undefined'):
        jit.compile_spec(replace(SCALE, defines=()))


def test_prelude_is_compiled():
    spec = jit.KernelSpec("main.cu", "scale", prelude="constexpr int FACTOR = 5;")
    assert jit.compile_spec(spec).cubin != jit.compile_spec(replace(spec, prelude="constexpr int FACTOR = 6;")).cubin


def test_nvrtc_missing(monkeypatch):
    from cuda.bindings import nvrtc

    def missing():
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    refused(RuntimeError, "pip install nvidia-cuda-nvrtc", jit.compile_spec, SCALE)


def test_cuda_python_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    refused(RuntimeError, "pip install cuda-python", jit.compile_spec, SCALE)


# --- nvcc


@pytest.mark.skipif(compilers.find_tool("nvcc") is None, reason="nvcc is not installed")
def test_nvcc(compiles):
    use(compiler="nvcc")
    compiled = jit.compile_spec(SHARED)
    assert compiled.cubin[:4] == b"\x7fELF"
    report = read_report("shared", compiled.log)
    assert report.static_smem == 1024 and report.registers > 0
    with pytest.raises(RuntimeError, match=r'nvcc could not compile[\s\S]*main\.cu\(3\)[\s\S]*"FACTOR" is undefined'):
        jit.compile_spec(replace(SCALE, defines=()))
    count = len(compiles)
    first = jit.cubin(SHARED)
    new_process_cache()
    assert jit.cubin(SHARED) == first
    assert len(compiles) == count + 1


def test_nvcc_missing(monkeypatch, tmp_path):
    use(compiler="nvcc")
    compilers.identity.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    for entry in (jit.compile_spec, jit.cubin):
        refused(RuntimeError, "FP8MOE_COMPILER=nvcc.*CUDA_HOME", entry, SCALE)


def test_nvcc_is_found_under_cuda_home(monkeypatch, tmp_path):
    tool = tmp_path / "toolkit" / "bin" / "nvcc"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert compilers.find_tool("nvcc") == str(tool)


# --- the cache key


def test_the_key_covers_everything_that_decides_the_code(sources, monkeypatch):
    def key(spec=SCALE):
        compilers.identity.cache_clear()
        return jit.cache_key(spec)

    keys = [key(), key(SHARED), key(replace(SCALE, defines=(("FACTOR", 4),))), key(replace(SCALE, prelude="int;"))]
    keys.append(key(replace(SCALE, architecture=SM90._replace(flag="sm_100a"))))
    (sources / "common.cuh").write_text(COMMON + "// changed\n")
    keys.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(compilers, "PTXAS_OPTIONS", ("-v", "-O1"))
        keys.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(compilers.metadata, "version", lambda wheel: "99.0")
        keys.append(key())
    with monkeypatch.context() as patch:
        import cuda.core

        patch.setattr(cuda.core, "__version__", "99.0")
        keys.append(key())
    assert len(set(keys)) == len(keys)
    (sources / "common.cuh").write_text(COMMON)
    assert key() == keys[0]


def test_the_key_covers_the_compiler(monkeypatch):
    nvrtc = jit.cache_key(SCALE)
    use(compiler="nvcc")
    monkeypatch.setattr(compilers, "identity", lambda compiler: f"{compiler} 1.0")
    nvcc = jit.cache_key(SCALE)
    monkeypatch.setattr(compilers, "identity", lambda compiler: f"{compiler} 1.1")
    assert len({nvrtc, nvcc, jit.cache_key(SCALE)}) == 3


def test_the_identity_of_nvrtc_without_its_wheel(monkeypatch):
    def absent(wheel):
        raise compilers.metadata.PackageNotFoundError(wheel)

    monkeypatch.setattr(compilers.metadata, "version", absent)
    compilers.identity.cache_clear()
    assert compilers.identity("nvrtc").startswith("nvrtc 1")
    compilers.identity.cache_clear()


# --- the disk cache


def test_the_second_process_does_not_compile(compiles):
    first = jit.cubin(SCALE)
    new_process_cache()
    assert jit.cubin(SCALE) == first
    assert len(compiles) == 1
    assert len(entries()) == 1


def test_the_cache_directory_is_private():
    old = os.umask(0)
    try:
        jit.cubin(SCALE)
    finally:
        os.umask(old)
    for directory in (config.settings.cache_dir, config.settings.cache_dir / "kernels"):
        assert directory.stat().st_mode & 0o777 == 0o700


def flip_one_bit(data):
    return data[:-200] + bytes([data[-200] ^ 1]) + data[-199:]


def other_architecture_with_a_plain_digest(data):
    elf = b"\x7fELF" + bytes(4000)
    return cubin_cache._MAGIC + hashlib.sha256(elf).digest() + elf


FAULTS = {
    "truncated": lambda data: data[:-100],
    "one bit": flip_one_bit,
    "half a header": lambda data: data[:20],
    "empty": lambda data: b"",
    "garbage": lambda data: os.urandom(5000),
    "a bare cubin": lambda data: data[cubin_cache._HEADER :],
    "another architecture": other_architecture_with_a_plain_digest,
}


def damage(path, fault):
    if fault == "another kernel":
        jit.cubin(SHARED)
        (other,) = (entry for entry in entries() if entry != path)
        path.write_bytes(other.read_bytes())
    elif fault == "a dangling link":
        path.unlink()
        path.symlink_to(path.parent / "absent")
    else:
        path.write_bytes(FAULTS[fault](path.read_bytes()))


@pytest.mark.parametrize("fault", [*FAULTS, "another kernel", "a dangling link"])
def test_a_bad_entry_is_compiled_again_and_replaced(compiles, fault):
    sound = jit.cubin(SCALE)
    (path,) = entries()
    damage(path, fault)
    for expected in (1, 0):  # the second time the entry is sound again
        new_process_cache()
        del compiles[:]
        assert jit.cubin(SCALE) == sound
        assert len(compiles) == expected


def test_an_entry_that_cannot_be_replaced_does_not_break_the_run(compiles):
    sound = jit.cubin(SCALE)
    (path,) = entries()
    path.unlink()
    path.mkdir()
    for _ in range(2):
        new_process_cache()
        with pytest.warns(RuntimeWarning, match="FP8MOE_CACHE_DIR"):
            assert jit.cubin(SCALE) == sound
    assert len(compiles) == 3


def test_an_unreadable_entry_is_compiled_again(compiles, monkeypatch):
    sound = jit.cubin(SCALE)
    new_process_cache()

    def deny(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", deny)
        assert jit.cubin(SCALE) == sound
    assert len(compiles) == 2


def test_a_read_only_directory_is_read_and_not_written(compiles, monkeypatch):
    sound = jit.cubin(SCALE)
    new_process_cache()

    def deny(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", deny)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.cubin(SCALE) == sound
    assert len(compiles) == 1
    with pytest.warns(RuntimeWarning, match=r"not kept in .*Read-only file system.*FP8MOE_CACHE_DIR"):
        assert jit.cubin(SHARED)[:4] == b"\x7fELF"


def test_a_directory_that_cannot_be_made(compiles, tmp_path):
    (tmp_path / "file").write_text("in the way")
    use(cache_dir=tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match="FP8MOE_CACHE_DIR"):
        assert jit.cubin(SCALE)[:4] == b"\x7fELF"
    assert jit.cubin(SCALE)[:4] == b"\x7fELF"
    assert len(compiles) == 2


@pytest.mark.parametrize("inner", [False, True])
def test_a_directory_that_others_can_write_is_not_used(compiles, inner):
    sound = jit.cubin(SCALE)
    (entry,) = entries()
    directory = config.settings.cache_dir / "kernels" if inner else config.settings.cache_dir
    directory.chmod(0o777)
    before = entry.stat().st_mtime_ns
    new_process_cache()
    with pytest.warns(RuntimeWarning, match="mode 777"):
        assert jit.cubin(SCALE) == sound
    assert len(compiles) == 2
    assert entry.stat().st_mtime_ns == before


def test_a_directory_of_another_user_is_not_used(compiles, monkeypatch):
    jit.cubin(SCALE)
    new_process_cache()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        jit.cubin(SCALE)
    assert len(compiles) == 2


def run_python(code, cache_dir, **popen):
    root = Path(fp8moe.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "FP8MOE_CACHE_DIR": str(cache_dir)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


def test_two_processes_may_compile_the_same_kernel_at_once(sources, compiles):
    code = f"""
        import hashlib, pathlib
        from fp8moe.runtime import jit
        jit.SOURCE_DIRS["sm90"] = (pathlib.Path({str(sources)!r}),)
        spec = jit.KernelSpec("main.cu", "scale", (("FACTOR", 3),))
        print(hashlib.sha256(jit.cubin(spec)).hexdigest())
    """
    processes = [run_python(code, config.settings.cache_dir) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert len(entries()) == 1
    assert hashlib.sha256(jit.cubin(SCALE)).hexdigest() == outputs[0][0].strip()
    assert not compiles


def in_four_threads(call):
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(call, [SCALE] * 4))


def test_threads_may_compile_the_same_kernel_at_once():
    assert len(set(in_four_threads(jit.cubin))) == 1


def test_a_second_thread_waits_until_cuda_core_is_whole():
    """Both threads are the first to use it, and the second comes while the first one imports it."""
    code = """
        import sys, threading
        from fp8moe.runtime import jit
        keys = []
        second = threading.Thread(target=lambda: keys.append(jit.cache_key(jit.KernelSpec("sample.cu", "sample"))))

        class Meanwhile:
            def find_spec(self, name, *_):
                if name == "cuda.core._launcher":
                    second.start()
                    second.join(0.3)

        sys.meta_path.insert(0, Meanwhile())
        keys.append(jit.cache_key(jit.KernelSpec("sample.cu", "sample")))
        second.join()
        print(len(keys), len(set(keys)))
    """
    output, errors = run_python(code, config.settings.cache_dir).communicate(timeout=120)
    assert output.split() == ["2", "1"], errors


def test_from_the_disk_cache_takes_milliseconds_and_does_not_load_the_compiler(sources):
    jit.cubin(SCALE)
    code = f"""
        import pathlib, time
        import cuda.core
        from fp8moe.runtime import jit
        jit.SOURCE_DIRS["sm90"] = (pathlib.Path({str(sources)!r}),)
        spec = jit.KernelSpec("main.cu", "scale", (("FACTOR", 3),))
        before = "libnvrtc" in open("/proc/self/maps").read()  # PyTorch for CUDA loads it
        start = time.process_time()  # other processes may have the CPUs meanwhile
        jit.cubin(spec)
        print(time.process_time() - start)
        print(before != ("libnvrtc" in open("/proc/self/maps").read()))
    """
    process = run_python(code, config.settings.cache_dir)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    seconds, loaded = output.split()
    assert float(seconds) < 0.05
    assert loaded == "False"


def test_load_compiles_once_for_many_threads(monkeypatch):
    calls = []

    def slow(code, name):
        calls.append(name)
        time.sleep(0.05)
        return object()

    monkeypatch.setattr(jit, "_load_cubin", slow)
    monkeypatch.setattr(jit, "_kernels", {})
    assert len(set(map(id, in_four_threads(jit.load)))) == 1
    assert calls == ["scale"]


# --- what the user can look at


def test_print_compiler_prints_the_log_even_when_the_kernel_is_cached(caplog):
    caplog.set_level("INFO", "fp8moe")
    jit.cubin(SCALE)
    assert caplog.text == ""
    use(print_compiler=True)
    jit.cubin(SCALE)
    printed = caplog.text
    assert "compiled scale of main.cu, defines {'FACTOR': 3}" in printed
    assert "registers" in printed and "spill stores" in printed


def test_dump_dir(tmp_path):
    use(dump_dir=tmp_path / "a" / "dump")
    code = jit.cubin(SCALE)
    files = {path.suffix: path for path in config.settings.dump_dir.iterdir()}
    assert {".cu", ".ptx", ".cubin"} <= set(files)
    assert all(path.name.startswith("scale-") for path in files.values())
    assert files[".cu"].read_text() == jit.full_source(SCALE)
    assert ".target sm_90a" in files[".ptx"].read_text()
    assert files[".cubin"].read_bytes() == code
    has_disassembler = any(compilers.find_tool(tool) for tool in ("cuobjdump", "nvdisasm"))
    assert (".sass" in files) == has_disassembler


def test_a_dump_dir_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for directory, reason in ((file, "File exists"), (file / "inner", "Not a directory")):
        use(dump_dir=directory)
        with pytest.raises(ValueError) as error:
            jit.cubin(SCALE)
        expected = f"FP8MOE_DUMP_DIR is {str(directory)!r}; it must be a directory that can be written: {reason}"
        assert str(error.value) == expected
    assert not file.read_bytes()


def test_dump_dir_writes_sass_with_the_toolkit(tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    tool = tools / "cuobjdump"
    tool.write_text('#!/bin/sh\necho "sass of $2"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    use(dump_dir=tmp_path / "dump")
    jit.cubin(SCALE)
    (sass,) = (tmp_path / "dump").glob("scale-*.sass")
    assert sass.read_text().startswith("sass of ") and sass.read_text().strip().endswith(".cubin")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_dump_dir_with_nvcc(tmp_path):
    use(dump_dir=tmp_path / "dump", compiler="nvcc")
    jit.cubin(SCALE)
    (ptx,) = (tmp_path / "dump").glob("scale-*.ptx")
    assert ".target sm_90a" in ptx.read_text()
