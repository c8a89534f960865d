"""What ends up in the trace, and what must not change because of it."""

import copy
import math
import pickle
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from reference import codes_of, reference_sketch
from torch import nn
from torch.nn import functional as F

import gradscale
from gradscale import Recorder
from gradscale._writer import Column
from gradscale.errors import ModelError, ProbeError, RecorderClosed, ScalerConflict, TraceExists
from gradscale.sketch import Sketch, sketch
from gradscale.trace import chunk_paths, column, read_trace

INF, NAN = float("inf"), float("nan")


def tiny():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(n=5):
    return torch.randn(n, 4), torch.randint(0, 3, (n,))


def plant(model, *values):
    """A backward that gives each parameter of ``model`` exactly the gradient of ``values``."""
    for p in model.parameters():
        p.grad = None
    sum((p * v).sum() for p, v in zip(model.parameters(), values)).backward()


class Holder(nn.Module):
    """Parameters and nothing else."""

    def __init__(self, **sizes):
        super().__init__()
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.ones(size)))


# ---- rows


def test_each_step_has_its_amax_and_every_kth_its_sketch(tmp_path, path):
    model, seen = tiny(), []
    with Recorder(model, tmp_path, every=3, chunk_steps=4) as recorder:
        for step in range(11):
            model.zero_grad()
            x, y = batch()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            recorder.step(loss=loss)
            seen.append((float(loss.detach()), [p.grad.clone() for p in model.parameters()]))
    chunks = read_trace(tmp_path)
    assert [c["step"].tolist() for c in chunks] == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert chunks[0].names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    np.testing.assert_allclose(column(chunks, "loss"), [loss for loss, _ in seen], rtol=1e-7)
    assert np.isnan(column(chunks, "loss_scale")).all()
    assert (column(chunks, "found_inf") == 0).all()
    assert (column(chunks, "nonfinite") == 0).all()
    expected = np.array([[float(g.abs().max()) for g in gradients] for _, gradients in seen], np.float32)
    assert (column(chunks, "amax") == expected).all()
    sampled = {}
    for c in chunks:
        samples = c.sketches()
        sampled.update({int(c["step"][row]): s for row, s in zip(samples.rows, samples.sketches)})
    assert sorted(sampled) == [0, 3, 6, 9]
    for step, sketches in sampled.items():
        assert sketches == [reference_sketch(codes_of(g)) for g in seen[step][1]]


def test_metadata_says_what_was_recorded(tmp_path):
    model = tiny()
    with Recorder(model, tmp_path, every=7, facts={"lr": 0.1, "odd": object(), "nan": NAN}, precision="bf16") as recorder:
        plant(model, 1.0, 2.0, 3.0, 4.0)
        recorder.step()
    meta = read_trace(tmp_path)[0].metadata
    assert meta["schema"] == "gradscale.trace/1"
    assert (meta["rank"], meta["world_size"], meta["chunk"], meta["every"], meta["values"]) == (0, 1, 0, 7, "unscaled")
    int(meta["run_id"], 16)
    first = meta["tensors"][0]
    assert (first["name"], first["shape"], first["elements"], first["role"]) == ("0.weight", [8, 4], 32, "parameter")
    assert first["reduction"] is None
    facts = meta["facts"]
    assert (facts["device"], facts["precision"], facts["lr"], facts["nan"]) == ("cpu", "bf16", 0.1, "nan")
    assert facts["framework"].startswith("torch ")


def test_first_chunk_is_there_right_after_step_0(tmp_path):
    model = tiny()
    recorder = Recorder(model, tmp_path)
    plant(model, 1.0, 1.0, 1.0, 1.0)
    recorder.step()
    assert [p.name for p in chunk_paths(tmp_path)] == ["rank0000-000000.safetensors"]
    assert read_trace(tmp_path)[0]["sampled"].tolist() == [0]
    recorder.close()


def test_safetensors_itself_reads_a_chunk(tmp_path):
    from safetensors.numpy import load_file

    model = tiny()
    with Recorder(model, tmp_path) as recorder:
        plant(model, 1.0, 1.0, 1.0, 1.0)
        recorder.step()
    ours = read_trace(tmp_path)[0].arrays
    theirs = load_file(tmp_path / "rank0000-000000.safetensors")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert array.dtype == ours[name].dtype and (array.tobytes() == ours[name].tobytes()), name


@pytest.mark.parametrize(
    "values, amax, bits, found_inf",
    [
        ([1.0, -3.0], 3.0, 0, 0),
        ([0.0, -0.0], 0.0, 0, 0),
        ([0.0, 0.0], 0.0, 0, 0),
        ([-0.0, -0.0], 0.0, 0, 0),
        ([INF, -3.0], 3.0, 1, 1),
        ([-INF, 2.0], 2.0, 1, 1),
        ([NAN, 2.0], 2.0, 2, 1),
        ([NAN, INF, -2.0], 2.0, 3, 1),
        ([INF, -INF], 0.0, 5, 1),
        ([NAN, NAN], 0.0, 6, 1),
        ([NAN, -INF], 0.0, 7, 1),
        ([NAN, 0.0], 0.0, 2, 1),
        ([1e-45, 0.0], 1e-45, 0, 0),
        ([-3.4028235e38, 1.0], 3.4028235e38, 0, 0),
    ],
)
def test_amax_is_finite_and_inf_and_nan_are_told_apart(tmp_path, path, values, amax, bits, found_inf):
    model = Holder(w=len(values))
    with Recorder(model, tmp_path) as recorder:
        plant(model, torch.tensor(values))
        recorder.step()
    chunk = read_trace(tmp_path)[0]
    assert chunk["amax"][0, 0] == np.float32(amax)
    assert not np.signbit(chunk["amax"][0, 0])
    assert (chunk["nonfinite"][0, 0], chunk["found_inf"][0]) == (bits, found_inf)


def test_accumulation_keeps_the_last_sum_and_ors_the_bits(tmp_path, path):
    model = Holder(w=2)
    with Recorder(model, tmp_path) as recorder:
        for values in ([5.0, 1.0], [-4.0, 1.0]):  # .grad: [5, 1], then [1, 2]
            (model.w * torch.tensor(values)).sum().backward()
        recorder.step()
        model.zero_grad()
        (model.w * torch.tensor([INF, 1.0])).sum().backward()
        model.w.grad = None
        (model.w * torch.tensor([1.0, NAN])).sum().backward()
        model.w.grad = None
        (model.w * torch.tensor([1.0, 7.0])).sum().backward()
        recorder.step()
    chunks = read_trace(tmp_path)
    assert column(chunks, "amax")[:, 0].tolist() == [2.0, 7.0]
    assert column(chunks, "nonfinite")[:, 0].tolist() == [0, 3]
    assert chunks[0].sketches().sketches[0][0] == reference_sketch(codes_of(torch.tensor([1.0, 2.0])))


def test_frozen_and_unused_parameters_have_no_gradient(tmp_path, path):
    model = Holder(used=2, unused=3, frozen=4)
    model.frozen.requires_grad_(False)
    with Recorder(model, tmp_path) as recorder:
        assert not model.frozen.requires_grad
        (model.used * 2).sum().backward()
        recorder.step()
        model.frozen.requires_grad_(True)  # thawed: seen from then on
        (model.used.sum() + model.frozen.sum()).backward()
        recorder.step()
    amax = column(read_trace(tmp_path), "amax")
    assert amax[0, 0] == 2 and np.isnan(amax[0, 1:]).all()
    assert np.isnan(amax[1, 1]) and amax[1, 2] == 1
    assert read_trace(tmp_path)[0].sketches().sketches[0][1] == Sketch.empty()


def test_tied_weights_are_one_column(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    with Recorder(model, tmp_path) as recorder:
        model(torch.ones(1, 3)).sum().backward()
        recorder.step()
    chunk = read_trace(tmp_path)[0]
    assert chunk.names == ["0.weight"]
    assert chunk["amax"][0, 0] == model[0].weight.grad.abs().max()


def test_zero_gradients_are_a_clean_step(tmp_path, path):
    model = Holder(w=3)
    with Recorder(model, tmp_path) as recorder:
        (model.w * 0).sum().backward()
        recorder.step()
    chunk = read_trace(tmp_path)[0]
    assert (chunk["amax"][0, 0], chunk["found_inf"][0], chunk["zeros"][0, 0], len(chunk["bins"])) == (0.0, 0, 3, 0)
    assert (chunk["smallest_nonzero"][0, 0], chunk["lowest_bit"][0, 0]) == (0, 32767)


def test_sparse_gradients_are_coalesced_and_absent_rows_are_zeros(tmp_path, path):
    model = nn.Embedding(10, 2, sparse=True)
    with Recorder(model, tmp_path) as recorder:
        model(torch.tensor([3, 3, 5])).sum().backward()
        assert model.weight.grad.is_sparse
        recorder.step()
    chunk = read_trace(tmp_path)[0]
    dense = torch.zeros(10, 2)
    dense[3], dense[5] = 2.0, 1.0
    assert chunk["amax"][0, 0] == 2.0
    assert chunk.sketches().sketches[0][0] == reference_sketch(codes_of(dense))


def test_half_and_double_parameters(tmp_path, path):
    model = Holder(a=2, b=2, c=0)
    model.a.data, model.b.data = model.a.data.half(), model.b.data.double()
    with Recorder(model, tmp_path) as recorder:
        plant(model, torch.tensor([INF, 1.5], dtype=torch.float16), torch.tensor([1e300, 1 + 2.0**-30], dtype=torch.float64), 1.0)
        recorder.step()
    chunk = read_trace(tmp_path)[0]
    assert chunk["amax"][0].tolist() == [1.5, 1.0, 0.0]
    assert chunk["nonfinite"][0].tolist() == [1, 1, 0]  # 1e300 is inf as an f32
    assert [t["elements"] for t in chunk.metadata["tensors"]] == [2, 2, 0]


def test_a_step_without_backward_is_a_row_without_gradients(tmp_path):
    model = Holder(w=2)
    with Recorder(model, tmp_path) as recorder:
        recorder.step()
    assert np.isnan(read_trace(tmp_path)[0]["amax"]).all()


def test_create_graph_is_not_made_larger_by_recording(tmp_path, path):
    model = Holder(w=2)
    with Recorder(model, tmp_path) as recorder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (model.w**3).sum().backward(create_graph=True)
        assert model.w.grad.requires_grad
        assert not any(t.requires_grad for entry in recorder._pending.waiting for t in entry[1:])
        recorder.step()
        model.w.grad = None
    assert read_trace(tmp_path)[0]["amax"][0, 0] == 3.0


# ---- names


class Wrapper(nn.Module):
    def __init__(self, inner, name="module"):
        super().__init__()
        setattr(self, name, inner)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        Wrapper,
        lambda m: Wrapper(m, "_orig_mod"),
        lambda m: Wrapper(Wrapper(m, "_orig_mod")),
        lambda m: Wrapper(Wrapper(m), "_orig_mod"),
    ],
)
def test_names_have_no_wrappers(tmp_path, wrap):
    Recorder(wrap(tiny()), tmp_path).close()
    recorder = Recorder(wrap(tiny()), tmp_path / "b")
    assert [c.name for c in recorder._writer.columns] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    recorder.close()


def test_a_submodule_that_is_called_module_keeps_its_name(tmp_path):
    model = Holder(w=1)
    model.module = nn.Linear(1, 1)
    recorder = Recorder(model, tmp_path)
    assert [c.name for c in recorder._writer.columns] == ["w", "module.weight", "module.bias"]
    recorder.close()


def test_backward_order_is_that_of_the_first_step(tmp_path):
    model = tiny()
    with Recorder(model, tmp_path) as recorder:
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        recorder.step()
    order = {t["name"]: t["backward_order"] for t in read_trace(tmp_path)[0].metadata["tensors"]}
    assert sorted(order.values()) == [0, 1, 2, 3]
    assert max(order["2.weight"], order["2.bias"]) < min(order["0.weight"], order["0.bias"])


# ---- the scaler


def scaler_of(**kwargs):
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 3, **kwargs})


WHERE = ["after backward", "after unscale_", "after clipping", "after step", "after update"]


@pytest.mark.parametrize("known", ["in the constructor", "at step()"])
@pytest.mark.parametrize("where", WHERE)
def test_step_may_stand_anywhere(tmp_path, path, where, known):
    """The scale recorded is the one backward used, found_inf what the scaler saw, the amax that of the scaled gradient."""
    model = Holder(w=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = scaler_of()
    recorder = Recorder(model, tmp_path, every=1, scaler=scaler if known == "in the constructor" else None)
    passed = None if known == "in the constructor" else scaler
    expected = []
    for step in range(12):
        optimizer.zero_grad()
        overflow = step in (0, 1, 6)
        loss = (model.w * torch.tensor([INF if overflow else 1.0, 2.0])).sum()
        scaler.scale(loss).backward()
        expected.append((scaler.get_scale(), int(overflow), 2 * scaler.get_scale()))
        if where == "after backward":
            recorder.step(passed)
        scaler.unscale_(optimizer)
        if where == "after unscale_":
            recorder.step(passed)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if where == "after clipping":
            recorder.step(passed)
        scaler.step(optimizer)
        if where == "after step":
            recorder.step(passed)
        scaler.update()
        if where == "after update":
            recorder.step(passed)
    recorder.close()
    chunks = read_trace(tmp_path)
    rows = zip(column(chunks, "loss_scale").tolist(), column(chunks, "found_inf").tolist(), column(chunks, "amax")[:, 0].tolist())
    assert list(rows) == expected
    assert len({scale for scale, _, _ in expected}) > 2  # it did grow and back off
    assert all(c.metadata["values"] == "scaled" for c in chunks)


def test_found_inf_of_the_scaler_counts_where_hooks_saw_nothing(tmp_path, path):
    # As after an all-reduce that overflowed: backward was clean here, the gradient the scaler checks is not.
    model = Holder(w=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = scaler_of()
    with Recorder(model, tmp_path) as recorder:
        scaler.scale(model.w.sum()).backward()
        model.w.grad[0] = INF
        scaler.unscale_(optimizer)
        recorder.step(scaler)
    chunk = read_trace(tmp_path)[0]
    assert (chunk["found_inf"][0], chunk["nonfinite"][0, 0]) == (1, 0)


def test_several_optimizers_under_one_scaler(tmp_path):
    model = Holder(a=2, b=2)
    optimizers = [torch.optim.SGD([p], lr=0.0) for p in (model.a, model.b)]
    scaler = scaler_of()
    with Recorder(model, tmp_path, scaler=scaler) as recorder:
        for bad in (0, 1, 2):
            for o in optimizers:
                o.zero_grad()
            values = [1.0, 1.0, 1.0]
            values[bad] = INF
            scaler.scale(model.a.sum() * values[0] + model.b.sum() * values[1]).backward()
            scaler.unscale_(optimizers[0])  # the second optimizer's flag is not there yet
            recorder.step()
            for o in optimizers:
                scaler.step(o)
            scaler.update()
    assert column(read_trace(tmp_path), "found_inf").tolist() == [1, 1, 0]


def test_several_scalers_with_one_scale_are_one(tmp_path):
    model = Holder(w=2)
    scalers = [scaler_of(), scaler_of()]
    with Recorder(model, tmp_path, scaler=scalers) as recorder:
        loss = model.w.sum()
        scalers[1].scale(loss)
        scalers[0].scale(loss).backward()
        recorder.step()
    assert read_trace(tmp_path)[0]["loss_scale"].tolist() == [1024.0]


def test_several_scalers_with_different_scales_are_refused(tmp_path):
    model = Holder(w=2)
    scalers = [scaler_of(), scaler_of(init_scale=8.0)]
    recorder = Recorder(model, tmp_path)
    loss = model.w.sum()
    scalers[1].scale(loss)
    scalers[0].scale(loss).backward()
    with pytest.raises(ScalerConflict, match=r"recording step 0: found scalers with the scales \[1024.0, 8.0\], expected one"):
        recorder.step(scalers)
    recorder.close()


def test_a_disabled_scaler_scales_nothing(tmp_path):
    model = Holder(w=2)
    with Recorder(model, tmp_path) as recorder:
        model.w.sum().backward()
        recorder.step(torch.amp.GradScaler("cpu", enabled=False))
    chunk = read_trace(tmp_path)[0]
    assert math.isnan(chunk["loss_scale"][0]) and chunk.metadata["values"] == "unscaled"


@pytest.mark.parametrize("scale", [128.0, lambda: 128.0])
def test_a_scale_multiplied_by_hand(tmp_path, scale):
    model = Holder(w=2)
    with Recorder(model, tmp_path, loss_scale=scale) as recorder:
        (128 * model.w.sum()).backward()
        recorder.step()
    chunk = read_trace(tmp_path)[0]
    assert (chunk["loss_scale"][0], chunk["amax"][0, 0], chunk.metadata["values"]) == (128.0, 128.0, "scaled")


def test_a_scaler_of_another_kind_gives_its_scale(tmp_path):
    class Mine:
        scale = 64.0

        def get_scale(self):
            return self.scale

    model, mine = Holder(w=2), Mine()
    with Recorder(model, tmp_path, scaler=mine) as recorder:
        (64 * model.w.sum()).backward()
        mine.scale = 32.0
        recorder.step()
    assert read_trace(tmp_path)[0]["loss_scale"][0] == 64.0


# ---- precision


def autocast_run(tmp_path, dtype, micro=1, **kwargs):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 40), nn.Linear(40, 40))
    scaler = scaler_of(init_scale=2.0**14, enabled=dtype is torch.float16)
    with Recorder(model, tmp_path, every=1, scaler=scaler, **kwargs) as recorder:
        for _ in range(2):
            model.zero_grad()
            for _ in range(micro):
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    hidden = model[:3](torch.randn(32, 40))
                loss = F.mse_loss(model[3](hidden.float()), torch.randn(32, 40))  # the last layer outside autocast
                scaler.scale(loss).backward()
            recorder.step(loss=loss)
    metadata = read_trace(tmp_path)[-1].metadata
    return {t["name"]: t["produced_in"] for t in metadata["tensors"]}, metadata["facts"].get("precision")


@pytest.mark.parametrize("micro", [1, 3])
def test_autocast_to_fp16_is_read_off_the_values(tmp_path, micro):
    produced, precision = autocast_run(tmp_path, torch.float16, micro)
    assert produced["0.weight"] == produced["2.weight"] == "fp16"
    assert produced["3.weight"] == "fp32"
    assert precision == "fp16"


def test_autocast_to_bf16_is_read_off_the_values(tmp_path):
    produced, _ = autocast_run(tmp_path, torch.bfloat16)
    assert produced["0.weight"] == produced["2.weight"] == "bf16"
    assert produced["3.weight"] == "fp32"


def test_fp32_is_read_off_the_values(tmp_path):
    produced, precision = autocast_run(tmp_path, None)
    assert set(produced.values()) == {"fp32"} and precision == "fp32"


def test_few_fp16_values_decide_nothing(tmp_path):
    model = Holder(w=999)
    with Recorder(model, tmp_path) as recorder:
        plant(model, torch.rand(999).half().float() + 2**-9)
        recorder.step()
    assert read_trace(tmp_path)[0].metadata["tensors"][0]["produced_in"] in (None, "fp32")
    model = Holder(w=999)
    with Recorder(model, tmp_path / "b") as recorder:
        plant(model, (torch.rand(999) + 1).half().float())
        recorder.step()
    assert read_trace(tmp_path / "b")[0].metadata["tensors"][0]["produced_in"] is None


def test_exponents_that_did_not_fit_once_are_not_forgotten():
    wide = sketch(torch.cat([torch.full((1000,), 1 + 2.0**-10), torch.tensor([2.0**60])]))
    narrow = sketch(torch.full((1000,), 1 + 2.0**-10))
    column = Column("w", [1000], 1000)
    column.learn(narrow)
    assert column.produced_in == "fp16"
    column.learn(wide)
    column.learn(narrow)
    assert column.produced_in is None


def test_a_longer_significand_that_was_seen_once_is_not_forgotten():
    column = Column("w", [1000], 1000)
    column.learn(sketch(torch.full((1000,), 1 + 2.0**-20)))
    column.learn(sketch(torch.full((1000,), 1 + 2.0**-10)))
    assert column.produced_in == "fp32"


# ---- it changes nothing


def train(record, tmp_path, **kwargs):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = scaler_of(growth_interval=4)
    recorder = Recorder(model, tmp_path / "trace", every=2, chunk_steps=3, **kwargs) if record else None
    losses = []
    for _ in range(15):
        x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        optimizer.zero_grad()

        def loss_of(x=x, y=y):
            with torch.autocast("cpu", torch.float16):
                return F.cross_entropy(model(x), y)

        loss = loss_of()
        scaler.scale(loss).backward()
        if recorder and record == "probe before":
            recorder.probe(lambda: scaler.scale(loss_of()).backward())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if recorder:
            recorder.step(scaler, loss=loss)
            if record == "probe":
                recorder.probe(lambda: scaler.scale(loss_of()).backward())
        losses.append(loss.detach().clone())
    if recorder:
        recorder.close()
    return losses, [t.clone() for t in model.state_dict().values()], torch.rand(4), scaler.state_dict()


def same(a, b):
    return all(torch.equal(x, y) for part in (0, 1) for x, y in zip(a[part], b[part])) and torch.equal(a[2], b[2]) and a[3] == b[3]


@pytest.mark.parametrize("record", ["plain", "activations", "probe", "probe before"])
def test_training_is_the_same_to_the_bit(tmp_path, record, path):
    kwargs = {"activations": ["*"], "forward": True} if record == "activations" else {}
    assert same(train(None, tmp_path), train(record, tmp_path, **kwargs))
    assert len(read_trace(tmp_path / "trace")) > 3


def test_closing_takes_all_hooks_away(tmp_path):
    model = tiny()
    recorder = Recorder(model, tmp_path, activations=["*"], forward=True)
    recorder.close()
    recorder.close()
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    for p in model.parameters():
        assert not p._post_accumulate_grad_hooks
    with pytest.raises(RecorderClosed, match="found a closed recorder, expected an open one"):
        recorder.step()


def test_a_model_with_hooks_can_be_copied_and_pickled(tmp_path):
    model = tiny()
    with Recorder(model, tmp_path, activations=["*"]) as recorder:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(torch.ones(1, 4)).sum().backward()
            assert not recorder._pending.order


# ---- probes


def test_a_probe_shows_what_fp16_flushed(tmp_path, path):
    model = Holder(w=2)
    x = torch.tensor([1.0, 2.0**-26])

    def loss_of():
        with torch.autocast("cpu", torch.float16):
            return (torch.mm(x[None].float(), model.w[:, None])).float().sum()

    with Recorder(model, tmp_path, every=2, scaler=scaler_of(init_scale=1.0)) as recorder:
        for step in range(4):
            model.zero_grad()
            recorder._scalers[0].scale(loss_of()).backward()
            recorder.step()
            assert recorder.probe(lambda: recorder._scalers[0].scale(loss_of()).backward()) == (step % 2 == 0)
    chunks = read_trace(tmp_path)
    assert chunks[0]["zeros"].tolist() == [[1]]
    assert chunks[0]["probe_zeros"].tolist() == [[0]]
    assert chunks[0]["probe_amax"].tolist() == [[1.0]] and chunks[0]["probe_nonfinite"].tolist() == [[0]]
    assert chunks[0].sketches("probe_").sketches[0][0] == reference_sketch(codes_of(x))
    assert chunks[1]["probe_sampled"].tolist() == [1] and chunks[1]["step"].tolist() == [1, 2, 3]


def test_a_probe_before_step_belongs_to_the_step_in_progress(tmp_path):
    model = Holder(w=2)
    with Recorder(model, tmp_path, every=2) as recorder:
        for step in range(3):
            plant(model, float(step + 1))
            assert recorder.sampled == (step % 2 == 0)
            recorder.probe(lambda step=step: (model.w * 10.0 * (step + 1)).sum().backward())
            recorder.step()
    chunks = read_trace(tmp_path)
    assert column(chunks, "amax")[:, 0].tolist() == [1.0, 2.0, 3.0]
    assert [c["probe_amax"].ravel().tolist() for c in chunks] == [[10.0], [30.0]]
    assert chunks[1]["probe_sampled"].tolist() == [1]


def test_a_probe_of_a_full_chunks_last_step_is_still_written(tmp_path):
    model = Holder(w=2)
    with Recorder(model, tmp_path, every=2, chunk_steps=2) as recorder:
        for step in range(5):
            plant(model, 1.0)
            recorder.step()
            recorder.probe(lambda: model.w.sum().backward())
    assert [c["probe_sampled"].tolist() for c in read_trace(tmp_path)] == [[0], [1], [1]]


def test_a_probe_restores_everything(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
    model[2].eval()
    model.register_buffer("replaced", torch.zeros(1))
    model.register_buffer("empty", None)
    scaler = scaler_of()
    recorder = Recorder(model, tmp_path, scaler=scaler)
    x, y = batch()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    gradients = [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients]
    buffers = dict(model.named_buffers())
    contents = {n: b.clone() for n, b in buffers.items()}
    state = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())

    def upset():
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", torch.float16):
            assert not torch.is_autocast_enabled("cpu")
            assert scaler.scale(torch.ones(1)) == 1
            model.train()
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.rand(3), random.random(), np.random.rand()
        model.replaced = torch.ones(1)
        model.empty = torch.ones(1)

    recorder.probe(upset)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients))
    assert all(torch.equal(a, b) for a, b in zip(gradients, values))
    after = dict(model.named_buffers())
    assert after.keys() == buffers.keys() and model.empty is None
    assert all(after[n] is buffers[n] and torch.equal(after[n], contents[n]) for n in buffers)
    assert [m.training for m in model] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1] and np.random.get_state()[1].tolist() == state[2]
    assert scaler.is_enabled() and scaler.get_scale() == 1024.0
    with torch.autocast("cpu", torch.float16):
        assert torch.is_autocast_enabled("cpu")
    recorder.close()


def test_a_probe_that_raises_restores_everything_too(tmp_path):
    model, scaler = Holder(w=2), scaler_of()
    with Recorder(model, tmp_path, scaler=scaler) as recorder:
        scaler.scale(model.w.sum()).backward()
        before = model.w.grad

        def fails():
            model.w.sum().backward()
            raise KeyError("mine")

        with pytest.raises(KeyError):
            recorder.probe(fails)
        assert model.w.grad is before and scaler.is_enabled()
        recorder.step()
    chunk = read_trace(tmp_path)[0]
    assert chunk["amax"][0, 0] == 1024.0 and "probe_sampled" not in chunk.arrays


def test_out_of_memory_in_a_probe_is_a_warning(tmp_path):
    model = Holder(w=2)

    def too_big():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with Recorder(model, tmp_path) as recorder:
        plant(model, 1.0)
        with pytest.warns(RuntimeWarning, match="step 0 was not probed: memory ran out"):
            assert recorder.probe(too_big) is False
        recorder.step()
    assert "probe_sampled" not in read_trace(tmp_path)[0].arrays


def test_a_half_precision_model_cannot_be_probed(tmp_path):
    with Recorder(tiny().half(), tmp_path) as recorder:
        with pytest.raises(ProbeError, match='parameter "0.weight": found torch.float16, expected torch.float32'):
            recorder.probe(lambda: None)


# ---- activations


def test_activation_gradients_of_chosen_modules(tmp_path, path):
    model = tiny()
    seen = {}
    with Recorder(model, tmp_path, activations=["1", "2"]) as recorder:
        x, y = batch()
        hidden = model[1](model[0](x))
        hidden.register_hook(lambda g: seen.update(hidden=g.clone()))
        F.cross_entropy(model[2](hidden), y).backward()
        recorder.step()
    chunk = read_trace(tmp_path)[0]
    tensors = {t["name"]: t for t in chunk.metadata["tensors"]}
    new = [n for n, t in tensors.items() if t["role"] == "activation_gradient"]
    assert sorted(new) == ["1:grad_input.0", "1:grad_output.0", "2:grad_input.0", "2:grad_output.0"]
    at = chunk.names.index("2:grad_input.0")
    assert tensors["2:grad_input.0"]["shape"] == [5, 8]
    assert chunk["amax"][0, at] == seen["hidden"].abs().max()
    assert chunk.sketches().sketches[0][at] == reference_sketch(codes_of(seen["hidden"]))


def test_a_module_that_is_called_twice_keeps_amax_and_sketch_of_both_calls(tmp_path, path):
    model = nn.Linear(2, 2)
    with Recorder(model, tmp_path, activations=["*"], forward=True) as recorder:
        for factor in (5.0, 3.0):
            (factor * model(torch.ones(1, 2))).sum().backward()
        recorder.step()
    chunk = read_trace(tmp_path)[0]
    at = chunk.names.index(":grad_output.0")
    assert chunk["amax"][0, at] == 5.0
    # 5, twice, and 3, twice. The sketch of the last call alone contradicted amax, and the program refused the trace.
    sketch = chunk.sketches().sketches[0][at]
    assert sketch.to_rows() == [((1 + 149) * 22 + 9, 2, 0), ((2 + 149) * 22 + 5, 2, 0)] and sketch.amax == 5.0


@pytest.mark.parametrize("order", [(INF, 3.0), (3.0, INF)])
def test_a_call_without_a_finite_element_leaves_the_other_calls_finite(tmp_path, path, order):
    model = nn.Linear(2, 2)
    with Recorder(model, tmp_path, activations=["*"]) as recorder:
        for factor in order:
            (factor * model(torch.ones(1, 2))).sum().backward()
        recorder.step()
    chunk = read_trace(tmp_path)[0]
    at = chunk.names.index(":grad_output.0")
    sketch = chunk.sketches().sketches[0][at]
    assert chunk["nonfinite"][0, at] == sketch.nonfinite == 1 and chunk["amax"][0, at] == sketch.amax == 3.0


def test_forward_amax_has_no_sketch_and_is_off_without_gradients(tmp_path, path):
    model = tiny()
    with Recorder(model, tmp_path, forward=True) as recorder:
        with torch.no_grad():
            model(100 * torch.ones(1, 4))  # a validation batch
        x, y = batch()
        out = model(x)
        F.cross_entropy(out, y).backward()
        recorder.step()
    chunk = read_trace(tmp_path)[0]
    at = chunk.names.index("2:output.0")
    assert chunk.metadata["tensors"][at]["role"] == "activation"
    assert chunk["amax"][0, at] == out.detach().abs().max()
    assert chunk.sketches().sketches[0][at] == Sketch.empty() and chunk["zeros"][0, at] == 0
    assert chunk["found_inf"][0] == 0
    order = [t["backward_order"] for t in chunk.metadata["tensors"]]
    assert sorted(o for o in order if o is not None) == [0, 1, 2, 3]


def test_an_inf_in_forward_is_not_a_gradient_overflow(tmp_path):
    model = Holder(w=2)
    model.act = nn.Identity()
    with Recorder(model, tmp_path, forward=True) as recorder:
        model.act(torch.tensor([INF], requires_grad=True))
        model.w.sum().backward()
        recorder.step()
    chunk = read_trace(tmp_path)[0]
    assert chunk["nonfinite"][0].tolist() == [0, 5] and chunk["found_inf"][0] == 0


def test_a_glob_that_matches_nothing_is_an_error(tmp_path):
    with pytest.raises(ModelError, match=r"found none that matches \['layers.\*'\].*there are 0, 1, 2"):
        Recorder(tiny(), tmp_path, activations=["layers.*"])


# ---- overflow lines


@pytest.mark.parametrize("where", ["before unscale_", "after update"])
def test_overflow_lines_name_the_step_the_scales_and_the_tensor(tmp_path, capsys, where):
    model = Holder(a=2, b=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = scaler_of()
    with Recorder(model, tmp_path, overflow_lines=True) as recorder:
        for factor in (1.0, INF):
            optimizer.zero_grad()
            scaler.scale(model.a.sum() + factor * model.b.sum()).backward()
            if where == "before unscale_":
                recorder.step(scaler)
            scaler.step(optimizer)
            scaler.update()
            if where == "after update":
                recorder.step(scaler)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "gradscale: step 1 overflow, loss_scale 1024.0 -> 512.0, first non-finite tensor b\n"


# ---- files


def test_a_directory_with_another_run_is_refused(tmp_path):
    model = tiny()
    with Recorder(model, tmp_path) as recorder:
        plant(model, 1.0, 1.0, 1.0, 1.0)
        recorder.step()
    with pytest.raises(TraceExists, match="found 1 chunks of rank 0 .* give each run its own directory"):
        Recorder(model, tmp_path)


def test_the_open_chunk_is_written_when_the_recorder_is_collected(tmp_path):
    model = tiny()
    recorder = Recorder(model, tmp_path)
    for _ in range(3):
        plant(model, 1.0, 1.0, 1.0, 1.0)
        recorder.step()
    del recorder
    assert [len(c["step"]) for c in read_trace(tmp_path)] == [1, 2]
    plant(model, 1.0, 1.0, 1.0, 1.0)  # the hooks left on the model do nothing


SCRIPT = """
import sys, torch
sys.path.insert(0, {package!r})
from gradscale import Recorder
from gradscale._writer import Column
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
recorder = Recorder(model, {trace!r}, every=2, chunk_steps=2)
print("ready", flush=True)
for step in range({steps}):
    model.zero_grad()
    model(torch.randn(2, 64)).square().mean().backward()
    recorder.step()
"""


def spawn(trace, steps):
    package = str(Path(gradscale.__file__).parent.parent)
    script = SCRIPT.format(package=package, trace=str(trace), steps=steps)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)


def test_the_interpreters_exit_writes_the_open_chunk(tmp_path):
    child = spawn(tmp_path, 2)
    assert child.wait(60) == 0
    assert [c["step"].tolist() for c in read_trace(tmp_path)] == [[0], [1]]


# ---- ranks


def rank_main(rank, world_size, trace):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(tiny(), gradient_as_bucket_view=True)
    with Recorder(model, trace, every=1) as recorder:
        for step in range(2):
            model.zero_grad()
            loss = model(torch.full((1, 4), rank + 1.0)).sum()
            loss.backward()
            before = [p.grad.clone() for p in model.parameters()]
            recorder.probe(lambda: model(torch.full((1, 4), rank + 3.0)).sum().backward())
            assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before))
            recorder.step(loss=loss)


def test_each_rank_of_ddp_writes_its_own_gradients_before_they_are_reduced(tmp_path):
    trace = tmp_path / "trace"
    ranks.run(rank_main, 2, tmp_path / "store", trace)
    both = [read_trace(trace, rank) for rank in (0, 1)]
    assert both[0][0].metadata["run_id"] == both[1][0].metadata["run_id"]
    assert [(c[0].metadata["rank"], c[0].metadata["world_size"]) for c in both] == [(0, 2), (1, 2)]
    assert both[0][0].names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(t["reduction"] == "unreduced" for t in both[1][0].metadata["tensors"])
    torch.manual_seed(0)
    model = tiny()
    for rank, chunks in enumerate(both):
        for kind, x in (("", rank + 1.0), ("probe_", rank + 3.0)):
            model.zero_grad()
            model(torch.full((1, 4), x)).sum().backward()
            expected = [reference_sketch(codes_of(p.grad)) for p in model.parameters()]
            assert chunks[0].sketches(kind).sketches[0] == chunks[1].sketches(kind).sketches[0] == expected


# ---- what cannot be recorded


def test_models_that_cannot_be_recorded_are_refused(tmp_path):
    with pytest.raises(ModelError, match="found no floating-point parameter"):
        Recorder(nn.ReLU(), tmp_path)
    with pytest.raises(ModelError, match='parameter "weight" without a shape.*run one forward first'):
        Recorder(nn.LazyLinear(3), tmp_path)
    for kwargs in ({"every": 0}, {"chunk_steps": -1}, {"every": 1.5}):
        with pytest.raises(ModelError, match="a whole number of steps"):
            Recorder(tiny(), tmp_path, **kwargs)


def test_import_without_torch_works(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1])\n"
        "import gradscale, gradscale.sketch, gradscale.trace\n"
        "try:\n    gradscale.Recorder\n"
        "except ImportError as e:\n    print(e)\n"
    )
    package = str(Path(gradscale.__file__).parent.parent)
    out = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, check=True).stdout
    assert out == "importing gradscale.Recorder: found no torch, expected torch; pip install 'gradscale[torch]'\n"
