"""Writing and reading the chunks of a trace, schema ``gradscale.trace/1``.

A trace is a directory of safetensors files ``rankRRRR-CCCCCC.safetensors``. Each is written to ``<name>.tmp`` beside it, synced
and renamed, so a run killed at any moment leaves whole chunks (and perhaps one ``.tmp``, which readers pass over). The metadata
has one key, ``gradscale``, with JSON text; T steps, N tensors and K sampled steps give the shapes of the arrays::

    step I64 [T]   loss_scale F64 [T]   found_inf U8 [T]   loss F64 [T]   amax F32 [T,N]   nonfinite U8 [T,N]
    sampled I64 [K]   zeros inf_positive inf_negative nan U64 [K,N]
    smallest_nonzero significand_or U32 [K,N]   lowest_bit I16 [K,N]
    indptr I64 [K*N+1]   bins U16 [nnz]   counts U64 [nnz]   sums U64 [nnz]

A probe's samples are the same arrays under ``probe_`` (with ``probe_amax`` and ``probe_nonfinite`` by sample), always unscaled.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from .errors import MissingDependency, TraceError
from .sketch import Sketch

try:
    import numpy as np
    from safetensors.numpy import save as _save
except ImportError as error:  # pragma: no cover
    raise MissingDependency(
        "importing gradscale.trace", str(error), "numpy and safetensors", "pip install 'gradscale[torch]'"
    ) from error

__all__ = ["SCHEMA", "Chunk", "Samples", "chunk_bytes", "chunk_name", "chunk_paths", "read_chunk", "read_trace", "write_chunk"]

SCHEMA = "gradscale.trace/1"
_NAME = re.compile(r"^rank(\d{4,})-(\d{6,})\.safetensors$")
_MAX_HEADER_BYTES = 100_000_000


def chunk_name(rank: int, chunk: int) -> str:
    """The file name of a chunk: ``rank0000-000000.safetensors``."""
    return f"rank{rank:04d}-{chunk:06d}.safetensors"


def chunk_paths(directory: "Union[str, os.PathLike[str]]", rank: Optional[int] = None) -> List[Path]:
    """The chunks in ``directory``, by rank and chunk number; other files (``*.tmp`` too) are passed over."""
    found = []
    for path in Path(directory).iterdir():
        match = _NAME.match(path.name)
        if match and (rank is None or int(match[1]) == rank):
            found.append((int(match[1]), int(match[2]), path))
    return [path for _, _, path in sorted(found)]


@dataclass
class Samples:
    """The sketches of some of a chunk's rows: ``rows[k]`` is the row number, ``sketches[k][n]`` its tensor n.

    A tensor that had no gradient in that step, or of which only amax is kept, has an empty sketch.
    """

    rows: List[int] = field(default_factory=list)
    sketches: List[List[Sketch]] = field(default_factory=list)

    def arrays(self, count: int, prefix: str = "") -> "Dict[str, np.ndarray[Any, Any]]":
        """The arrays of the file, for ``count`` tensors."""
        shape = (len(self.rows), count)
        flat = [s for row in self.sketches for s in row]

        def column(name: str, dtype: Any) -> "np.ndarray[Any, Any]":
            return np.array([getattr(s, name) for s in flat], dtype).reshape(shape)

        indptr = np.zeros(len(flat) + 1, np.int64)
        np.cumsum([len(s.bins) for s in flat], out=indptr[1:])
        out = {
            "sampled": np.array(self.rows, np.int64),
            "zeros": column("zeros", np.uint64),
            "inf_positive": column("inf_positive", np.uint64),
            "inf_negative": column("inf_negative", np.uint64),
            "nan": column("nan", np.uint64),
            "smallest_nonzero": column("smallest_nonzero", np.uint32),
            "significand_or": column("significand_or", np.uint32),
            "lowest_bit": column("lowest_bit", np.int16),
            "indptr": indptr,
            "bins": _joined([s.bins for s in flat], np.uint16),
            "counts": _joined([s.counts for s in flat], np.uint64),
            "sums": _joined([s.sums for s in flat], np.uint64),
        }
        if prefix:
            bits = column("amax_bits", np.uint32)
            amax = bits.view(np.float32).copy()
            amax[column("elements", np.uint64) == 0] = np.nan
            out["amax"] = amax
            out["nonfinite"] = column("nonfinite", np.uint8)
        return {prefix + name: value for name, value in out.items()}


def _joined(parts: "Sequence[np.ndarray[Any, Any]]", dtype: Any) -> "np.ndarray[Any, Any]":
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


@dataclass
class Chunk:
    """One chunk: the metadata (what the JSON says) and the arrays by their name in the file."""

    metadata: Dict[str, Any]
    arrays: "Dict[str, np.ndarray[Any, Any]]"

    @property
    def names(self) -> List[str]:
        """The tensors' names, in column order."""
        return [t["name"] for t in self.metadata["tensors"]]

    def __getitem__(self, name: str) -> "np.ndarray[Any, Any]":
        return self.arrays[name]

    def sketches(self, prefix: str = "") -> Samples:
        """The sampled sketches (``prefix="probe_"``: the probe's), rebuilt; an absent prefix gives none."""
        a = self.arrays
        if prefix + "sampled" not in a:
            return Samples()
        rows = a[prefix + "sampled"].tolist()
        count = len(self.metadata["tensors"])
        indptr = a[prefix + "indptr"]
        out = Samples(rows, [])
        for k, row in enumerate(rows):
            sketches = []
            for n in range(count):
                part = slice(int(indptr[k * count + n]), int(indptr[k * count + n + 1]))
                counts = a[prefix + "counts"][part]
                zeros, positive, negative, nan = (
                    int(a[prefix + key][k, n]) for key in ("zeros", "inf_positive", "inf_negative", "nan")
                )
                amax = a["probe_amax"][k, n] if prefix else a["amax"][row, n]
                sketches.append(
                    Sketch(
                        zeros + positive + negative + nan + int(counts.sum()),
                        zeros,
                        positive,
                        negative,
                        nan,
                        int(np.float32(amax).view(np.uint32)) if len(counts) else 0,
                        int(a[prefix + "smallest_nonzero"][k, n]),
                        int(a[prefix + "significand_or"][k, n]),
                        int(a[prefix + "lowest_bit"][k, n]),
                        a[prefix + "bins"][part],
                        counts,
                        a[prefix + "sums"][part],
                    )
                )
            out.sketches.append(sketches)
        return out


def chunk_bytes(metadata: Mapping[str, Any], arrays: "Mapping[str, np.ndarray[Any, Any]]") -> bytes:
    """A chunk as the bytes of its file; the same content gives the same bytes."""
    text = json.dumps({**metadata, "schema": SCHEMA}, sort_keys=True, allow_nan=False)
    return _save({name: np.ascontiguousarray(a) for name, a in arrays.items()}, metadata={"gradscale": text})


def write_chunk(
    directory: "Union[str, os.PathLike[str]]", metadata: Mapping[str, Any], arrays: "Mapping[str, np.ndarray[Any, Any]]"
) -> Path:
    """Writes a chunk under the name its metadata gives it, by temporary name, fsync and rename; returns the path."""
    data = chunk_bytes(metadata, arrays)
    path = Path(directory) / chunk_name(metadata["rank"], metadata["chunk"])
    write_file(path, data)
    return path


def write_file(path: Path, data: bytes) -> None:
    """Writes ``data`` so that ``path`` is never seen half-written, not even after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if hasattr(os, "O_DIRECTORY"):  # the rename itself is on disk only once the directory is
        directory = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(directory)
        except OSError:  # some network file systems refuse; the chunk is whole all the same
            pass
        finally:
            os.close(directory)


_DTYPES = {"I64": "<i8", "U64": "<u8", "F64": "<f8", "F32": "<f4", "U32": "<u4", "I16": "<i2", "U16": "<u2", "U8": "u1"}
_PER_SAMPLE = {
    "zeros": "U64",
    "inf_positive": "U64",
    "inf_negative": "U64",
    "nan": "U64",
    "smallest_nonzero": "U32",
    "significand_or": "U32",
    "lowest_bit": "I16",
}


def read_chunk(path: "Union[str, os.PathLike[str]]") -> Chunk:
    """Reads one chunk and checks it: types, shapes, order of rows and bins.

    Raises `TraceError` naming the file when it is cut short, foreign or inconsistent.
    """
    path = Path(path)
    doing = f'reading trace chunk "{path}"'
    fix = "delete the file, or record again"
    data = path.read_bytes()
    if len(data) < 8:
        raise TraceError(doing, f"{len(data)} bytes", "at least 8 bytes of safetensors header", fix)
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise TraceError(doing, f"a header of {length} bytes in a file of {len(data)}", "a header inside the file", fix)
    try:
        header = json.loads(data[8 : 8 + length])
        metadata = json.loads(header.pop("__metadata__")["gradscale"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TraceError(
            doing, "no gradscale metadata", f'safetensors metadata "gradscale" of schema {SCHEMA}', "is it a trace?"
        ) from None
    if not isinstance(metadata, dict) or metadata.get("schema") != SCHEMA:
        found = metadata.get("schema") if isinstance(metadata, dict) else metadata
        raise TraceError(doing, f"schema {found!r}", f"schema {SCHEMA!r}", "upgrade gradscale, or record again")
    body = data[8 + length :]
    arrays: "Dict[str, np.ndarray[Any, Any]]" = {}
    for name, entry in header.items():
        try:
            dtype = np.dtype(_DTYPES[entry["dtype"]])
            shape = tuple(int(n) for n in entry["shape"])
            start, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise TraceError(f'{doing}, array "{name}"', repr(entry), f"a dtype of {sorted(_DTYPES)}", fix) from None
        if min(shape, default=0) < 0 or not 0 <= start <= end <= len(body) or end - start != math.prod(shape) * dtype.itemsize:
            raise TraceError(
                f'{doing}, array "{name}", byte {8 + length + start}',
                f"bytes {start}..{end} for shape {list(shape)} in {len(body)}",
                f"{math.prod(shape) * dtype.itemsize} bytes inside the file",
                fix,
            )
        arrays[name] = np.frombuffer(body, dtype, math.prod(shape), start).reshape(shape)
    chunk = Chunk(metadata, arrays)
    _check(doing, fix, chunk)
    return chunk


def _check(doing: str, fix: str, chunk: Chunk) -> None:
    arrays, count = chunk.arrays, len(chunk.metadata.get("tensors", []))

    def expect(name: str, dtype: str, shape: Tuple[int, ...]) -> None:
        array = arrays.get(name)
        found = "no such array" if array is None else f"{array.dtype.str} {list(array.shape)}"
        if array is None or array.dtype != np.dtype(_DTYPES[dtype]) or array.shape != shape:
            raise TraceError(f'{doing}, array "{name}"', found, f"{_DTYPES[dtype]} {list(shape)}", fix)

    def ascending(name: str, values: "np.ndarray[Any, Any]", low: int, high: int) -> None:
        wide = values.astype(np.int64)
        if len(wide) and (wide[0] < low or wide[-1] > high or (np.diff(wide) <= 0).any()):
            raise TraceError(f'{doing}, array "{name}"', "values out of order or range", f"ascending {low}..{high}", fix)

    steps = len(arrays["step"]) if "step" in arrays and arrays["step"].ndim == 1 else 0
    for name, dtype in (("step", "I64"), ("loss_scale", "F64"), ("found_inf", "U8"), ("loss", "F64")):
        expect(name, dtype, (steps,))
    expect("amax", "F32", (steps, count))
    expect("nonfinite", "U8", (steps, count))
    ascending("step", arrays["step"], 0, 2**62)
    for prefix in ("", "probe_"):
        if prefix and "probe_sampled" not in arrays:
            continue
        rows = arrays.get(prefix + "sampled", np.zeros(0, np.int64))
        samples = len(rows)
        expect(prefix + "sampled", "I64", (samples,))
        ascending(prefix + "sampled", rows, 0, steps - 1)
        for name, dtype in _PER_SAMPLE.items():
            expect(prefix + name, dtype, (samples, count))
        if prefix:
            expect("probe_amax", "F32", (samples, count))
            expect("probe_nonfinite", "U8", (samples, count))
        expect(prefix + "indptr", "I64", (samples * count + 1,))
        indptr = arrays[prefix + "indptr"]
        if indptr[0] != 0 or (np.diff(indptr) < 0).any():
            raise TraceError(f'{doing}, array "{prefix}indptr"', "descending row starts", "ascending from 0", fix)
        nonempty = int(indptr[-1])
        expect(prefix + "bins", "U16", (nonempty,))
        expect(prefix + "counts", "U64", (nonempty,))
        expect(prefix + "sums", "U64", (nonempty,))
        bins = arrays[prefix + "bins"].astype(np.int64)
        rises = np.diff(bins) > 0
        starts = indptr[1:-1]
        rises[starts[(starts > 0) & (starts < nonempty)] - 1] = True  # a new row may start lower
        if not rises.all() or (nonempty and bins.max() >= 277 * 22):
            raise TraceError(f'{doing}, array "{prefix}bins"', "bins out of order or range", "ascending within a row", fix)


def read_trace(directory: "Union[str, os.PathLike[str]]", rank: int = 0) -> List[Chunk]:
    """Reads the chunks of one rank, in order.

    Raises `TraceError` when there is none, when one is bad, missing in between or of another run.
    """
    doing = f'reading trace "{directory}"'
    chunks = [read_chunk(path) for path in chunk_paths(directory, rank)]
    if not chunks:
        raise TraceError(doing, f"no chunk of rank {rank}", chunk_name(rank, 0), "has the first step been recorded?")
    numbers = [c.metadata["chunk"] for c in chunks]
    if numbers != list(range(len(chunks))):
        raise TraceError(doing, f"chunks {numbers}", f"0..{len(chunks) - 1}")
    runs = sorted({c.metadata["run_id"] for c in chunks})
    if len(runs) > 1:
        raise TraceError(doing, f"runs {runs}", "one run", "move the other run's chunks to another directory")
    return chunks


def column(chunks: Iterable[Chunk], name: str) -> "np.ndarray[Any, Any]":
    """A per-step array (``step``, ``loss_scale``, ``found_inf``, ``loss``, ``amax``, ``nonfinite``) over all ``chunks``."""
    return np.concatenate([c[name] for c in chunks])
