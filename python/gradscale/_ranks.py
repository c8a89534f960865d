"""Several ranks, one run.

Up to `max_writers` ranks write their own chunks, and whoever reads the trace merges them. Above that, thousands of small files would
be in the way: the ranks' counts are added up while they are still on the devices, and rank 0 writes. Everything is an integer, so
the order in which ranks are added changes nothing, and both ways give the same bits::

    each step      [ order of amax | -(order of the least) | is NaN ] a column, found_inf     one MAX to rank 0
    sampled steps  [ zeros, +inf, -inf, NaN, counts, sums ] a column                            SUM to rank 0, in parts
                   [ amax, -smallest, -lowest bit, 23 bits of OR, ... ] a column                one MAX to rank 0

OR has no reduction on every backend (NCCL has none), so each of its bits is a flag under MAX.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from ._writer import Column
from .sketch import BIN_COUNT, NO_LOWEST_BIT, Sketch

_HEAD = 8
_SUMS = 4 + 2 * BIN_COUNT
_FIELD_BITS = 23
# amax, -smallest, -lowest, OR of what counts, OR of what teaches the precision, "its exponents do not fit", elements were seen
_MAXIMA = 3 + 2 * _FIELD_BITS + 1
_NOTHING = -(1 << 40)  # below every order of every value: a column without a gradient on this rank
_COLUMNS_A_PART = 256  # 25 MB of sums at a time
_COUNT_SHIFT = 41


def rank_and_world() -> Tuple[int, int]:
    """This process's rank and how many there are; 0 of 1 outside a process group."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def from_rank_0(value: str) -> str:
    """Rank 0's ``value``, on all ranks."""
    if rank_and_world()[1] == 1:
        return value
    held = [value]
    torch.distributed.broadcast_object_list(held, src=0)
    return held[0]


# ---- shards and replicas


def counts_here(tensor: "torch.Tensor") -> bool:
    """Whether this rank is the one that counts its part of ``tensor``: where a distributed tensor is replicated along a mesh
    dimension, the first of the replicas does."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return True
    coordinate = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    if coordinate is None:
        return False
    return all(c == 0 for c, p in zip(coordinate, placements) if p.is_replicate())


def reduction_of(model: "torch.nn.Module", world_size: int) -> "Dict[int, Optional[str]]":
    """By the id of each parameter: whether its hook sees gradients before or after the sum over ranks.

    A parameter that FSDP2 (``fully_shard``) manages is seen after the reduce-scatter. Another distributed tensor is seen complete where its
    mesh spans all ranks and nothing in it is partial. Anything else is seen before: DDP, and a plain process group, reduce later.
    """
    out: "Dict[int, Optional[str]]" = {}
    for parameter in model.parameters():
        if world_size == 1:
            out[id(parameter)] = None
            continue
        placements = getattr(parameter, "placements", None)
        reduced = False
        if placements is not None:
            complete = not any(p.is_partial() for p in placements)
            spans = parameter.device_mesh.size() == world_size  # type: ignore[attr-defined]
            reduced = complete and (spans or any(p.is_shard() for p in placements) and _is_fully_sharded(model))
        out[id(parameter)] = "reduced" if reduced else "unreduced"
    return out


def _is_fully_sharded(model: "torch.nn.Module") -> bool:
    return any(type(m).__name__.startswith("FSDP") for m in model.modules())


# ---- agreeing on columns


def union_of_columns(columns: "List[Column]") -> "Tuple[List[Column], List[int]]":
    """The columns of all ranks (pipeline stages have different ones), the same list everywhere, and where this rank's own went."""
    text = json.dumps([[c.name, c.shape, c.role] for c in columns])
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    seen = torch.tensor([digest, -digest], dtype=torch.int64, device=collective_device())
    torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
    high, low = seen.tolist()
    if high == -low:
        return columns, list(range(len(columns)))
    gathered: "List[Any]" = [None] * torch.distributed.get_world_size()
    described = [(c.name, c.shape, c.elements, c.role, c.reduction) for c in columns]
    torch.distributed.all_gather_object(gathered, described)
    place: "Dict[Tuple[str, str], int]" = {}
    union: "List[Column]" = []
    for part in gathered:
        for name, shape, elements, role, reduction in part:
            if (name, role) not in place:
                place[name, role] = len(union)
                union.append(Column(name, list(shape), elements, role, reduction))
    return union, [place[c.name, c.role] for c in columns]


_device: "Optional[torch.device]" = None


def collective_device(preferred: "Optional[torch.device]" = None) -> "torch.device":
    """A device that the process group can reduce tensors on: ``preferred`` (that of the gradients) where it can."""
    candidates = [preferred] if preferred is not None else []
    if torch.cuda.is_available():
        candidates.append(torch.device("cuda", torch.cuda.current_device()))
    group = torch.distributed.group.WORLD
    for candidate in (*candidates, torch.device("cpu")):
        try:
            group._get_backend(candidate)  # type: ignore[union-attr]
            return candidate
        except (RuntimeError, AttributeError):
            continue
    return torch.device("cpu")


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is set on any rank; waits for all of them."""
    seen = torch.tensor([int(flag)], dtype=torch.int64, device=collective_device())
    torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
    return bool(seen.item())


# ---- the sums


class Reducer:
    """Brings the ranks' steps together on rank 0. Every rank calls the same methods in the same order."""

    def __init__(self, device: "torch.device") -> None:
        self.rank, self.world_size = rank_and_world()
        self.device = collective_device(device)

    def _to_rank_0(self, tensor: "torch.Tensor", op: Any) -> None:
        torch.distributed.reduce(tensor, dst=0, op=op)

    def amax(
        self,
        count: int,
        amax: "Mapping[int, float]",
        bits: "Mapping[int, int]",
        waiting: "Sequence[Tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]",
        largest: "set[int]",
        flags: "Sequence[torch.Tensor]",
        order: Sequence[int],
        encode: "Callable[[float, int], Tuple[int, int, int]]",
    ) -> "torch.Tensor":
        """A step's ``3 * count + 1 + count`` integers, on rank 0 the largest over all ranks: see the module's text. The last ``count`` are 1 +
        the place of each column in this rank's backward."""
        host = np.full((4, count), _NOTHING, np.int64)
        host[2:] = 0
        still_waiting = {entry[0] for entry in waiting}
        for column, value in amax.items():
            if column not in still_waiting:
                host[:3, column] = encode(value, bits[column])
        for place, column in enumerate(order):
            host[3, column] = place + 1
        table = torch.from_numpy(host).to(self.device)
        if waiting:
            last = {entry[0]: i for i, entry in enumerate(waiting)}
            index = torch.tensor([e[0] for e in waiting]).to(self.device)
            low = torch.stack([e[1].to(self.device) for e in waiting]).to(torch.int64)
            is_nan = torch.isnan(torch.stack([e[3].to(self.device) for e in waiting])).to(torch.int64)
            table[1].scatter_reduce_(0, index, -low, "amax")
            table[2].scatter_reduce_(0, index, is_nan, "amax")
            chosen = [e for i, e in enumerate(waiting) if last[e[0]] == i or e[0] in largest]
            index = torch.tensor([e[0] for e in chosen]).to(self.device)
            high = torch.stack([e[2].to(self.device) for e in chosen]).to(torch.int64)
            table[0].scatter_reduce_(0, index, high, "amax")
        found = torch.zeros(1, dtype=torch.int64, device=self.device)
        for flag in flags:
            found = torch.maximum(found, (flag.detach().reshape(1).to(self.device) != 0).to(torch.int64))
        vector = torch.cat([table.reshape(-1), found])
        self._to_rank_0(vector, torch.distributed.ReduceOp.MAX)
        return vector

    def sketches(
        self,
        count: int,
        rows: "Mapping[int, Tuple[torch.Tensor, int]]",
        teaches: "Mapping[int, torch.Tensor]",
        columns: "Optional[Sequence[Column]]",
    ) -> "Optional[List[Sketch]]":
        """The sketch of each column over all ranks, on rank 0; None elsewhere.

        ``teaches``: where a column's precision is to be read off another row than the one that counts. ``columns`` learn it.
        """
        maxima = torch.full((count, _MAXIMA), 0, dtype=torch.int64, device=self.device)
        maxima[:, 1], maxima[:, 2] = -0x7FFFFFFF, -NO_LOWEST_BIT
        shifts = torch.arange(_FIELD_BITS, device=self.device)
        for i, (row, _) in rows.items():
            row = row.to(self.device)
            maxima[i, 0] = row[4]
            maxima[i, 1:3] = -torch.stack([row[5], row[7]])
            maxima[i, 3 : 3 + _FIELD_BITS] = row[6] >> shifts & 1
            head = teaches[i].to(self.device) if i in teaches else row
            maxima[i, 3 + _FIELD_BITS : 3 + 2 * _FIELD_BITS] = head[6] >> shifts & 1
            # amax < 2^(lowest + 40), by the exponent of amax; a subnormal amax always fits.
            maxima[i, -1] = ((head[4] > 0) & ((head[4] >> 23) - 127 >= head[7] + 40)).to(torch.int64)
        self._to_rank_0(maxima, torch.distributed.ReduceOp.MAX)
        sketches: "List[Sketch]" = []
        top = maxima.cpu().numpy() if self.rank == 0 else None
        for start in range(0, count, _COLUMNS_A_PART):
            part = range(start, min(start + _COLUMNS_A_PART, count))
            sums = torch.zeros((len(part), _SUMS), dtype=torch.int64, device=self.device)
            for i in part:
                if i in rows:
                    row, absent = rows[i][0].to(self.device), rows[i][1]
                    sums[i - start, :4] = row[:4]
                    sums[i - start, 0] += absent
                    if len(row) == _HEAD + BIN_COUNT:  # count and sum share a word
                        sums[i - start, 4 : 4 + BIN_COUNT] = row[_HEAD:] >> _COUNT_SHIFT
                        sums[i - start, 4 + BIN_COUNT :] = row[_HEAD:] & ((1 << _COUNT_SHIFT) - 1)
                    else:
                        sums[i - start, 4:] = row[_HEAD:]
            self._to_rank_0(sums, torch.distributed.ReduceOp.SUM)
            if top is not None:
                for i, one in zip(part, sums.cpu().numpy()):
                    sketches.append(_sketch(one, top[i]))
        if top is None:
            return None
        if columns is not None:
            for column, one, most in zip(columns, sketches, top):
                if one.finite_nonzero:
                    column.significand_or |= _or_of(most[3 + _FIELD_BITS : 3 + 2 * _FIELD_BITS])
                    column.exponents_fit = column.exponents_fit and not most[-1]
                    column.finite_nonzero += one.finite_nonzero
        return sketches


def _or_of(flags: "np.ndarray[Any, Any]") -> int:
    return int((flags << np.arange(len(flags))).sum())


def _sketch(sums: "np.ndarray[Any, Any]", most: "np.ndarray[Any, Any]") -> Sketch:
    head = np.array([*sums[:4], most[0], -most[1], _or_of(most[3 : 3 + _FIELD_BITS]), -most[2]], np.int64)
    return Sketch.from_row(np.concatenate([head, sums[4:]]))


def warn_of_failed_probe(step: int) -> None:
    """Said on each rank when another one could not probe."""
    warnings.warn(
        f"gradscale: step {step} was not probed: memory ran out on another rank", RuntimeWarning, stacklevel=3
    )
