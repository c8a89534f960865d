"""A recording process that is killed: what is left is read each time, by the program too where it is there."""

import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
from program import PROGRAM, run, run_json
from torch import nn

from gradscale import Recorder
from gradscale.trace import chunk_paths, column, read_trace

KILLS = 20


def record_for_ever(trace, started, dies_in):
    """Writes a chunk a step, so that much of the time it is writing one. ``dies_in``: kills itself in that call, in its fourth chunk."""
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    recorder = Recorder(model, trace, every=1, chunk_steps=1)
    if dies_in is not None:
        real = getattr(os, dies_in)

        def deadly(*arguments):
            if os.path.exists(os.path.join(trace, "rank0000-000003.safetensors.tmp")):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        setattr(os, dies_in, deadly)
    started.set()
    while True:
        model.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        recorder.step()


def start(trace, dies_in=None):
    # A fork starts at once, where torch's import would take seconds; where CUDA is, only a fresh process may use it.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    started = context.Event()
    child = context.Process(target=record_for_ever, args=(trace, started, dies_in), daemon=True)
    child.start()
    assert started.wait(60)
    return child


def read_what_is_left(trace):
    """How many chunks there are, and how many temporary files; all chunks are read."""
    torn = [name for name in os.listdir(trace) if name.endswith(".tmp")]
    assert len(torn) <= 1
    paths = chunk_paths(trace)
    if not paths:  # killed before the first step was written
        if PROGRAM:
            run("analyze", trace, "--json", status=2)
        return 0, len(torn)
    steps = column(read_trace(trace), "step")
    assert steps.tolist() == list(range(len(paths)))
    if PROGRAM:
        document = run_json("analyze", trace, "--by", "step", "--scales", "1")
        assert [g["step"] for g in document["groups"]] == steps.tolist()
        assert all(g["elements"] == 12 * (16 * 16 + 16) for g in document["groups"])
        assert any(".tmp" in str(w) for w in document["warnings"]) == bool(torn), document["warnings"]
    return len(paths), len(torn)


def test_killed_twenty_times_what_is_left_is_read(tmp_path):
    rng = random.Random(20)
    left = []
    for i in range(KILLS):
        trace = tmp_path / str(i)
        child = start(trace)
        enough, deadline = rng.choice([0, 1, 2, 5, 9]), time.monotonic() + 30
        while len(chunk_paths(trace)) < enough and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child.pid, signal.SIGKILL)
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        left.append(read_what_is_left(trace))
    assert sum(chunks > 1 for chunks, _ in left) >= KILLS // 3, left


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_killed_while_a_chunk_is_written_it_leaves_the_ones_before(tmp_path, call):
    child = start(tmp_path / "trace", call)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert read_what_is_left(tmp_path / "trace") == (3, 1)
