"""What the claims' experiments share: models, gradients in FP32 and FP16, the program, means with their spread."""

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "experiments" / "fidelity"))
sys.path.insert(0, str(ROOT / "python"))
import tasks  # noqa: E402, F401

UNDERFLOW = 2.0**-25  # FP16: abs up to here becomes zero
OVERFLOW = 65520.0  # FP16: abs from here becomes infinite


def program():
    return os.environ.get("GRADSCALE_BIN", "gradscale")


def gradscale(*arguments, bad_news=False):
    """The program's stdout. Exit status 1 (bad news) is an error unless expected."""
    try:
        done = subprocess.run([program(), *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)
    except OSError as error:
        raise SystemExit(f'running "{program()}": {error}; build it with cargo build --release and set GRADSCALE_BIN to it') from error
    if done.returncode == 2 or (done.returncode == 1 and not bad_news):
        raise RuntimeError(f"{program()} {' '.join(map(str, arguments))}: {done.stderr.strip() or done.stdout[-500:]}")
    return done.stdout


def gradscale_json(*arguments, **options):
    return json.loads(gradscale(*arguments, "--json", "--quiet", **options))


def spread(values):
    """Mean, standard deviation, least and most of finite numbers; the count of those that aren't."""
    finite = [v for v in values if math.isfinite(v)]
    return {
        "mean": statistics.fmean(finite) if finite else None,
        "sd": statistics.stdev(finite) if len(finite) > 1 else None,
        "least": min(finite, default=None),
        "most": max(finite, default=None),
        "runs": len(values),
        "not_finite": len(values) - len(finite),
    }


def gradients(task, batch, device, scale=1.0, fp16=False):
    """Gradients of this batch, multiplied by `scale`, as backward leaves them; the model's buffers stay as they were."""
    buffers = [(b, b.clone()) for b in task.model.buffers()]
    with torch.autocast(device, torch.float16, enabled=fp16):
        loss = task.loss(batch)
    found = torch.autograd.grad(loss * scale, [p for p in task.model.parameters()])
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return found


def flat(tensors):
    return torch.cat([t.detach().reshape(-1).float() for t in tensors])


def step_by_hand(task, device, scale=1.0, fp16=True):
    """A training step in FP16 (or FP32) at a fixed scale that is taken out again, with no look at infs. Returns the loss."""
    task.optimizer.zero_grad()
    batch = task.batch()
    with torch.autocast(device, torch.float16, enabled=fp16):
        loss = task.loss(batch)
    (loss * scale).backward()
    if scale != 1:
        for p in task.model.parameters():
            p.grad /= scale
    task.optimizer.step()
    return float(loss.detach())
