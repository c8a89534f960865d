"""Claims about PyTorch's scaler and about snippets of code, run on the real classes: 5, 12, 13, 14, 15, 17."""

import math
import tempfile
import warnings
from pathlib import Path

import torch
import torch.multiprocessing
from common import flat, spread, tasks
from torch import nn

import gradscale as package

STATIC = 1024.0


def _digits(seed, device, optimizer):
    task = tasks.build("cnn", "digits", seed, device)
    task.optimizer = {
        "sgd": lambda: torch.optim.SGD(task.model.parameters(), lr=0.05, momentum=0.9),
        "adam": lambda: torch.optim.Adam(task.model.parameters(), lr=3e-3),
    }[optimizer]()
    return task


def _train(task, steps, scale_loss=1.0, scale_gradients=1.0):
    """FP32 training with the loss or the gradients multiplied and nothing divided. Returns the size of the first update."""
    first = None
    for _ in range(steps):
        task.optimizer.zero_grad()
        (task.loss(task.batch()) * scale_loss).backward()
        for p in task.model.parameters():
            p.grad *= scale_gradients
        before = flat(task.model.parameters()) if first is None else None
        task.optimizer.step()
        if before is not None:
            first = flat(task.model.parameters()) - before
    return first


def _multiplied(options, **what):
    """With and without the factor: size of the first update, final loss."""
    steps, seeds = (20, 1) if options.quick else (400, 5)
    out = {}
    for optimizer in ("sgd", "adam"):
        ratios, apart, plain_loss, scaled_loss = [], [], [], []
        for seed in range(seeds):
            plain, scaled = (_digits(seed, options.device, optimizer) for _ in range(2))
            a, b = _train(plain, steps), _train(scaled, steps, **what)
            ratios.append(float(b.norm() / a.norm()))
            apart.append(float((b - a).norm() / a.norm()))
            plain_loss.append(plain.evaluate())
            scaled_loss.append(scaled.evaluate())
        out[optimizer] = {
            "first_update_ratio": spread(ratios), "first_update_apart": spread(apart), "final_loss": spread(plain_loss),
            "final_loss_multiplied": spread(scaled_loss), "steps": steps,
        }  # fmt: skip
    return out


def claim_5(options):
    """`(loss * S).backward(); optimizer.step()`: does the step take S out?"""
    return _multiplied(options, scale_loss=STATIC)


def claim_15(options):
    """`loss.backward()`, gradients times S by hand, `optimizer.step()`."""
    out = _multiplied(options, scale_gradients=STATIC)
    # Nor does it bring back what FP16 flushed.
    flushed = torch.tensor([1e-8, 1e-6]).half()
    out["flushed_then_multiplied"] = (flushed.float() * STATIC).tolist()
    return out


def claim_12(options):
    """The class, where it lives, its defaults, and a loop of the three calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old = torch.cuda.amp.GradScaler(enabled=False)
    scaler = torch.amp.GradScaler(options.device)
    task = tasks.build("cnn", "digits", 0, options.device)
    before, scales = task.evaluate(), set()
    for _ in range(20 if options.quick else 300):
        task.optimizer.zero_grad()
        with torch.autocast(options.device, torch.float16):
            loss = task.loss(task.batch())
        scaler.scale(loss).backward()
        scaler.step(task.optimizer)
        scaler.update()
        scales.add(scaler.get_scale())
    overflow = torch.amp.GradScaler(options.device, init_scale=2.0**40)
    p = nn.Parameter(torch.ones(1, device=options.device))
    optimizer = torch.optim.SGD([p], lr=1.0)
    with torch.autocast(options.device, torch.float16):
        loss = (p.half() * 1.0).sum()
    overflow.scale(loss).backward()
    overflow.step(optimizer)
    overflow.update()
    return {
        "torch": torch.__version__,
        "torch_amp": str(torch.amp.GradScaler),
        "torch_cuda_amp_still_there": isinstance(old, torch.amp.GradScaler),
        "warning_of_the_old_name": [str(w.message) for w in caught if w.category is FutureWarning],
        "defaults": {
            "init_scale": scaler._init_scale, "growth_factor": scaler.get_growth_factor(), "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(), "enabled": scaler.is_enabled(),
        },
        "three_calls": {"loss_before": before, "loss_after": task.evaluate(), "scales": sorted(scales)},
        "overflow": {"weight": float(p.detach()), "scale_before_log2": 40, "scale_after_log2": math.log2(overflow.get_scale())},
    }  # fmt: skip


def _one_step(scaler, gradient, device="cpu", new_scale=None):
    """A step of a one-weight model whose gradient (before scaling) is given; what went wrong, or None."""
    p = nn.Parameter(torch.zeros(1, device=device))
    optimizer = torch.optim.SGD([p], lr=1.0)
    try:
        scaler.scale((p * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update(*(() if new_scale is None else (new_scale,)))
    except Exception as error:  # what the class does is the question
        return f"{type(error).__name__}: {error}"
    return None


def claim_13(options):
    """`growth_interval=None` on the real class, and what does make the scale static."""
    out = {}
    scaler = torch.amp.GradScaler("cpu", init_scale=STATIC, growth_interval=None)
    out["none_clean_step"] = _one_step(scaler, 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=STATIC, growth_interval=None)
    out["none_overflow_step"] = _one_step(scaler, math.inf)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler = torch.amp.GradScaler("cuda", init_scale=STATIC, growth_interval=None)
        error = _one_step(scaler, 1.0, "cuda" if torch.cuda.is_available() else "cpu")
    out["on_cuda_device"] = {
        "cuda_available": torch.cuda.is_available(), "enabled": scaler.is_enabled(), "scale": scaler.get_scale(), "error": error,
        "warnings": [str(w.message) for w in caught],
    }  # fmt: skip
    huge = torch.amp.GradScaler("cpu", init_scale=STATIC, growth_interval=2**31 - 1)
    scales = []
    for gradient in (1.0, math.inf, 1.0):
        _one_step(huge, gradient)
        scales.append(huge.get_scale())
    out["huge_interval_clean_inf_clean"] = scales
    fixed = torch.amp.GradScaler("cpu", init_scale=STATIC)
    scales = []
    for gradient in (1.0, math.inf, 1.0):
        _one_step(fixed, gradient, new_scale=STATIC)
        scales.append(fixed.get_scale())
    out["update_with_new_scale_clean_inf_clean"] = scales
    return out


def claim_14(options):
    """`print(scaler._scale)`, and ways that do tell of an overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    out = {"before_first_scale": repr(scaler._scale)}
    rows = []
    for gradient in (1.0, math.inf):
        p = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([p], lr=1.0)
        scaler.scale((p * gradient).sum()).backward()
        row = {"gradient": "inf" if math.isinf(gradient) else gradient, "scale_after_backward": repr(scaler._scale)}
        scaler.unscale_(optimizer)
        row["found_inf_after_unscale"] = float(sum(scaler._found_inf_per_device(optimizer).values()))
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        row["scale_fell_in_update"] = scaler.get_scale() < before
        rows.append(row)
    out["steps"] = rows
    task = _digits(0, "cpu", "sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    batch = task.batch()

    def backward():
        with torch.autocast("cpu", torch.float16):
            loss = task.loss(batch)
        scaler.scale(loss).backward()

    backward()
    out["explain"] = package.explain(task.model, scaler, probe=backward).cause
    return out


# ---- 17: two processes


def _worker(rank, world, store, directory):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results = {
        "reduced": _ranks(rank, wrap=True, start=(65536.0, 65536.0)),
        "not reduced": _ranks(rank, wrap=False, start=(65536.0, 65536.0)),
        "unequal starts": _ranks(rank, wrap=True, start=(65536.0, 1024.0)),
    }
    torch.save(results, Path(directory) / f"rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _ranks(rank, wrap, start):
    """Twelve steps, interval 4; in step 5 rank 1 alone has an inf. Scales by step, skipped steps and the last weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    trained = nn.parallel.DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=start[rank], growth_interval=4)
    generator = torch.Generator().manual_seed(rank)
    scales, skipped = [], []
    for step in range(12):
        optimizer.zero_grad()
        loss = trained(torch.randn(8, 4, generator=generator)).square().mean()
        if step == 5 and rank == 1:
            loss = loss * math.inf
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        before = flat(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        if torch.equal(before, flat(model.parameters())):
            skipped.append(step)
    return {"scales": scales, "skipped": skipped, "weights": flat(model.parameters()), "scaler": id(scaler)}


def claim_17(options):
    """A scaler on each of two gloo ranks: with DDP, without it, and with DDP from unequal starts."""
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(_worker, (2, str(Path(scratch) / "store"), scratch), nprocs=2)
        one, two = (torch.load(Path(scratch) / f"rank{r}.pt") for r in range(2))
    return {
        name: {
            "scales_equal": one[name]["scales"] == two[name]["scales"],
            "skipped": [one[name]["skipped"], two[name]["skipped"]],
            "last_scales": [one[name]["scales"][-1], two[name]["scales"][-1]],
            "weights_apart": float((one[name]["weights"] - two[name]["weights"]).abs().max()),
        }
        for name in one
    }
