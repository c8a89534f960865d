"""A slow sketch, value by value in Python integers, written from the format's text."""

import numpy as np

from gradscale.sketch import Sketch


def sub_bin(field):
    """Sub-bin and the lower edge its sums are taken from."""
    if field == 0:
        return 0, 0
    if field < 0x080000:
        return 1, 0
    if field < 0x600000:
        k = field // 0x080000
        return k + 1, k * 0x080000
    if field < 0x680000:
        return 13, 0x600000
    if field == 0x680000:
        return 14, 0x680000
    if field < 0x700000:
        return 15, 0x680000
    if field < 0x780000:
        return 16, 0x700000
    if field < 0x7F0000:
        return 17, 0x780000
    if field < 0x7F8000:
        return 18, 0x7F0000
    if field < 0x7FE000:
        return 19, 0x7F8000
    if field < 0x7FF000:
        return 20, 0x7FE000
    return 21, 0x7FF000


def reference_sketch(codes):
    """The sketch of f32 bit patterns."""
    zeros = inf_positive = inf_negative = nan = amax = significand_or = 0
    smallest, lowest_bit = None, 32767
    bins = {}
    for code in (int(c) for c in codes):
        bits = code & 0x7FFFFFFF
        if bits > 0x7F800000:
            nan += 1
            continue
        if bits == 0x7F800000:
            if code >> 31:
                inf_negative += 1
            else:
                inf_positive += 1
            continue
        if bits == 0:
            zeros += 1
            continue
        amax = max(amax, bits)
        smallest = bits if smallest is None else min(smallest, bits)
        if bits < 0x800000:
            p = bits.bit_length() - 1
            e, field = p - 149, (bits << (23 - p)) & 0x7FFFFF
        else:
            e, field = (bits >> 23) - 127, bits & 0x7FFFFF
        significand_or |= field
        trailing = (field & -field).bit_length() - 1
        lowest_bit = min(lowest_bit, e if field == 0 else e - 23 + trailing)
        sub, edge = sub_bin(field)
        count, total = bins.get((e + 149) * 22 + sub, (0, 0))
        bins[(e + 149) * 22 + sub] = (count + 1, total + field - edge)
    keys = sorted(bins)
    return Sketch(
        len(codes), zeros, inf_positive, inf_negative, nan, amax, smallest or 0, significand_or, lowest_bit,
        np.array(keys, np.uint16),
        np.array([bins[k][0] for k in keys], np.uint64),
        np.array([bins[k][1] for k in keys], np.uint64),
    )  # fmt: skip


def codes_of(tensor):
    """The f32 bit patterns of a tensor, widened or rounded to f32 by numpy, not by torch."""
    return tensor.detach().numpy().astype(np.float32).reshape(-1).view(np.uint32)
