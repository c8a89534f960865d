"""Several ranks: whichever way they come together, the counts are those of one process that computes the same gradients."""

import os
import signal
import time
import warnings

import numpy as np
import pytest
import ranks
import torch
from program import needs_program, run, run_json
from torch import nn

from gradscale import Recorder
from gradscale.errors import ModelError
from gradscale.sketch import Sketch, sketch
from gradscale.trace import chunk_paths, column, read_trace

INF, NAN = float("inf"), float("nan")
STEPS, EVERY = 7, 3


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def data(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 4, generator=generator)


def loss_of(model, rank, step, scale=256.0):
    x = data(rank, step)
    if step == 4 and rank == 1:
        x = x * INF  # one rank overflows
    return model(x).square().mean() * scale


def merged(trace):
    """A trace of however many ranks: step -> (amax, nonfinite, found_inf, sketches), by tensor name."""
    out = {}
    for rank in sorted({int(p.name[4:8]) for p in chunk_paths(trace)}):
        for chunk in read_trace(trace, rank):
            samples = dict(zip(chunk.sketches().rows, chunk.sketches().sketches))
            for row, step in enumerate(chunk["step"].tolist()):
                one = out.setdefault(step, {"found_inf": 0, "amax": {}, "bits": {}, "sketch": {}})
                one["found_inf"] |= int(chunk["found_inf"][row])
                for n, name in enumerate(chunk.names):
                    amax, bits = float(chunk["amax"][row, n]), int(chunk["nonfinite"][row, n])
                    if amax != amax:
                        continue
                    if name in one["amax"]:
                        before = one["bits"][name]
                        bits = (bits | before) & 3 | (bits & before & 4)
                        amax = max(amax, one["amax"][name])
                    one["amax"][name], one["bits"][name] = amax, bits
                    if row in samples:
                        one["sketch"][name] = one["sketch"].get(name, Sketch.empty()).merge(samples[row][n])
    return out


def alone(world_size, average=False):
    """What one process computes for all ranks: each rank's own gradients, or their mean."""
    model, out = tiny(), {}
    for step in range(STEPS):
        parts = []
        for rank in range(world_size):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            parts.append({n: p.grad.clone() for n, p in model.named_parameters()})
        if average:
            parts = [{n: sum(p[n] for p in parts) / world_size for n in parts[0]}]
        one = out[step] = {"found_inf": 0, "amax": {}, "bits": {}, "sketch": {}}
        for name in parts[0]:
            whole = Sketch.empty()
            for part in parts:
                whole = whole.merge(sketch(part[name]))
            one["amax"][name], one["bits"][name] = whole.amax, whole.nonfinite
            one["found_inf"] |= int(bool(whole.nonfinite))
            if step % EVERY == 0:
                one["sketch"][name] = whole
    return out


def record(rank, world_size, trace, max_writers, wrap, device_path=False):
    if device_path:  # the code that leaves results on a device until step()
        import gradscale.recorder

        gradscale.recorder._reads_at_once = lambda tensor: False
    model = tiny()
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif wrap == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif wrap == "hsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    with Recorder(model, trace, every=EVERY, chunk_steps=3, max_writers=max_writers, loss_scale=256.0) as recorder:
        for step in range(STEPS):
            model.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            if wrap == "group":  # by hand, after backward: hooks saw this rank's own
                for p in model.parameters():
                    torch.distributed.all_reduce(p.grad)
            recorder.step(loss=loss)


def assert_same(seen, expected, close=False):
    assert sorted(seen) == sorted(expected)
    for step, one in expected.items():
        got = seen[step]
        assert got["found_inf"] == one["found_inf"], step
        if close:  # a sum over ranks in another order: the counts of elements hold, not the last bits
            assert {n: s.elements for n, s in got["sketch"].items()} == {n: s.elements for n, s in one["sketch"].items()}
            for name, amax in one["amax"].items():
                assert got["amax"][name] == pytest.approx(amax, rel=1e-5), (step, name)
            continue
        assert got["amax"] == one["amax"] and got["bits"] == one["bits"], step
        assert got["sketch"] == one["sketch"], step


@pytest.mark.parametrize("wrap", ["ddp", "group"])
@pytest.mark.parametrize("max_writers", [8, 1])
def test_unreduced_gradients_are_those_of_one_process(tmp_path, wrap, max_writers):
    trace = tmp_path / "trace"
    ranks.run(record, 2, tmp_path / "store", trace, max_writers, wrap)
    writers = {p.name[:8] for p in chunk_paths(trace)}
    assert writers == ({"rank0000", "rank0001"} if max_writers == 8 else {"rank0000"})
    assert_same(merged(trace), alone(2))
    for chunk in read_trace(trace):
        assert {t["reduction"] for t in chunk.metadata["tensors"]} == {"unreduced"}
        assert chunk.metadata["world_size"] == (2 if max_writers == 8 else 1)
        assert chunk.metadata["facts"].get("ranks") == (None if max_writers == 8 else 2)


def test_four_ranks_and_the_device_path_give_the_same_bits(tmp_path):
    ranks.run(record, 4, tmp_path / "a", tmp_path / "many", 4, "group", False)
    ranks.run(record, 4, tmp_path / "b", tmp_path / "one", 3, "group", True)
    many, one = merged(tmp_path / "many"), merged(tmp_path / "one")
    assert_same(one, many)
    assert_same(one, alone(4))
    tensors = [read_trace(tmp_path / d)[-1].metadata["tensors"] for d in ("many", "one")]
    assert [(t["name"], t["backward_order"], t["produced_in"]) for t in tensors[0]] == [
        (t["name"], t["backward_order"], t["produced_in"]) for t in tensors[1]
    ]


@pytest.mark.parametrize("max_writers", [8, 1])
def test_shards_of_fsdp2_count_once_and_are_reduced(tmp_path, max_writers):
    trace = tmp_path / "trace"
    ranks.run(record, 2, tmp_path / "store", trace, max_writers, "fsdp")
    # A mean of two numbers is the same in any order: to the bit.
    assert_same(merged(trace), alone(2, average=True))
    chunk = read_trace(trace)[0]
    assert {t["reduction"] for t in chunk.metadata["tensors"]} == {"reduced"}
    assert [t["shape"] for t in chunk.metadata["tensors"]] == [[8, 4], [8], [3, 8], [3]]


@pytest.mark.parametrize("max_writers", [8, 1])
def test_replicas_of_a_hybrid_mesh_count_once(tmp_path, max_writers):
    trace = tmp_path / "trace"
    ranks.run(record, 4, tmp_path / "store", trace, max_writers, "hsdp")
    assert_same(merged(trace), alone(4, average=True), close=True)


def plain_dtensors(rank, world_size, trace, max_writers):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(1)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.shard = nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]))
            self.replica = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
            self.own = nn.Parameter(torch.ones(2))

    model = Two()
    weights = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)])
    replica = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), mesh, [Replicate()])
    with Recorder(model, trace, max_writers=max_writers) as recorder:
        (model.shard * weights).sum().full_tensor().backward()
        (model.replica * replica).sum().full_tensor().backward()
        (model.own * (rank + 1)).sum().backward()
        recorder.step()


@pytest.mark.parametrize("max_writers", [8, 1])
def test_shards_replicas_and_plain_tensors_side_by_side(tmp_path, max_writers):
    ranks.run(plain_dtensors, 2, tmp_path / "store", tmp_path / "trace", max_writers)
    one = merged(tmp_path / "trace")[0]
    assert one["sketch"] == {
        "shard": sketch(torch.arange(15.0)),
        "replica": sketch(torch.tensor([1.0, 2.0, 3.0, 4.0])),
        "own": sketch(torch.tensor([1.0, 1.0, 2.0, 2.0])),
    }
    assert one["amax"] == {"shard": 14.0, "replica": 4.0, "own": 2.0}
    tensors = {t["name"]: t["reduction"] for t in read_trace(tmp_path / "trace")[0].metadata["tensors"]}
    assert tensors == {"shard": "reduced", "replica": "reduced", "own": "unreduced"}


def other_stages(rank, world_size, trace):
    """Each rank has a layer of its own, and one module that only it watches in step 0."""
    model = nn.Sequential()
    model.add_module(f"stage{rank}", nn.Linear(3, 3))
    model.add_module("shared", nn.Linear(3, 3, bias=False))
    with Recorder(model, trace, every=1, max_writers=1, activations=["*"], forward=True) as recorder:
        for step in range(2):
            model.zero_grad()
            x = torch.full((2, 3), rank + 1.0)
            if rank == 1 and step == 0:
                x = model.stage1(x)
                loss = x.sum()
            else:
                loss = model(x).sum()
            loss.backward()
            recorder.probe(lambda: model(torch.ones(2, 3)).sum().backward())
            recorder.step(loss=loss)


def test_ranks_with_other_parameters_and_activations_agree_on_columns(tmp_path):
    ranks.run(other_stages, 2, tmp_path / "store", tmp_path / "trace")
    chunks = read_trace(tmp_path / "trace")
    assert [p.name[:8] for p in chunk_paths(tmp_path / "trace")] == ["rank0000", "rank0000"]
    last = chunks[-1]
    assert last.names[:4] == ["stage0.weight", "stage0.bias", "shared.weight", "stage1.weight"]
    assert len(set(last.names)) == len(last.names)
    for name in ("stage0:output.0", "stage1:output.0", "shared:grad_output.0", "stage1:grad_output.0"):
        at = last.names.index(name)
        assert np.isfinite(last["amax"][0, at]), name
    sketches = dict(zip(last.names, last.sketches().sketches[0]))
    assert sketches["shared:grad_output.0"].elements == 12 and sketches["stage1.weight"].elements == 9
    probes = dict(zip(last.names, last.sketches("probe_").sketches[0]))
    assert probes["shared.weight"].elements == 18 and probes["stage0.weight"].elements == 9


def scaled(rank, world_size, trace):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with Recorder(model, trace, max_writers=1, every=2) as recorder:
        for step in range(5):
            optimizer.zero_grad()
            for _ in range(2):  # two micro-batches
                loss = loss_of(model, rank, 4 if step == 2 else 0, 1.0)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            recorder.step(scaler, loss=loss)


def test_a_scaler_and_accumulation_above_the_limit(tmp_path):
    ranks.run(scaled, 2, tmp_path / "store", tmp_path / "trace")
    chunks = read_trace(tmp_path / "trace")
    assert column(chunks, "loss_scale").tolist() == [64.0, 64.0, 64.0, 32.0, 32.0]
    assert column(chunks, "found_inf").tolist() == [0, 0, 1, 0, 0]
    assert chunks[-1].metadata["values"] == "scaled"


def sparse_and_flagged(rank, world_size, trace):
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Recorder(model, trace, max_writers=1, every=1, scaler=scaler) as recorder:
        scaler.scale(model(torch.tensor([1, 1, 4 + rank])).sum()).backward()
        if rank == 1:  # after the hooks: only rank 1's scaler sees it
            model.weight.grad = torch.full((10, 3), INF)
        else:
            model.weight.grad = model.weight.grad.to_dense()
        scaler.unscale_(optimizer)
        recorder.step()


def test_sparse_gradients_and_a_flag_that_one_ranks_scaler_alone_has(tmp_path):
    ranks.run(sparse_and_flagged, 2, tmp_path / "store", tmp_path / "trace")
    (chunk,) = read_trace(tmp_path / "trace")
    one = chunk.sketches().sketches[0][0]
    assert (one.elements, one.zeros, one.finite_nonzero) == (60, 48, 12)
    assert chunk["found_inf"].tolist() == [1] and chunk["nonfinite"].tolist() == [[0]] and chunk["amax"].tolist() == [[16.0]]


def probing(rank, world_size, trace):
    model = tiny()
    with Recorder(model, trace, max_writers=1, every=1) as recorder:
        model(data(rank, 0)).sum().backward()
        recorder.step()

        def out_of_memory():
            model(data(rank, 0)).sum().backward()
            if rank == 1:
                raise torch.OutOfMemoryError("planted")

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not recorder.probe(out_of_memory)
        assert len(caught) == 1 and ("another rank" in str(caught[0].message)) == (rank == 0)
        assert recorder.probe(lambda: model(data(rank, 1)).sum().backward())


def test_a_probe_that_fails_on_one_rank_fails_on_all(tmp_path):
    ranks.run(probing, 2, tmp_path / "store", tmp_path / "trace")
    (chunk,) = read_trace(tmp_path / "trace")
    assert chunk.sketches("probe_").sketches[0][0].elements == 64


def until_killed(rank, world_size, trace):
    model = tiny()
    with Recorder(model, trace, every=2, chunk_steps=2) as recorder:
        for step in range(10**9 if rank == 1 else 41):
            model.zero_grad()
            loss_of(model, rank, 0).backward()
            recorder.step()
            time.sleep(0.002)


def test_a_rank_that_dies_leaves_the_others_readable(tmp_path):
    trace = tmp_path / "trace"
    both = ranks.start(until_killed, 2, tmp_path / "store", trace)
    deadline = time.monotonic() + 60
    while len(chunk_paths(trace, 1) if trace.exists() else []) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(both[1].pid, signal.SIGKILL)
    ranks.finish(both, [0, -signal.SIGKILL])
    assert column(read_trace(trace, 0), "step").tolist() == list(range(41))
    dead = column(read_trace(trace, 1), "step")
    assert len(dead) >= 5 and dead.tolist() == list(range(len(dead)))


@needs_program
def test_the_program_merges_ranks_to_what_rank_0_would_have_written(tmp_path):
    ranks.run(record, 2, tmp_path / "a", tmp_path / "many", 8, "ddp")
    ranks.run(record, 2, tmp_path / "b", tmp_path / "one", 1, "ddp")
    many, one = (run_json("analyze", tmp_path / d, "--by", "tensor", "--scales", "2^-4..2^8")["groups"] for d in ("many", "one"))
    assert many == one
    run("merge", tmp_path / "many", "-o", tmp_path / "merged", "--quiet")
    assert_same(merged(tmp_path / "merged"), merged(tmp_path / "one"))


def test_reduction_can_be_said(tmp_path):
    model = tiny()
    with Recorder(model, tmp_path, reduction="reduced") as recorder:
        model(data(0, 0)).sum().backward()
        recorder.step()
    assert {t["reduction"] for t in read_trace(tmp_path)[0].metadata["tensors"]} == {"reduced"}
    with pytest.raises(ModelError, match="reduction='summed'"):
        Recorder(model, tmp_path / "b", reduction="summed")
