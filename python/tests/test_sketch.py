"""The sketch against the slow reference, to the bit."""

import numpy as np
import pytest
import torch
from reference import codes_of, reference_sketch

import gradscale.sketch as module
from gradscale.errors import SketchError
from gradscale.sketch import BIN_COUNT, STARTS, Sketch, produced_in, sketch


def from_codes(codes):
    return torch.from_numpy(np.array(codes, np.uint32).view(np.float32).copy())


def edge_codes():
    """Every sub-bin's first field and its neighbours, in every binade, both signs."""
    codes = set()
    for start in STARTS:
        for exponent in range(1, 255):
            codes.add(exponent << 23 | start)
        for p in range(23):  # subnormals: the highest set bit is p
            codes.add(1 << p | start >> (23 - p))
    near = {c + d for c in codes for d in (-1, 0, 1)}
    near |= {0, 1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF}
    near = sorted(c for c in near if 0 <= c <= 0x7FFFFFFF)
    return near + [c | 0x80000000 for c in near]


def test_every_edge_of_every_binade_lands_in_its_bin():
    codes = edge_codes()
    assert sketch(from_codes(codes)) == reference_sketch(codes)


def test_each_value_alone_has_its_own_scalars():
    rng = np.random.default_rng(1)
    codes = edge_codes()
    for code in [codes[i] for i in rng.integers(0, len(codes), 300)] + [0, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x7FC00000]:
        assert sketch(from_codes([code])) == reference_sketch([code]), hex(code)


def test_random_bit_patterns():
    codes = np.random.default_rng(2).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    assert sketch(from_codes(codes)) == reference_sketch(codes)


def test_gradients_as_they_look():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(40_000, generator=g) * torch.exp(4 * torch.randn(40_000, generator=g) - 14)
    x[::7] = 0
    x[::13] = -0.0
    assert sketch(x) == reference_sketch(codes_of(x))


def test_all_fp16_codes():
    x = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.float16)
    assert sketch(x) == reference_sketch(codes_of(x))
    assert sketch(x).significand_or & 0x1FFF == 0


def test_all_bf16_codes():
    codes = np.arange(65536, dtype=np.uint32) << 16
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    s = sketch(x)
    expected = reference_sketch(codes)
    assert s == expected


@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fn"])
def test_all_fp8_codes(name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    assert sketch(x) == reference_sketch(codes_of(x.to(torch.float32)))


def test_f64_is_rounded_to_f32_first():
    values = [1 + 2.0**-24, 1 + 3 * 2.0**-24, 2.0**-150, 3 * 2.0**-151, 1e300, -1e300, 3.4028235677973366e38, 5e-324, 0.1]
    x = torch.tensor(values, dtype=torch.float64)
    with np.errstate(over="ignore"):
        expected = reference_sketch(codes_of(x))
    assert sketch(x) == expected
    assert (expected.inf_positive, expected.inf_negative, expected.zeros) == (2, 1, 2)


def test_blocks_do_not_change_a_bit(monkeypatch):
    codes = np.random.default_rng(4).integers(0, 1 << 32, 5000, dtype=np.uint32)
    whole = sketch(from_codes(codes))
    for block in (1, 7, 4096, 4999, 5000):
        monkeypatch.setattr(module, "_BLOCK", block)
        part = codes if block > 1 else codes[:50]
        assert sketch(from_codes(part)) == (whole if block > 1 else reference_sketch(part))


def test_both_ways_to_or_agree():
    for n in (1, 2, 3, 5, 64, 1000, 1023):
        x = torch.randint(0, 1 << 23, (n,), dtype=torch.int32) & torch.randint(0, 1 << 23, (n,), dtype=torch.int32)
        assert module._or_by_folding(x) == module._or_all(x) == int(np.bitwise_or.reduce(x.numpy()))
        alone = torch.zeros(n, dtype=torch.int32)
        for i in range(n):
            alone[i] = 1 << (i % 23)
            assert module._or_by_folding(alone) == (1 << min(i + 1, 23)) - 1


def test_a_full_block_of_one_value_does_not_carry():
    # The largest offset a sub-bin holds, in every element of the largest block there is.
    n = module._BLOCK + 3
    s = sketch(from_codes([0x7F - 1 << 23 | 0x07FFFF]).expand(n))
    assert s.to_rows() == [((-1 + 149) * 22 + 1, n, n * 0x07FFFF)]


def test_shape_stride_and_sign_do_not_matter():
    x = torch.randn(6, 10, 4)
    expected = sketch(x)
    assert sketch(x.permute(2, 0, 1)) == expected
    assert sketch(-x) == expected
    assert sketch(x[:, ::3]) == sketch(x[:, ::3].contiguous())
    assert sketch(x[0, 0, 0]).elements == 1


def test_empty_tensor_is_the_neutral_element():
    empty = sketch(torch.zeros(0, 3))
    assert empty == Sketch.empty()
    some = sketch(torch.tensor([1.0, 0.0, float("inf")]))
    assert some.merge(empty) == some == empty.merge(some)


def test_merge_is_the_sketch_of_both_in_any_order():
    codes = np.random.default_rng(5).integers(0, 1 << 32, 3000, dtype=np.uint32)
    parts = [sketch(from_codes(p)) for p in np.split(codes, [10, 1000, 1700])]
    whole = sketch(from_codes(codes))
    a, b, c, d = parts
    assert a.merge(b).merge(c).merge(d) == whole
    assert d.merge(b.merge(c.merge(a))) == whole


@pytest.mark.parametrize("block", [1 << 21, 500])
def test_joined_rows_are_the_row_of_both(block, monkeypatch):
    codes = np.random.default_rng(7).integers(0, 1 << 32, 3000, dtype=np.uint32)
    codes[:9], codes[-9:] = 0, 1
    whole = sketch(from_codes(codes))
    monkeypatch.setattr(module, "_BLOCK", block)  # 500: counts and sums apart in the longer of the two
    rows = [module.device_row(from_codes(part)) for part in np.split(codes, [300])]
    assert module.Sketch.from_row(module.joined_rows(*rows).numpy()) == whole
    assert module.Sketch.from_row(module.joined_rows(*rows[::-1]).numpy()) == whole


def test_counts_add_up():
    s = sketch(from_codes(np.random.default_rng(6).integers(0, 1 << 32, 10_000, dtype=np.uint32)))
    assert s.zeros + s.inf_positive + s.inf_negative + s.nan + s.finite_nonzero == s.elements == 10_000
    assert s.bins.max() < BIN_COUNT


def test_absent_elements_of_a_sparse_tensor_are_zeros():
    dense = torch.zeros(5, 3)
    dense[1] = torch.tensor([1.0, 2.0, 0.0])
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([[0.5, 1.0, 0.0], [0.5, 1.0, 0.0]]), (5, 3))
    assert sketch(dense.to_sparse()) == sketch(dense)
    assert sketch(twice) == sketch(dense)


def test_complex_numbers_are_two_reals():
    assert sketch(torch.tensor([1 + 2j, 0j])) == sketch(torch.tensor([1.0, 2.0, 0.0, 0.0]))


def test_integers_are_refused():
    with pytest.raises(SketchError, match="dtype torch.int64, expected a floating-point tensor"):
        sketch(torch.arange(3))


def test_nonfinite_bits_tell_inf_nan_and_nothing_finite_apart():
    inf, nan = float("inf"), float("nan")
    cases = [([1.0], 0), ([inf, 1.0], 1), ([nan, 1.0], 2), ([-inf, nan, 0.0], 3), ([inf], 5), ([nan], 6), ([inf, nan], 7), ([], 0)]
    for values, bits in cases:
        assert sketch(torch.tensor(values)).nonfinite == bits, values


def test_amax_is_the_largest_finite():
    assert sketch(torch.tensor([float("inf"), -3.0, float("nan")])).amax == 3.0
    assert sketch(torch.tensor([float("inf")])).amax == 0.0


@pytest.mark.parametrize(
    "significand_or, exponents_fit, count, expected",
    [
        (0x7FE000, True, 1, "fp16"),  # 11 bits
        (0x002000, True, 1, "fp16"),
        (0x001000, True, 10**6, "fp32"),  # 12 bits
        (0x000001, True, 1, "fp32"),
        (0x7FE000, False, 10**6, None),
        (0x7F0000, True, 1000, "bf16"),  # 8 bits
        (0x7F0000, False, 1000, "bf16"),
        (0x7F0000, True, 999, None),
        (0x008000, True, 1000, "fp16"),  # 9 bits
        (0, True, 1000, "bf16"),
        (0, True, 0, None),
    ],
)
def test_the_capture_rule(significand_or, exponents_fit, count, expected):
    assert produced_in(significand_or, exponents_fit, count) == expected
