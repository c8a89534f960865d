"""The GPU's kernels, launched as on a GPU, on tensors in host memory by a driver that has none."""

import contextlib
import ctypes

import numpy as np
import pytest
import torch
from reference import codes_of, reference_sketch
from test_sketch import edge_codes, from_codes

import gradscale._cuda as module
from gradscale._cuda import Kernels, kernels_for
from gradscale.recorder import _amax_of, _device_amax
from gradscale.sketch import Sketch, dense_values, device_row, sketch

KINDS = [torch.float32, torch.float16, torch.bfloat16]


def drawn(count, dtype, seed=7):
    """Values of every kind, rare ones too."""
    rng = np.random.default_rng(seed)
    if dtype is torch.float32:
        codes = rng.integers(0, 1 << 32, count, dtype=np.uint32)
        ordinary = (rng.standard_normal(count) * 1e-3).astype(np.float32)
        x = torch.from_numpy(np.where(rng.random(count) < 0.1, codes.view(np.float32), ordinary))
    else:
        x = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, count, dtype=np.int16)).view(dtype)
    x[::11] = 0
    return x


def by_torch(tensor):
    return Sketch.from_row(device_row(dense_values(tensor)).numpy())


@pytest.mark.parametrize("dtype", KINDS)
def test_any_start_and_length_counts_as_torch_does(kernels, dtype):
    whole = drawn(20_000, dtype)
    for start in range(9):
        for count in (1, 2, 7, 8, 31, 257, 8191, 8192, 8193, 9000, 17_001):
            x = whole[start : start + count]
            assert sketch(x) == by_torch(x), (start, count)


@pytest.mark.parametrize("dtype", KINDS[1:])
def test_patterns_count_as_torch_does(kernels, monkeypatch, dtype):
    monkeypatch.setattr(module, "_MANY_HALVES", 1)
    whole = drawn(100_000, dtype)
    skewed = [torch.full((70_000,), v, dtype=dtype) for v in (0.0, -0.0, -1.5, float("inf"), float("nan"))]
    mixed = torch.where(torch.arange(200_000) % 3 == 0, -0.75, 0.5).to(dtype)
    for x in [whole, whole[1:], whole[3:40_000], whole[:5], mixed, *skewed]:
        assert sketch(x) == by_torch(x)
    for window in (1 << 14, 1 << 13):  # a GPU with less shared memory takes several passes
        kernels._window = window
        assert sketch(whole) == by_torch(whole)


def test_a_result_beyond_one_word_a_bin_counts_as_torch_does(kernels, monkeypatch):
    x = drawn(50_000, torch.float32)
    monkeypatch.setattr(module, "_MOST_PACKED", 1000)
    assert len(kernels.row(x)) == 8 + 2 * 6094
    assert sketch(x) == by_torch(x)


def test_sums_beyond_32_bits_carry(kernels):
    # The largest field of a row, more than 2^32 in all, once as neighbours that differ and once as a constant; and packed.
    for codes in ([0x3F87FFFF, 0x3F17FFFE], [0x3F87FFFF], [0x3FFFFFFF, 0x3FFFF000]):
        x = from_codes(codes).repeat(100_000 // len(codes))
        assert sketch(x) == by_torch(x)


def test_every_edge_counts_as_the_reference(kernels):
    codes = edge_codes()
    assert sketch(from_codes(codes)) == reference_sketch(codes)


def decoded(low, high, norm):
    return _amax_of(int(low), int(high), bool(norm.isnan()))


@pytest.mark.parametrize("dtype", KINDS)
def test_extremes_are_torchs(kernels, monkeypatch, dtype):
    x = drawn(30_000, dtype)
    finite = torch.where(torch.isfinite(x), x, torch.ones_like(x))
    inf = finite.clone()
    inf[12345] = -float("inf")
    nan = finite.clone()
    nan[29_999] = float("nan")
    zeros = torch.zeros(40, dtype=dtype)
    full = torch.full((9,), float("inf"), dtype=dtype)
    for values in [x, x[1:], x[5:12_000], x[:3], finite, finite[7:], inf, nan, nan[-1:], zeros, full]:
        low, high, norm = _device_amax(values)
        with monkeypatch.context() as patch:
            patch.setattr("gradscale.recorder.kernels_for", lambda device: None)
            expected = _device_amax(values)
        # Where there is no inf, the smallest is some NaN's payload, which torch may widen otherwise; it tells nothing.
        assert decoded(low, high, norm) == decoded(*expected)


def test_what_fills_its_memory_is_not_copied_and_what_does_not_is(kernels, monkeypatch):
    seen = []
    row = kernels.row
    monkeypatch.setattr(kernels, "row", lambda values: seen.append(values.data_ptr()) or row(values))
    x = torch.randn(4, 6, 5, 3)
    fills = [x, x.permute(3, 1, 0, 2), x.contiguous(memory_format=torch.channels_last), x.half(), x.bfloat16()]
    for tensor in fills:
        assert sketch(tensor) == by_torch(tensor)
        assert seen[-1] == tensor.data_ptr()
    for tensor in (x[:, ::2], x[:, :1].expand(4, 6, 5, 3), x.double(), torch.view_as_complex(torch.randn(5, 2)).conj()):
        assert sketch(tensor) == by_torch(tensor)


def test_without_cuda_there_are_no_kernels():
    assert kernels_for(torch.device("cpu")) is None
    assert kernels_for(torch.device("mps")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_torch_without_a_gpu_or_with_rocm_has_no_kernels(monkeypatch):
    monkeypatch.setattr(module, "_known", {})
    assert kernels_for(torch.device("cuda", 0)) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(module, "_known", {})
    assert kernels_for(torch.device("cuda", 0)) is None


class Refusing:
    """A driver without one function, or whose function fails."""

    def __init__(self, driver, name, missing):
        self._driver, self._name, self._missing = driver, name, missing

    def __getattr__(self, name):
        if name == self._name:
            if self._missing:
                raise AttributeError(name)
            return lambda *arguments: 719
        return getattr(self._driver, name)


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("name", ["cuDeviceGet", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_a_driver_that_refuses_leaves_the_work_to_torch(driver, monkeypatch, name, missing):
    class Stream:
        cuda_stream = 0

        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: Stream())
    monkeypatch.setattr(torch.cuda, "device", lambda place: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)  # the tables stay in host memory
    monkeypatch.setattr(ctypes, "CDLL", lambda library: Refusing(driver, name, missing))
    assert module._find(torch.device("cuda", 0)) is None
    monkeypatch.setattr(ctypes, "CDLL", lambda library: driver)
    assert isinstance(module._find(torch.device("cuda", 0)), Kernels)
