"""The parts of launching that need no GPU: layouts that TMA takes, launch attributes, arguments, the SM limit."""

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from cuda.bindings import driver

from fp8moe.runtime import config, launch
from fp8moe.runtime.launch import planned
from tests.errors import refused

SUCCESS = driver.CUresult.CUDA_SUCCESS


def strides_of(tensor, shape, strides):
    return launch._map_strides(tensor, shape, strides)


def test_strides_of_a_plain_matrix_are_kept():
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    assert strides_of(x, (64, 128), (128, 1)) == (128, 1)
    assert strides_of(x.view(torch.uint8), (4, 64, 64), (64, 256, 1)) == (64, 256, 1)


@pytest.mark.parametrize(
    ("shape", "strides", "mapped"),
    [
        ((1, 5), (5, 1), (4, 1)),  # one row of any pitch
        ((7, 1), (4, 1), (4, 1)),  # the scales of one token: (K/128, M = 1)
        ((7, 1), (4, 9), (4, 1)),
        ((1, 1), (3, 1), (4, 1)),
        ((3, 1, 8), (40, 2, 1), (40, 4, 1)),
    ],
)
def test_the_stride_of_a_dimension_of_size_1_does_not_matter(shape, strides, mapped):
    assert strides_of(torch.zeros(256), shape, strides) == mapped


@pytest.mark.parametrize(
    ("shape", "strides", "message"),
    [
        ((8, 8), (10, 1), "multiples of 4 elements"),
        ((8, 8), (1, 8), "innermost must be 1"),
        ((8, 8), (-8, 1), "not be negative"),
        ((8, 0), (8, 1), "between 1 and"),
        ((8, 8), (8,), "same 1 to 5 dimensions"),
        ((1,) * 6, (1,) * 6, "same 1 to 5 dimensions"),
        ((8, 33), (32, 1), "past the storage"),
        ((9, 8), (32, 1), "past the storage"),
    ],
)
def test_a_layout_that_cannot_be_mapped(shape, strides, message):
    refused(ValueError, message, strides_of, torch.zeros(8, 32), shape, strides)


def test_the_storage_offset_counts():
    x = torch.zeros(8, 32)
    assert strides_of(x[4:], (4, 32), (32, 1)) == (32, 1)
    refused(ValueError, "past the storage", strides_of, x[4:], (5, 32), (32, 1))


@pytest.mark.parametrize(
    ("box", "size", "swizzle"),
    [
        ((64, 128), 1, 128),
        ((256, 64), 2, 128),
        ((64,), 4, 0),
        ((1, 4), 4, 0),
        ((8, 32), 1, 32),
        ((2, 8, 2, 8, 64), 1, 64),
    ],
)
def test_boxes(box, size, swizzle):
    launch._check_box(box, len(box), size, swizzle)


@pytest.mark.parametrize(
    ("box", "size", "swizzle", "message"),
    [
        ((64, 256), 1, 128, "256 bytes .* at most the swizzle of 128"),
        ((64, 8), 1, 0, "8 bytes"),
        ((257, 64), 1, 0, "1 to 256"),
        ((0, 64), 1, 0, "1 to 256"),
        ((64,), 1, 0, "2 dimensions"),
        ((64, 64), 1, 96, "swizzle is 96"),
    ],
)
def test_a_box_that_tma_does_not_take(box, size, swizzle, message):
    refused(ValueError, message, launch._check_box, box, 2, size, swizzle)


def test_tensor_map_arguments():
    x = torch.zeros(64, 128, dtype=torch.uint8)
    layout = {"shape": (64, 128), "strides": (128, 1), "box": (64, 128)}
    refused(TypeError, "torch.float64", launch.tensor_map, torch.zeros(1, dtype=torch.float64), **layout)
    refused(ValueError, "l2_promotion is 100", launch.tensor_map, x, **layout, l2_promotion=100)
    refused(ValueError, "tensor is on cpu", launch.tensor_map, x, **layout, swizzle=128)


def test_every_type_and_mode_has_a_name_in_the_driver():
    for names, enumeration, prefix in (
        (launch._TMA_TYPES, driver.CUtensorMapDataType, "DATA_TYPE_"),
        (launch._SWIZZLES, driver.CUtensorMapSwizzle, "SWIZZLE_"),
        (launch._PROMOTIONS, driver.CUtensorMapL2promotion, "L2_PROMOTION_"),
    ):
        for name in names.values():
            assert hasattr(enumeration, f"CU_TENSOR_MAP_{prefix}{name}")


def test_a_map_calls_the_driver_only_for_a_new_address(monkeypatch):
    calls = []
    results = iter((SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE, SUCCESS))
    monkeypatch.setattr(
        driver, "cuTensorMapReplaceAddress", lambda _, pointer: calls.append(pointer) or (next(results),)
    )
    tma = launch.TensorMap(driver.CUtensorMap(), 256)
    tma.replace_address(256)
    assert calls == []
    tma.replace_address(512)
    tma.replace_address(512)
    assert calls == [512]
    refused(RuntimeError, "cuTensorMapReplaceAddress failed: CUDA_ERROR_INVALID_VALUE", tma.replace_address, 8)
    tma.replace_address(8)  # what was refused is not taken for the present address
    assert calls == [512, 8, 8]


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(
    ("grid", "cluster"), [((132, 1, 1), (2, 1, 1)), ((8, 6, 4), (2, 3, 4)), ((7, 1, 1), (1, 1, 1))]
)
def test_the_launch_configuration(grid, cluster, pdl):
    made = launch._launch_config(grid, (128, 2, 1), cluster, 5000, pdl)
    assert (made.gridDimX, made.gridDimY, made.gridDimZ) == grid  # in blocks
    assert (made.blockDimX, made.blockDimY, made.blockDimZ) == (128, 2, 1)
    assert made.sharedMemBytes == 5000
    values = {attribute.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_"): attribute.value for attribute in made.attrs}
    assert made.numAttrs == len(values)
    assert ("CLUSTER_DIMENSION" in values) == (cluster != (1, 1, 1))
    assert ("PROGRAMMATIC_STREAM_SERIALIZATION" in values) == pdl
    if cluster != (1, 1, 1):
        size = values["CLUSTER_DIMENSION"].clusterDim
        assert (size.x, size.y, size.z) == cluster
    if pdl:
        assert values["PROGRAMMATIC_STREAM_SERIALIZATION"].programmaticStreamSerializationAllowed == 1


def test_a_cluster_must_divide_the_grid():
    with pytest.raises(ValueError, match=r"\(133, 1, 1\) blocks.*\(2, 1, 1\)"):
        launch._launch_config((133, 1, 1), (128, 1, 1), (2, 1, 1), 0, False)


@pytest.fixture
def enqueued(monkeypatch):
    """Has each launch read by a function, of the stream, the kernel and the addresses of its arguments; a list of it.

    A launch fails for which the function returns None.
    """

    def start(read):
        launches = []

        def enqueue(config, function, parameters, extra):
            found = read(int(config.hStream), int(function), (ctypes.c_void_p * 4).from_address(parameters))
            launches.extend([] if found is None else [found])
            return (driver.CUresult.CUDA_ERROR_LAUNCH_FAILED if found is None else SUCCESS,)

        monkeypatch.setattr(driver, "cuLaunchKernelEx", enqueue)
        monkeypatch.setattr(launch, "_prepare", lambda *args, **options: None)
        return launches

    return start


def word(kind, address):
    return kind.from_address(address).value


def test_a_launch_takes_the_values_that_its_arguments_hold(enqueued):
    def read(stream, function, pointers):
        count = word(ctypes.c_int32, pointers[2])
        return None if count < 0 else (stream, function, pointers[0], word(ctypes.c_int64, pointers[1]), count)

    launches = enqueued(read)
    tma = launch.TensorMap(driver.CUtensorMap(), 0)
    pointer, count = ctypes.c_int64(), ctypes.c_int(7)
    launcher = launch.Launcher(SimpleNamespace(handle=99), grid=4, block=32, args=(tma, pointer, count))
    for stream, value in ((0, 1 << 40), (4096, 16)):
        pointer.value = value
        launcher.launch(stream)
    assert launches == [(0, 99, tma.address, 1 << 40, 7), (4096, 99, tma.address, 16, 7)]
    count.value = -1
    refused(RuntimeError, "cuLaunchKernelEx failed: CUDA_ERROR_LAUNCH_FAILED", launcher.launch, 0)


def test_a_launch_with_pointers(enqueued):
    kinds = ctypes.c_int64, ctypes.c_int64, ctypes.c_int32
    launches = enqueued(lambda stream, function, pointers: (stream, *map(word, kinds, pointers[:3])))
    launcher = launch.PointerLauncher(SimpleNamespace(handle=99), grid=4, block=32, pointers=2, args=(ctypes.c_int(7),))
    launcher.launch(0, 1 << 46, 16)
    for addresses in ((16,), (16, 32, 48)):
        with pytest.raises(ValueError):
            launcher.launch(0, *addresses)
    launcher.launch(4096, 32, 1 << 46)
    assert launches == [(0, 1 << 46, 16, 7), (4096, 32, 1 << 46, 7)]


def test_sizes_of_one_to_three_dimensions():
    assert launch._dim3(5) == (5, 1, 1)
    assert launch._dim3((5,)) == (5, 1, 1)
    assert launch._dim3((5, 6)) == (5, 6, 1)
    assert launch._dim3((5, 6, 7)) == (5, 6, 7)


def test_the_limit_on_sms(monkeypatch):
    monkeypatch.setattr(launch, "_multiprocessors", lambda index: 132)
    for limit, expected in ((None, 132), (64, 64), (500, 132)):
        monkeypatch.setattr(config, "settings", replace(config.settings, num_sms=limit))
        assert launch.num_sms(0) == expected


def test_a_launch_with_tensors(monkeypatch, enqueued):
    class Sizes(ctypes.Structure):
        _pointers_ = 2
        _fields_ = (("x", ctypes.c_int64), ("y", ctypes.c_int64), ("rows", ctypes.c_int64))

    launches = enqueued(
        lambda stream, function, pointers: sum(
            ([*(ctypes.c_int64 * count).from_address(pointers[i])] for i, count in enumerate((1, 2, 3))), []
        )
    )
    monkeypatch.setattr(launch, "device_guard", lambda index: nullcontext())
    monkeypatch.setattr(launch, "current_stream", lambda index: 0)
    options = {"grid": 4, "block": 32, "pointers": 1}
    args = (ctypes.c_int64 * 2)(), Sizes(rows=7), ctypes.c_int(3)
    launcher = launch.PointerLauncher(SimpleNamespace(handle=99), args=args, **options)
    x, y = torch.zeros(2), torch.zeros(3)
    launcher(x, None, y, y, None)
    assert launches == [[x.data_ptr(), 0, y.data_ptr(), y.data_ptr(), 0, 7]]
    refused(ValueError, "expected 5 addresses, got 2", launcher, x, y)


# ---- the cache of launch plans ----


@pytest.fixture
def built(monkeypatch):
    """A planned function, and the arguments of each plan that it has built."""
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(launch, "device_guard", lambda index: nullcontext())
    calls = []

    @planned
    def build(device_index, *sizes, pdl=False):
        calls.append((device_index, sizes, pdl))
        return object()

    return build, calls


def test_a_plan_is_built_once_for_its_arguments_and_settings(built, monkeypatch):
    plan, calls = built
    first = plan(0, 1, 2)
    assert plan.find(0, 1, 2) is plan(0, 1, 2) is first
    others = [plan(1, 1, 2), plan(0, 2, 1), plan(0, 1, 2, pdl=True), plan(0, 1, None)]
    monkeypatch.setattr(config, "settings", replace(config.settings, num_sms=7))
    assert plan.find(0, 1, 2) is None
    others.append(plan(0, 1, 2))
    assert len({first, *others}) == len(calls) == 6


class Pair(NamedTuple):
    data: torch.Tensor
    scale: torch.Tensor | None


def test_a_plan_depends_on_layouts_not_on_addresses(built):
    plan, _ = built
    x = torch.zeros(4, 8)
    made = plan(0, Pair(x, None), x)
    assert plan.find(0, Pair(torch.ones(4, 8), None), x.clone()) is made
    for other in (x[:3], x.T.contiguous().T, x.bfloat16()):
        assert plan.find(0, Pair(other, None), x) is None
        assert plan.find(0, Pair(x, other), x) is None
        assert plan.find(0, Pair(x, None), other) is None


class Selected(NamedTuple):
    data: torch.Tensor
    name: str

    def layouts(self):
        return self.data.shape


def test_a_named_tuple_says_what_counts(built):
    plan, _ = built
    made = plan(0, Selected(torch.zeros(4, 8), "a"))
    assert plan.find(0, Selected(torch.zeros(8, 4).T, "b")) is made
    assert plan.find(0, Selected(torch.zeros(3, 8), "a")) is None


def test_two_functions_do_not_share_plans(built):
    plan, _ = built
    other = planned(lambda device_index, *sizes: object())
    assert plan(0, 1) is not other(0, 1)


def test_the_oldest_plan_goes(built, monkeypatch):
    monkeypatch.setattr(launch, "_MAX_PLANS", 3)
    plan, _ = built
    kept = [plan(0, i) for i in range(5)]
    assert [plan.find(0, i) for i in range(5)] == [None, None, *kept[2:]]


def test_a_plan_that_cannot_be_built_is_not_kept(monkeypatch):
    monkeypatch.setattr(launch, "device_guard", lambda index: nullcontext())
    plan = planned(lambda index: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            plan(0)
    assert plan.find(0) is None
