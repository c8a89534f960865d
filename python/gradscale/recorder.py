"""The recorder: gradients are caught while backward makes them, and every step becomes a row of the trace.

::

    backward ── post-accumulate hooks ──► amax, inf/NaN bits, every k-th step a sketch   (stay on the device)
                     └─ first hook of a step: a copy of the scaler's scale
    step()   ── one read-back ──► a row ──► open chunk ──► rankRRRR-CCCCCC.safetensors

Because everything is taken during backward, `Recorder.step` may stand anywhere before ``zero_grad``: after ``unscale_``,
after clipping, after ``scaler.update()``. Values are recorded as backward made them, that is multiplied by the loss scale.

Caveats. With gradient accumulation the hook sees the growing sum once a micro-batch; the last call before ``step()`` gives amax
and sketch, while inf and NaN bits of all calls count. Of a module that is called several times in a step, amax and sketch are of all its calls'
activation gradients together. Parameters that are first given to the model later are not seen.
"""

from __future__ import annotations

import fnmatch
import gc
import math
import os
import sys
import uuid
import warnings
import weakref
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

from .errors import MissingDependency, ModelError, ProbeError, RecorderClosed, ScalerConflict

try:
    import torch
except ImportError as error:
    raise MissingDependency("importing gradscale.Recorder", "no torch", "torch", "pip install 'gradscale[torch]'") from error

import numpy as np

from ._cuda import kernels_for
from ._ranks import Reducer, any_rank, counts_here, from_rank_0, rank_and_world, reduction_of, union_of_columns, warn_of_failed_probe
from ._writer import Column, Row, Writer, plain_facts
from .sketch import Sketch, dense_values, element_count, joined_rows, row_of, stored_values

__all__ = ["Recorder"]

Scaler = Any  # a torch.amp.GradScaler, or anything with get_scale()

_INF = math.inf
_NOT_RECORDED = 255
# 2 * (f32 bits) + this, in wrapping 32-bit arithmetic, sorts inf < NaN < finite by magnitude: the minimum tells of inf and NaN, the
# maximum is the largest finite abs, in one pass and without a branch.
_ORDER = 0x01000000 - 0x80000000
_LOWEST_FINITE = _ORDER
_I32_MIN = -0x80000000


class _Pending:
    """What the hooks of one step have seen so far."""

    def __init__(self, sketching: bool) -> None:
        self.sketching = sketching
        self.order: List[int] = []  # columns, as backward reached them
        self.amax: Dict[int, float] = {}
        self.bits: Dict[int, int] = {}
        # column, smallest and largest ordered bits, a norm that is NaN if any value is: scalars that wait on their device
        self.waiting: List[Tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.largest: Set[int] = set()  # columns whose amax is that of all calls
        self.rows: Dict[int, Tuple[torch.Tensor, int]] = {}
        # The first micro-batch's sketch is the one whose significands tell the precision: a sum has more bits.
        self.first: Dict[int, torch.Tensor] = {}
        self.captured = False
        self.scales: List[Tuple[Any, Any]] = []  # scaler, its scale when the first hook of backward fired
        self.loss: Any = None
        # Of all ranks together, where they were added up.
        self.vector: Optional[torch.Tensor] = None
        self.merged: Optional[List[Sketch]] = None
        self.found_inf = False

    def take(self, host: "np.ndarray[Any, Any]") -> None:
        """Decodes what `Reducer.amax` gave."""
        self.found_inf = bool(host[-1] > 0)
        high, low, is_nan, place = host[:-1].reshape(4, -1).tolist()
        seen = [i for i, h in enumerate(high) if h >= _I32_MIN]
        for i in seen:
            self.amax[i], self.bits[i] = _amax_of(-low[i], high[i], bool(is_nan[i]))
        self.order = sorted((i for i in seen if place[i] > 0), key=lambda i: (place[i], i))

    def move(self, moved: Mapping[int, int]) -> None:
        """Renumbers columns."""
        self.order = [moved.get(i, i) for i in self.order]
        self.largest = {moved.get(i, i) for i in self.largest}
        self.waiting = [(moved.get(e[0], e[0]), *e[1:]) for e in self.waiting]
        self.amax = {moved.get(i, i): v for i, v in self.amax.items()}
        self.bits = {moved.get(i, i): v for i, v in self.bits.items()}
        self.rows = {moved.get(i, i): v for i, v in self.rows.items()}
        self.first = {moved.get(i, i): v for i, v in self.first.items()}

    def see(self, column: int, tensor: "torch.Tensor", largest: bool = False) -> None:
        """Takes in a gradient. ``largest``: amax is that of all calls, not of the last."""
        bits_so_far = self.bits.get(column)
        if bits_so_far is None:
            self.order.append(column)
            self.bits[column] = bits_so_far = 0
        if _reads_at_once(tensor):
            amax, bits = _cpu_amax(tensor)
            if largest and column in self.amax:
                amax = max(amax, self.amax[column])
                self.bits[column] = _bits_of_both(bits_so_far, bits)
            elif bits:
                self.bits[column] = bits_so_far | bits
            self.amax[column] = amax
            return
        if largest:
            self.largest.add(column)
        if tensor.numel() == 0:
            self.amax[column] = 0.0
        else:
            self.waiting.append((column, *_device_amax(tensor)))

    def sketch(self, column: int, tensor: "torch.Tensor", together: bool = False) -> None:
        """Sketches a gradient; the last call of a step counts, or with ``together`` the elements of all calls."""
        row, absent = row_of(tensor)
        if column in self.rows:
            before, absent_before = self.rows[column]
            if together:
                row, absent = joined_rows(before, row), absent_before + absent
            elif column not in self.first:
                self.first[column] = before
        self.rows[column] = (row, absent)


def _reads_at_once(tensor: "torch.Tensor") -> bool:
    """Whether looking at a value of this tensor waits for nothing; elsewhere results stay on the device until `step`."""
    return tensor.is_cpu


def _cpu_amax(tensor: "torch.Tensor") -> Tuple[float, int]:
    if tensor.dtype is not torch.float32 or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        tensor = dense_values(tensor)
    if tensor.numel() == 0:
        return 0.0, 0
    low, high = torch.aminmax(tensor)
    amax = max(-low.item(), high.item())
    if amax < _INF:  # a NaN comes out of aminmax on both sides
        return amax + 0.0, 0
    values = dense_values(tensor)
    finite = values[torch.isfinite(values)]
    bits = (1 if torch.isinf(values).any() else 0) | (2 if torch.isnan(values).any() else 0)
    if finite.numel() == 0:
        return 0.0, bits | 4
    return float(finite.abs().max()), bits


def _device_amax(tensor: "torch.Tensor") -> "Tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    kernels = kernels_for(tensor.device)
    if kernels is not None:
        return kernels.extremes(stored_values(tensor))
    values = dense_values(tensor)
    order = torch.tensor(_ORDER, dtype=torch.int32)
    low, high = torch.aminmax(torch.add(order, values.view(torch.int32), alpha=2))
    return low, high, torch.linalg.vector_norm(values, _INF)


def _amax_of(low: int, high: int, is_nan: bool) -> Tuple[float, int]:
    """Decodes what `_device_amax` left on the device."""
    bits = (1 if low == _I32_MIN else 0) | (2 if is_nan else 0)
    if high < _LOWEST_FINITE:
        return 0.0, bits | 4
    code = np.array([(high - _ORDER) // 2], np.uint32)
    return float(code.view(np.float32)[0]), bits


def _bits_of_both(one: int, other: int) -> int:
    """The bits of two tensors' elements together: no element is finite only where none is in either."""
    return (one | other) & 3 | one & other & 4


def _order_of(amax: float, bits: int) -> Tuple[int, int, int]:
    """What `_device_amax` would have left for these: largest ordered bits, minus the smallest, is NaN. They merge by maximum."""
    code = int(np.float32(amax).view(np.uint32))  # a Python integer: twice it leaves 32 bits
    high = _I32_MIN if bits & 4 else 2 * code + _ORDER
    return high, -_I32_MIN if bits & 1 else 0, bits >> 1 & 1


class Recorder:
    """Records a run's gradients into the directory ``trace``, to be read by the ``gradscale`` program.

    ``model``: the module that is trained, wrapped or not; columns are its parameters, named as ``named_parameters()`` names them
    without DDP's ``module.`` and compile's ``_orig_mod.``. ``every``: a sketch each so many steps (step 0 always; amax is kept every
    step). ``chunk_steps``: steps a file; the first file holds step 0 alone and is written at once. ``scaler``: the loss scaler, or a
    list of them when they share one scale; giving it to `step` does as well. ``loss_scale``: a fixed scale, or a function that
    returns it, where the loss is multiplied by hand. ``activations``: globs of module names; the gradients of those leaf modules'
    outputs and inputs are recorded too. ``forward``: the amax of those modules' (or every leaf module's) outputs is recorded as well.
    ``max_writers``: in a process group, up to so many ranks write their own chunks; above, the ranks' counts are added up and rank 0 writes. ``reduction``: "unreduced" or
    "reduced", where it should not be told from the kind of model whether gradients are recorded before or after they are summed over ranks.
    ``facts``: strings and numbers to keep with the run. ``precision``: what the run computes in ("fp16", "bf16", "fp32"), where it
    should not be read off the values. ``overflow_lines``: one line on stderr for each step that overflowed. ``run_id``: what ties the chunks of a run together; by default a random hexadecimal text, the same on all ranks.

    Use it as a context manager, call `close`, or let the interpreter's exit write the open chunk. The training result stays the same
    to the bit.

    Raises `TraceExists` when the directory holds this rank's chunks already, `ModelError` when there is nothing to record.
    """

    def __init__(
        self,
        model: "torch.nn.Module",
        trace: "Union[str, os.PathLike[str]]",
        every: int = 50,
        chunk_steps: int = 1000,
        scaler: "Union[Scaler, Sequence[Scaler], None]" = None,
        activations: Optional[Sequence[str]] = None,
        facts: Optional[Mapping[str, Any]] = None,
        loss_scale: Union[float, Callable[[], float], None] = None,
        precision: Optional[str] = None,
        overflow_lines: bool = False,
        forward: bool = False,
        run_id: Optional[str] = None,
        max_writers: int = 8,
        reduction: Optional[str] = None,
    ) -> None:
        for name, value in (("every", every), ("chunk_steps", chunk_steps)):
            if not isinstance(value, int) or value < 1:
                raise ModelError("starting a recorder", f"{name}={value!r}", "a whole number of steps, at least 1")
        if reduction not in (None, "reduced", "unreduced"):
            raise ModelError("starting a recorder", f"reduction={reduction!r}", '"reduced", "unreduced" or None')
        self._model = model
        self._scalers = _as_list(scaler)
        self._fixed_scale = loss_scale
        self._overflow_lines = overflow_lines
        self._step = 0
        self._probing = False
        self._probe_sketches: Optional[List[Sketch]] = None
        self._handles: List[Any] = []
        parameters = _named_parameters(model)
        rank, world_size = rank_and_world()
        reductions = reduction_of(model, world_size)
        columns = []
        self._parameters: List["torch.nn.Parameter"] = []
        for name, parameter in parameters:
            # Those of the whole parameter, also where this rank holds a shard of it.
            shape = list(parameter.shape) + [2] * parameter.is_complex()
            columns.append(Column(name, shape, math.prod(shape), "parameter", reduction or reductions[id(parameter)]))
            self._parameters.append(parameter)
        device = self._parameters[0].device
        all_facts: Dict[str, Any] = {"framework": f"torch {torch.__version__}", "device": device.type}
        if device.type == "cuda":
            all_facts["device_name"] = torch.cuda.get_device_name(device)
        all_facts.update(facts or {})
        if precision is not None:
            all_facts["precision"] = precision
        # Which of the writer's columns each parameter is.
        self._places = list(range(len(columns)))
        self._reducer: Optional[Reducer] = None
        if world_size > max(1, max_writers):
            self._reducer = Reducer(device)
            all_facts["ranks"] = world_size
            columns, self._places = union_of_columns(columns)
        self._agreed = len(columns)
        self._watching = activations is not None or forward
        self._writer = Writer(
            Path(trace), run_id or from_rank_0(uuid.uuid4().hex), 0 if self._reducer else rank, 1 if self._reducer else world_size,
            every, chunk_steps, plain_facts(all_facts), columns, scaled=loss_scale is not None,
            silent=self._reducer is not None and rank > 0,
        )  # fmt: skip
        # Writes the open chunk when the recorder is collected, or at the interpreter's exit. The writer does not know the model,
        # so nothing is kept alive by this.
        self._finalizer = weakref.finalize(self, self._writer.close)
        self._pending = self._new_pending()
        self._column_of: Dict[Tuple[str, str], int] = {}
        for place, parameter in zip(self._places, self._parameters):
            self._handles.append(_hook_parameter(parameter, self, place))
        if self._watching:
            self._watch_modules(activations, forward)

    # ---- the life of a recorder

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes the open chunk and takes all hooks off the model. Closing twice is fine; steps after it are refused."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._finalizer()

    @property
    def trace(self) -> Path:
        """The directory the chunks go to."""
        return self._writer.directory

    @property
    def sampled(self) -> bool:
        """Whether the step in progress (or, between a `step` and the next backward, the last one) carries a sketch."""
        return self._probe_step() % self._writer.every == 0

    # ---- hooks

    def _new_pending(self) -> _Pending:
        return _Pending(self._step % self._writer.every == 0)

    def _on_gradient(self, column: int, parameter: "torch.Tensor") -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        pending = self._pending
        if not pending.captured:
            self._capture_scale(pending)
        if gradient.requires_grad:  # backward(create_graph=True); without it no graph is built here
            gradient = gradient.detach()
        pending.see(column, gradient)
        if pending.sketching and counts_here(gradient):
            pending.sketch(column, gradient)

    def _on_activation(self, name: str, role: str, tensor: "torch.Tensor") -> None:
        key = (name, role)
        column = self._column_of.get(key)
        columns = self._writer.columns
        if column is None:
            column = self._column_of[key] = len(columns)
            columns.append(Column(name, list(tensor.shape), element_count(tensor), role))
        pending = self._pending
        gradient = role == "activation_gradient"
        if gradient and not pending.captured:
            self._capture_scale(pending)
        tensor = tensor.detach()
        pending.see(column, tensor, largest=True)
        if pending.sketching and gradient:
            columns[column].shape, columns[column].elements = list(tensor.shape), element_count(tensor)
            # Of all calls, as amax is: a recurrent cell's module is called once a time step.
            pending.sketch(column, tensor, together=True)

    def _watch_modules(self, activations: Optional[Sequence[str]], forward: bool) -> None:
        globs = ["*"] if activations is None else list(activations)
        leaves = [(_plain_name(n), m) for n, m in self._model.named_modules() if next(m.children(), None) is None]
        chosen = [(n, m) for n, m in leaves if any(fnmatch.fnmatchcase(n, g) for g in globs)]
        if not chosen:
            names = ", ".join(n for n, _ in leaves[:8])
            raise ModelError(
                "choosing modules to watch", f"none that matches {globs}", "a glob of a leaf module's name", f"there are {names}"
            )
        for name, module in chosen:
            self._handles.append(module.register_forward_pre_hook(_ForwardPre(self, name, activations is not None)))
            self._handles.append(module.register_forward_hook(_Forward(self, name, activations is not None, forward)))

    # ---- the loss scale

    def _capture_scale(self, pending: _Pending) -> None:
        pending.captured = True
        if self._probing:
            return
        scalers = self._scalers
        if not scalers and self._step == 0 and self._fixed_scale is None:
            # The scaler may be named only at step(), when update() has perhaps changed its scale. So look at every one alive, once.
            scalers = _live_scalers()
        pending.scales = [(s, _scale_now(s)) for s in scalers if _is_enabled(s)]

    def _scale_of(self, scaler: Scaler, pending: _Pending) -> Any:
        for known, scale in pending.scales:
            if known is scaler:
                return scale
        if _inf_flags(scaler):  # unscale_ has run and update() has not: the scale is still the one that was used
            return _scale_now(scaler)
        if not hasattr(scaler, "_per_optimizer_states"):
            return _scale_now(scaler)
        return None

    # ---- a step

    def step(self, scaler: "Union[Scaler, Sequence[Scaler], None]" = None, loss: Any = None) -> None:
        """Ends an optimizer step: call it once, anywhere after the last backward and before ``zero_grad``.

        ``scaler``: the loss scaler, if it was not given before. ``loss``: the unscaled loss, a number or a tensor of one. The device is
        waited for once.

        Raises `ScalerConflict` when several scalers had different scales, `RecorderClosed` after `close`.
        """
        if not self._finalizer.alive:
            raise RecorderClosed("recording a step", "a closed recorder", "an open one", "call close() after the last step")
        scalers = _as_list(scaler)
        if scalers:
            self._scalers = scalers
        self._pending.loss = loss
        pending = self._pending
        if self._reducer is not None:
            pending = self._together(self._reducer, pending)
        if not self._writer.silent:
            self._record(pending)
        self._step += 1
        self._pending = self._new_pending()

    def _record(self, pending: _Pending) -> None:
        """Reads back what the step left on the devices, and makes it a row."""
        readback = _Readback()
        count = len(self._writer.columns)
        sketches = pending.merged
        if pending.sketching and sketches is None:
            sketches = [Sketch.empty() for _ in range(count)]
            _read_sketches(readback, pending.rows, sketches)
        first = [Sketch.empty() for _ in range(count)] if pending.first else []
        _read_sketches(readback, {i: (row, 0) for i, row in pending.first.items()}, first)
        if pending.vector is None:
            _read_amax(readback, pending)
        else:
            readback.integers(pending.vector, pending.take)

        scales: List[float] = []
        flags: List[float] = []
        after: List[float] = []
        for one in self._scalers:
            if _is_enabled(one):
                self._writer.scaled = True
                readback.number(self._scale_of(one, pending), scales)
                for flag in _inf_flags(one):
                    readback.number(flag, flags)
                if self._overflow_lines:
                    readback.number(_scale_now(one), after)
        losses: List[float] = []
        readback.number(pending.loss, losses)
        readback.run()

        if len(set(scales)) > 1:
            raise ScalerConflict(
                f"recording step {self._step}", f"scalers with the scales {scales}", "one loss_scale a step",
                "record each scaler's model with its own Recorder",
            )  # fmt: skip
        loss_scale = scales[0] if scales else math.nan
        if not self._scalers and self._fixed_scale is not None:
            loss_scale = float(self._fixed_scale() if callable(self._fixed_scale) else self._fixed_scale)

        amax = np.full(count, np.nan, np.float32)
        nonfinite = np.zeros(count, np.uint8)
        for i, value in pending.amax.items():
            amax[i] = value
        for i, bits in pending.bits.items():
            nonfinite[i] = bits
        columns = self._writer.columns
        gradients = [i for i in pending.order if columns[i].role != "activation"]
        first_bad = next((columns[i].name for i in gradients if pending.bits[i]), None)
        found_inf = int(first_bad is not None or pending.found_inf or any(f != 0 for f in flags))
        if self._step == 0:
            for position, i in enumerate(gradients):
                columns[i].backward_order = position
        if sketches is not None and pending.merged is None:
            for i, s in enumerate(sketches):
                columns[i].learn(first[i] if i in pending.first else s)
        if found_inf and self._overflow_lines:
            print(_overflow_line(self._step, loss_scale, after, self._scalers, first_bad), file=sys.stderr)
        probe, self._probe_sketches = self._probe_sketches, None
        self._writer.add(
            Row(self._step, loss_scale, found_inf, losses[0] if losses else math.nan, amax, nonfinite, sketches, probe)
        )

    # ---- many ranks

    def _together(self, reducer: Reducer, pending: _Pending) -> _Pending:
        """This step over all ranks, on rank 0; on the others what they sent."""
        if self._watching:
            self._agree([pending])
        flags = [f for one in self._scalers if _is_enabled(one) for f in _inf_flags(one)]
        count = len(self._writer.columns)
        whole = _Pending(pending.sketching)
        whole.scales, whole.captured, whole.loss = pending.scales, pending.captured, pending.loss
        whole.vector = reducer.amax(
            count, pending.amax, pending.bits, pending.waiting, pending.largest, flags, pending.order, _order_of
        )
        if pending.sketching:
            whole.merged = reducer.sketches(count, pending.rows, pending.first, self._writer.columns)
        return whole

    def _agree(self, pendings: List[_Pending]) -> None:
        """Gives activations that came up since the last agreement the same columns on all ranks."""
        columns, agreed = self._writer.columns, self._agreed
        if not any_rank(len(columns) > agreed):
            return
        union, places = union_of_columns(columns[agreed:])
        mine = columns[agreed:]
        columns[agreed:] = union
        for place, column in zip(places, mine):
            columns[agreed + place] = column
        for place, column in enumerate(union):
            self._column_of[column.name, column.role] = agreed + place
        moved = {agreed + i: agreed + place for i, place in enumerate(places)}
        for pending in pendings:
            pending.move(moved)
        self._agreed = len(columns)

    # ---- the probe

    def _probe_step(self) -> int:
        return self._step if self._pending.order or self._step == 0 else self._step - 1

    def probe(self, function: Callable[[], Any]) -> bool:
        """Runs ``function`` (forward and backward on the same batch) in FP32 and records what FP16 may have flushed.

        Call it each step, right before or after `step`: it does nothing unless that step carries a sketch, and says whether it ran.
        Autocast is off inside, also where ``function`` turns it on, and the known scalers do not scale. Afterwards random state,
        buffers, ``.grad`` and training flags are what they were. When memory runs out it is skipped with a warning.

        Raises `ProbeError` when the parameters themselves are not f32: their backward cannot be repeated in FP32.
        """
        if not self._finalizer.alive:
            raise RecorderClosed("probing", "a closed recorder", "an open one")
        if not self.sampled:
            return False
        for place, parameter in zip(self._places, self._parameters):
            column = self._writer.columns[place]
            if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
                raise ProbeError(
                    f'probing step {self._probe_step()}, parameter "{column.name}"', str(parameter.dtype), "torch.float32",
                    "train with autocast and f32 parameters, or leave the probe out",
                )  # fmt: skip
        step = self._probe_step()
        before_step = step == self._step
        failed = False
        outer, self._pending, self._probing = self._pending, _Pending(True), True
        try:
            with ExitStack() as stack:
                stack.enter_context(_restored(self._model, self._parameters))
                stack.enter_context(_fp32(self._scalers))
                if _is_ddp(self._model):  # reduces nothing, and leaves the buckets alone that .grad may be a view of
                    stack.enter_context(self._model.no_sync())  # type: ignore[operator]
                try:
                    with torch.enable_grad():
                        function()
                except RuntimeError as error:
                    if not _is_out_of_memory(error):
                        raise
                    warnings.warn(
                        f"gradscale: step {step} was not probed: memory ran out; underflow before capture stays unknown there",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                    failed = True
            if self._reducer is not None and any_rank(failed) and not failed:
                warn_of_failed_probe(step)
                failed = True
            if failed:
                return False
            if self._reducer is not None:
                if self._watching:
                    self._agree([outer, self._pending])
                merged = self._reducer.sketches(len(self._writer.columns), self._pending.rows, {}, None)
                if merged is None:  # rank 0 has them
                    return True
                sketches = merged
            else:
                sketches = [Sketch.empty() for _ in self._writer.columns]
                readback = _Readback()
                _read_sketches(readback, self._pending.rows, sketches)
                readback.run()
        finally:
            self._pending, self._probing = outer, False
        if before_step:
            self._probe_sketches = sketches
        else:
            self._writer.add_probe(step, sketches)
        return True


def _overflow_line(
    step: int, before: float, after: Sequence[float], scalers: Sequence[Scaler], tensor: Optional[str]
) -> str:
    """The line that tells of an overflow; other programs read it, so its one place is here."""
    if math.isnan(before):
        scale = "no loss_scale"
    else:
        new = after[0] if after else before
        if after and new == before:  # update() is still to come
            backoff = getattr(scalers[0], "get_backoff_factor", None)
            new = before * (backoff() if backoff is not None else 1.0)
        scale = f"loss_scale {before} -> {new}"
    return f"gradscale: step {step} overflow, {scale}, first non-finite tensor {tensor if tensor is not None else 'unknown'}"


# ---- reading back


class _Readback:
    """Gathers small results of several kinds and brings them to the host with one copy a device."""

    def __init__(self) -> None:
        self._parts: "Dict[torch.device, List[Tuple[torch.Tensor, Callable[[np.ndarray[Any, Any]], None]]]]" = {}

    def integers(self, tensor: "torch.Tensor", then: "Callable[[np.ndarray[Any, Any]], None]") -> None:
        """Reads a flat integer tensor; ``then`` gets it as int64."""
        self._parts.setdefault(tensor.device, []).append((tensor.to(torch.int64), then))

    def number(self, value: Any, into: List[float]) -> None:
        """Reads a number, or a tensor of one, into a list; None is left out. On a device it passes through f32."""
        if value is None:
            return
        if not isinstance(value, torch.Tensor):
            into.append(float(value))
        elif _reads_at_once(value):
            into.append(float(value.detach()))
        else:
            place = len(into)
            into.append(math.nan)

            def put(bits: "np.ndarray[Any, Any]") -> None:
                into[place] = float(bits.astype(np.int32).view(np.float32)[0])

            self.integers(value.detach().reshape(1).to(torch.float32).view(torch.int32), put)

    def run(self) -> None:
        """Copies and hands out."""
        for parts in self._parts.values():
            tensors = [t for t, _ in parts]
            host = (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).cpu().numpy()
            at = 0
            for tensor, then in parts:
                then(host[at : at + tensor.numel()])
                at += tensor.numel()


def _read_amax(readback: _Readback, pending: _Pending) -> None:
    by_device: "Dict[torch.device, List[Tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]]" = {}
    for entry in pending.waiting:
        by_device.setdefault(entry[1].device, []).append(entry)
    for entries in by_device.values():
        columns = [e[0] for e in entries]

        def put(host: "np.ndarray[Any, Any]", columns: List[int] = columns) -> None:
            table = host.reshape(3, len(columns))
            for j, column in enumerate(columns):
                amax, bits = _amax_of(int(table[0, j]), int(table[1, j]), bool(table[2, j]))
                if column in pending.largest and column in pending.amax:
                    amax = max(amax, pending.amax[column])
                    pending.bits[column] = _bits_of_both(pending.bits[column], bits)
                else:
                    pending.bits[column] |= bits
                pending.amax[column] = amax

        low = torch.stack([e[1] for e in entries])
        high = torch.stack([e[2] for e in entries])
        is_nan = torch.isnan(torch.stack([e[3] for e in entries])).to(torch.int32)
        readback.integers(torch.cat([low, high, is_nan]), put)


def _read_sketches(
    readback: _Readback, rows: "Mapping[int, Tuple[torch.Tensor, int]]", sketches: List[Sketch]
) -> None:
    for i, (row, absent) in rows.items():

        def put(host: "np.ndarray[Any, Any]", i: int = i, absent: int = absent) -> None:
            sketches[i] = Sketch.from_row(host, absent)

        readback.integers(row, put)


# ---- names, ranks, scalers


def _as_list(scaler: Any) -> List[Scaler]:
    if scaler is None:
        return []
    if isinstance(scaler, (list, tuple)):
        return [s for i, s in enumerate(scaler) if s is not None and not any(s is t for t in scaler[:i])]
    return [scaler]


def _is_enabled(scaler: Scaler) -> bool:
    enabled = getattr(scaler, "is_enabled", None)
    return True if enabled is None else bool(enabled())


def _scale_now(scaler: Scaler) -> Any:
    """The scaler's scale as it is now: a copy that stays on the device, a number, or None before the first use."""
    if hasattr(scaler, "_scale"):
        scale = scaler._scale
        return scale.detach().clone() if isinstance(scale, torch.Tensor) else scale
    return scaler.get_scale()


def _inf_flags(scaler: Scaler) -> "List[torch.Tensor]":
    """The found_inf of each optimizer and device, while the scaler still has them: between unscale_ and update()."""
    states = getattr(scaler, "_per_optimizer_states", None) or {}
    return [flag for state in states.values() for flag in state.get("found_inf_per_device", {}).values()]


def _live_scalers() -> List[Scaler]:
    kind = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # before torch 2.3
    return [o for o in gc.get_objects() if issubclass(type(o), kind) and o._scale is not None]


def _plain_name(name: str) -> str:
    parts = [p for p in name.split(".") if p != "_orig_mod"]
    return ".".join(parts)


def _named_parameters(model: "torch.nn.Module") -> "List[Tuple[str, torch.nn.Parameter]]":
    named = [(_plain_name(n), p) for n, p in model.named_parameters()]
    while named and all(n.startswith("module.") for n, _ in named):
        named = [(n[len("module.") :], p) for n, p in named]
    doing = "starting a recorder"
    for name, parameter in named:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ModelError(doing, f'parameter "{name}" without a shape', "initialised parameters", "run one forward first")
    named = [(n, p) for n, p in named if p.is_floating_point() or p.is_complex()]
    if not named:
        raise ModelError(doing, "no floating-point parameter", "a model with at least one")
    return named


def _is_ddp(model: "torch.nn.Module") -> bool:
    """Hooks run before DDP's all-reduce: they see this rank's own gradients."""
    return any(type(m).__name__ == "DistributedDataParallel" for m in (model, getattr(model, "_orig_mod", None)))


def _hook_parameter(parameter: "torch.nn.Parameter", recorder: Recorder, column: int) -> Any:
    weak = weakref.ref(recorder)  # the model must not keep the recorder alive, nor the other way round through autograd

    def hook(parameter: "torch.Tensor") -> None:
        recorder = weak()
        if recorder is not None:
            recorder._on_gradient(column, parameter)

    # torch takes hooks only of tensors that require a gradient, but keeps them when that is switched off and on again: so a
    # parameter that is frozen now is recorded once it is thawed.
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        if frozen:
            parameter.requires_grad_(False)


class _ModuleHook:
    """A hook on a module that can be copied and pickled with it: the copy watches nothing."""

    def __init__(self, recorder: Optional[Recorder], name: str = "", gradients: bool = False, forward: bool = False) -> None:
        self._recorder = None if recorder is None else weakref.ref(recorder)
        self._name = name
        self._gradients = gradients
        self._forward = forward

    def __reduce__(self) -> Any:
        return (type(self), (None,))

    def _active(self) -> Optional[Recorder]:
        recorder = None if self._recorder is None else self._recorder()
        return recorder if torch.is_grad_enabled() else None

    def _watch(self, recorder: Recorder, values: Any, kind: str) -> None:
        for position, tensor in _tensors(values):
            if tensor.requires_grad:
                weak, name = weakref.ref(recorder), f"{self._name}:{kind}.{position}"

                def hook(gradient: "torch.Tensor", weak: Any = weak, name: str = name) -> None:
                    recorder = weak()
                    if recorder is not None:
                        recorder._on_activation(name, "activation_gradient", gradient)

                tensor.register_hook(hook)


class _ForwardPre(_ModuleHook):
    def __call__(self, module: "torch.nn.Module", inputs: Any) -> None:
        recorder = self._active()
        if recorder is not None and self._gradients:
            self._watch(recorder, inputs, "grad_input")


class _Forward(_ModuleHook):
    def __call__(self, module: "torch.nn.Module", inputs: Any, outputs: Any) -> None:
        recorder = self._active()
        if recorder is None:
            return
        if self._gradients:
            self._watch(recorder, outputs, "grad_output")
        if self._forward and not recorder._probing:
            for position, tensor in _tensors(outputs):
                recorder._on_activation(f"{self._name}:output.{position}", "activation", tensor)


def _tensors(values: Any) -> "Iterator[Tuple[int, torch.Tensor]]":
    items = values if isinstance(values, (list, tuple)) else [values]
    for position, value in enumerate(items):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield position, value


# ---- what a probe must not change


@contextmanager
def _restored(model: "torch.nn.Module", parameters: "Sequence[torch.nn.Parameter]") -> Iterator[None]:
    gradients = [p.grad for p in parameters]
    modules = [m for m in model.modules()]
    flags = [m.training for m in modules]
    buffers = [(m, dict(m._buffers)) for m in modules]
    copies = {id(b): (b, b.detach().clone()) for _, own in buffers for b in own.values() if b is not None}
    devices = {p.device for p in parameters if p.device.type != "cpu"}
    python_state = sys.modules["random"].getstate() if "random" in sys.modules else None
    numpy_state = np.random.get_state()
    with ExitStack() as stack:
        for kind in {d.type for d in devices} or {"cuda"}:
            mine = [d for d in devices if d.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=mine, device_type=kind))
        for p in parameters:
            p.grad = None
        try:
            yield
        finally:
            for p, gradient in zip(parameters, gradients):
                p.grad = gradient
            for m, flag in zip(modules, flags):
                m.training = flag
            with torch.no_grad():
                for m, own in buffers:
                    m._buffers.clear()
                    m._buffers.update(own)
                for buffer, copy in copies.values():
                    buffer.copy_(copy)
            if python_state is not None:
                sys.modules["random"].setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def _fp32(scalers: Sequence[Scaler]) -> Iterator[None]:
    """Autocast off, also against a ``with torch.autocast(...)`` inside, and the scalers of torch's kind disabled."""
    kind = torch.amp.autocast_mode.autocast
    enter = kind.__enter__

    def enter_disabled(self: Any) -> Any:
        enabled, self._enabled = self._enabled, False
        try:
            return enter(self)
        finally:
            self._enabled = enabled

    off = [(s, s._enabled) for s in scalers if hasattr(s, "_enabled")]
    with ExitStack() as stack:
        for device in {"cpu", *(["cuda"] if torch.cuda.is_available() else [])}:
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            kind.__enter__ = enter_disabled  # type: ignore[method-assign]
            for s, _ in off:
                s._enabled = False
            yield
        finally:
            kind.__enter__ = enter  # type: ignore[method-assign]
            for s, enabled in off:
                s._enabled = enabled


def _is_out_of_memory(error: RuntimeError) -> bool:
    kinds = tuple(
        k for k in (getattr(torch, "OutOfMemoryError", None), getattr(torch.cuda, "OutOfMemoryError", None)) if k is not None
    )
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
