"""Claims about training runs: 1, 6, 7, 8, 16, 18, 19."""

import copy
import csv
import functools
import math
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import HERE, OVERFLOW, ROOT, flat, gradients, gradscale_json, spread, step_by_hand, tasks

import loops  # experiments/fidelity/loops.py

RESULTS = ROOT / "experiments" / "fidelity" / "results"


@dataclass
class Far:
    """A convolutional network whose training has gone far, and some batches for it."""

    task: Any
    loss: float
    steps: int
    batches: list


@functools.cache
def _trained_far(seed, device, goal, most):
    task = tasks.build("cnn", "digits", seed, device)
    window, steps = [], 0
    while steps < most:
        window = (window + [step_by_hand(task, device, fp16=False)])[-100:]
        steps += 1
        if steps >= 100 and statistics.fmean(window) < goal:
            break
    return Far(task, statistics.fmean(window), steps, [task.batch() for _ in range(20)])


def trained_far(seed, options, goal=1e-4):
    """The digits network in FP32 until the mean loss of 100 batches is below `goal`, 20,000 steps at most. Callers leave it as it is."""
    return _trained_far(seed, options.device, goal, 200 if options.quick else 20_000)


def _zeros(task, batches, device, scale):
    """What FP16 at this scale makes of the gradients, judged by the FP32 gradients of the same weights and batches."""
    counts = defaultdict(float)
    for batch in batches:
        true = flat(gradients(task, batch, device))
        half = flat(gradients(task, batch, device, scale, fp16=True))
        nonzero, finite = true != 0, bool(torch.isfinite(half).all())
        counts["elements"] += len(true)
        counts["true_zeros"] += int((~nonzero).sum())
        counts["overflowed_batches"] += not finite
        if finite:
            flushed = nonzero & (half == 0)
            counts["nonzero"] += int(nonzero.sum())
            counts["flushed"] += int(flushed.sum())
            counts["flushed_l1"] += float(true[flushed].abs().sum())
            counts["l1"] += float(true.abs().sum())
    return {
        "true_zeros": counts["true_zeros"] / counts["elements"],
        "flushed": counts["flushed"] / counts["nonzero"] if counts["nonzero"] else None,
        "flushed_l1": counts["flushed_l1"] / counts["l1"] if counts["l1"] else None,
        "overflowed_batches": int(counts["overflowed_batches"]),
        "batches": len(batches),
    }


def claim_1(options):
    """A network trained until its loss is 1e-4 and 1e-5, then on from there in FP32, FP16 unscaled and FP16 scaled."""
    scales = (1.0, 2.0**10, 2.0**16, 2.0**20, 2.0**24)
    out = []
    for seed in range(1 if options.quick else 3):
        fresh = tasks.build("cnn", "digits", seed, options.device)
        zeros = {f"{s:g}": _zeros(fresh, [fresh.batch() for _ in range(20)], options.device, s) for s in scales}
        out.append({"seed": seed, "goal": None, "steps": 0, "evaluated": fresh.evaluate(), "zeros": zeros})
        for goal in (1e-4, 1e-5):
            far = trained_far(seed, options, goal)
            zeros = {f"{s:g}": _zeros(far.task, far.batches, options.device, s) for s in scales}
            row = {"seed": seed, "goal": goal, "steps": far.steps, "loss": far.loss, "evaluated": far.task.evaluate(), "zeros": zeros}
            row["after"] = {mode: _go_on(far, seed, mode, options) for mode in ("fp32", "fp16 unscaled", "fp16 scaled")}
            out.append(row)
    return {"runs": out}


def _go_on(far, seed, mode, options):
    """Trains a copy on from the checkpoint."""
    task = tasks.build("cnn", "digits", seed, options.device)
    task.model.load_state_dict(far.task.model.state_dict())
    task.optimizer.load_state_dict(copy.deepcopy(far.task.optimizer.state_dict()))
    start = flat(task.model.parameters())
    steps, note = 50 if options.quick else 1000, {}
    if mode == "fp16 scaled":
        loop = loops.Loop(task, options.device, growth_interval=200)
        loop.run(steps)
        note = {"skipped": len(loop.skipped), "last_scale": loop.last_scale}
    else:
        for _ in range(steps):
            step_by_hand(task, options.device, fp16=mode != "fp32")
    moved = float((flat(task.model.parameters()) - start).norm())
    return {"steps": steps, "evaluated": task.evaluate(), "moved": moved, **note}


def claim_6(options):
    """Step time: no scaling, a static scale by hand, a static scale that is checked, a dynamic one. CPU time, in turns."""
    out = {}
    for architecture, data in (("cnn", "digits"), ("transformer", "addition")):
        task = tasks.build(architecture, data, 0, options.device)
        state = copy.deepcopy(task.model.state_dict())

        def turn(way, steps):
            task.model.load_state_dict(state)
            scaler = torch.amp.GradScaler(options.device, init_scale=1024.0)
            begin = time.process_time() if options.device == "cpu" else time.perf_counter()
            for _ in range(steps):
                if way in ("none", "static by hand"):
                    step_by_hand(task, options.device, 1024.0 if way == "static by hand" else 1.0)
                    continue
                task.optimizer.zero_grad()
                with torch.autocast(options.device, torch.float16):
                    loss = task.loss(task.batch())
                scaler.scale(loss).backward()
                scaler.step(task.optimizer)
                scaler.update(1024.0 if way == "static, checked" else None)
                float(loss.detach())
            if options.device == "cuda":
                torch.cuda.synchronize()
            end = time.process_time() if options.device == "cpu" else time.perf_counter()
            return 1e3 * (end - begin) / steps

        ways = ("none", "static by hand", "static, checked", "dynamic")
        times = {way: [] for way in ways}
        for way in ways:
            turn(way, 5)
        for _ in range(2 if options.quick else 20):
            for way in ways:
                times[way].append(turn(way, 5 if options.quick else 25))
        out[architecture] = {
            way: {
                "median_ms": statistics.median(times[way]),
                "ratio_to_none": spread([a / b for a, b in zip(times[way], times["none"])])
                | {"median": statistics.median(a / b for a, b in zip(times[way], times["none"]))},
            }
            for way in ways
        }
    return out


@functools.cache
def _static_scales(device, quick):
    """Lost update at every static power of two, by the program, from an FP32 trace of each task."""
    rows = []
    exponents = range(0, 25)
    for architecture in ("cnn", "transformer"):
        for data in tasks.ARCHITECTURES[architecture]:
            for seed in range(1 if quick else 3):
                with tempfile.TemporaryDirectory() as scratch:
                    trace = Path(scratch) / "trace"
                    loops.train_fp32((architecture, data), seed, 120 if quick else 1200, device, trace, activations=False)
                    flags = [w for k in exponents for w in ("--policy", f"static:scale=2^{k}")]
                    runs = gradscale_json("simulate", trace, *flags)["runs"]
                    best = gradscale_json("recommend", trace)["best_static_scale"]
                lost = [r["lost_update"]["elements"] for r in runs]
                good = [k for k, j in zip(exponents, lost) if j <= min(lost) + 0.0005]
                overflow_free = [k for k, r in zip(exponents, runs) if r["skipped"] == 0]
                rows.append(
                    {
                        "architecture": architecture, "data": data, "seed": seed, "best_log2": math.log2(best),
                        "as_good_log2": [good[0], good[-1]], "largest_without_overflow_log2": max(overflow_free, default=None),
                        "lost_at_1": lost[0], "lost_at_128": lost[7], "lost_at_1024": lost[10], "lost_at_best": min(lost),
                    }
                )  # fmt: skip
    return rows


def claim_7(options):
    """The best static scale of an architecture on three data sets."""
    rows = _static_scales(options.device, options.quick)
    summary = {}
    for architecture in ("cnn", "transformer"):
        mine = [r for r in rows if r["architecture"] == architecture]
        best = {d: statistics.fmean(r["best_log2"] for r in mine if r["data"] == d) for d in tasks.ARCHITECTURES[architecture]}
        free = {
            d: statistics.fmean(r["largest_without_overflow_log2"] for r in mine if r["data"] == d)
            for d in tasks.ARCHITECTURES[architecture]
        }
        common = (max(r["as_good_log2"][0] for r in mine), min(r["as_good_log2"][1] for r in mine))
        summary[architecture] = {
            "best_log2": best,
            "best_apart_factor": 2 ** (max(best.values()) - min(best.values())),
            "largest_without_overflow_log2": free,
            "ceiling_apart_factor": 2 ** (max(free.values()) - min(free.values())),
            "as_good_for_all_log2": list(common) if common[0] <= common[1] else None,
        }
    return {"summary": summary, "runs": rows}


def claim_8(options):
    """What 128 and 1024 lose and how far they lie below the ceiling, here and in public statistics of GPU runs."""
    rows = _static_scales(options.device, options.quick)
    here = {}
    for architecture in ("cnn", "transformer"):
        mine = [r for r in rows if r["architecture"] == architecture]
        here[architecture] = {
            "lost_at_128": spread([r["lost_at_128"] for r in mine]), "lost_at_1024": spread([r["lost_at_1024"] for r in mine]),
            "largest_without_overflow_log2": spread([r["largest_without_overflow_log2"] for r in mine]),
        }  # fmt: skip
    public = []
    steps = defaultdict(list)
    with (HERE / "data" / "resnet50_weight_gradients.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            steps[row["step"]].append((float(row["amax"]), float(row["l2_norm"]), int(row["elements"])))
    for step, tensors in steps.items():
        amax = max(t[0] for t in tensors)
        rms = min(norm / math.sqrt(n) for _, norm, n in tensors)
        public.append({"model": "ResNet-50", "step": step, "amax": amax, **_room(amax), "smallest_rms_log2": math.log2(rms)})
    with (HERE / "data" / "gradient_amax_of_public_runs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            public.append({"model": row["model"], "step": row["step"], "amax": float(row["amax"]), **_room(float(row["amax"]))})
    return {"here": here, "public": public}


def _room(amax):
    largest = math.ceil(math.log2(OVERFLOW / amax)) - 1  # the largest k with amax * 2^k < 65520
    return {"largest_scale_log2": largest, "binades_above_128": largest - 7, "binades_above_1024": largest - 10}


def claim_16(options):
    """Growth interval 100 against 2000 over five seeds."""
    steps, seeds = (150, 1) if options.quick else (4000, 5)
    rows = []
    for cell in (("cnn", "digits"), ("rnn", "counting")):
        for seed in range(seeds):
            for n in (100, 2000):
                task = tasks.build(*cell, seed, options.device)
                loop = loops.Loop(task, options.device, growth_interval=n)
                losses = []
                loop.run(steps, lambda step, scale, found_inf, loss: losses.append(loss))
                tail = losses[steps // 2 :]
                rows.append(
                    {
                        "architecture": cell[0], "data": cell[1], "seed": seed, "growth_interval": n, "steps": steps,
                        "skipped": len(loop.skipped), "last_scale": loop.last_scale, "evaluated": task.evaluate(),
                        "tail_mean_loss": statistics.fmean(tail), "tail_worst_loss": max(tail), "lost_update": loop.lost_update(),
                    }
                )  # fmt: skip
    summary = {}
    for cell in {(r["architecture"], r["data"]): 0 for r in rows}:
        mine = [r for r in rows if (r["architecture"], r["data"]) == cell]
        by = {n: [r for r in mine if r["growth_interval"] == n] for n in (100, 2000)}
        summary["/".join(cell)] = {
            **{
                str(n): {k: spread([r[k] for r in by[n]]) for k in ("skipped", "evaluated", "tail_mean_loss", "tail_worst_loss", "lost_update")}
                for n in by
            },
            "log10_evaluated_100_minus_2000": spread(
                [math.log10(a["evaluated"] / b["evaluated"]) for a, b in zip(by[100], by[2000])]
            ),
        }
    return {"summary": summary, "runs": rows}


def _losses():
    path = RESULTS / "losses.csv"
    if not path.exists():
        raise SystemExit(f'reading "{path}": it is not there; run experiments/fidelity/run.py --part losses first')
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def claim_18(options):
    """FP16 at scale 1, short and long: final loss against larger static scales and FP32."""
    with (RESULTS / "runs.csv").open(newline="") as file:
        fp32 = {(r["architecture"], r["data"], r["seed"]): float(r["final_loss"]) for r in csv.DictReader(file) if r["kind"] == "fp32"}
    by = defaultdict(dict)
    for row in _losses():
        if row["static_scale"]:
            cell = (row["architecture"], row["data"])
            by[cell].setdefault(float(row["static_scale"]), []).append(row)
    out = {}
    for cell, scales in by.items():
        out["/".join(cell)] = {
            "fp32_final_loss": spread([v for k, v in fp32.items() if k[:2] == cell]),
            **{
                f"2^{math.log2(s):g}": {
                    "final_loss": spread([float(r["final_loss"]) for r in rows]), "flushed": spread([float(r["flushed"]) for r in rows]),
                    "skipped": spread([float(r["skipped"]) for r in rows]),
                }
                for s, rows in sorted(scales.items())
            },
        }  # fmt: skip
    return out


def claim_19(options):
    """The best static scale, in hindsight, against PyTorch's dynamic scaler at several intervals."""
    cells = defaultdict(list)
    for row in _losses():
        cells[row["architecture"], row["data"]].append(row)
    out = {}
    for cell, rows in cells.items():
        settings = defaultdict(dict)
        for r in rows:
            name = f"static 2^{math.log2(float(r['static_scale'])):g}" if r["static_scale"] else f"dynamic {r['growth_interval']}"
            settings[name][r["seed"]] = (float(r["lost_update"]), float(r["final_loss"]))
        table = {
            name: {"lost_update": spread([v[0] for v in by.values()]), "final_loss": spread([v[1] for v in by.values()])}
            for name, by in settings.items()
        }
        best = {
            kind: min((n for n in table if n.startswith(kind)), key=lambda n: table[n]["lost_update"]["mean"]) for kind in ("static", "dynamic")
        }
        a, b = settings[best["static"]], settings[best["dynamic"]]
        out["/".join(cell)] = {
            "best": best,
            "settings": table,
            "log10_loss_static_minus_dynamic": spread([math.log10(a[s][1] / b[s][1]) for s in a if s in b]),
        }
    return out
