"""What is wrong with these gradients? Asked in the live process, right after a backward.

::

    scaler.scale(loss).backward()
    print(gradscale.explain(model, scaler))                            # what .grad alone can tell
    print(gradscale.explain(model, scaler, probe=lambda: scaler.scale(loss_of(batch)).backward()))

A zero in an FP16 gradient looks the same whether the true gradient is zero or was too small; an inf looks the same whether it came
from the forward or from the loss scale. So a *probe*, a function that runs forward and backward on the same batch, is run
twice, as it is and in FP32, with random state, buffers and ``.grad`` restored:

    ==================  ==========================  =================================================
    as it runs          in FP32                     cause
    ==================  ==========================  =================================================
    zeros               nonzero there               ``underflow``, or ``collapsed_scale`` where the scale is far too low
    zeros               zero there too              ``true_zeros``
    inf or NaN          finite; first in forward    ``forward_overflow``: no loss scale cures it
    inf or NaN          finite; first in backward   ``gradient_overflow``: the scale was too high; backing off cures it
    inf or NaN          inf or NaN too              ``not_a_scale_problem``: data, parameters, or the mathematics
    ==================  ==========================  =================================================

Without a probe the answer is ``cannot_tell`` wherever ``.grad`` does not decide. Call it before ``zero_grad``, best before ``scaler.update()``.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from .errors import MissingDependency, ModelError

if TYPE_CHECKING:
    import torch

__all__ = ["CAUSES", "Explanation", "NonFinite", "TensorFacts", "explain"]

#: What `Explanation.cause` can be.
CAUSES = (
    "healthy",
    "underflow",
    "true_zeros",
    "collapsed_scale",
    "gradient_overflow",
    "forward_overflow",
    "not_a_scale_problem",
    "cannot_tell",
)

# A scale below 1 with so much room above is no answer to large gradients any more: it has been backed off for another reason.
_ROOM_OF_A_COLLAPSED_SCALE = 2.0**8
_FP16_LARGEST = 65504.0


@dataclass
class TensorFacts:
    """One parameter's gradient: the one in ``.grad``, or with a probe the one that the probe computed. Counts are of elements."""

    name: str
    elements: int
    zeros: int
    inf: int
    nan: int
    #: largest finite abs, multiplied by the loss scale as it is in backward (unless ``.grad`` was unscaled and there is no probe)
    amax: float
    #: "fp16", "bf16", "fp32" where the values show which precision produced them
    produced_in: Optional[str] = None
    #: zeros that are nonzero in FP32; None without a probe
    flushed: Optional[int] = None
    #: nonzero elements in FP32; None without a probe
    nonzero_in_fp32: Optional[int] = None

    @property
    def true_zeros(self) -> Optional[int]:
        """Zeros that are zero in FP32 too; None without a probe."""
        return None if self.flushed is None else self.zeros - self.flushed


@dataclass
class NonFinite:
    """The first tensor that was not finite."""

    name: str
    #: "inf", "nan" or "inf and nan"
    kind: str
    #: "forward" or "backward"; None where only a probe could tell
    phase: Optional[str]
    #: "gradient", "output", "input", "loss" or "parameter"
    what: str = "gradient"
    #: whether the order was observed; without a probe or a recorder it is the reverse of ``named_parameters()``
    order_known: bool = False

    def __str__(self) -> str:
        place = {"gradient": "gradient of ", "output": "output of ", "input": "input of ", "parameter": "parameter "}.get(self.what, "")
        phase = "forward or backward" if self.phase is None else self.phase
        guess = "" if self.order_known else " (order guessed from the parameters')"
        return f"{place}{self.name}: {self.kind}, in {phase}{guess}"


@dataclass
class Explanation:
    """The answer of `explain`; ``print`` it."""

    #: one of `CAUSES`
    cause: str
    #: one sentence
    why: str
    #: what to do about it
    try_next: str
    #: the scale the scaler holds now (its ``update()`` may have changed it); None without a scaler
    loss_scale: Optional[float]
    #: whether the scaler skips, or skipped, this step; without a scaler, whether a gradient is not finite
    skipped: bool
    tensors: List[TensorFacts]
    first_nonfinite: Optional[NonFinite] = None
    #: further causes that hold beside it
    also: Tuple[str, ...] = ()
    #: whether a probe ran in FP32
    probed: bool = False
    #: parameters that had no gradient
    without_gradient: List[str] = field(default_factory=list)

    @property
    def zeros(self) -> int:
        """Zeros over all gradients."""
        return sum(t.zeros for t in self.tensors)

    @property
    def elements(self) -> int:
        """Elements over all gradients."""
        return sum(t.elements for t in self.tensors)

    @property
    def flushed(self) -> Optional[int]:
        """Zeros that are nonzero in FP32, over all gradients; None without a probe."""
        counts = [t.flushed for t in self.tensors if t.flushed is not None]
        return sum(counts) if counts else None

    @property
    def underflow_fraction(self) -> Optional[float]:
        """Share of the elements that are nonzero in FP32 and zero here; None without a probe."""
        nonzero = sum(t.nonzero_in_fp32 or 0 for t in self.tensors)
        return None if self.flushed is None else self.flushed / nonzero if nonzero else 0.0

    def __str__(self) -> str:
        words = self.cause.replace("_", " ")
        if self.cause == "cannot_tell" and not self.probed:
            words = "cannot tell without a probe"
        lines = [f"{words}: {self.why}"]
        scale = "no loss_scale" if self.loss_scale is None else f"loss_scale {_scale_text(self.loss_scale)}"
        lines.append(f"  {scale}, step {'skipped' if self.skipped else 'not skipped'}, {self.zeros} of {self.elements} elements zero")
        if self.first_nonfinite is not None:
            lines.append(f"  first not finite: {self.first_nonfinite}")
        if self.also:
            lines.append(f"  also: {', '.join(c.replace('_', ' ') for c in self.also)}")
        shown = sorted(self.tensors, key=lambda t: (-(t.inf + t.nan > 0), -(t.flushed or 0), -t.zeros / max(t.elements, 1)))[:12]
        if shown:
            width = max(6, *(len(t.name) for t in shown))
            head = f"  {'tensor':<{width}}  {'elements':>10}  {'zeros':>10}  {'inf':>6}  {'nan':>6}  {'amax':>9}"
            lines.append(head + (f"  {'flushed':>10}" if self.probed else ""))
            for t in shown:
                row = f"  {t.name:<{width}}  {t.elements:>10}  {t.zeros:>10}  {t.inf:>6}  {t.nan:>6}  {t.amax:>9.3g}"
                lines.append(row + (f"  {'?' if t.flushed is None else t.flushed:>10}" if self.probed else ""))
            if len(self.tensors) > len(shown):
                lines.append(f"  ... and {len(self.tensors) - len(shown)} more")
        lines.append(f"try: {self.try_next}")
        return "\n".join(lines)


def _scale_text(scale: float) -> str:
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1} = {scale:.6g}" if fraction == 0.5 else f"{scale:.6g}"


def explain(
    model: "torch.nn.Module",
    scaler: Any = None,
    probe: Optional[Callable[[], Any]] = None,
    loss: Any = None,
    recorder: Any = None,
    limit: float = 0.01,
) -> Explanation:
    """Says what happened to the gradients that ``model`` holds now, and why.

    ``scaler``: a torch.amp.GradScaler, anything with ``get_scale()``, or the scale as a number. ``probe``: runs forward and
    backward on the same batch, written as in training (autocast, ``scaler.scale(loss).backward()``), without ``unscale_``, ``step`` or
    ``update``. ``loss``: the loss, where there is no probe: whether it is finite tells forward from backward. ``recorder``: a `Recorder` of
    this model; it knows the order of backward. ``limit``: the share of zeros (of flushed elements among the nonzero ones, with a
    probe) from which they are the finding.

    Nothing is changed: random state, buffers, ``.grad``, the scaler and the parameters are as they were.

    Raises `ModelError` when no parameter has a gradient and there is no probe.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependency("explaining gradients", "no torch", "torch", "pip install 'gradscale[torch]'") from error
    from .recorder import _named_parameters

    named = [(n, p) for n, p in _named_parameters(model)]
    scale = _scale(scaler)
    facts = [_facts(n, p.grad) for n, p in named if p.grad is not None]
    without = [n for n, p in named if p.grad is None and p.requires_grad]
    if not facts and probe is None:
        raise ModelError("explaining gradients", "no parameter with a gradient", "a model after backward()", "call it before zero_grad()")
    seen = facts  # in .grad, before a probe's gradients take their place
    skipped = _skipped(scaler, seen)
    bad_parameter = next((n for n, p in named if not _is_finite(p)), None)
    plain = None
    in_fp32: Optional[_Run] = None
    if probe is not None:
        plain = _run(model, named, probe, scaler)
        if any(f.inf or f.nan for f in seen) and not plain.nonfinite:
            # update() has already backed off: look at the step with the scale that it had.
            higher = _scale_before(scaler)
            if higher is not None:
                plain = _run(model, named, probe, scaler, higher)
        in_fp32 = _run(model, named, probe, scaler, fp32=True) if _can_run_in_fp32(named) else None
        facts = [_facts(n, g) for n, g in plain.gradients.items()]
        without = [n for n, p in named if n not in plain.gradients and p.requires_grad]
        if in_fp32 is not None:
            _compare(facts, plain, in_fp32)
    answer = Explanation("cannot_tell", "", "", scale, skipped, facts, None, (), in_fp32 is not None, without)
    if bad_parameter is not None:
        answer.first_nonfinite = NonFinite(bad_parameter, "nan or inf", "forward", "parameter", True)
        _say(answer, "not_a_scale_problem", f"the parameter {bad_parameter} itself is not finite", "go back to a checkpoint before it")
    elif any(f.inf or f.nan for f in seen) or (plain is not None and plain.nonfinite):
        _explain_nonfinite(answer, seen, named, plain, in_fp32, loss, recorder)
    else:
        _explain_zeros(answer, limit, in_fp32, plain is not None or _are_scaled(scaler))
    if scale is not None and scale < 1 and answer.cause in ("forward_overflow", "not_a_scale_problem"):
        answer.also = (*answer.also, "collapsed_scale")
    return answer


def _say(answer: Explanation, cause: str, why: str, try_next: str) -> None:
    answer.cause, answer.why, answer.try_next = cause, why, try_next


# ---- what .grad shows


def _facts(name: str, gradient: "torch.Tensor") -> TensorFacts:
    from .sketch import produced_in, sketch

    s = sketch(gradient)
    produced = None
    if s.finite_nonzero:
        produced = produced_in(s.significand_or, s.amax < math.ldexp(1.0, s.lowest_bit + 40), s.finite_nonzero)
    return TensorFacts(name, s.elements, s.zeros, s.inf_positive + s.inf_negative, s.nan, s.amax, produced)


def _is_finite(tensor: "torch.Tensor") -> bool:
    import torch

    from .sketch import dense_values

    values = dense_values(tensor)
    return bool(torch.isfinite(values).all())


def _kind(tensor: "torch.Tensor") -> str:
    import torch

    kinds = [k for k, test in (("inf", torch.isinf), ("nan", torch.isnan)) if bool(test(tensor).any())]
    return " and ".join(kinds)


def _scale(scaler: Any) -> Optional[float]:
    if scaler is None or isinstance(scaler, (int, float)):
        return None if scaler is None else float(scaler)
    enabled = getattr(scaler, "is_enabled", None)
    if enabled is not None and not enabled():
        return None
    return float(scaler.get_scale())


def _scale_before(scaler: Any) -> Optional[float]:
    factor = getattr(scaler, "get_backoff_factor", None)
    scale = getattr(scaler, "_scale", None)
    if factor is None or scale is None or not factor():
        return None
    return float(scale) / float(factor())


def _skipped(scaler: Any, facts: Sequence[TensorFacts]) -> bool:
    if scaler is not None and not isinstance(scaler, (int, float)):
        from .recorder import _inf_flags

        flags = _inf_flags(scaler)
        if flags:
            return any(bool(f.item()) for f in flags)
    return any(f.inf or f.nan for f in facts)


def _are_scaled(scaler: Any) -> bool:
    """Whether ``.grad`` still carries the scale: `unscale_` has left no trace. After ``update()`` nobody can tell."""
    states = getattr(scaler, "_per_optimizer_states", None) or {}
    return not any(getattr(s.get("stage"), "name", "READY") != "READY" for s in states.values())


# ---- the probe


@dataclass
class _Run:
    """One run of the probe."""

    gradients: "Dict[str, torch.Tensor]" = field(default_factory=dict)
    order: List[str] = field(default_factory=list)  # parameters as backward reached them
    events: List[NonFinite] = field(default_factory=list)  # what was not finite, as it came up

    @property
    def nonfinite(self) -> bool:
        return bool(self.events)


def _can_run_in_fp32(named: "Sequence[Tuple[str, torch.nn.Parameter]]") -> bool:
    import torch

    return all(p.dtype in (torch.float32, torch.float64, torch.complex64) for _, p in named if p.requires_grad)


def _run(
    model: "torch.nn.Module",
    named: "Sequence[Tuple[str, torch.nn.Parameter]]",
    probe: Callable[[], Any],
    scaler: Any,
    scale: Optional[float] = None,
    fp32: bool = False,
) -> _Run:
    """Runs ``probe`` and watches it; everything it touches is restored."""
    import torch

    from .recorder import _fp32, _is_ddp, _plain_name, _restored, _tensors

    run = _Run()
    handles: List[Any] = []

    def note(name: str, tensor: "torch.Tensor", phase: str, what: str) -> None:
        kind = _kind(tensor.detach())
        if kind:
            run.events.append(NonFinite(name, kind, phase, what, True))

    def on_gradient(name: str) -> Callable[[Any], None]:
        def hook(parameter: Any) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            if name not in run.gradients:
                run.order.append(name)
            from .sketch import dense_values

            run.gradients[name] = dense_values(gradient).clone()
            if not any(e.name == name and e.what == "gradient" for e in run.events):
                note(name, run.gradients[name], "backward", "gradient")

        return hook

    def watch(name: str, kind: str) -> Callable[..., None]:
        def hook(module: Any, values: Any, outputs: Any = None) -> None:
            for _, tensor in _tensors(outputs if kind == "output" else values):
                note(name, tensor, "forward", kind)

        return hook

    scalers = [] if scaler is None or isinstance(scaler, (int, float)) else [scaler]
    with ExitStack() as stack:
        parameters = [p for _, p in named]
        stack.enter_context(_restored(model, parameters))
        stack.enter_context(_watched_losses(run))
        if fp32:
            stack.enter_context(_fp32(scalers))
        elif scale is not None:
            stack.enter_context(_at_scale(scaler, scale))
        if _is_ddp(model):
            stack.enter_context(model.no_sync())  # type: ignore[operator]
        try:
            handles.append(model.register_forward_pre_hook(watch("the model", "input")))
            for name, module in model.named_modules():
                if next(module.children(), None) is None and module is not model:
                    handles.append(module.register_forward_pre_hook(watch(_plain_name(name), "input")))
                    handles.append(module.register_forward_hook(watch(_plain_name(name), "output")))
            for name, p in named:
                if p.requires_grad:
                    handles.append(p.register_post_accumulate_grad_hook(on_gradient(name)))
            with torch.enable_grad():
                probe()
        finally:
            for handle in handles:
                handle.remove()
    return run


@contextmanager
def _watched_losses(run: _Run) -> Iterator[None]:
    """Notes the tensors that backward starts from, where they are not finite."""
    import torch

    backward = torch.autograd.backward

    def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            kind = _kind(tensor.detach())
            if kind:
                run.events.append(NonFinite("the loss", kind, "forward", "loss", True))
        return backward(tensors, *args, **kwargs)

    torch.autograd.backward = watched
    try:
        yield
    finally:
        torch.autograd.backward = backward


@contextmanager
def _at_scale(scaler: Any, scale: float) -> Iterator[None]:
    before = scaler._scale.clone()
    scaler._scale.fill_(scale)
    try:
        yield
    finally:
        scaler._scale.copy_(before)


def _compare(facts: Sequence[TensorFacts], plain: _Run, in_fp32: _Run) -> None:
    for one in facts:
        exact = in_fp32.gradients.get(one.name)
        mine = plain.gradients[one.name]
        if exact is not None and exact.shape == mine.shape:
            one.flushed = int(((mine == 0) & (exact != 0)).sum())
            one.nonzero_in_fp32 = int((exact != 0).sum())


# ---- judging


def _explain_nonfinite(
    answer: Explanation,
    seen: Sequence[TensorFacts],
    named: "Sequence[Tuple[str, torch.nn.Parameter]]",
    plain: Optional[_Run],
    in_fp32: Optional[_Run],
    loss: Any,
    recorder: Any,
) -> None:
    if plain is not None and plain.nonfinite:
        first = answer.first_nonfinite = plain.events[0]
    else:
        first = answer.first_nonfinite = _first_in_grad(seen, named, recorder)
        if loss is not None:
            value = float(loss.detach()) if hasattr(loss, "detach") else float(loss)
            first.phase = "backward" if math.isfinite(value) else "forward"
        if plain is None:
            _say(
                answer, "cannot_tell", f"{first}; the loss scale, an activation or the data may have done it",
                "give explain() a probe: a function that runs forward and backward on the same batch",
            )  # fmt: skip
        else:
            _say(
                answer, "cannot_tell", f"{first}, but the probe's forward and backward were finite",
                "a probe of the same batch, called before the optimizer steps",
            )  # fmt: skip
        return
    if in_fp32 is None:
        _say(
            answer, "cannot_tell", f"{first}; parameters that are not f32 cannot be run in FP32 for comparison",
            "explain a run with f32 parameters under autocast",
        )  # fmt: skip
    elif in_fp32.nonfinite:
        origin = in_fp32.events[0]
        answer.first_nonfinite = origin
        where = "the batch itself is not finite" if origin.what == "input" and origin.name == "the model" else f"{origin}, in FP32 too"
        _say(answer, "not_a_scale_problem", where, "look at this batch and at what computes that tensor; no loss scale cures it")
    elif first.phase == "forward":
        scaled_loss = first.what == "loss" and (answer.loss_scale or 1) > 1
        if scaled_loss:
            _say(
                answer, "forward_overflow", "the scaled loss is not finite, though every module's output is",
                "compute the loss in f32; if it is, lower the loss scale",
            )  # fmt: skip
        else:
            _say(
                answer, "forward_overflow", f"{first}; in FP32 it is finite: an activation left FP16's range (65504)",
                "run that module in f32 or bf16, or normalise before it; no loss scale cures it",
            )  # fmt: skip
    else:
        largest = max((float(g.abs().max()) for g in in_fp32.gradients.values() if g.numel()), default=0.0)
        needs = f"the largest gradient is {largest:.3g} in FP32"
        if answer.loss_scale is not None and largest > 0:
            fits = math.floor(math.log2(_FP16_LARGEST / largest))
            needs += f", so a scale up to about 2^{fits} fits it"
        _say(
            answer, "gradient_overflow", f"{first}; forward and FP32 are finite: the loss scale was too high for this step; {needs}",
            "nothing, if it is one step in hundreds: the scaler backs off and skips it",
        )  # fmt: skip


def _first_in_grad(
    facts: Sequence[TensorFacts], named: "Sequence[Tuple[str, torch.nn.Parameter]]", recorder: Any
) -> NonFinite:
    order = [n for n, _ in named][::-1]
    known = False
    if recorder is not None:
        columns = [c for c in recorder._writer.columns if c.backward_order is not None and c.role == "parameter"]
        if columns:
            order, known = [c.name for c in sorted(columns, key=lambda c: c.backward_order)], True
    bad = {f.name: f for f in facts if f.inf or f.nan}
    name = next((n for n in order if n in bad), next(iter(bad)))
    kind = " and ".join(k for k, c in (("inf", bad[name].inf), ("nan", bad[name].nan)) if c)
    return NonFinite(name, kind, None, "gradient", known)


def _explain_zeros(answer: Explanation, limit: float, in_fp32: Optional[_Run], scaled: bool) -> None:
    zeros, elements = answer.zeros, max(answer.elements, 1)
    share = zeros / elements
    amax = max((t.amax for t in answer.tensors), default=0.0)
    scale = answer.loss_scale
    in_backward = amax if scaled or scale is None else amax * scale
    collapsed = scale is not None and scale < 1 and in_backward * _ROOM_OF_A_COLLAPSED_SCALE < _FP16_LARGEST
    lost = answer.underflow_fraction
    if collapsed:
        room = "everything" if in_backward == 0 else f"{math.log2(_FP16_LARGEST / in_backward):.0f} binades"
        why = f"the loss scale is {_scale_text(scale or 0.0)}, {room} below what these gradients need"
        if lost is not None:
            why += f"; {100 * lost:.3g} % of the nonzero gradient elements became zero"
            answer.also = ("underflow",) if lost >= limit else ()
        _say(
            answer, "collapsed_scale", why + "; many skipped steps must have come before",
            "find what made those steps overflow (a probe on such a step tells), then restart the scaler, scaler.update(65536.0)",
        )  # fmt: skip
        return
    if lost is not None:
        if lost >= limit:
            smallest = _least_scale(answer, in_fp32)
            raise_to = "" if smallest is None else f", 2^{smallest} or more for these gradients"
            _say(
                answer, "underflow", f"{100 * lost:.3g} % of the elements that are nonzero in FP32 are zero here",
                f"a larger loss scale{raise_to}, a smaller growth interval, or bf16",
            )  # fmt: skip
        elif share >= limit:
            _say(
                answer, "true_zeros", f"{100 * share:.3g} % of the elements are zero, and all of them but {answer.flushed} are zero in FP32 too",
                "nothing about the scale: look for dead units, unused rows or masks if there should be none",
            )  # fmt: skip
        else:
            _say(answer, "healthy", f"{100 * lost:.2g} % of the nonzero elements were flushed to zero", "nothing")
        return
    if share < limit:
        _say(answer, "healthy", f"all gradients are finite and {100 * share:.2g} % of the elements zero", "nothing")
        return
    with_zeros = [t for t in answer.tensors if t.zeros]
    if all(t.produced_in == "fp32" for t in with_zeros):
        _say(
            answer, "true_zeros", f"{100 * share:.3g} % of the elements are zero, in tensors whose values FP32 produced: nothing was flushed there",
            "nothing about the scale: look for dead units, unused rows or masks if there should be none",
        )  # fmt: skip
        return
    _say(
        answer, "cannot_tell", f"{100 * share:.3g} % of the elements are zero; FP16 may have flushed them, or they are true zeros",
        "give explain() a probe: a function that runs forward and backward on the same batch",
    )  # fmt: skip


def _least_scale(answer: Explanation, in_fp32: Optional[_Run]) -> Optional[int]:
    """log2 of a power-of-two scale that keeps 99 % of the nonzero elements from flushing and overflows nothing; None if there is none."""
    import torch

    if in_fp32 is None:
        return None
    parts = [g[g != 0].abs() for g in in_fp32.gradients.values()]
    values = torch.cat([p.to("cpu", torch.float64) for p in parts if p.numel()])
    if values.numel() == 0:
        return None
    at = values.kthvalue(max(1, math.ceil(values.numel() * 0.01))).values
    needed = math.floor(math.log2(2.0**-25 / float(at))) + 1
    return needed if math.ldexp(float(values.max()), needed) < _FP16_LARGEST else None
