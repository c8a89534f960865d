"""A trace, opened in a notebook."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from program import PROGRAM, needs_program, run_json
from test_distributed import STEPS, alone, assert_same, merged, record
from torch import nn

import gradscale
from gradscale import Recorder
from gradscale.errors import ProgramError, TraceError
from gradscale.sketch import sketch
from gradscale.trace import chunk_paths


@pytest.fixture
def trace(tmp_path):
    """12 steps at a scale that halves; step 5 overflows; a probe in step 0."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    scale = 64.0
    with Recorder(model, tmp_path / "trace", every=4, chunk_steps=5, loss_scale=lambda: scale, facts={"<b>": "x & y"}) as recorder:
        for step in range(12):
            if step == 6:
                scale = 32.0
            model.zero_grad()
            x = torch.randn(3, 5) * (float("inf") if step == 5 else 1)
            loss = model(x).square().mean()
            (loss * scale).backward()
            recorder.step(loss=loss)
            recorder.probe(lambda x=x: model(x).square().mean().backward())
    return tmp_path / "trace"


def test_steps_amax_and_sketches(trace):
    run = gradscale.open(trace, pandas=False)
    steps = run.steps
    assert steps["step"].tolist() == list(range(12)) and len(run) == 12
    assert steps["loss_scale"].tolist() == [64.0] * 6 + [32.0] * 6
    assert steps["found_inf"].tolist() == [0] * 5 + [1] + [0] * 6
    assert steps["sampled"].tolist() == [s % 4 == 0 for s in range(12)]
    assert run.amax.shape == (12, 4) and run.amax.dtype == np.float32
    assert (run.amax * steps["loss_scale"][:, None].astype(np.float32) == run.amax_as_recorded).all()
    finite = steps["found_inf"] == 0
    assert (steps["amax"][finite] == run.amax.max(axis=1)[finite]).all()
    assert sorted(run.sketches) == [0, 4, 8] and sorted(run.probes) == [0, 4, 8]
    assert list(run.sketches[4]) == run.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert run.sketches[4]["0.weight"].elements == 20 and run.nonfinite[5].all()


def test_pandas_where_it_is(trace):
    pandas = pytest.importorskip("pandas")
    run = gradscale.open(trace)
    assert isinstance(run.steps, pandas.DataFrame) and run.steps.index.name == "step"
    assert run.amax.loc[3, "0.bias"] == gradscale.open(trace, pandas=False).amax[3, 1]
    assert run.steps.loc[5, "found_inf"] == 1


def test_it_shows_itself_escaped(trace):
    run = gradscale.open(trace)
    assert "12 steps 0 to 11; 4 tensors, 3 sampled steps, 3 probes; 1 steps overflowed; loss_scale 32 to 64" in repr(run)
    page = run._repr_html_()
    assert "0.weight" in page and "5" in page and "<b>:" not in page and "&lt;b&gt;: x &amp; y" in page
    run.tensors[0]["name"] = "<script>alert(1)</script>"
    run.sketches.clear()
    assert "<script>" not in run._repr_html_()


@pytest.mark.parametrize("max_writers", [8, 1])
def test_ranks_are_merged(tmp_path, max_writers):
    ranks.run(record, 2, tmp_path / "store", tmp_path / "trace", max_writers, "group")
    run = gradscale.open(tmp_path / "trace", pandas=False)
    expected = alone(2)
    seen = {}
    for row in range(STEPS):
        amax, bits = (dict(zip(run.names, part[row].tolist())) for part in (run.amax_as_recorded, run.nonfinite))
        found_inf = int(run.steps["found_inf"][row])
        seen[row] = {"found_inf": found_inf, "amax": amax, "bits": bits, "sketch": run.sketches.get(row, {})}
    assert_same(seen, expected)
    assert_same(merged(tmp_path / "trace"), seen)


def test_bad_traces_are_named(trace, tmp_path):
    with pytest.raises(TraceError, match="no such directory"):
        gradscale.open(tmp_path / "nothing")
    with pytest.raises(TraceError, match="found no chunk"):
        gradscale.open(tmp_path)
    last = chunk_paths(trace)[-1]
    last.write_bytes(last.read_bytes()[:200])
    with pytest.raises(TraceError, match=last.name):
        gradscale.open(trace)
    with pytest.warns(RuntimeWarning, match=last.name):
        assert len(gradscale.open(trace, skip_bad=True)) == 11


def test_a_missing_program_is_said_to_be(trace, monkeypatch, tmp_path):
    monkeypatch.delenv("GRADSCALE_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProgramError, match="found no program gradscale on PATH.*GRADSCALE_BIN"):
        gradscale.open(trace).report()
    with pytest.raises(ProgramError, match="expected a program that runs"):
        gradscale.open(trace).report(program=str(tmp_path / "not-there"))


@needs_program
def test_the_report_is_the_programs(trace, tmp_path):
    report = gradscale.open(trace).report(tmp_path / "out", program=PROGRAM)
    assert report.page == tmp_path / "out" / "report.html" and report.json["schema"] == "gradscale.report/1"
    assert str(report) and report._repr_html_().startswith("<iframe srcdoc=")
    assert "<script" not in report._repr_html_() and "<svg" not in report._repr_html_()
    with pytest.raises(ProgramError, match="exit status 2"):
        gradscale.open(trace).report(tmp_path / "out", program=PROGRAM, arguments=["--nonsense"])


@needs_program
def test_amax_is_what_the_program_shows(trace):
    run = gradscale.open(trace, pandas=False)
    document = run_json("analyze", trace, "--by", "step", "--scales", "1")
    for group in document["groups"]:
        assert group["amax"] == run.amax[group["step"]].max(), group["step"]


def test_open_needs_no_torch(trace):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.modules['torch'] = None\n"
        "import gradscale\nprint(len(gradscale.open(sys.argv[2])))"
    )
    package = str(Path(gradscale.__file__).parent.parent)
    done = subprocess.run([sys.executable, "-c", code, package, str(trace)], capture_output=True, text=True)
    assert done.stdout == "12\n", done.stderr


def test_a_sketch_of_a_step_is_that_of_its_gradient(tmp_path):
    model = nn.Linear(3, 2, bias=False)
    with Recorder(model, tmp_path) as recorder:
        model(torch.ones(1, 3)).sum().backward()
        expected = sketch(model.weight.grad)
        recorder.step()
    assert gradscale.open(tmp_path).sketches[0]["weight"] == expected
