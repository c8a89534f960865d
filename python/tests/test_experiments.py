"""The studies of `experiments/fidelity` and `experiments/claims`: their parts, and a smoke test of the whole."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from program import needs_program

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"

if not (EXPERIMENTS / "fidelity").exists():
    pytest.skip("the experiments are not beside this package", allow_module_level=True)
pytest.importorskip("sklearn")


def script(*arguments):
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.fixture
def fidelity(monkeypatch):
    """The modules of the fidelity study, gone from `sys.modules` afterwards: `run` is a name that others use."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS / "fidelity"))
    import loops
    import run
    import svg

    yield loops, run, svg
    for name in ("loops", "run", "svg", "tasks"):
        sys.modules.pop(name, None)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_rule_of_torch_gives_the_scaler_s_own_scales(fidelity):
    loops, _, _ = fidelity
    overflows, n = {4, 9, 10, 23}, 3
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=loops.INITIAL_SCALE, growth_interval=n)
    seen = []
    for step in range(30):
        scaler.scale((p * (math.inf if step in overflows else 1.0)).sum()).backward()
        seen.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert loops.trajectory(n, 30, overflows) == (seen, scaler.get_scale())


def test_one_seed_one_start_and_the_same_batches(fidelity):
    loops, _, _ = fidelity
    for architecture, names in loops.tasks.ARCHITECTURES.items():
        for data in names:
            a, b, other = (loops.tasks.build(architecture, data, seed) for seed in (1, 1, 2))
            first, again = a.batch(), b.batch()
            assert all(torch.equal(x, y) for x, y in zip(first, again))
            loss = a.loss(first)
            assert torch.equal(loss, b.loss(again)) and loss.dim() == 0 and not torch.equal(loss, other.loss(first))
            assert math.isfinite(a.evaluate()) and a.evaluate() == b.evaluate()
    with pytest.raises(ValueError, match="cnn/digits"):
        loops.tasks.build("cnn", "text")


def test_lost_update_counts_skips_whole_and_the_nearest_probe_elsewhere(fidelity):
    loops, _, _ = fidelity
    loop = loops.Loop(loops.tasks.build("cnn", "digits"), "cpu")
    loop.steps, loop.skipped, loop.flushed = 10, [3], {0: 0.0, 8: 0.5}
    assert loop.lost_update() == (1 + 5 * 0.5) / 10  # step 3 skipped; 5 to 9 are nearer to 8


def test_what_the_probe_counts_is_flushed(fidelity):
    loops, _, _ = fidelity
    task = loops.tasks.build("cnn", "digits")
    tiny = loops.Loop(task, "cpu", static_scale=2.0**-20, probe_every=1)
    tiny.run(1)
    ample = loops.Loop(loops.tasks.build("cnn", "digits"), "cpu", static_scale=2.0**12, probe_every=1)
    ample.run(1)
    assert tiny.flushed[0] > 0.2 and tiny.rounded[0] > 0.2 and ample.flushed[0] < 0.01
    assert tiny.last_scale == 2.0**-20


def test_a_table_forgets_a_torn_row_and_knows_its_keys(fidelity, tmp_path):
    _, run, _ = fidelity
    table = run.Table(tmp_path / "t.csv", ("a", "b"), ("a",))
    table.add({"a": 1, "b": 0.5})
    table.path.open("a").write("2")
    again = run.Table(tmp_path / "t.csv", ("a", "b"), ("a",))
    assert again.rows == [{"a": "1", "b": "0.5"}] and again.has({"a": 1}) and not again.has({"a": 2})
    with pytest.raises(SystemExit, match="expected .*'c'.*choose another --out"):
        run.Table(tmp_path / "t.csv", ("a", "c"), ("a",))


def test_zero_has_a_place_on_a_logarithmic_axis(fidelity):
    _, _, svg = fidelity
    x = svg.Scale(1, 100, 0, 200, log=True, zero=1)
    assert (x(0), x(1), x(10), x(100)) == (0, 0, 100, 200)
    picture = svg.Picture(100, 50, "<a & b>", ["c"])
    assert "&lt;a &amp; b&gt;" in picture.svg()
    with pytest.raises(ValueError, match="expected dot, ring"):
        picture.mark(1, 1, "star")


@needs_program
def test_the_fidelity_study_runs_and_goes_on_where_it_was(tmp_path):
    folder = EXPERIMENTS / "fidelity"
    script(folder / "run.py", "--quick", "--out", tmp_path)
    names = ("runs", "predictions", "regret", "causes", "sampling", "losses")
    before = {name: (tmp_path / f"{name}.csv").read_bytes() for name in names}
    predictions = rows(tmp_path / "predictions.csv")
    assert len(predictions) == 3 * 2 * 4 + 2  # architectures, intervals, sources; inside attention too
    assert all(r["real_last_scale"] for r in predictions)
    assert {r["kind"] for r in rows(tmp_path / "runs.csv")} == {"fp32", "fp16", "fp16-nudged"}
    script(folder / "run.py", "--quick", "--out", tmp_path)
    assert {name: (tmp_path / f"{name}.csv").read_bytes() for name in names} == before
    script(folder / "summarize.py", "--results", tmp_path)
    assert "## Skips, every run" in (tmp_path / "summary.md").read_text()
    for name in ("errors", "counts", "losses"):
        assert (tmp_path / f"{name}.svg").read_text().endswith("</svg>\n")


@needs_program
def test_claims_are_measured_anew(tmp_path):
    out = tmp_path / "results.json"
    script(EXPERIMENTS / "claims" / "run.py", "--quick", "--out", out, "--only", "2,11,13,14")
    results = json.loads(out.read_text())
    assert sorted(results, key=int) == ["2", "11", "13", "14"]
    assert results["2"]["largest"] == 65504 and results["2"]["is_next_after_2_to_minus_25"]
    assert results["11"]["pytorch_reaches_32768_at"] == 14000
    assert results["13"]["none_clean_step"].startswith("TypeError")
    assert results["14"]["before_first_scale"] == "None"


def test_every_claim_has_a_result_and_a_section():
    results = json.loads((EXPERIMENTS / "claims" / "results.json").read_text())
    page = (EXPERIMENTS / "claims" / "README.md").read_text()
    for number in range(1, 20):
        assert str(number) in results and f"\n### {number}. " in page


def test_the_committed_tables_are_of_the_committed_runs(tmp_path):
    folder = EXPERIMENTS / "fidelity" / "results"
    for path in folder.glob("*.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    script(EXPERIMENTS / "fidelity" / "summarize.py", "--results", tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name


def test_a_missing_program_is_named(tmp_path):
    environment = {**os.environ, "GRADSCALE_BIN": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, EXPERIMENTS / "claims" / "run.py", "--only", "11", "--out", tmp_path / "r.json"],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 1 and "set GRADSCALE_BIN" in done.stderr and not (tmp_path / "r.json").exists()
