"""Training runs: real FP16 with a loss scaler and an FP32 probe beside it, FP32 through the recorder, and torch's rule."""

import math
import sys
import time
from pathlib import Path

import tasks
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from gradscale import Recorder  # noqa: E402

INITIAL_SCALE = 65536.0
NEVER = 2**31 - 1  # a growth interval no run reaches
PROBE_EVERY = 25


class Loop:
    """Real FP16 training of a task: autocast with a GradScaler, with an FP32 probe of the same weights and batch now and then.

    `static_scale` keeps the scale and still skips. `observe(step, scale, found_inf, loss)` is called after each step.
    """

    def __init__(self, task, device, growth_interval=NEVER, static_scale=None, probe_every=PROBE_EVERY, init_scale=INITIAL_SCALE):
        self.task, self.device, self.static_scale, self.probe_every = task, device, static_scale, probe_every
        self.scaler = torch.amp.GradScaler(device, init_scale=static_scale or init_scale, growth_interval=growth_interval)
        self.parameters = [p for p in task.model.parameters() if p.requires_grad]
        self.skipped, self.unseen_skips = [], 0
        self.flushed, self.rounded = {}, {}  # by step: share of the nonzero elements of the FP32 gradient

    def fp32_gradients(self, batch):
        """Gradients of this batch in FP32, buffers left as they were."""
        buffers = [(b, b.clone()) for b in self.task.model.buffers()]
        gradients = torch.autograd.grad(self.task.loss(batch), self.parameters)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        return gradients

    def on_overflow(self, step, scale, batch):
        """Called at a skipped step before the update, gradients still in place."""

    def run(self, steps, observe=lambda *_: None, recorder=None):
        task, scaler = self.task, self.scaler
        scale = scaler.get_scale()
        for step in range(steps):
            task.optimizer.zero_grad()
            batch = task.batch()
            with torch.autocast(self.device, torch.float16):
                loss = task.loss(batch)
            scaler.scale(loss).backward()
            finite = all(bool(torch.isfinite(p.grad).all()) for p in self.parameters)
            if not finite:
                self.skipped.append(step)
                self.on_overflow(step, scale, batch)
                # Would the FP32 gradient of these weights have shown it, or did something inside overflow?
                self.unseen_skips += max(float(g.abs().max()) for g in self.fp32_gradients(batch)) * scale < 65520
            elif step % self.probe_every == 0:
                self._probe(step, scale, batch)
            scaler.step(task.optimizer)
            scaler.update(self.static_scale)
            if recorder is not None:
                recorder.step(scaler, loss=loss)
            observe(step, scale, not finite, float(loss.detach()))
            scale = scaler.get_scale()
        self.last_scale = scale
        self.steps = steps

    def _probe(self, step, scale, batch):
        nonzero = flushed = rounded = 0
        for parameter, gradient in zip(self.parameters, self.fp32_gradients(batch)):
            there = gradient != 0
            nonzero += int(there.sum())
            flushed += int((there & (parameter.grad == 0)).sum())
            rounded += int((there & ((gradient * scale).abs() <= 2.0**-25)).sum())
        self.flushed[step] = flushed / max(nonzero, 1)
        self.rounded[step] = rounded / max(nonzero, 1)

    def lost_update(self):
        """Mean over the steps of 1 where skipped, else what the nearest probe counted as flushed."""
        skipped, probes = set(self.skipped), sorted(self.flushed)
        total = 0.0
        for step in range(self.steps):
            if step in skipped:
                total += 1
            elif probes:
                total += self.flushed[min(probes, key=lambda p: abs(p - step))]
        return total / self.steps


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def train_fp16(cell, seed, steps, device, growth_interval=NEVER, static_scale=None, nudge=False, trace=None, init_scale=INITIAL_SCALE):
    """A row of runs.csv. `nudge`: every weight starts at its next float, as near as two different runs can be."""
    kind = "fp16-nudged" if nudge else "fp16" if init_scale == INITIAL_SCALE else f"fp16-from-{init_scale:g}"
    task = tasks.build(*cell, seed, device)
    if nudge:
        with torch.no_grad():
            for p in task.model.parameters():
                p.copy_(torch.nextafter(p, torch.full_like(p, math.inf)))
    loop = Loop(task, device, growth_interval, static_scale, init_scale=init_scale)
    start = time.perf_counter()
    if trace is None:
        loop.run(steps)
    else:
        with Recorder(task.model, trace, every=50, scaler=loop.scaler) as recorder:
            loop.run(steps, recorder=recorder)
    return {
        "architecture": cell[0], "data": cell[1], "seed": seed, "kind": kind,
        "growth_interval": "" if static_scale else growth_interval, "static_scale": static_scale or "", "steps": steps,
        "skipped": len(loop.skipped), "unseen_skips": loop.unseen_skips, "last_scale": loop.last_scale, "final_loss": task.evaluate(),
        "flushed": mean(loop.flushed.values()), "rounded": mean(loop.rounded.values()), "lost_update": loop.lost_update(),
        "seconds": round(time.perf_counter() - start, 1), "skipped_steps": " ".join(map(str, loop.skipped)),
    }  # fmt: skip


def train_fp32(cell, seed, steps, device, trace, every=50, activations=True):
    task = tasks.build(*cell, seed, device)
    start = time.perf_counter()
    with Recorder(task.model, trace, every=every, precision="fp32", activations=["*"] if activations else None) as recorder:
        for _ in range(steps):
            task.optimizer.zero_grad()
            loss = task.loss(task.batch())
            loss.backward()
            recorder.step(loss=loss)
            task.optimizer.step()
    return {
        "architecture": cell[0], "data": cell[1], "seed": seed, "kind": "fp32", "steps": steps, "skipped": 0,
        "final_loss": task.evaluate(), "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


class Watched:
    """Largest abs of each gradient of one backward, in the order it reached them: leaf modules' outputs, then parameters."""

    def __init__(self, model):
        self.seen = {}
        self.convolutions = {}  # by name of the weight: module, input, gradient of the output
        self.handles = []
        for name, module in model.named_modules():
            if next(module.children(), None) is None:
                self.handles.append(module.register_forward_hook(self._forward(name)))
        self.parameters = [(name, p) for name, p in model.named_parameters()]

    def _forward(self, name):
        def hook(module, inputs, output):
            if not output.requires_grad:
                return
            output.register_hook(lambda gradient: self._see(f"{name}:grad_output", gradient))
            if isinstance(module, torch.nn.Conv2d):
                output.register_hook(lambda g: self.convolutions.update({f"{name}.weight": (module, inputs[0].detach(), g.detach())}))

        return hook

    def summed_in_fp32(self, name):
        """Headroom of a convolution's weight gradient, computed anew in FP32 from the very inputs it had; None for other tensors."""
        if name not in self.convolutions:
            return None
        module, x, gradient = self.convolutions[name]
        if not bool(torch.isfinite(gradient).all()):
            return None
        x = x.to(gradient.dtype).float()
        sums = torch.nn.grad.conv2d_weight(x, module.weight.shape, gradient.float(), module.stride, module.padding, module.dilation, module.groups)
        return math.log2(65520 / float(sums.abs().max()))

    def _see(self, name, gradient):
        largest = float(gradient.detach().abs().max())
        # A NaN comes of an inf before it, or of a sum of infs: it counts as one.
        largest = math.inf if math.isnan(largest) else largest
        self.seen[name] = max(self.seen.get(name, 0.0), largest)

    def clear(self):
        self.seen, self.convolutions = {}, {}

    def close(self):
        for handle in self.handles:
            handle.remove()


def causes(cell, seed, steps, device, growth_interval):
    """A row for each skipped step of a real FP16 run. Headroom is log2(65520 / (amax * scale)): at 0 and below, FP32 shows the overflow."""
    task = tasks.build(*cell, seed, device)
    loop = Loop(task, device, growth_interval, probe_every=NEVER)
    watched = Watched(task.model)
    rows = []

    def look(step, scale, batch):
        first = next((name for name, amax in watched.seen.items() if math.isinf(amax)), None)
        if first is None:
            first = next(name for name, p in watched.parameters if not bool(torch.isfinite(p.grad).all()))
        again = watched.summed_in_fp32(first)
        watched.clear()
        gradients = loop.fp32_gradients(batch)
        parameters, activations = max(float(g.abs().max()) for g in gradients), max(watched.seen.values())
        rows.append(
            {
                "step": step, "scale_log2": math.log2(scale), "first": first, "summed_in_fp32_headroom": "" if again is None else again,
                "parameters_headroom": math.log2(65520 / (parameters * scale)),
                "activations_headroom": math.log2(65520 / (activations * scale)),
            }
        )  # fmt: skip

    loop.on_overflow = look
    backward = task.batch
    task.batch = lambda: (watched.clear(), backward())[1]
    loop.run(steps)
    watched.close()
    return rows


def trajectory(growth_interval, steps, skipped):
    """Scales that torch's rule uses at each step when these steps overflow, and the scale after the last."""
    skipped, scale, clean, scales = set(skipped), INITIAL_SCALE, 0, []
    for step in range(steps):
        scales.append(scale)
        if step in skipped:
            scale, clean = scale / 2, 0
        else:
            clean += 1
            if clean == growth_interval:
                scale, clean = scale * 2, 0
    return scales, scale
