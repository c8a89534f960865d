"""Dumps sketched on a cluster: whatever happens to its workers, the trace has the bytes that one machine makes."""

import os
import pickle
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from program import needs_program, run
from safetensors.torch import save_file

from gradscale import distributed, errors
from gradscale.distributed import merge, plan, sketch, sketch_one
from gradscale.errors import DumpError, TraceError, TraceExists
from gradscale.sketch import Sketch
from gradscale.sketch import sketch as sketch_tensor
from gradscale.trace import read_chunk, read_trace

dask = pytest.importorskip("distributed")


def tensors(step, rank):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    made = {
        "wide.weight": torch.randn(64, 33, generator=generator) * torch.exp(4 * torch.randn(64, 33, generator=generator)),
        "tiny.bias": 1e-9 * torch.randn(64, generator=generator),
        "half.weight": torch.randn(50, generator=generator).half(),
        "steps": torch.arange(4),
    }
    if step == 3:
        made["wide.weight"][0, :3] = torch.tensor([float("inf"), float("nan"), 0.0])
    if rank == 1:
        made["only.rank1"] = torch.randn(5, generator=generator)
    return made


def write_dumps(folder, steps=6, ranks=2):
    """Every format, by step and rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for step in range(steps):
        for rank in range(ranks):
            made = tensors(step, rank)
            stem = folder / f"step_{step:06d}.rank{rank}"
            if step % 3 == 0:
                save_file(made, f"{stem}.safetensors")
            elif step % 3 == 1:
                np.savez(f"{stem}.npz", **{name: t.numpy() for name, t in made.items()})
            else:
                torch.save({"model": made, "epoch": 3}, f"{stem}.pt")
    return folder


def contents(trace):
    return {path.name: path.read_bytes() for path in sorted(Path(trace).iterdir())}


def by_hand(todo, program=""):
    """One process, one task after another."""
    for task in todo.tasks:
        sketch_one(task, program)
    return merge(todo, run_id="run")


@pytest.fixture(scope="module")
def cluster():
    """Three workers, each a process of its own."""
    with dask.LocalCluster(n_workers=3, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0") as made, dask.Client(made) as client:
        yield client


def test_a_cluster_makes_the_bytes_of_one_process(tmp_path, cluster):
    dumps = write_dumps(tmp_path / "dumps")
    one = by_hand(plan(dumps, tmp_path / "one"))
    out = sketch(dumps, tmp_path / "many", cluster, program="", run_id="run")
    assert contents(out) == contents(one)
    assert not (tmp_path / "many.parts").exists()
    assert not list(tmp_path.glob("*.tmp"))


def test_the_counts_are_those_of_the_tensors(tmp_path):
    by_hand(plan(write_dumps(tmp_path / "dumps"), tmp_path / "out"))
    chunks = read_trace(tmp_path / "out")
    assert [s for c in chunks for s in c["step"].tolist()] == list(range(6))
    for chunk in chunks:
        samples = chunk.sketches()
        for row, step in zip(samples.rows, chunk["step"].tolist()):
            got = dict(zip(chunk.names, samples.sketches[row]))
            prefix = "model." if step % 3 == 2 else ""
            for name in ("wide.weight", "tiny.bias", "half.weight"):
                both = sketch_tensor(tensors(step, 0)[name]).merge(sketch_tensor(tensors(step, 1)[name]))
                assert got[prefix + name] == both, (step, name)
            assert got[prefix + "only.rank1"] == sketch_tensor(tensors(step, 1)["only.rank1"])
            assert not any("steps" in name for name in got), "integers have no gradient"
            bits = chunk["nonfinite"][row, chunk.names.index(prefix + "wide.weight")]
            assert bits == (3 if step == 3 else 0)


@needs_program
def test_the_program_makes_the_same_trace_of_the_same_dumps(tmp_path):
    dumps = write_dumps(tmp_path / "dumps")
    # Beside the usual names, those where a number is a tensor's, a shard's or a directory's.
    (tmp_path / "dumps" / "iter_40" / "rank_1").mkdir(parents=True)
    np.save(tmp_path / "dumps" / "iter_40" / "rank_1" / "grad_3.npy", np.arange(7, dtype=">f4"))
    np.save(tmp_path / "dumps" / "iter_40" / "fc.npy", np.asfortranarray(np.random.default_rng(0).standard_normal((5, 4))))
    torch.save([torch.ones(3), {"a": torch.zeros(2)}], tmp_path / "dumps" / "grads-50.pt")
    torch.save(torch.full((9,), 1e-8), tmp_path / "dumps" / "000060.pt")
    save_file({"w": torch.ones(2)}, tmp_path / "dumps" / "model-00001-of-00002.safetensors", {"step": "70"})
    save_file({"v": torch.ones(2)}, tmp_path / "dumps" / "model-00002-of-00002.safetensors", {"step": "70"})
    run("sketch", dumps, "-o", tmp_path / "whole", "--quiet")
    ours = by_hand(plan(dumps, tmp_path / "ours"))
    theirs = by_hand(plan(dumps, tmp_path / "theirs"), program=os.environ["GRADSCALE_BIN"])
    assert contents(ours) == contents(theirs)

    def counted(trace):
        out = {}
        for chunk in read_trace(trace):
            samples = chunk.sketches()
            for row, step in enumerate(chunk["step"].tolist()):
                for n, name in enumerate(chunk.names):
                    if samples.sketches[row][n] != Sketch.empty():
                        cell = (chunk["amax"][row, n].tobytes(), int(chunk["nonfinite"][row, n]))
                        out[step, name] = (samples.sketches[row][n], *cell)
        return out

    assert counted(ours) == counted(tmp_path / "whole")


@needs_program
def test_steps_and_ranks_are_found_as_the_program_finds_them(tmp_path):
    names = [
        "step_000100.npz", "step-7.npz", "step8.npz", "global_step9.npz", "iter_10.npz", "iteration 11.npz", "update_12.npz",
        "grads-13.npz", "gradients_14.npz", "checkpoint-15.npz", "ckpt_16.npz", "dump_17.npz", "grad_18.npz", "000019.npz",
        "STEP_20.npz", "step_v2.npz", "step.npz", "prestep_21.npz", "step_22x.npz", "step_99999999999999999999999.npz",
        "step_23_iter_24.npz", "model-00001-of-00006.npz", "step_25-00001-of-00002.npz", "checkpoint-00001-of-00006.npz",
        "step_26.rank1.npz", "f16.npz", "3/a.npz", "run-100/b.npz", "step_27/rank_2/c.npz", "epoch_4/d.npz", "grad_5/e.npz",
        "step=28.npz", "step.29.npz", "step__30.npz", "step_31é.npz", "éstep_32.npz", "_step_33.npz",
    ]  # fmt: skip
    for name in names:
        folder = tmp_path / "of" / name.replace("/", "+") / "root"
        path = folder / name
        path.parent.mkdir(parents=True)
        np.savez(path, w=np.ones(1, np.float32))
        run("sketch", folder, "-o", tmp_path / "out" / name.replace("/", "+"), "--quiet")
        (chunk,) = read_trace(tmp_path / "out" / name.replace("/", "+"))
        ((_, step, _),) = distributed._dumps(folder)
        assert (step or 0) == chunk["step"][0], name


def test_a_worker_that_is_killed_in_the_middle_changes_nothing(tmp_path, cluster, monkeypatch):
    dumps = write_dumps(tmp_path / "dumps", steps=30)
    one = by_hand(plan(dumps, tmp_path / "one"))
    before = set(cluster.run(os.getpid).values())
    assert len(before) == 3 and os.getpid() not in before
    killed = []

    def kill_one():
        parts = tmp_path / "many.parts"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            done = len(list(parts.glob("*.safetensors"))) if parts.exists() else 0
            if done >= 5:
                victim = sorted(before)[0]
                os.kill(victim, signal.SIGKILL)
                killed.append((victim, done))
                return
            time.sleep(0.001)

    thread = threading.Thread(target=kill_one)
    thread.start()
    out = sketch(dumps, tmp_path / "many", cluster, program="", run_id="run")
    thread.join()
    ((victim, done),) = killed
    assert done < 60, "it was killed in the middle"
    cluster.wait_for_workers(3, timeout=60)
    assert victim not in set(cluster.run(os.getpid).values())
    assert contents(out) == contents(one)


def test_a_task_that_runs_twice_counts_once(tmp_path):
    dumps = write_dumps(tmp_path / "dumps", steps=1, ranks=1)
    todo = plan(dumps, tmp_path / "out")
    (task,) = todo.tasks
    sketch_one(task, "")
    written = Path(task.part).stat().st_ino
    sketch_one(task, "")
    assert Path(task.part).stat().st_ino == written, "what is whole is left as it is"
    # Two at the same moment, each with a temporary file of its own.
    Path(task.part).unlink()
    threads = [threading.Thread(target=sketch_one, args=(task, "")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [p.name for p in todo.parts.iterdir()] == [Path(task.part).name]
    (chunk,) = read_trace(merge(todo))
    counted = dict(zip(chunk.names, chunk.sketches().sketches[0]))
    assert counted["wide.weight"].elements == 64 * 33


def test_a_run_that_was_broken_off_goes_on_where_it_stopped(tmp_path, monkeypatch):
    dumps = write_dumps(tmp_path / "dumps")
    todo = plan(dumps, tmp_path / "out")
    for task in todo.tasks[:5]:
        sketch_one(task, "")
    # A torn part, as a disk that filled up leaves it, is made again.
    Path(todo.tasks[2].part).write_bytes(b"torn")
    again = plan(dumps, tmp_path / "out")
    assert again == todo
    read = []
    real = distributed._by_python
    monkeypatch.setattr(distributed, "_by_python", lambda path: read.append(path) or real(path))
    by_hand(again)
    assert len(read) == len(todo.tasks) - 4
    # A file that changed is another input, though it has the same name and size.
    changed = Path(todo.tasks[0].path)
    time.sleep(0.01)
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    before, after = todo.tasks[0].part, plan(dumps, tmp_path / "more").tasks[0].part
    assert Path(before).name != Path(after).name


def test_errors_come_back_from_a_worker_and_leave_no_trace(tmp_path, cluster):
    dumps = write_dumps(tmp_path / "dumps")
    bad = dumps / "step_000009.npz"
    bad.write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(DumpError, match="step_000009.npz") as caught:
        sketch(dumps, tmp_path / "out", cluster, retries=1, program="")
    assert caught.value.expected
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "out.parts").glob("*.tmp")) == []
    bad.unlink()
    assert len(read_trace(sketch(dumps, tmp_path / "out", cluster, program=""))) == 1


@needs_program
def test_a_task_that_fails_once_is_tried_again(tmp_path, cluster):
    dumps = write_dumps(tmp_path / "dumps", steps=1, ranks=1)
    program = tmp_path / "moody"
    program.write_text(f"#!/bin/sh\nif mkdir {tmp_path}/failed 2>/dev/null; then echo busy >&2; exit 1; fi\nexec {os.environ['GRADSCALE_BIN']} \"$@\"\n")
    program.chmod(0o755)
    out = sketch(dumps, tmp_path / "out", cluster, program=str(program), run_id="run")
    assert (tmp_path / "failed").exists()
    assert contents(out) == contents(by_hand(plan(dumps, tmp_path / "one")))


def test_a_disk_that_fills_up_while_merging_leaves_no_trace(tmp_path, monkeypatch):
    todo = plan(write_dumps(tmp_path / "dumps", steps=1), tmp_path / "out")
    for task in todo.tasks:
        sketch_one(task, "")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(distributed, "write_chunk", full)
        with pytest.raises(OSError, match="No space"):
            merge(todo)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dumps", "out.parts"]
    assert len(read_trace(merge(todo))) == 1, "the parts are still there"


def test_every_error_survives_a_pickle():
    for name in errors.__all__:
        kind = getattr(errors, name)
        error = kind("doing", "found", "expected", "fix")
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is kind and str(back) == str(error) and back.fix == "fix"


def test_what_cannot_be_sketched_is_said(tmp_path):
    dumps = write_dumps(tmp_path / "dumps", steps=1, ranks=1)
    with pytest.raises(DumpError, match="no such file"):
        plan(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpError, match="no dump"):
        plan(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "note.txt").write_text("x")
    with pytest.raises(DumpError, match="note.txt"):
        plan(tmp_path / "note.txt", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(TraceExists, match="full"):
        plan(dumps, tmp_path / "full")
    todo = plan(dumps, tmp_path / "out")
    with pytest.raises(TraceError, match="share"):
        merge(todo)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.tmp"))
    trace = by_hand(todo)
    with pytest.raises(DumpError, match="sketched already"):
        plan(trace, tmp_path / "again")
    with pytest.raises(DumpError, match="no-such-program"):
        sketch_one(plan(dumps, tmp_path / "other").tasks[0], "/no-such-program")


def test_a_pickle_that_would_run_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    (tmp_path / "step_1.pt").write_bytes(b"")
    torch.save({"w": torch.ones(2), "evil": Evil()}, tmp_path / "step_1.pt")
    (task,) = plan(tmp_path / "step_1.pt", tmp_path / "out").tasks
    with pytest.raises(DumpError, match="step_1.pt"):
        sketch_one(task, "")
    assert not (tmp_path / "ran").exists()
    # An array of objects is a pickle as well.
    np.save(tmp_path / "step_2.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "step_3.npz", evil=np.array([Evil()], dtype=object))
    for name in ("step_2.npy", "step_3.npz"):
        (task,) = plan(tmp_path / name, tmp_path / "out").tasks
        with pytest.raises(DumpError, match=name):
            sketch_one(task, "")
        assert not (tmp_path / "ran").exists()


def test_a_local_cluster_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    dumps = write_dumps(tmp_path / "dumps", steps=2, ranks=1)
    out = sketch([dumps / "step_000000.rank0.safetensors", dumps / "step_000001.rank0.npz"], tmp_path / "out", program="")
    assert [read_chunk(p)["step"].tolist() for p in sorted(out.iterdir())] == [[0, 1]]


def test_long_runs_are_written_in_chunks(tmp_path):
    dumps = write_dumps(tmp_path / "dumps", steps=7, ranks=1)
    todo = plan(dumps, tmp_path / "out")
    for task in todo.tasks:
        sketch_one(task, "")
    merge(todo, chunk_steps=3)
    assert [len(c["step"]) for c in read_trace(tmp_path / "out")] == [3, 3, 1]
