"""Tables and plots from what `run.py` left: `summary.md` and the SVG files, from the CSV files of a folder.

    python experiments/fidelity/summarize.py [--results experiments/fidelity/results]

Every run in the files is in every table; nothing is left out. Needs no torch.
"""

import argparse
import csv
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from svg import BLUE, FAINT, GREEN, GRID, ORANGE, PINK, RED, SKY, TEXT, Picture, Scale  # noqa: E402

ARCHITECTURES = ("transformer", "cnn", "rnn")
NAMES = {"transformer": "transformer", "cnn": "convolutional", "rnn": "recurrent"}
SOURCES = {
    "fp32": "FP32 run, parameters",
    "fp32-activations": "FP32 run, parameters and activations",
    "fp32-attention": "the same and the gradient inside attention",
    "fp16": "FP16 run at interval 500",
    "fp16-other-seed": "FP16 run at interval 500, another seed",
    "nudged": "a second real run, a rounding error away",
    "fp32-repeated": "FP32 run, parameters, over just those runs",
    "rule of thumb": "no run: one skip every N + 1 steps",
}


def read(path):
    if not path.exists():
        raise SystemExit(f'reading "{path}": it is not there; run experiments/fidelity/run.py and copy its CSV files there')
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def with_comparisons(predictions, runs):
    """And, to tell what the replay adds, a guess that looks at no gradient (at the ceiling, every growth is followed by an overflow); and the
    replay over just the runs that were run a second time."""
    repeated = {key(r) for r in predictions if r["source"] == "nudged"}
    steps = int(runs[0]["steps"]) if runs else 0
    guesses = []
    for r in predictions:
        if r["source"] == "fp32":
            guess = round(steps / (int(r["growth_interval"]) + 1))
            guesses.append({**r, "source": "rule of thumb", "predicted_skipped": str(guess), "predicted_last_scale": ""})
            if key(r) in repeated:
                guesses.append({**r, "source": "fp32-repeated"})
    return [*predictions, *guesses]


def key(row):
    return row["architecture"], row["data"], row["seed"], row["growth_interval"]


def mean(values):
    values = list(values)
    return statistics.fmean(values) if values else math.nan


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows)])


def percent(value):
    return f"{100 * value:.2f} %" if math.isfinite(value) else "–"


def off(rows):
    """Signed errors of predicted skips."""
    return [int(r["predicted_skipped"]) - int(r["real_skipped"]) for r in rows]


def errors(predictions):
    """By architecture and source: mean absolute error, bias, and so on. The recorded run's own interval is no prediction."""
    lines = []
    for architecture in (*ARCHITECTURES, "all"):
        for source, words in SOURCES.items():
            rows = [
                r for r in predictions
                if architecture in (r["architecture"], "all") and r["source"] == source and not (source == "fp16" and r["growth_interval"] == "500")
            ]  # fmt: skip
            if not rows:
                continue
            e = off(rows)
            real = sum(int(r["real_skipped"]) for r in rows)
            scales = source != "rule of thumb"
            last = [abs(math.log2(float(r["predicted_last_scale"]) / float(r["real_last_scale"]))) for r in rows if scales]
            lines.append(
                [
                    NAMES.get(architecture, "all"), words, str(len(rows)), f"{real / len(rows):.1f}", f"{mean(map(abs, e)):.2f}", f"{mean(e):+.2f}",
                    f"{max(map(abs, e))}", f"{100 * sum(e) / real:+.1f} %" if real else "–", f"{mean(last):.2f}" if scales else "–",
                    f"{100 * mean(float(r['same_scale']) for r in rows):.0f} %" if scales else "–",
                    f"{mean(float(r['mean_binades_apart']) for r in rows):.2f}" if scales else "–",
                ]
            )  # fmt: skip
    head = ["architecture", "predicted from", "runs", "real skips, mean", "mean absolute error", "bias", "worst", "total", "last scale off, binades",
            "steps at the same scale", "binades apart, mean"]  # fmt: skip
    return table(head, lines)


def by_interval(predictions):
    lines = []
    intervals = sorted({int(r["growth_interval"]) for r in predictions})
    for architecture in ARCHITECTURES:
        for n in intervals:
            cells = [NAMES[architecture], str(n)]
            for source in ("fp32", "nudged"):
                rows = [
                    r for r in predictions
                    if r["architecture"] == architecture and int(r["growth_interval"]) == n and r["source"] == source
                ]  # fmt: skip
                if not rows:
                    cells += ["–"] * (3 if source == "fp32" else 2)
                    continue
                e = off(rows)
                if source == "fp32":
                    cells.append(f"{mean(int(r['real_skipped']) for r in rows):.1f}")
                cells += [f"{mean(map(abs, e)):.2f}", f"{mean(e):+.2f}"]
            lines.append(cells)
    return table(["architecture", "interval", "real skips, mean", "FP32 replay: mean abs. error", "bias", "second real run: mean abs. error", "bias"], lines)


def every_run(predictions):
    """One row a real run: real skips, and what each source predicted."""
    by = defaultdict(dict)
    for r in predictions:
        by[r["architecture"], r["data"], int(r["seed"]), int(r["growth_interval"])][r["source"]] = r
    lines = []
    for (architecture, data, seed, n), sources in sorted(by.items(), key=lambda i: (ARCHITECTURES.index(i[0][0]), *i[0][1:])):
        real = next(iter(sources.values()))
        cells = [NAMES[architecture], data, str(seed), str(n), real["real_skipped"]]
        for source in list(SOURCES)[:-2]:
            r = sources.get(source)
            cells.append(r["predicted_skipped"] if r else "–")
        fp32 = sources.get("fp32")
        cells += [
            f"2^{math.log2(float(real['real_last_scale'])):g}",
            f"2^{math.log2(float(fp32['predicted_last_scale'])):g}" if fp32 else "–",
            f"{100 * float(fp32['same_scale']):.0f} %" if fp32 else "–",
        ]
        lines.append(cells)
    head = ["architecture", "data", "seed", "interval", "real", "FP32", "FP32 + activations", "FP32 + attention", "FP16", "FP16, other seed", "second real run",
            "real last scale", "FP32: last scale", "FP32: same scale"]  # fmt: skip
    return table(head, lines)


def lost_table(predictions):
    """The lost update predicted from the FP32 run's trace, against that of the real run."""
    lines = []
    for architecture in (*ARCHITECTURES, "all"):
        rows = [r for r in predictions if architecture in (r["architecture"], "all") and r["source"] == "fp32" and r["predicted_lost_update"]]
        apart = [float(r["predicted_lost_update"]) - float(r["real_lost_update"]) for r in rows]
        if rows:
            lines.append(
                [
                    NAMES.get(architecture, "all"), str(len(rows)), percent(mean(float(r["real_lost_update"]) for r in rows)),
                    percent(mean(map(abs, apart))), percent(mean(apart)), percent(max(map(abs, apart))),
                ]
            )  # fmt: skip
    return table(["architecture", "runs", "real, mean", "mean absolute error", "bias", "worst"], lines)


def regret_table(regret):
    lines = []
    for architecture in (*ARCHITECTURES, "all"):
        rows = [r for r in regret if architecture in (r["architecture"], "all")]
        if not rows:
            continue
        excess = [float(r["lost_recommended"]) - float(r["lost_best"]) for r in rows]
        default = [float(r["lost_default"]) - float(r["lost_best"]) for r in rows]
        named = sorted({int(r["recommended"]) for r in rows})
        lines.append(
            [
                NAMES.get(architecture, "all"), str(len(rows)), ", ".join(map(str, named)), percent(mean(float(r["lost_recommended"]) for r in rows)),
                percent(mean(float(r["lost_best"]) for r in rows)), percent(mean(excess)), percent(max(excess)), percent(mean(default)),
            ]
        )  # fmt: skip
    head = ["architecture", "runs", "recommended intervals", "lost at the recommended", "lost at the best tried", "regret, mean", "worst", "regret of 2000"]
    return table(head, lines)


def every_regret(regret):
    return table(
        ["architecture", "data", "seed", "recommended", "as good", "lost there", "predicted", "best tried", "lost there ", "lost at 2000"],
        [
            [
                NAMES[r["architecture"]], r["data"], r["seed"], r["recommended"], f"{r['low'] or '?'} to {r['high'] or '…'}",
                percent(float(r["lost_recommended"])), percent(float(r["predicted_lost"])), r["best"], percent(float(r["lost_best"])),
                percent(float(r["lost_default"])),
            ]
            for r in sorted(regret, key=lambda r: (ARCHITECTURES.index(r["architecture"]), r["data"], int(r["seed"])))
        ],
    )  # fmt: skip


def causes_table(causes):
    lines = []
    for architecture in ARCHITECTURES:
        for data in sorted({r["data"] for r in causes if r["architecture"] == architecture}):
            rows = [r for r in causes if r["architecture"] == architecture and r["data"] == data]
            seen = [float(r["parameters_headroom"]) <= 0 for r in rows]
            by_activation = [float(r["activations_headroom"]) <= 0 for r in rows]
            near = [0 < float(r["parameters_headroom"]) < 0.5 for r in rows]
            inside = [r["summed_in_fp32_headroom"] != "" and float(r["summed_in_fp32_headroom"]) > 0 for r in rows]
            parameter = [not r["first"].endswith(":grad_output") for r in rows]
            lines.append(
                [
                    NAMES[architecture], data, str(len(rows)), str(sum(seen)), str(sum(not s and a for s, a in zip(seen, by_activation))),
                    str(sum(not s and not a and i for s, a, i in zip(seen, by_activation, inside))), str(sum(not s and not a and not i for s, a, i in zip(seen, by_activation, inside))),
                    str(sum(near)), f"{max(float(r['parameters_headroom']) for r in rows):.2f}", str(sum(parameter)),
                ]
            )  # fmt: skip
    head = ["architecture", "data", "skips", "FP32 parameter gradients overflow too", "only FP32 activation gradients do", "only sums inside an FP16 convolution do", "none of these",
            "FP32 parameter gradients within half a binade below", "most headroom, binades", "first overflow in a parameter's gradient"]  # fmt: skip
    return table(head, lines)


def sampling_table(sampling):
    lines = []
    for architecture in ARCHITECTURES:
        rows = [r for r in sampling if r["architecture"] == architecture]
        apart = [abs(float(r["every_50"]) - float(r["every_1"])) for r in rows]
        if rows:
            lines.append([NAMES[architecture], str(len(rows)), f"{mean(apart):.1e}", f"{max(apart):.1e}", f"{max(float(r['every_1']) for r in rows):.3f}"])
    return table(["architecture", "runs", "mean difference", "largest", "largest lost update"], lines)


def setting(row):
    return f"static 2^{math.log2(float(row['static_scale'])):g}" if row["static_scale"] else f"interval {row['growth_interval']}"


def losses_table(losses):
    lines = []
    for cell in dict.fromkeys((r["architecture"], r["data"]) for r in losses):
        mine = [r for r in losses if (r["architecture"], r["data"]) == cell]
        for name in dict.fromkeys(map(setting, mine)):
            rows = [r for r in mine if setting(r) == name]
            loss = [float(r["final_loss"]) for r in rows]
            logs = [math.log10(v) for v in loss if math.isfinite(v)]
            lines.append(
                [
                    f"{NAMES[cell[0]]}, {cell[1]}", name, str(len(rows)), percent(mean(float(r["lost_update"]) for r in rows)),
                    f"{10 ** mean(logs):.3g}" if logs else "–", f"{min(loss):.3g} to {max(loss):.3g}", str(sum(not math.isfinite(v) for v in loss)),
                ]
            )  # fmt: skip
    return table(["run", "setting", "seeds", "lost update", "final loss, geometric mean", "least to most", "not finite"], lines)


LITTLE = 0.001  # a lost update below this is the level that a seed's other runs are compared with


def bands_table(losses):
    """Final loss by lost update, as a multiple of what the same seed reaches where little is lost."""
    lines = []
    for cell in dict.fromkeys((r["architecture"], r["data"]) for r in losses):
        mine = [r for r in losses if (r["architecture"], r["data"]) == cell and math.isfinite(float(r["final_loss"]))]
        level = {}
        for seed in {r["seed"] for r in mine}:
            low = [math.log(float(r["final_loss"])) for r in mine if r["seed"] == seed and float(r["lost_update"]) < LITTLE]
            if low:
                level[seed] = mean(low)
        for low, high, words in ((0, LITTLE, "below 0.1 %"), (LITTLE, 0.01, "0.1 to 1 %"), (0.01, 0.1, "1 to 10 %"), (0.1, 0.9, "10 to 90 %"), (0.9, 2, "all")):
            times = [
                math.log(float(r["final_loss"])) - level[r["seed"]] for r in mine if r["seed"] in level and low <= float(r["lost_update"]) < high
            ]
            if times:
                sd = math.exp(statistics.stdev(times)) if len(times) > 1 else math.nan
                lines.append(
                    [f"{NAMES[cell[0]]}, {cell[1]}", words, str(len(times)), f"{math.exp(mean(times)):.3g}", f"{sd:.3g}", f"{math.exp(max(times)):.3g}"]
                )
    return table(["run", "lost update", "runs", "final loss, times the seed's level", "standard deviation, a factor", "worst"], lines)


# ---- plots


def jitter(i, count, width):
    return width * ((i + 0.5) / max(count, 1) - 0.5)


def plot_errors(predictions):
    """Signed error against the interval, beside that of a second real run."""
    intervals = sorted({int(r["growth_interval"]) for r in predictions})
    miss = {s: mean(map(abs, off([r for r in with_comparisons(predictions, []) if r["source"] == s]))) for s in ("fp32-repeated", "nudged")}
    picture = Picture(
        960, 430, f"Predicted skips are off by {miss['fp32-repeated']:.1f} in the mean; a second real run of the same training by {miss['nudged']:.1f}",
        ["A dot is one real FP16 run (two data sets, every seed). A ring is one that was begun again with every weight at its next float: another run from",
         "there on. The means in the title are over the runs that were repeated; bars are means too. Made by experiments/fidelity/summarize.py."],
    )  # fmt: skip
    values = off([r for r in predictions if r["source"] in ("fp32", "nudged")])
    top = max(4, max(map(abs, values)))
    top = 2 * math.ceil((top + 1) / 2)
    picture.legend(
        76, 54, [("dot", BLUE, "predicted by replaying the FP32 run"), ("ring", RED, "a second real run, a rounding error away")]
    )
    for i, architecture in enumerate(ARCHITECTURES):
        x = Scale(-0.5, len(intervals) - 0.5, 70 + 300 * i, 330 + 300 * i)
        y = Scale(-top, top, 345, 95)
        step = max(2, 2 * round(top / 8))
        picture.panel(
            x, y, NAMES[architecture], [(k, str(n)) for k, n in enumerate(intervals)],
            [(v, f"{v:+d}" if v else "0") for v in range(-top, top + 1) if v % step == 0], "growth interval",
            "predicted − real skips" if i == 0 else None,
        )  # fmt: skip
        picture.line([(x.start, y(0)), (x.end, y(0))], TEXT, 1)
        for k, n in enumerate(intervals):
            for source, shape, colour, side in (("fp32", "dot", BLUE, -0.19), ("nudged", "ring", RED, 0.19)):
                e = sorted(
                    off([r for r in predictions if r["architecture"] == architecture and int(r["growth_interval"]) == n and r["source"] == source])
                )
                for j, value in enumerate(e):
                    picture.mark(x(k + side + jitter(j, len(e), 0.26)), y(value), shape, colour, 3.2, 0.55)
                if e:
                    picture.line([(x(k + side - 0.15), y(mean(e))), (x(k + side + 0.15), y(mean(e)))], colour, 3)
    return picture.svg()


def plot_counts(predictions):
    """Predicted against real skips."""
    rows = [r for r in predictions if r["source"] == "fp32"]
    most = max(max(int(r["predicted_skipped"]), int(r["real_skipped"])) for r in rows)
    limit = 1.4 * most
    picture = Picture(
        960, 400, "Predicted and real skips lie on one line, from none to a hundred",
        ["A dot is one real FP16 run of 1200 steps; both axes are logarithmic, zero has a place of its own. Made by experiments/fidelity/summarize.py."],
    )  # fmt: skip
    colours = {10: RED, 25: ORANGE, 50: GREEN, 100: SKY, 200: BLUE, 500: PINK}
    shapes = {10: "dot", 25: "diamond", 50: "cross", 100: "ring", 200: "dot", 500: "diamond"}
    intervals = sorted({int(r["growth_interval"]) for r in rows})
    picture.legend(76, 54, [(shapes.get(n, "dot"), colours.get(n, TEXT), f"interval {n}") for n in intervals])
    ticks = [(0, "0")] + [(v, str(v)) for v in (1, 2, 5, 10, 20, 50, 100) if v < limit]
    for i, architecture in enumerate(ARCHITECTURES):
        x = Scale(0.35, limit, 70 + 300 * i, 330 + 300 * i, log=True, zero=0.5)
        y = Scale(0.35, limit, 330, 95, log=True, zero=0.5)
        picture.panel(x, y, NAMES[architecture], ticks, ticks, "real skips", "predicted skips" if i == 0 else None)
        picture.line([(x(0.35), y(0.35)), (x(limit), y(limit))], FAINT, 1.2, "5 4")
        mine = [r for r in rows if r["architecture"] == architecture]
        seen = defaultdict(int)
        for r in mine:
            a, b, n = int(r["real_skipped"]), int(r["predicted_skipped"]), int(r["growth_interval"])
            k = seen[a, b]  # equal points side by side
            seen[a, b] += 1
            picture.mark(x(a) + 3 * (k % 3 - 1) * (k > 0), y(b) + 3 * (k // 3 % 3 - 1) * (k > 0), shapes.get(n, "dot"), colours.get(n, TEXT), 3.6, 0.7)
    return picture.svg()


def plot_regret(runs, regret, low):
    """What every real run lost, against its interval; the recommended one marked."""
    picture = Picture(
        960, 430, "Lost update of real FP16 runs at each interval: the recommended ones lie at the bottom, or near it",
        ["A line joins the real runs of one seed and data set; a diamond is the run at the interval that the FP32 run's trace recommends. The last panel",
         "starts from scale 1, where growing late costs something. Zero has a place of its own. Made by experiments/fidelity/summarize.py."],
    )  # fmt: skip
    picture.legend(76, 54, [("dot", BLUE, "a real run"), ("line", FAINT, "of one seed and data set"), ("diamond", GREEN, "at the recommended interval")])
    panels = [(a, "fp16", regret, NAMES[a]) for a in ARCHITECTURES] + [("cnn", "fp16-from-1", low, "convolutional, from 1")]
    for i, (architecture, kind, answers, title) in enumerate(panels):
        x = Scale(7, 4000, 70 + 225 * i, 262 + 225 * i, log=True)
        y = Scale(2e-4, 0.15, 340, 95, log=True, zero=2.6e-4)
        ticks = [(n, str(n)) for n in (10, 50, 200, 500, 2000)]
        levels = [(0, "0"), (1e-3, "0.1 %"), (1e-2, "1 %"), (1e-1, "10 %")] if i == 0 else [(v, "") for v in (0, 1e-3, 1e-2, 1e-1)]
        picture.panel(x, y, title, ticks, levels, "growth interval", "lost update" if i == 0 else None)
        groups = defaultdict(set)
        for r in runs:
            if r["architecture"] == architecture and r["kind"] == kind:
                groups[r["data"], r["seed"]].add((int(r["growth_interval"]), float(r["lost_update"])))
        for points in map(sorted, groups.values()):
            picture.line([(x(n), y(j if j > 3e-4 else 0)) for n, j in points], GRID, 1.2)
        for points in map(sorted, groups.values()):
            for n, j in points:
                picture.mark(x(n), y(j if j > 3e-4 else 0), "dot", BLUE, 2.8, 0.5)
        for r in answers:
            if r["architecture"] == architecture:
                j = float(r["lost_recommended"])
                picture.mark(x(int(r["recommended"])), y(j if j > 3e-4 else 0), "diamond", GREEN, 4.5, 0.75)
    return picture.svg()


def plot_losses(losses):
    """Final loss against lost update."""
    picture = Picture(
        960, 430, "Final loss against lost update: nothing to see below half a per cent; who skips everything learns nothing",
        ["A mark is one real FP16 run: static scales 2^0 to 2^20, and PyTorch's scaler at seven intervals. Skips are nearly all of what is lost",
         "above 1 %. Zero has a place of its own. Made by experiments/fidelity/summarize.py."],
    )  # fmt: skip
    picture.legend(76, 54, [("dot", BLUE, "static scale"), ("cross", RED, "dynamic, growth interval 10 to 2000")])
    cells = list(dict.fromkeys((r["architecture"], r["data"]) for r in losses))
    width = (960 - 80 - 30 * len(cells)) / len(cells)
    for i, cell in enumerate(cells):
        rows = [r for r in losses if (r["architecture"], r["data"]) == cell]
        finite = [float(r["final_loss"]) for r in rows if math.isfinite(float(r["final_loss"])) and float(r["final_loss"]) > 0]
        low, high = min(finite) / 1.5, max(finite) * 1.5
        left = 70 + (width + 45) * i
        x = Scale(2e-6, 1.6, left, left + width - 10, log=True, zero=3e-6)
        y = Scale(low, high, 340, 95, log=True)
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        levels = [(10.0**p, f"{10.0**p:g}") for p in powers] if len(powers) > 1 else [(v, f"{v:g}") for v in (0.5, 1, 1.5, 2, 2.5) if low < v < high]
        picture.panel(
            x, y, f"{NAMES[cell[0]]}, {cell[1]}", [(0, "0"), (1e-5, "10⁻⁵"), (1e-4, "10⁻⁴"), (1e-3, "0.1 %"), (1e-2, "1 %"), (1e-1, "10 %"), (1, "100 %")],
            levels, "lost update", "final loss" if i == 0 else None,
        )  # fmt: skip
        for r in rows:
            loss = float(r["final_loss"])
            if math.isfinite(loss) and loss > 0:
                j = float(r["lost_update"])
                static = bool(r["static_scale"])
                picture.mark(x(j if j > 4e-6 else 0), y(loss), "dot" if static else "cross", BLUE if static else RED, 3.6, 0.6)
    return picture.svg()


def write(path, text):
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    folder = parser.parse_args().results
    runs, predictions, regret, low, causes, sampling, losses = (
        read(folder / f"{name}.csv") for name in ("runs", "predictions", "regret", "regret_from_1", "causes", "sampling", "losses")
    )
    parts = ["# Fidelity: every run", "", f"Written by `summarize.py` from {len(runs)} training runs; `README.md` beside this folder says what they mean."]
    for title, rows, make in (
        ("Error of the predicted skips", with_comparisons(predictions, runs), errors),
        ("By growth interval", predictions, by_interval),
        ("What overflowed in the skipped steps of real runs at interval 10", causes, causes_table),
        ("Predicted lost update: sketches at every 50th step against every step", sampling, sampling_table),
        ("Regret of the recommended interval", regret, regret_table),
        ("Regret of the recommended interval, from scale 1", low, regret_table),
        ("Regret, every run", regret, every_regret),
        ("Regret, every run, from scale 1", low, every_regret),
        ("Predicted and real lost update", predictions, lost_table),
        ("Final loss by lost update", losses, bands_table),
        ("Final loss at static scales and growth intervals", losses, losses_table),
        ("Skips, every run", predictions, every_run),
    ):
        parts += ["", f"## {title}", "", make(rows) if rows else "No run yet."]
    write(folder / "summary.md", "\n".join(parts) + "\n")
    for name, rows, draw in (
        ("errors", predictions, lambda: plot_errors(predictions)),
        ("counts", predictions, lambda: plot_counts(predictions)),
        ("regret", regret, lambda: plot_regret(runs, regret, low)),
        ("losses", losses, lambda: plot_losses(losses)),
    ):
        if rows:
            write(folder / f"{name}.svg", draw())


if __name__ == "__main__":
    main()
