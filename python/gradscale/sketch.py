"""The sketch of a tensor: integer counts that answer every power-of-two loss scale exactly.

Each finite nonzero element |x| = 2^e * (1 + field / 2^23) falls in one of 22 sub-bins of its binade e = -149 .. 127::

    sub 0        {0}                        sub 15   (0x680000, 0x700000)
    sub 1        (0, 0x080000)              sub 16   [0x700000, 0x780000)
    sub 2 .. 12  [k, k + 1) * 0x080000      sub 17   [0x780000, 0x7F0000)
                 with k = sub - 1           sub 18   [0x7F0000, 0x7F8000)
    sub 13       [0x600000, 0x680000)       sub 19   [0x7F8000, 0x7FE000)
    sub 14       {0x680000}                 sub 20   [0x7FE000, 0x7FF000)
                                            sub 21   [0x7FF000, 0x7FFFFF]

The edges are the places where rounding to FP16, BF16 and the 8-bit formats changes its mind; the finer equal ones keep
the L2 share of what is lost within 1e-3. f32 subnormals are normalised by their leading bit. f16, bf16 and 8-bit values are
widened, f64 is rounded to f32 first. Everything is an integer and merges by addition, OR, min and max, so neither order nor
device changes a bit. Only 32- and 64-bit integer operations run on the device (and exact int-to-f32 conversions of
numbers below 2^24, which find the highest bit): MPS has no f64. On an NVIDIA GPU the program's own kernels count (`_cuda`), the same
integers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional, Tuple

from ._cuda import kernels_for
from .errors import MissingDependency, SketchError

try:
    import numpy as np
except ImportError as error:  # pragma: no cover
    raise MissingDependency("importing gradscale.sketch", "no numpy", "numpy", "pip install 'gradscale[torch]'") from error

if TYPE_CHECKING:
    import torch

__all__ = ["BIN_COUNT", "EDGES", "NO_LOWEST_BIT", "STARTS", "SUB_COUNT", "Sketch", "sketch"]

SUB_COUNT = 22
BINADE_COUNT = 277  # e = -149 .. 127
BIN_COUNT = BINADE_COUNT * SUB_COUNT
NO_LOWEST_BIT = 32767

#: The first field of each sub-bin.
STARTS = (
    [0, 1]
    + [k * 0x080000 for k in range(1, 12)]
    + [0x600000, 0x680000, 0x680001, 0x700000, 0x780000, 0x7F0000, 0x7F8000, 0x7FE000, 0x7FF000]
)
#: The edge that is subtracted from a field before it is summed. It differs from the first field in sub-bins 1 and 15,
#: which are open below.
EDGES = [0 if s == 1 else 0x680000 if s == 0x680001 else s for s in STARTS]

# One block's count and sum share a 64-bit word: no sub-bin is wider than 2^19, so the sum over 2^21 elements stays below
# 2^40 and the count needs 21 bits and a half above it.
_BLOCK = 1 << 21
_COUNT_SHIFT = 41
_INFINITY = 0x7F800000
_MAX_I32 = 0x7FFFFFFF

# The flat row a device computes: the head below, then BIN_COUNT packed words (one block), or counts and sums apart.
_ZEROS, _INF_POSITIVE, _INF_NEGATIVE, _NAN, _AMAX, _SMALLEST, _OR, _LOWEST = range(8)
_HEAD = 8


@dataclass(eq=False)
class Sketch:
    """Counts of one tensor's values. ``elements`` is everything, zeros, infinities and NaN included."""

    elements: int
    zeros: int
    inf_positive: int
    inf_negative: int
    nan: int
    #: f32 bits of the largest finite abs; 0 when all are zero or none is finite.
    amax_bits: int
    #: f32 bits of the smallest finite nonzero abs; 0 when there is none.
    smallest_nonzero: int
    #: OR of the 23-bit significand fields of all finite nonzero elements.
    significand_or: int
    #: exponent of the lowest set bit over all finite nonzero elements; 32767 when there is none.
    lowest_bit: int
    #: the nonempty bins, ascending: (e + 149) * 22 + sub
    bins: "np.ndarray[Any, np.dtype[np.uint16]]"
    counts: "np.ndarray[Any, np.dtype[np.uint64]]"
    #: sum of (field - lower edge of the sub-bin) over the elements of each bin
    sums: "np.ndarray[Any, np.dtype[np.uint64]]"

    @classmethod
    def empty(cls) -> "Sketch":
        """The sketch of no element at all; merging it changes nothing."""
        return cls(
            0, 0, 0, 0, 0, 0, 0, 0, NO_LOWEST_BIT,
            np.zeros(0, np.uint16), np.zeros(0, np.uint64), np.zeros(0, np.uint64),
        )  # fmt: skip

    @classmethod
    def from_row(cls, row: "np.ndarray[Any, np.dtype[np.int64]]", absent: int = 0) -> "Sketch":
        """Builds the sketch from what `device_row` computed, plus ``absent`` zeros that a sparse tensor leaves out."""
        table = row[_HEAD : _HEAD + BIN_COUNT]
        bins = np.flatnonzero(table)
        words = table[bins].astype(np.uint64)
        if len(row) == _HEAD + BIN_COUNT:
            counts, sums = words >> np.uint64(_COUNT_SHIFT), words & np.uint64((1 << _COUNT_SHIFT) - 1)
        else:
            counts, sums = words, row[_HEAD + BIN_COUNT :][bins].astype(np.uint64)
        head = [int(v) for v in row[:_HEAD]]
        zeros = head[_ZEROS] + absent
        some = len(bins) > 0
        return cls(
            elements=zeros + head[_INF_POSITIVE] + head[_INF_NEGATIVE] + head[_NAN] + int(counts.sum()),
            zeros=zeros,
            inf_positive=head[_INF_POSITIVE],
            inf_negative=head[_INF_NEGATIVE],
            nan=head[_NAN],
            amax_bits=head[_AMAX],
            smallest_nonzero=head[_SMALLEST] if some else 0,
            significand_or=head[_OR],
            lowest_bit=head[_LOWEST] if some else NO_LOWEST_BIT,
            bins=bins.astype(np.uint16),
            counts=counts,
            sums=sums,
        )

    @property
    def amax(self) -> float:
        """Largest finite abs; 0 when all are zero or none is finite."""
        return float(struct.unpack("<f", struct.pack("<I", self.amax_bits))[0])

    @property
    def finite_nonzero(self) -> int:
        """How many elements lie in the bins."""
        return int(self.counts.sum())

    @property
    def nonfinite(self) -> int:
        """The trace's bits: 1 an inf was seen, 2 a NaN, 4 no element was finite (and there is one)."""
        bits = (1 if self.inf_positive or self.inf_negative else 0) | (2 if self.nan else 0)
        none_finite = self.elements > 0 and self.zeros == 0 and len(self.bins) == 0
        return bits | (4 if none_finite else 0)

    def merge(self, other: "Sketch") -> "Sketch":
        """The sketch of both tensors' elements together. Associative and commutative, to the bit."""
        bins = np.union1d(self.bins, other.bins).astype(np.uint16)
        counts = np.zeros(len(bins), np.uint64)
        sums = np.zeros(len(bins), np.uint64)
        for part in (self, other):
            at = np.searchsorted(bins, part.bins)
            counts[at] += part.counts
            sums[at] += part.sums
        smallest = [s.smallest_nonzero for s in (self, other) if s.smallest_nonzero]
        return Sketch(
            self.elements + other.elements,
            self.zeros + other.zeros,
            self.inf_positive + other.inf_positive,
            self.inf_negative + other.inf_negative,
            self.nan + other.nan,
            max(self.amax_bits, other.amax_bits),
            min(smallest) if smallest else 0,
            self.significand_or | other.significand_or,
            min(self.lowest_bit, other.lowest_bit),
            bins,
            counts,
            sums,
        )

    def to_rows(self) -> "list[tuple[int, int, int]]":
        """The nonempty bins as (bin, count, sum), ascending."""
        return list(zip(self.bins.tolist(), self.counts.tolist(), self.sums.tolist()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sketch):
            return NotImplemented
        return self._scalars() == other._scalars() and self.to_rows() == other.to_rows()

    def _scalars(self) -> "tuple[int, ...]":
        return (
            self.elements, self.zeros, self.inf_positive, self.inf_negative, self.nan,
            self.amax_bits, self.smallest_nonzero, self.significand_or, self.lowest_bit,
        )  # fmt: skip


def produced_in(significand_or: int, exponents_fit: bool, finite_nonzero: int) -> Optional[str]:
    """Reads off which precision produced values with these significands, or None where they cannot tell.

    ``exponents_fit``: in each sampled step every value was a multiple of 2^L and amax < 2^(L+40), L the lowest bit. An FP16
    value times any loss scale keeps both, whatever tensor type it is stored in afterwards.
    """
    if finite_nonzero == 0:
        return None
    if significand_or & 0xFFFF == 0:  # at most 8 significand bits
        return "bf16" if finite_nonzero >= 1000 else None
    if significand_or & 0x1FFF:  # more than 11
        return "fp32"
    return "fp16" if exponents_fit else None


_tables: "dict[Any, tuple[torch.Tensor, torch.Tensor]]" = {}


def _lookup(device: "torch.device") -> "tuple[torch.Tensor, torch.Tensor]":
    """Sub-bin by the top 11 field bits, and the lower edge of each sub-bin, on ``device``."""
    import torch

    pair = _tables.get(device)
    if pair is None:
        starts = np.array(STARTS)
        # 0x1000 divides every edge but the two single values {0} and {0x680000}, which device_row moves down by one.
        last_of_each = np.arange(1 << 11) * 0x1000 + 0xFFF
        sub = np.searchsorted(starts, last_of_each, side="right") - 1
        pair = (
            torch.from_numpy(sub.astype(np.int32)).to(device),
            torch.tensor(EDGES, dtype=torch.int32).to(device),
        )
        _tables[device] = pair
    return pair


def dense_values(tensor: "torch.Tensor") -> "torch.Tensor":
    """The values a tensor stores, as one flat f32 tensor: this rank's shard of a distributed one, the coalesced values of
    a sparse one (absent zeros left out), real and imaginary parts of a complex one."""
    import torch

    tensor = _strided(tensor)
    if tensor.dtype is not torch.float32:
        tensor = tensor.to(torch.float32)
    return tensor.reshape(-1)


def _strided(tensor: "torch.Tensor") -> "torch.Tensor":
    """The values a tensor stores, as a strided tensor of real numbers."""
    import torch

    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce().values()
        else:
            tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        raise SketchError("sketching a tensor", f"dtype {tensor.dtype}", "a floating-point tensor")
    return tensor


def stored_values(tensor: "torch.Tensor") -> "torch.Tensor":
    """As `dense_values`, but in the order of memory, and f16 and bf16 as they are: no copy where the kernels can read the
    tensor itself. For what does not depend on the order."""
    import torch

    tensor = _strided(tensor).resolve_neg()
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        tensor = tensor.to(torch.float32)
    if not tensor.is_contiguous():
        # A transposed or channels-last gradient fills its memory too, in another order.
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda d: -strides[d]))
    return tensor.reshape(-1)


def row_of(tensor: "torch.Tensor") -> "Tuple[torch.Tensor, int]":
    """The sketch of ``tensor`` as a row on its device (`Sketch.from_row` reads it), and how many zeros a sparse one leaves out.
    Waits for nothing."""
    kernels = kernels_for(tensor.device)
    if kernels is None:
        values = dense_values(tensor)
        row = device_row(values)
    else:
        values = stored_values(tensor)
        row = kernels.row(values)
    return row, element_count(tensor) - values.numel()


def device_row(values: "torch.Tensor") -> "torch.Tensor":
    """The sketch of flat f32 ``values`` as one int64 row on their device (`Sketch.from_row` reads it). Waits for nothing."""
    import torch

    blocks = [b for b in values.split(_BLOCK) if b.numel()]
    if len(blocks) == 1:
        return torch.cat(_sketch_block(blocks[0]))
    device = values.device
    head = torch.zeros(_HEAD, dtype=torch.int64, device=device)
    head[_SMALLEST] = _MAX_I32
    head[_LOWEST] = NO_LOWEST_BIT
    counts = torch.zeros(BIN_COUNT, dtype=torch.int64, device=device)
    sums = torch.zeros(BIN_COUNT, dtype=torch.int64, device=device)
    for block in blocks:
        one, packed = _sketch_block(block)
        counts += packed >> _COUNT_SHIFT
        sums += packed & ((1 << _COUNT_SHIFT) - 1)
        head = torch.cat(
            [
                head[:_AMAX] + one[:_AMAX],
                torch.maximum(head[_AMAX], one[_AMAX]).reshape(1),
                torch.minimum(head[_SMALLEST], one[_SMALLEST]).reshape(1),
                (head[_OR] | one[_OR]).reshape(1),
                torch.minimum(head[_LOWEST], one[_LOWEST]).reshape(1),
            ]
        )
    return torch.cat([head, counts, sums])


def joined_rows(one: "torch.Tensor", other: "torch.Tensor") -> "torch.Tensor":
    """The row of both rows' elements together, on their device. Waits for nothing."""
    import torch

    tables = []
    for row in (one, other):
        table = row[_HEAD:]
        if len(table) == BIN_COUNT:  # count and sum share a word
            table = torch.cat([table >> _COUNT_SHIFT, table & ((1 << _COUNT_SHIFT) - 1)])
        tables.append(table)
    head = torch.cat(
        [
            one[:_AMAX] + other[:_AMAX],
            torch.maximum(one[_AMAX], other[_AMAX]).reshape(1),
            torch.minimum(one[_SMALLEST], other[_SMALLEST]).reshape(1),
            (one[_OR] | other[_OR]).reshape(1),
            torch.minimum(one[_LOWEST], other[_LOWEST]).reshape(1),
        ]
    )
    return torch.cat([head, tables[0] + tables[1]])


def _sketch_block(block: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    subs, edges = _lookup(block.device)
    raw = block.contiguous().view(torch.int32)
    bits = raw & _MAX_I32
    finite = bits < _INFINITY
    valid = finite & (bits > 0)
    infinite = bits == _INFINITY

    # A subnormal's bits are a number below 2^23; converted to f32 (exactly) it is normalised: its exponent is the index
    # of the highest bit, its field the field.
    normal = bits >= 0x00800000
    lifted = torch.where(normal, 0, bits).to(torch.float32).view(torch.int32)
    field = torch.where(normal, bits, lifted) & 0x7FFFFF
    binade = torch.where(normal, (bits >> 23) + 22, (lifted >> 23) - 127)  # e + 149

    sub = subs[field >> 12]
    sub = sub - ((field == 0) | (field == 0x680000)).to(torch.int32)
    offset = field - edges[sub]
    # What is not a finite nonzero value goes to one bin past the end, and is cut off.
    index = torch.where(valid, binade * SUB_COUNT + sub, BIN_COUNT).to(torch.int64)
    packed = offset.to(torch.int64) + (1 << _COUNT_SHIFT)
    table = torch.zeros(BIN_COUNT + 1, dtype=torch.int64, device=block.device).scatter_add_(0, index, packed)

    # The lowest set bit of the significand, hidden bit included, found by its exact conversion to f32.
    significand = field | 0x800000
    lowest = ((significand & -significand).to(torch.float32).view(torch.int32) >> 23) - 127
    lowest = binade + lowest - (149 + 23)
    head = torch.stack(
        [
            (bits == 0).sum(),
            (infinite & (raw > 0)).sum(),
            (infinite & (raw < 0)).sum(),
            (bits > _INFINITY).sum(),
            torch.where(finite, bits, 0).max().to(torch.int64),
            torch.where(valid, bits, _MAX_I32).min().to(torch.int64),
            _or_all(torch.where(valid, field, 0)).to(torch.int64),
            torch.where(valid, lowest, NO_LOWEST_BIT).min().to(torch.int64),
        ]
    )
    return head, table[:BIN_COUNT]


def _or_all(values: "torch.Tensor") -> "torch.Tensor":
    """OR of all elements. torch has no such reduction; numpy has, for what lies in host memory."""
    if values.device.type == "cpu":
        return values.new_tensor(int(np.bitwise_or.reduce(values.numpy())))
    return _or_by_folding(values)


def _or_by_folding(values: "torch.Tensor") -> "torch.Tensor":
    """OR of all elements by folding halves; where they overlap, OR does not mind."""
    count = values.numel()
    while count > 1:
        half = (count + 1) // 2
        values = values[:half] | values[count - half :]
        count = half
    return values[0]


def sketch(tensor: "torch.Tensor") -> Sketch:
    """Sketches ``tensor``: any shape, layout, device and floating-point type; order does not matter.

    NaN, +inf, -inf and zeros (either sign; the absent elements of a sparse tensor too) are counted apart. An empty tensor gives
    `Sketch.empty`.

    Raises `SketchError` when the tensor holds no floating-point numbers.
    """
    row, absent = row_of(tensor)
    return Sketch.from_row(row.cpu().numpy(), absent)


def element_count(tensor: "torch.Tensor") -> int:
    """How many real numbers ``tensor`` stands for here: this rank's shard; a complex number is two; absent zeros count."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor.numel() * (2 if tensor.is_complex() else 1)
