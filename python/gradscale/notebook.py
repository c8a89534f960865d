"""A recorded trace in a notebook.

::

    run = gradscale.open("trace/")
    run                       # a table: what was recorded, the worst tensors
    run.steps                 # a row a step: loss_scale, found_inf, loss, amax   (a pandas DataFrame where pandas is)
    run.amax                  # steps x tensors
    run.sketches[0]["layer.weight"]
    run.report()              # the program's page, in the notebook

Ranks are merged as the program merges them: amax is the largest, flags are OR-ed, sketches add up. Scales come out of ``amax`` (it is
divided by each step's ``loss_scale``, as the program shows it); sketches stay as they were recorded.
"""

from __future__ import annotations

import html
import json
import math
import os
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import numpy as np

from .errors import GradscaleError, ProgramError, TraceError
from .sketch import Sketch
from .trace import Chunk, chunk_paths, read_chunk

__all__ = ["Report", "Run", "open"]


def open(
    trace: "Union[str, os.PathLike[str]]", skip_bad: bool = False, pandas: Optional[bool] = None
) -> "Run":
    """Reads the trace in the directory ``trace``, all its ranks.

    ``skip_bad``: go on without chunks that cannot be read, each with a warning. ``pandas``: give tables as DataFrames; by default where
    pandas is installed.

    Raises `TraceError` when there is no chunk, one is bad, or chunks of two runs lie side by side.
    """
    directory = Path(trace)
    doing = f'opening trace "{directory}"'
    if not directory.is_dir():
        raise TraceError(doing, "no such directory", "a directory that a Recorder wrote")
    chunks: List[Chunk] = []
    for path in chunk_paths(directory):
        try:
            chunks.append(read_chunk(path))
        except TraceError as error:
            if not skip_bad:
                raise
            warnings.warn(f"gradscale: passed over: {error}", RuntimeWarning, stacklevel=2)
    if not chunks:
        raise TraceError(doing, "no chunk", "rank0000-000000.safetensors", "has the first step been recorded?")
    runs = sorted({c.metadata["run_id"] for c in chunks})
    if len(runs) > 1:
        raise TraceError(doing, f"runs {runs}", "one run", "move the other run's chunks to another directory")
    if len({c.metadata.get("values") for c in chunks if len(c["step"])}) > 1:
        # The first chunk may have been written before the first scaled step.
        raise TraceError(doing, "scaled values beside unscaled ones", "one kind in a run")
    return Run(directory, chunks, pandas)


class Run:
    """A recorded run; `open` makes it."""

    def __init__(self, path: Path, chunks: Sequence[Chunk], pandas: Optional[bool] = None) -> None:
        self.path = path
        last = chunks[-1].metadata
        self.run_id: str = last["run_id"]
        self.every: Optional[int] = last.get("every")
        self.facts: Dict[str, Any] = {}
        #: whether the recorded values are multiplied by the loss scale, as backward makes them
        self.scaled: bool = last.get("values") == "scaled"
        self.ranks: List[int] = sorted({c.metadata["rank"] for c in chunks})
        #: what the metadata says of each tensor, by column
        self.tensors: List[Dict[str, Any]] = []
        place: Dict[str, int] = {}
        for chunk in chunks:
            for key, value in chunk.metadata.get("facts", {}).items():
                self.facts.setdefault(key, value)
            for tensor in chunk.metadata["tensors"]:
                if tensor["name"] in place:
                    self.tensors[place[tensor["name"]]].update({k: v for k, v in tensor.items() if v is not None})
                else:
                    place[tensor["name"]] = len(self.tensors)
                    self.tensors.append(dict(tensor))
        self._pandas = pandas
        self._merge(chunks, place)

    def _merge(self, chunks: Sequence[Chunk], place: Mapping[str, int]) -> None:
        steps = np.unique(np.concatenate([c["step"] for c in chunks]))
        count = len(self.tensors)
        self._step = steps
        self._scale = np.full(len(steps), np.nan)
        self._loss = np.full(len(steps), np.nan)
        self._found_inf = np.full(len(steps), -1, np.int8)
        self._amax = np.full((len(steps), count), np.nan, np.float32)
        self._nonfinite = np.zeros((len(steps), count), np.uint8)
        none_finite = np.ones((len(steps), count), bool)
        #: step -> tensor -> `Sketch`, as recorded; only the sampled steps
        self.sketches: Dict[int, Dict[str, Sketch]] = {}
        #: the same for the probes, which ran in FP32; always unscaled
        self.probes: Dict[int, Dict[str, Sketch]] = {}
        for chunk in chunks:
            rows = np.searchsorted(steps, chunk["step"])
            columns = [place[n] for n in chunk.names]
            for mine, theirs in ((self._scale, chunk["loss_scale"]), (self._loss, chunk["loss"])):
                mine[rows] = np.where(np.isnan(mine[rows]), theirs, mine[rows])
            recorded = np.where(chunk["found_inf"] == 255, -1, chunk["found_inf"].astype(np.int16)).astype(np.int8)
            self._found_inf[rows] = np.maximum(self._found_inf[rows], recorded)
            at = np.ix_(rows, np.array(columns, np.int64))
            self._amax[at] = np.fmax(self._amax[at], chunk["amax"])
            self._nonfinite[at] |= chunk["nonfinite"] & 3
            none_finite[at] &= (chunk["nonfinite"] & 4 != 0) | np.isnan(chunk["amax"])
            for prefix, into in (("", self.sketches), ("probe_", self.probes)):
                samples = chunk.sketches(prefix)
                for row, sketches in zip(samples.rows, samples.sketches):
                    held = into.setdefault(int(chunk["step"][row]), {})
                    for name, sketch in zip(chunk.names, sketches):
                        held[name] = held[name].merge(sketch) if name in held else sketch
        none_finite &= self._nonfinite != 0
        self._nonfinite |= (none_finite * 4).astype(np.uint8)

    # ---- tables

    @property
    def names(self) -> List[str]:
        """The tensors' names, in column order."""
        return [t["name"] for t in self.tensors]

    @property
    def nonfinite(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Steps x tensors: 1 an inf was seen, 2 a NaN, 4 no element was finite."""
        return self._nonfinite

    @property
    def amax_as_recorded(self) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Steps x tensors: the largest finite abs as it was in backward, NaN where there was no gradient."""
        return self._amax

    @property
    def amax(self) -> Any:
        """Steps x tensors: the largest finite abs of the gradient itself, the loss scale divided out."""
        values = self._amax
        if self.scaled:
            scale = np.where(np.isnan(self._scale), 1.0, self._scale)[:, None]
            with np.errstate(divide="ignore", invalid="ignore"):
                values = (self._amax.astype(np.float64) / scale).astype(np.float32)
        pandas = self._frames()
        if pandas is None:
            return values
        return pandas.DataFrame(values, index=pandas.Index(self._step, name="step"), columns=self.names)

    @property
    def steps(self) -> Any:
        """A row a step: ``step``, ``loss_scale`` and ``loss`` (NaN where not recorded), ``found_inf`` (-1 where not recorded), ``amax`` over all
        gradients with the loss scale divided out, ``sampled``. A DataFrame, or a structured array without pandas."""
        gradients = [i for i, t in enumerate(self.tensors) if t.get("role") != "activation"]
        amax = np.asarray(self.amax)[:, gradients]
        table = np.zeros(
            len(self._step),
            [("step", "<i8"), ("loss_scale", "<f8"), ("found_inf", "i1"), ("loss", "<f8"), ("amax", "<f4"), ("sampled", "?")],
        )
        table["step"], table["loss_scale"], table["loss"] = self._step, self._scale, self._loss
        table["found_inf"] = self._found_inf
        table["amax"] = np.fmax.reduce(amax, axis=1) if gradients else np.nan
        table["sampled"] = np.isin(self._step, list(self.sketches))
        pandas = self._frames()
        return table if pandas is None else pandas.DataFrame(table).set_index("step")

    def _frames(self) -> Any:
        if self._pandas is False:
            return None
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError:
            if self._pandas:
                raise
            return None
        return pandas

    # ---- to look at

    def __len__(self) -> int:
        return len(self._step)

    def __repr__(self) -> str:
        return f"<gradscale run {self.run_id}: {'; '.join(self._summary())}>"

    def _summary(self) -> List[str]:
        overflowed = int((self._found_inf == 1).sum())
        lines = [
            f"{len(self)} steps {self._step[0]} to {self._step[-1]}" if len(self) else "0 steps",
            f"{len(self.tensors)} tensors, {len(self.sketches)} sampled steps, {len(self.probes)} probes",
            f"{overflowed} steps overflowed",
        ]
        scales = self._scale[~np.isnan(self._scale)]
        lines.append(f"loss_scale {scales.min():g} to {scales.max():g}" if len(scales) else "no loss_scale")
        if len(self.ranks) > 1:
            lines.append(f"{len(self.ranks)} ranks")
        return lines

    def _repr_html_(self) -> str:
        """What a notebook shows: names come from files, so everything is escaped."""
        amax = np.asarray(self.amax)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a column without any gradient
            low, high = np.nanmin(amax, axis=0), np.nanmax(amax, axis=0)
        zeros = {n: 0 for n in self.names}
        elements = {n: 0 for n in self.names}
        for held in self.sketches.values():
            for name, sketch in held.items():
                zeros[name] += sketch.zeros
                elements[name] += sketch.elements
        order = sorted(range(len(self.tensors)), key=lambda i: -zeros[self.names[i]] / max(elements[self.names[i]], 1))
        rows = []
        for i in order[:20]:
            tensor = self.tensors[i]
            share = f"{100 * zeros[tensor['name']] / elements[tensor['name']]:.3g} %" if elements[tensor["name"]] else ""
            cells = [
                tensor["name"], "×".join(map(str, tensor.get("shape", []))), tensor.get("produced_in") or "?",
                _number(low[i]), _number(high[i]), share, str(int((self._nonfinite[:, i] != 0).sum())),
            ]  # fmt: skip
            rows.append("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
        more = f"<p>... and {len(order) - 20} more tensors</p>" if len(order) > 20 else ""
        head = "".join(
            f"<th>{h}</th>" for h in ("tensor", "shape", "produced in", "least amax", "largest amax", "zeros", "steps with inf or NaN")
        )
        facts = ", ".join(f"{k}: {v}" for k, v in sorted(self.facts.items()))
        return (
            f"<div><p><b>gradscale run</b> {html.escape(self.run_id)} in {html.escape(str(self.path))}<br>"
            f"{html.escape('; '.join(self._summary()))}<br><small>{html.escape(facts)}</small></p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{more}"
            f"<p><small>amax without the loss scale; zeros are a share of the elements at the sampled steps</small></p></div>"
        )

    def report(
        self, output: "Union[str, os.PathLike[str], None]" = None, program: Optional[str] = None, arguments: Sequence[str] = ()
    ) -> "Report":
        """Runs ``gradscale report`` on the trace; the result shows itself in a notebook.

        ``output``: the directory it writes to, a temporary one by default. ``program``: the program's path; by default ``GRADSCALE_BIN``, or
        ``gradscale`` on PATH. ``arguments``: further ones for it.

        Raises `ProgramError` when the program is not there, or could not do it.
        """
        doing = f'making the report of "{self.path}"'
        found = program or os.environ.get("GRADSCALE_BIN") or shutil.which("gradscale")
        if found is None:
            raise ProgramError(
                doing, "no program gradscale on PATH", "the gradscale program", "install it, or name it with program= or GRADSCALE_BIN"
            )
        directory = Path(tempfile.mkdtemp(prefix="gradscale-report-") if output is None else output)
        command = [found, "report", str(self.path), "-o", str(directory), *map(str, arguments)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
        except OSError as error:
            raise ProgramError(doing, str(error), f'a program that runs at "{found}"') from error
        if done.returncode == 2:
            raise ProgramError(doing, f"exit status 2: {done.stderr.strip()}", "exit status 0")
        return Report(directory, done.stdout, done.stderr)


def _number(value: Any) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"


@dataclass
class Report:
    """What ``gradscale report`` wrote into ``directory``."""

    directory: Path
    stdout: str
    stderr: str = field(repr=False, default="")

    @property
    def page(self) -> Path:
        """The page, one HTML file."""
        return self.directory / "report.html"

    @property
    def json(self) -> Any:
        """The numbers, ``report.json``."""
        try:
            return json.loads((self.directory / "report.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise GradscaleError(f'reading "{self.directory}"', str(error), "report.json") from error

    def __str__(self) -> str:
        return self.stdout

    def _repr_html_(self) -> str:
        page = html.escape(self.page.read_text(encoding="utf-8"), quote=True)
        # A frame of its own: the page's style stays inside, and no script in it could run.
        return f'<iframe srcdoc="{page}" sandbox="" style="width:100%;height:800px;border:0"></iframe>'
