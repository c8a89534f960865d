"""Both halves count the same: what the program sketches from a file equals `gradscale.sketch`, field by field, and what the
recorder writes comes out of the program with the same counts."""

import json
from dataclasses import fields

import numpy as np
import pytest
import torch
from program import needs_program, run, run_json
from reference import codes_of, reference_sketch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from gradscale import Recorder
from gradscale.sketch import STARTS, Sketch, sketch
from gradscale.trace import column, read_trace

pytestmark = needs_program


def from_bits(codes):
    return torch.from_numpy(np.array(codes, np.uint32).view(np.float32).copy())


def sub_bin_edges():
    """Every sub-bin's edge and its neighbours, in every binade, subnormal ones and both signs included."""
    codes = []
    for start in STARTS:
        for field in (start - 1, start, start + 1):
            field &= 0x7FFFFF
            codes += [exponent << 23 | field for exponent in range(256)]
            for p in range(23):  # the f32 subnormals whose highest bit is p
                codes += [(0x800000 | (field + d)) >> (23 - p) & 0x7FFFFF for d in (0, 1 << (23 - p))]
    codes = np.array(codes, np.uint32)
    return from_bits(np.concatenate([codes, codes | 0x80000000]))


def adversarial():
    rng = np.random.default_rng(20)
    every_f16 = np.arange(1 << 16, dtype=np.uint16)
    random_bits = rng.integers(0, 1 << 32, 200_003, dtype=np.uint64).astype(np.uint32)
    doubles = rng.integers(0, 1 << 63, 50_000, dtype=np.uint64)
    doubles[1::2] = (doubles[1::2] & np.uint64(0x800FFFFFFFFFFFFF)) | np.uint64(0x3800000000000000)  # around f32's smallest
    # Halfway between two f32, and one f64 step beside it: rounded once, to even.
    halfway = (np.arange(1, 4001, dtype=np.uint64) << np.uint64(29)) + np.uint64(0x3F50000010000000)
    return {
        "every_f16": torch.from_numpy(every_f16.view(np.float16)),
        "every_bf16": torch.from_numpy(every_f16.view(np.int16)).view(torch.bfloat16),
        "sub_bin_edges": sub_bin_edges(),
        "random_bits": from_bits(random_bits),
        "subnormals": from_bits(np.concatenate([np.arange(1, 70_000), 0x7FFFFF - np.arange(70_000)])),
        "f64": torch.from_numpy(doubles.view(np.float64)),
        "f64_halfway": torch.from_numpy(np.concatenate([halfway, halfway + 1, halfway - 1]).view(np.float64)),
        "nonfinite": torch.tensor([float("inf"), -float("inf"), float("nan"), -float("nan")] * 3),
        "zeros": torch.tensor([0.0, -0.0, 0.0]),
        "one": torch.tensor([-(2.0**-149)]),
        "scalar": torch.tensor(3.5),
        "f16_3d": torch.randn(7, 5, 3).half(),
        "largest": torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max]),
        "empty": torch.zeros(0, 4),
    }


def sketched(tmp_path, *arguments):
    """What `gradscale sketch` makes of files, read back: {step: {tensor: Sketch}}."""
    run("sketch", *arguments, "-o", tmp_path / "sketched", "--quiet")
    out = {}
    for chunk in read_trace(tmp_path / "sketched"):
        samples = chunk.sketches()
        for row, sketches in zip(samples.rows, samples.sketches):
            out[int(chunk["step"][row])] = dict(zip(chunk.names, sketches))
    return out


def assert_same(ours, theirs, what):
    for field in fields(Sketch):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), (what, field.name)
        else:
            assert a == b, (what, field.name, a, b)


@pytest.mark.parametrize("name", sorted(adversarial()))
def test_adversarial_values_are_counted_alike(tmp_path, name):
    tensor = adversarial()[name]
    save_file({name: tensor}, tmp_path / "dump.safetensors")
    ((_, tensors),) = sketched(tmp_path, tmp_path / "dump.safetensors").items()
    assert_same(sketch(tensor), tensors[name], name)
    if tensor.dtype != torch.bfloat16 and tensor.numel() < 80_000:  # and both as the slow reference does
        with np.errstate(over="ignore", invalid="ignore"):
            assert_same(reference_sketch(codes_of(tensor)), tensors[name], name)


@pytest.mark.parametrize("dtype", ["<f2", ">f2", "<f4", ">f4", "<f8", ">f8"])
def test_numpy_files_of_every_type_and_order_are_counted_alike(tmp_path, dtype):
    values = np.random.default_rng(3).standard_normal((40, 33)) * 10.0 ** np.random.default_rng(4).integers(-9, 4, (40, 33))
    array = np.asfortranarray(values.astype(dtype))
    np.save(tmp_path / "grads.npy", array)
    ((_, tensors),) = sketched(tmp_path, tmp_path / "grads.npy").items()
    assert_same(sketch(torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))), tensors["grads"], dtype)


def little_run():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 20), nn.LayerNorm(20), nn.Linear(20, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def little_batch():
    return torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))


@pytest.mark.parametrize("kind", ["safetensors", "npz", "pt"])
def test_real_gradients_in_a_dump_each_step_are_counted_alike(tmp_path, kind):
    model, optimizer = little_run()
    dumps, expected = tmp_path / "dumps", {}
    dumps.mkdir()
    for step in (0, 7, 100):
        optimizer.zero_grad()
        x, y = little_batch()
        with torch.autocast("cpu", torch.float16, enabled=step == 7):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        expected[step] = {n: sketch(g) for n, g in gradients.items()}
        path = dumps / f"step_{step:06d}.{kind}"
        if kind == "safetensors":
            save_file(gradients, path)
        elif kind == "npz":
            np.savez(path, **{n: g.numpy() for n, g in gradients.items()})
        else:
            torch.save(gradients, path)
        optimizer.step()
    seen = sketched(tmp_path, dumps)
    assert sorted(seen) == [0, 7, 100]
    for step, tensors in expected.items():
        assert sorted(seen[step]) == sorted(tensors)
        for name, one in tensors.items():
            assert_same(one, seen[step][name], (step, name))


# ---- a recorded trace through the program


SCALE = 1024.0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of 120 steps in FP16 with three planted overflows."""
    torch.set_num_threads(1)
    trace = tmp_path_factory.mktemp("recorded") / "trace"
    model, optimizer = little_run()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**6, backoff_factor=0.5)
    with Recorder(model, trace, every=5, chunk_steps=50, scaler=scaler) as recorder:
        for step in range(120):
            optimizer.zero_grad()
            x, y = little_batch()
            if step in (31, 32, 90):
                x = x * 1e7
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            recorder.step(loss=loss)
            scaler.update(SCALE)
    return trace


def merged_by_tensor(trace):
    out = {}
    for chunk in read_trace(trace):
        samples = chunk.sketches()
        for sketches in samples.sketches:
            for name, one in zip(chunk.names, sketches):
                out[name] = out.get(name, Sketch.empty()).merge(one)
    return out


def test_analyze_counts_what_was_recorded(recorded):
    document = run_json("analyze", recorded, "--by", "tensor", "--scales", "1,1024")
    groups = {g["tensor"]: g for g in document["groups"]}
    merged = merged_by_tensor(recorded)
    assert sorted(groups) == sorted(merged)
    for name, one in merged.items():
        group = groups[name]
        assert group["elements"] == one.elements and group["zeros"] == one.zeros, name
        assert group["inf"] == one.inf_positive + one.inf_negative and group["nan"] == one.nan, name
        assert group["amax"] == one.amax / SCALE, name
        smallest = np.array([one.smallest_nonzero], np.uint32).view(np.float32)[0]
        assert group["smallest_nonzero"] == float(smallest) / SCALE, name
        for rate in group["rates"]:
            kinds = ("underflow_to_zero", "subnormal", "normal", "overflow_to_infinity")
            assert sum(rate[k] for k in kinds) == one.finite_nonzero, name


def test_analyze_flushes_what_torch_flushes(tmp_path):
    """The counts at a scale against torch's own cast of the recorded gradients."""
    model, _ = little_run()
    x, y = little_batch()
    with Recorder(model, tmp_path / "trace") as recorder:
        F.cross_entropy(model(x), y).backward()
        recorder.step()
    scales = [2.0**k for k in range(-20, 25, 4)]
    listed = ",".join(f"{s:.17g}" for s in scales)
    document = run_json("analyze", tmp_path / "trace", "--by", "tensor", "--scales", listed)
    groups = {g["tensor"]: g for g in document["groups"]}
    for name, p in model.named_parameters():
        nonzero = p.grad[p.grad != 0]
        for rate, scale in zip(groups[name]["rates"], scales):
            half = (nonzero * scale).half()
            assert rate["exact"] and rate["scale"] == scale
            assert rate["underflow_to_zero"] == int((half == 0).sum()), (name, scale)
            assert rate["overflow_to_infinity"] == int(half.isinf().sum()), (name, scale)
            assert rate["subnormal"] == int(((half != 0) & (half.abs() < 2.0**-14)).sum()), (name, scale)


def test_report_and_recommend_read_it(recorded, tmp_path):
    found_inf = column(read_trace(recorded), "found_inf")
    assert np.flatnonzero(found_inf).tolist() == [31, 32, 90]
    document = run_json("recommend", recorded)
    assert document["steps"] == 120 and document["verdict"] in ("keep_default", "change", "cannot_tell", "not_a_scale_problem")
    run("report", recorded, "-o", tmp_path / "report", "--quiet")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["schema"] == "gradscale.report/1"
    page = (tmp_path / "report" / "report.html").read_text()
    assert "3.weight" in page


def test_recommend_wants_a_hundred_steps(tmp_path):
    model, _ = little_run()
    with Recorder(model, tmp_path / "trace") as recorder:
        for _ in range(20):
            model.zero_grad()
            x, y = little_batch()
            F.cross_entropy(model(x), y).backward()
            recorder.step()
    run("recommend", tmp_path / "trace", status=2)
    run("report", tmp_path / "trace", "-o", tmp_path / "report", "--quiet")


def test_the_programs_own_trace_of_a_trace_is_the_same(recorded, tmp_path):
    run("merge", recorded, "-o", tmp_path / "merged", "--quiet")
    ours, theirs = read_trace(recorded), read_trace(tmp_path / "merged")
    for name in ("step", "loss_scale", "found_inf", "loss", "amax", "nonfinite"):
        a, b = column(ours, name), column(theirs, name)
        assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), name
    for part in ("", "probe_"):
        mine, its = ([s for c in chunks for s in c.sketches(part).sketches] for chunks in (ours, theirs))
        assert mine == its
    assert [t["produced_in"] for t in ours[-1].metadata["tensors"]] == [t["produced_in"] for t in theirs[-1].metadata["tensors"]]


def test_activations_of_a_module_called_many_times_are_read(tmp_path):
    # Its sketch once was of the last call, its amax of all: a trace that contradicts itself.
    torch.manual_seed(0)
    cell, head = nn.Linear(4, 4), nn.Linear(4, 2)
    model = nn.ModuleDict({"cell": cell, "head": head})
    with Recorder(model, tmp_path, every=2, activations=["*"]) as recorder:
        for _ in range(4):
            h = torch.randn(3, 4)
            for _ in range(5):
                h = torch.tanh(cell(h))
            (1e-3 * head(h)).sum().backward()
            recorder.step()
    assert run_json("simulate", tmp_path, "--policy", "pytorch")["runs"][0]["skipped"] == 0
