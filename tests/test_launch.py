"""The parts of launching that need no GPU: layouts that TMA takes, grids in clusters, the SM limit."""

from dataclasses import replace

import pytest
import torch

from fp8moe import config
from fp8moe.kernels import launch


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
    with pytest.raises(ValueError, match=message):
        strides_of(torch.zeros(8, 32), shape, strides)


def test_the_storage_offset_counts():
    x = torch.zeros(8, 32)
    assert strides_of(x[4:], (4, 32), (32, 1)) == (32, 1)
    with pytest.raises(ValueError, match="past the storage"):
        strides_of(x[4:], (5, 32), (32, 1))


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
    with pytest.raises(ValueError, match=message):
        launch._check_box(box, 2, size, swizzle)


def test_tensor_map_arguments():
    x = torch.zeros(64, 128, dtype=torch.uint8)
    layout = {"shape": (64, 128), "strides": (128, 1), "box": (64, 128)}
    with pytest.raises(TypeError, match="torch.float64"):
        launch.tensor_map(torch.zeros(1, dtype=torch.float64), **layout)
    with pytest.raises(ValueError, match="l2_promotion is 100"):
        launch.tensor_map(x, **layout, l2_promotion=100)
    with pytest.raises(ValueError, match="device-accessible"):
        launch.tensor_map(x, **layout, swizzle=128)


def test_every_type_and_mode_has_a_name_in_cuda_core():
    from cuda.core._tensor_map import TensorMapDataType, TensorMapL2Promotion, TensorMapSwizzle

    assert set(launch._TMA_TYPES.values()) <= set(TensorMapDataType.__members__)
    assert set(launch._SWIZZLES.values()) <= set(TensorMapSwizzle.__members__)
    assert set(launch._PROMOTIONS.values()) <= set(TensorMapL2Promotion.__members__)


@pytest.mark.parametrize("dtype", launch._TMA_TYPES)
def test_cuda_core_sees_the_address_and_layout_of_each_type(dtype):
    from cuda.core.utils import StridedMemoryView

    x = torch.zeros(64, 64).to(dtype)[2:]
    view = StridedMemoryView.from_any_interface(torch.as_strided(x, (1, 3, 32), (16, 128, 1)), stream_ptr=-1)
    assert view.ptr == x.data_ptr()
    assert view.shape == (1, 3, 32) and view.strides == (16, 128, 1)


@pytest.mark.parametrize(
    ("grid", "cluster", "clusters"),
    [((132, 1, 1), (2, 1, 1), (66, 1, 1)), ((8, 6, 4), (2, 3, 4), (4, 2, 1)), ((7, 1, 1), (1, 1, 1), (7, 1, 1))],
)
def test_grid_in_clusters(grid, cluster, clusters):
    assert launch.clusters_in(grid, cluster) == clusters


def test_a_cluster_must_divide_the_grid():
    with pytest.raises(ValueError, match=r"\(133, 1, 1\) blocks.*\(2, 1, 1\)"):
        launch.clusters_in((133, 1, 1), (2, 1, 1))


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


def test_streams_are_wrapped_once(monkeypatch):
    handles = iter((4096, 4096, 8192))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: next(handles), raising=False)
    launch._stream.cache_clear()
    first, again, other = (launch.current_stream(0) for _ in range(3))
    assert first is again and other is not first
    assert first.__cuda_stream__() == (0, 4096) and other.__cuda_stream__() == (0, 8192)
    launch._stream.cache_clear()
