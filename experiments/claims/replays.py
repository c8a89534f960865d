"""Claims about the rule of dynamic scaling, by replaying recorded and made-up series with the program: 9, 10, 11."""

import csv
import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from common import HERE, ROOT, gradscale, gradscale_json

GPU_RUNS = ROOT / "tests" / "data" / "gpu_runs"


def _series(path, rows, columns):
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def _replay(rows, columns, *policies):
    """By policy: the program's answer and the scale at each step."""
    with tempfile.TemporaryDirectory() as scratch:
        series, path = Path(scratch) / "series.csv", Path(scratch) / "trajectory.csv"
        _series(series, rows, columns)
        flags = [w for p in policies for w in ("--policy", p)]
        document = gradscale_json("simulate", series, *flags, "--trajectory", path)
        scales = defaultdict(list)
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                scales[row["policy"]].append(float(row["loss_scale"]))
    return [(run, one) for run, one in zip(document["runs"], scales.values())]


def claim_9(options):
    """Golden traces of the real implementations, the live torch class, and which policies follow torch's rule."""
    golden = {}
    for path in sorted((ROOT / "tests" / "data" / "golden").glob("*.jsonl")):
        cases = json.loads(gradscale("check", "--golden", path, "--json", bad_news=True))["cases"]
        golden[path.stem] = {"cases": len(cases), "passed": sum(c["passed"] for c in cases)}
    live = json.loads(
        gradscale(
            "check", "--exec", f"{sys.executable} -c 'import sys; sys.path.insert(0, \"python\"); from gradscale.testing import main; main([\"torch.amp.GradScaler\"])'",
            "--policy", "pytorch:growth_interval=20", "--silence", "60", "--cases", "20", "--json", bad_news=True,
        )
    )  # fmt: skip
    # The same fifteen steps for everyone: start 64, interval 3.
    overflows = [0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    rows = [(i, "inf" if f else 1e-12) for i, f in enumerate(overflows)]
    names = re.findall(r"^([a-z][a-z0-9-]*)  +\S", "\n".join(gradscale("policies").splitlines()[1:]), re.M)
    same, others, no_interval = [], {}, []
    torch_scales = None
    for name in names:
        try:
            ((run, scales),) = _replay(rows, ("step", "amax"), f"{name}:growth_interval=3,init_scale=64")
        except RuntimeError:
            no_interval.append(name)
            continue
        scales = [*scales, run["last_scale"]]
        torch_scales = torch_scales or scales  # torch-amp comes first
        if scales == torch_scales:
            same.append(name)
        else:
            others[name] = scales
    return {
        "golden": golden,
        "golden_cases": sum(g["cases"] for g in golden.values()),
        "golden_passed": sum(g["passed"] for g in golden.values()),
        "live_torch": {"passed": live["passed"], "properties": {p["name"]: p["passed"] for p in live["properties"]}},
        "torch_scales": torch_scales, "as_torch": same, "otherwise": others, "no_such_interval": no_interval,
    }  # fmt: skip


def claim_10(options):
    """Quiet stretches: at a cap they say nothing; elsewhere, how often does a growth stand for as long again?"""
    with (GPU_RUNS / "mlperf10_rnnt_a100x8.csv").open(newline="") as file:
        runs = defaultdict(list)
        for row in csv.DictReader(file):
            runs[row["run"]].append(row)
    capped = []
    for events in runs.values():
        overflows = {int(r["step"]) for r in events if r["found_inf"] == "1"}
        steps = int(events[-1]["step"]) + 1
        rows = [(i, "inf" if i in overflows else 1e-6) for i in range(steps)]
        ((run, scales),) = _replay(rows, ("step", "amax"), "apex-amp:init_scale=256,scale_window=2000,max_loss_scale=512")
        at_cap = scales.index(512.0)
        capped.append({"overflows": sorted(overflows), "steps": steps, "reaches_cap_at": at_cap, "steps_at_cap": steps - at_cap})
    rcnn = defaultdict(list)
    with (GPU_RUNS / "mlperf07_maskrcnn_v100x16.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["found_inf"] == "1":
                rcnn[row["run"]].append((int(row["step"]), float(row["loss_scale"])))
    late = [[e for e in events if e[0] > 1000] for events in rcnn.values()]
    after = []
    for events in rcnn.values():
        for (before, _), (step, _) in zip(events, events[1:]):
            if step > 1000 and step - before > 1000:
                # The window of 1000 grows 1000 steps after the last overflow and every 1000 steps from then on.
                after.append((step - before - 1) % 1000)
    return {
        "capped": capped,
        "mask_rcnn": {
            "late_overflows": [len(e) for e in late],
            "scales": sorted({s for e in late for _, s in e}),
            "with_a_growth_before": len(after),
            "within_100_steps_of_it": sum(a < 100 for a in after),
        },
        "small_runs": _growths(),
    }


def _growths():
    """Of the growths in the real FP16 runs of the fidelity study, which stood for another interval?"""
    path = ROOT / "experiments" / "fidelity" / "results" / "runs.csv"
    if not path.exists():
        raise SystemExit(f'reading "{path}": it is not there; run experiments/fidelity/run.py first')
    out = defaultdict(lambda: {"growths": 0, "stood": 0})
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["kind"] != "fp16" or not row["growth_interval"]:
                continue
            n, steps = int(row["growth_interval"]), int(row["steps"])
            skipped = set(map(int, row["skipped_steps"].split()))
            clean = 0
            for step in range(steps):
                clean = 0 if step in skipped else clean + 1
                if clean == n:
                    clean = 0
                    if step + n < steps:
                        out[n]["growths"] += 1
                        out[n]["stood"] += not any(s in skipped for s in range(step + 1, step + 1 + n))
    return {str(n): v for n, v in sorted(out.items()) if n <= 500}


def claim_11(options):
    """From 256 to 32768: how long it takes, which gradients allow it, and a public run that climbed as far."""
    steps = 20_001
    rows = [(i, 1.5) for i in range(steps)]
    (slow, scales), (_, other) = _replay(
        rows, ("step", "amax"), "pytorch:init_scale=256,growth_interval=2000", "deepspeed:init_scale=256,scale_window=1000"
    )
    gnmt = defaultdict(list)
    with (HERE / "data" / "mlperf06_gnmt_v100x8.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["found_inf"] == "1":
                gnmt[row["run"]].append((int(row["step_lo"]), float(row["loss_scale_after"])))
    return {
        "pytorch_reaches_32768_at": scales.index(32768.0),
        "deepspeed_reaches_32768_at": other.index(32768.0),
        "skipped": slow["skipped"],
        "last_scale": slow["last_scale"],
        "amax_below_to_run_at_32768": 65520 / 32768,
        "amax_from_to_stop_there": 65520 / 65536,
        "gnmt": [
            {"first_cut_to": events[0][1], "least_after_a_cut": min(s for _, s in events), "last_cut_to": events[-1][1], "at_step": events[-1][0]}
            for events in gnmt.values()
        ],
    }
