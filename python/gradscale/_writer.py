"""The open chunk of a trace: rows come in, files go out.

It knows nothing of the model, so it can outlive it: the last chunk is still written when the recorder is collected or the
interpreter exits.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np

from .errors import TraceError, TraceExists
from .sketch import NO_LOWEST_BIT, Sketch, produced_in
from .trace import SCHEMA, Samples, chunk_paths, read_chunk, write_chunk


@dataclass
class Column:
    """One recorded tensor, and what its sampled values have shown so far about the precision that produced them."""

    name: str
    shape: List[int]
    elements: int
    role: str = "parameter"
    reduction: Optional[str] = None
    backward_order: Optional[int] = None
    significand_or: int = 0
    exponents_fit: bool = True
    finite_nonzero: int = 0

    def learn(self, sketch: Sketch) -> None:
        """Takes a sampled sketch into account for `produced_in`."""
        if sketch.lowest_bit == NO_LOWEST_BIT:
            return
        self.significand_or |= sketch.significand_or
        self.finite_nonzero += sketch.finite_nonzero
        self.exponents_fit = self.exponents_fit and sketch.amax < math.ldexp(1.0, sketch.lowest_bit + 40)

    @property
    def produced_in(self) -> Optional[str]:
        """By the capture rule, for this tensor alone."""
        return produced_in(self.significand_or, self.exponents_fit, self.finite_nonzero)


def believed(columns: List[Column]) -> List[Optional[str]]:
    """`produced_in` of each column. "fp16" is believed only where those tensors have 1000 finite nonzero elements together:
    a handful of values fits in 11 significand bits by chance."""
    alone = [c.produced_in for c in columns]
    evidence = sum(c.finite_nonzero for c, p in zip(columns, alone) if p == "fp16")
    return [None if p == "fp16" and evidence < 1000 else p for p in alone]


@dataclass
class Row:
    """One step. ``amax`` and ``nonfinite`` may be shorter than the columns that are known later."""

    step: int
    loss_scale: float
    found_inf: int
    loss: float
    amax: "np.ndarray[Any, np.dtype[np.float32]]"
    nonfinite: "np.ndarray[Any, np.dtype[np.uint8]]"
    sketches: Optional[List[Sketch]] = None
    probe: Optional[List[Sketch]] = None


@dataclass
class Writer:
    """Collects rows and writes a chunk whenever it is full; the first holds the first step alone."""

    directory: Path
    run_id: str
    rank: int
    world_size: int
    every: int
    chunk_steps: int
    facts: Dict[str, Any]
    columns: List[Column] = field(default_factory=list)
    scaled: bool = False
    chunk: int = 0
    rows: List[Row] = field(default_factory=list)
    # The chunk written last, kept until the next row: a probe of its last step may still come.
    closed: List[Row] = field(default_factory=list)
    done: bool = False
    # Another rank writes for this one.
    silent: bool = False

    def __post_init__(self) -> None:
        self._process = os.getpid()
        if self.silent:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        there = chunk_paths(self.directory, self.rank)
        if there:
            try:
                whose = f"run {read_chunk(there[0]).metadata['run_id']}"
            except TraceError:
                whose = "unreadable"
            raise TraceExists(
                f'recording to "{self.directory}"',
                f"{len(there)} chunks of rank {self.rank} ({whose})",
                "a directory without chunks of this rank",
                "give each run its own directory, or delete the old one",
            )

    def add(self, row: Row) -> None:
        """Takes a finished step; writes the chunk when that fills it."""
        if self.silent:
            return
        self.closed = []
        self.rows.append(row)
        if self.chunk == 0 or len(self.rows) >= self.chunk_steps:
            self.flush()

    def add_probe(self, step: int, sketches: List[Sketch]) -> None:
        """Attaches a probe's sketches to a recorded step; a chunk that is already written is written again."""
        for row in self.rows:
            if row.step == step:
                row.probe = sketches
                return
        for row in self.closed:
            if row.step == step:
                row.probe = sketches
                self._write(self.closed, self.chunk - 1)

    def flush(self) -> None:
        """Writes the open chunk, if it has any row, and opens the next."""
        if self.rows:
            self._write(self.rows, self.chunk)
            self.closed, self.rows = self.rows, []
            self.chunk += 1

    def close(self) -> None:
        """Writes what is open, once; a forked child (a data loader's worker) leaves its parent's trace alone."""
        if not self.done and os.getpid() == self._process:
            self.done = True
            self.flush()

    def _write(self, rows: List[Row], chunk: int) -> None:
        count = len(self.columns)
        steps = len(rows)
        amax = np.full((steps, count), np.nan, np.float32)
        nonfinite = np.zeros((steps, count), np.uint8)
        samples, probes = Samples(), Samples()
        for t, row in enumerate(rows):
            amax[t, : len(row.amax)] = row.amax
            nonfinite[t, : len(row.nonfinite)] = row.nonfinite
            for part, sketches in ((samples, row.sketches), (probes, row.probe)):
                if sketches is not None:
                    part.rows.append(t)
                    part.sketches.append(sketches + [Sketch.empty()] * (count - len(sketches)))
        arrays: "Dict[str, np.ndarray[Any, Any]]" = {
            "step": np.array([r.step for r in rows], np.int64),
            "loss_scale": np.array([r.loss_scale for r in rows], np.float64),
            "found_inf": np.array([r.found_inf for r in rows], np.uint8),
            "loss": np.array([r.loss for r in rows], np.float64),
            "amax": amax,
            "nonfinite": nonfinite,
            **samples.arrays(count),
            **(probes.arrays(count, "probe_") if probes.rows else {}),
        }
        write_chunk(self.directory, self._metadata(chunk), arrays)

    def _metadata(self, chunk: int) -> Dict[str, Any]:
        produced = believed(self.columns)
        facts = dict(self.facts)
        if facts.get("precision") is None:
            facts.pop("precision", None)
            seen = {p for c, p in zip(self.columns, produced) if c.role != "activation"}
            for precision in ("fp16", "fp32"):
                if precision in seen:
                    facts["precision"] = precision
                    break
            else:
                if "bf16" in seen:  # all of them: no neighbour has more than 8 significand bits
                    facts["precision"] = "bf16"
        tensors = [
            {
                "name": c.name,
                "shape": c.shape,
                "elements": c.elements,
                "role": c.role,
                "produced_in": p,
                "reduction": c.reduction,
                "backward_order": c.backward_order,
            }
            for c, p in zip(self.columns, produced)
        ]
        return {
            "schema": SCHEMA,
            "run_id": self.run_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "chunk": chunk,
            "tensors": tensors,
            "values": "scaled" if self.scaled else "unscaled",
            "every": self.every,
            "facts": facts,
        }


def plain_facts(facts: Dict[str, Any]) -> Dict[str, Any]:
    """The facts JSON can hold: strings, booleans and finite numbers as they are, the rest as text."""
    out: Dict[str, Any] = {}
    for key, value in facts.items():
        plain = value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value))
        out[str(key)] = value if plain else str(value)
    return out

