"""The experiment that makes the runs the program carries."""

import csv
import importlib.util
import io
import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from gradscale.trace import read_chunk

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "record_run.py"


@pytest.fixture
def record_run():
    if not SCRIPT.exists():
        pytest.skip("the experiments are not beside this package")
    spec = importlib.util.spec_from_file_location("record_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield module
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_a_run_has_its_members_and_the_same_bytes_again(record_run, name, tmp_path, monkeypatch):
    if name == "cnn":
        pytest.importorskip("sklearn")
    paths = []
    for again in ("a", "b"):
        monkeypatch.setattr(sys, "argv", ["record_run.py", name, "--steps", "3", "--every", "2", "--out", str(tmp_path / again)])
        record_run.main()
        paths.append(tmp_path / again / f"{name}.zip")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with zipfile.ZipFile(paths[0]) as archive:
        names = archive.namelist()
        assert names == ["trace/rank0000-000000.safetensors", "trace/rank0000-000001.safetensors", "fp16.csv", "about.json"]
        archive.extractall(tmp_path)
        about = json.loads(archive.read("about.json"))
        rows = list(csv.DictReader(io.StringIO(archive.read("fp16.csv").decode())))
    assert [row["step"] for row in rows] == ["0", "1", "2"] and rows[0]["loss_scale"] == "65536"
    chunk = read_chunk(tmp_path / names[0])
    assert chunk.metadata["facts"]["precision"] == "fp32"
    assert sum(t["elements"] for t in chunk.metadata["tensors"]) == about["parameters"]


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_the_committed_runs_are_whole(name, tmp_path):
    path = SCRIPT.parent / "runs" / f"{name}.zip"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this package")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    from gradscale.trace import column, read_trace

    chunks = read_trace(tmp_path / "trace")
    assert column(chunks, "step").tolist() == list(range(8000))
    elements = [t["elements"] for t in chunks[0].metadata["tensors"]]
    for c in chunks:
        for sketches in c.sketches().sketches:
            assert [s.elements for s in sketches] == elements
