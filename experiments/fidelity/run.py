"""How near does a replay come to real FP16 training, what does its recommendation cost there, and does the lost update matter?

    python experiments/fidelity/run.py [--part runs|low|causes|losses|all] [--device cpu|cuda] [--out target/fidelity] [--seeds 3] [--steps 1200] [--quick]

Needs torch, scikit-learn and the program: on the path, or named by GRADSCALE_BIN. Each finished run is appended to a CSV file in OUT; started
again, the script goes on where it was, and runs that stand in the files aren't repeated. `summarize.py` makes tables and plots of the files.

    runs.csv          every training run: skips, last scale, final loss, measured underflow; the steps that were skipped
    predictions.csv   every real FP16 run against each way of predicting it
    causes.csv        every skip of some runs: how near the FP32 gradients of the same weights came to overflow, and what overflowed first
    sampling.csv      predicted lost update from sketches at every 50th step and at every step
    regret.csv        the growth interval that an FP32 run's trace recommends, and what was lost there in real runs
    regret_from_1.csv the same from scale 1 instead of 65536
    losses.csv        final loss against lost update, over static scales and growth intervals

`--quick` makes a minute's smoke test of it: one seed, 60 steps, two intervals.
"""

import argparse
import csv
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from loops import causes, mean, train_fp16, train_fp32, trajectory  # noqa: E402

CELLS = (
    ("transformer", "text"), ("transformer", "addition"), ("cnn", "digits"), ("cnn", "stripes"), ("rnn", "digits"), ("rnn", "counting"),
)  # fmt: skip
INTERVALS = (10, 25, 50, 100, 200, 500)
DEFAULT_INTERVAL = 2000
LOSS_SEEDS = 5
STATIC_LOG2 = (0, 4, 8, 12, 16, 17, 18, 20)
LOW_CELLS = (("cnn", "digits"), ("cnn", "stripes"))  # also tried from scale 1, where growing late costs something; elsewhere little is flushed
NUDGED_UP_TO = 100  # the longest interval whose runs are repeated from a start a rounding error away,
NUDGED_SEEDS = 2  # and the seeds
LOSS_CELLS = (("cnn", "digits"), ("transformer", "addition"))

RUN_FIELDS = (
    "architecture", "data", "seed", "kind", "growth_interval", "static_scale", "steps", "skipped", "unseen_skips", "last_scale",
    "final_loss", "flushed", "rounded", "lost_update", "seconds", "skipped_steps",
)  # fmt: skip
PREDICTION_FIELDS = (
    "architecture", "data", "seed", "growth_interval", "source", "predicted_skipped", "real_skipped", "predicted_last_scale",
    "real_last_scale", "same_scale", "mean_binades_apart", "predicted_lost_update", "real_lost_update",
)  # fmt: skip
CAUSE_FIELDS = (
    "architecture", "data", "seed", "growth_interval", "step", "scale_log2", "parameters_headroom", "activations_headroom", "first",
    "summed_in_fp32_headroom",
)  # fmt: skip
SAMPLING_FIELDS = ("architecture", "data", "seed", "growth_interval", "every_50", "every_1")
REGRET_FIELDS = (
    "architecture", "data", "seed", "recommended", "low", "high", "lost_recommended", "lost_default", "best", "lost_best", "predicted_lost",
)  # fmt: skip


class Table:
    """A CSV file that grows by whole rows and knows which keys it has."""

    def __init__(self, path, fields, keys):
        self.path, self.fields, self.keys = path, fields, keys
        self.rows = []
        if path.exists():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                if tuple(reader.fieldnames or ()) != tuple(fields):
                    raise SystemExit(f'reading "{path}": found columns {reader.fieldnames}, expected {list(fields)}; choose another --out')
                self.rows = [row for row in reader if None not in row.values()]
        self._write(self.rows)  # a row torn by a killed run is gone

    def _write(self, rows):
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self.path)

    def find(self, **wanted):
        wanted = {k: str(v) for k, v in wanted.items()}
        return next((r for r in self.rows if all(r[k] == v for k, v in wanted.items())), None)

    def has(self, row):
        return self.find(**{k: row[k] for k in self.keys}) is not None

    def add(self, row):
        row = {field: text_of(row.get(field, "")) for field in self.fields}
        self.rows.append(row)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.fields, lineterminator="\n").writerow(row)


def text_of(value):
    return f"{value:.9g}" if isinstance(value, float) else str(value)


# ---- the program


def gradscale(*arguments):
    program = os.environ.get("GRADSCALE_BIN", "gradscale")
    try:
        answer = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f'running "{program}": {error}; build it with cargo build --release and set GRADSCALE_BIN to it') from error
    if answer.returncode == 2:
        raise SystemExit(f"running {program} {' '.join(map(str, arguments))}: {answer.stderr.strip()}")
    return answer.stdout


def simulate(trace, intervals, options=()):
    """By interval: what the program predicts (its JSON) and the scale it predicts at each step."""
    policies = [f"pytorch:growth_interval={n}" for n in intervals]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trajectory.csv"
        flags = [word for p in policies for word in ("--policy", p)]
        document = json.loads(gradscale("simulate", trace, *flags, *options, "--json", "--quiet", "--trajectory", path))
        scales = {p: [] for p in policies}
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                scales[row["policy"]].append(float(row["loss_scale"]))
    return {n: (run, scales[p]) for n, p, run in zip(intervals, policies, document["runs"])}


# ---- the parts


class Study:
    def __init__(self, arguments):
        self.device, self.steps, self.seeds = arguments.device, arguments.steps, range(arguments.seeds)
        self.intervals = INTERVALS
        self.out = arguments.out
        if arguments.quick:
            self.steps, self.seeds, self.intervals = 60, range(1), (10, 25)
        self.quick = arguments.quick
        self.traces = self.out / "traces"
        self.traces.mkdir(parents=True, exist_ok=True)
        key = ("architecture", "data", "seed")
        self.runs = Table(self.out / "runs.csv", RUN_FIELDS, (*key, "kind", "growth_interval"))
        self.predictions = Table(self.out / "predictions.csv", PREDICTION_FIELDS, (*key, "growth_interval", "source"))
        self.causes = Table(self.out / "causes.csv", CAUSE_FIELDS, (*key, "growth_interval"))
        self.sampling = Table(self.out / "sampling.csv", SAMPLING_FIELDS, (*key, "growth_interval"))
        self.regret = {
            "fp16": Table(self.out / "regret.csv", REGRET_FIELDS, key),
            "fp16-from-1": Table(self.out / "regret_from_1.csv", REGRET_FIELDS, key),
        }
        self.losses = Table(self.out / "losses.csv", RUN_FIELDS, (*key, "growth_interval", "static_scale"))

    def say(self, *words):
        print(*words, file=sys.stderr, flush=True)

    def trace(self, cell, seed, name):
        return self.traces / f"{cell[0]}-{cell[1]}-{seed}-{name}"

    def recorded(self, cell, seed, name, train):
        """The trace of that name, made by `train(path)` unless it is there and whole; the row is for runs.csv."""
        path = self.trace(cell, seed, name)
        if not path.exists():
            unfinished = path.with_name(path.name + ".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            row = train(unfinished)
            if not self.runs.has({"growth_interval": "", **row}):
                self.runs.add(row)
            unfinished.replace(path)
        return path

    def fp32(self, cell, seed):
        return self.recorded(cell, seed, "fp32", lambda path: train_fp32(cell, seed, self.steps, self.device, path))

    def fp16(self, cell, seed):
        """The recorded FP16 run, at the longest interval."""
        n = self.intervals[-1]
        return self.recorded(
            cell, seed, "fp16", lambda path: train_fp16(cell, seed, self.steps, self.device, growth_interval=n, trace=path)
        )

    def real(self, cell, seed, n, kind="fp16"):
        """The row of that real run."""
        row = self.runs.find(architecture=cell[0], data=cell[1], seed=seed, kind=kind, growth_interval=n)
        if row is None:
            options = {"fp16": {}, "fp16-nudged": {"nudge": True}, "fp16-from-1": {"init_scale": 1.0}}[kind]
            made = train_fp16(cell, seed, self.steps, self.device, growth_interval=n, **options)
            self.say(f"{cell[0]}/{cell[1]} seed {seed} {kind} interval {n}: {made['skipped']} skipped, {made['seconds']} s")
            self.runs.add(made)
            row = self.runs.rows[-1]
        return row

    def cell(self, cell, seed):
        fp32, fp16 = self.fp32(cell, seed), self.fp16(cell, seed)
        for n in self.intervals:
            self.real(cell, seed, n)
        other = self.fp16(cell, (seed + 1) % len(self.seeds))
        self.predict(cell, seed, "fp32", fp32, ("--exclude", "*:grad_*"))
        self.predict(cell, seed, "fp32-activations", fp32, ("--exclude", "*.probabilities:*"))
        if cell[0] == "transformer":
            self.predict(cell, seed, "fp32-attention", fp32)
        self.predict(cell, seed, "fp16", fp16)
        if len(self.seeds) > 1:
            self.predict(cell, seed, "fp16-other-seed", other)
        if seed < NUDGED_SEEDS:
            self.predict_nudged(cell, seed)
        self.recommend(cell, seed, fp32)
        if seed == 0:
            self.sample(cell, seed, fp32)

    def predict(self, cell, seed, source, trace, options=()):
        missing = [n for n in self.intervals if not self.predictions.has(self.key(cell, seed, growth_interval=n, source=source))]
        for n, (run, scales) in simulate(trace, missing, options).items() if missing else ():
            lost = run["lost_update"]
            self.compare(cell, seed, n, source, run["skipped"], scales, run["last_scale"], lost["elements"] if lost else "")

    def predict_nudged(self, cell, seed):
        """One real run as the prediction of another that starts a rounding error away."""
        for n in self.intervals:
            if n <= NUDGED_UP_TO and not self.predictions.has(self.key(cell, seed, growth_interval=n, source="nudged")):
                run = self.real(cell, seed, n, "fp16-nudged")
                scales, last = trajectory(n, self.steps, map(int, run["skipped_steps"].split()))
                self.compare(cell, seed, n, "nudged", int(run["skipped"]), scales, last, float(run["lost_update"]))

    def compare(self, cell, seed, n, source, skipped, scales, last, lost):
        real = self.real(cell, seed, n)
        real_scales, real_last = trajectory(n, self.steps, map(int, real["skipped_steps"].split()))
        if real_last != float(real["last_scale"]):
            raise SystemExit(f"{cell[0]}/{cell[1]} seed {seed} interval {n}: the scaler ended at {real['last_scale']}, torch's rule at {real_last}")
        apart = [abs(math.log2(a / b)) for a, b in zip(scales, real_scales)]
        self.predictions.add(
            self.key(
                cell, seed, growth_interval=n, source=source, predicted_skipped=skipped, real_skipped=real["skipped"],
                predicted_last_scale=last, real_last_scale=real_last, same_scale=mean(a == 0 for a in apart),
                mean_binades_apart=mean(apart), predicted_lost_update=lost, real_lost_update=real["lost_update"],
            )
        )  # fmt: skip

    def key(self, cell, seed, **more):
        return {"architecture": cell[0], "data": cell[1], "seed": seed, **more}

    def recommend(self, cell, seed, trace, kind="fp16"):
        """What the FP32 trace recommends, run for real, against the best of the real runs."""
        table = self.regret[kind]
        if table.has(self.key(cell, seed)) or self.steps < 100:
            return
        options = ("--init-scale", 1) if kind == "fp16-from-1" else ()
        answer = json.loads(gradscale("recommend", trace, "--exclude", "*:grad_*", *options, "--json", "--quiet"))
        n = answer["growth_interval"] or DEFAULT_INTERVAL
        lost = {i: float(self.real(cell, seed, i, kind)["lost_update"]) for i in sorted({*self.intervals, DEFAULT_INTERVAL, n})}
        best = min(lost, key=lambda i: (lost[i], i))
        interval = answer["interval"] or {"low": "", "high": ""}
        table.add(
            self.key(
                cell, seed, recommended=n, low=interval["low"], high=interval["high"] or "", lost_recommended=lost[n],
                lost_default=lost[DEFAULT_INTERVAL], best=best, lost_best=lost[best], predicted_lost=answer["lost_update"]["recommended"],
            )
        )  # fmt: skip

    def sample(self, cell, seed, trace):
        """Sketches at every 50th step against sketches at every step, of the same run."""
        missing = [n for n in self.intervals if not self.sampling.has(self.key(cell, seed, growth_interval=n))]
        if not missing:
            return
        with tempfile.TemporaryDirectory() as scratch:
            dense = Path(scratch) / "trace"
            train_fp32(cell, seed, self.steps, self.device, dense, every=1, activations=False)
            every_1, every_50 = simulate(dense, missing), simulate(trace, missing, ("--exclude", "*:grad_*"))
        for n in missing:
            row = self.key(cell, seed, growth_interval=n)
            self.sampling.add(
                {**row, "every_50": every_50[n][0]["lost_update"]["elements"], "every_1": every_1[n][0]["lost_update"]["elements"]}
            )

    def run_all(self):
        for seed in self.seeds:
            for cell in CELLS[1::2] if self.quick else CELLS:
                self.cell(cell, seed)

    def run_low(self):
        """The recommendation where the scale starts at 1 and has far to climb."""
        for seed in self.seeds:
            for cell in LOW_CELLS:
                self.recommend(cell, seed, self.fp32(cell, seed), "fp16-from-1")

    def run_causes(self):
        """What overflowed in each skipped step, and would FP32 gradients have said so?"""
        n = 10
        for cell in CELLS[1::2] if self.quick else CELLS:
            if self.causes.has(self.key(cell, 0, growth_interval=n)):
                continue
            rows = causes(cell, 0, self.steps, self.device, n)
            for row in rows:
                self.causes.add(self.key(cell, 0, growth_interval=n, **row))
            self.say(f"{cell[0]}/{cell[1]}: {len(rows)} skips looked into")

    def run_losses(self):
        """Final loss at static scales and at growth intervals."""
        settings = [{"static_scale": 2.0**k} for k in STATIC_LOG2] + [{"growth_interval": n} for n in (*self.intervals, DEFAULT_INTERVAL)]
        for seed in range(1 if self.quick else LOSS_SEEDS):
            for cell in LOSS_CELLS[:1] if self.quick else LOSS_CELLS:
                for setting in settings:
                    row = self.key(cell, seed, growth_interval="", static_scale="", **{})
                    row.update({k: text_of(v) for k, v in setting.items()})
                    if self.losses.has(row):
                        continue
                    done = "growth_interval" in setting and self.runs.find(
                        architecture=cell[0], data=cell[1], seed=seed, kind="fp16", growth_interval=setting["growth_interval"]
                    )
                    made = done or train_fp16(cell, seed, self.steps, self.device, **setting)
                    self.losses.add(made)
                    self.say(f"{cell[0]}/{cell[1]} seed {seed} {setting}: lost {made['lost_update']}, loss {made['final_loss']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=["runs", "low", "causes", "losses", "all"], default="all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "target" / "fidelity")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--quick", action="store_true", help="a smoke test of a minute")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.steps < 1:
        parser.error(f"--seeds {arguments.seeds} --steps {arguments.steps}: expected at least 1 of each")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    study = Study(arguments)
    if arguments.part in ("runs", "all"):
        study.run_all()
    if arguments.part in ("low", "all"):
        study.run_low()
    if arguments.part in ("causes", "all"):
        study.run_causes()
    if arguments.part in ("losses", "all"):
        study.run_losses()


if __name__ == "__main__":
    main()
