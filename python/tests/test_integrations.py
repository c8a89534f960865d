"""The callbacks, driven by stand-ins that call them as the frameworks do, and by the frameworks themselves where they are installed."""

import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradscale
from gradscale.integrations import LightningCallback, TransformersCallback
from gradscale.trace import column, read_trace


def model_of():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batch(n=8):
    return torch.randn(n, 6), torch.randint(0, 3, (n,))


class Events:
    """What transformers' CallbackHandler does with a callback."""

    def __init__(self, callback, args, model, optimizer):
        self.callback, self.args, self.kwargs = callback, args, {"model": model, "optimizer": optimizer, "lr_scheduler": None}

    def __call__(self, event):
        getattr(self.callback, event)(self.args, SimpleNamespace(global_step=0), SimpleNamespace(), **self.kwargs)


@pytest.mark.parametrize("fp16", [False, True])
def test_transformers_steps_are_rows(tmp_path, fp16):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if fp16 else None
    optimizer.scaler = scaler  # as AcceleratedOptimizer has it
    callback = TransformersCallback(every=2)
    fire = Events(callback, SimpleNamespace(output_dir=str(tmp_path)), model, optimizer)
    for event in ("on_init_end", "on_train_begin", "on_epoch_begin"):
        fire(event)
    for step in range(5):
        fire("on_step_begin")
        for micro in range(2):
            x, y = batch()
            if step == 3 and micro == 1:
                x = x * float("inf")
            loss = F.cross_entropy(model(x), y) / 2
            (scaler.scale(loss) if fp16 else loss).backward()
            if micro == 0:
                fire("on_substep_end")
        fire("on_pre_optimizer_step")
        if fp16:
            scaler.step(optimizer)
            scaler.update()
        fire("on_optimizer_step")
        model.zero_grad()
        fire("on_step_end")
    for event in ("on_log", "on_save", "on_epoch_end", "on_train_end"):
        fire(event)
    chunks = read_trace(tmp_path / "gradscale")
    assert column(chunks, "step").tolist() == list(range(5))
    assert column(chunks, "found_inf").tolist() == [0, 0, 0, 1, 0]
    if fp16:
        assert column(chunks, "loss_scale").tolist() == [256.0] * 4 + [128.0]
    assert chunks[0].names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert callback.recorder is None and not model[0].weight._post_accumulate_grad_hooks


def test_lightning_steps_are_rows(tmp_path):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    trainer = SimpleNamespace(default_root_dir=str(tmp_path), global_step=0, precision_plugin=SimpleNamespace(scaler=scaler))
    callback = LightningCallback(tmp_path / "mine", every=1, chunk_steps=2)
    callback.setup(trainer, model, stage="fit")
    callback.on_fit_start(trainer, model)
    callback.on_train_start(trainer, model)
    losses = []
    for index in range(8):  # an optimizer step every second batch
        x, y = batch()
        callback.on_train_batch_start(trainer, model, (x, y), index)
        loss = F.cross_entropy(model(x), y)
        callback.on_before_backward(trainer, model, loss)
        scaler.scale(loss / 2).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            callback.on_before_optimizer_step(trainer, model, optimizer)
            scaler.step(optimizer)
            scaler.update()
            trainer.global_step += 1
            losses.append(float(loss.detach()))
        callback.on_train_batch_end(trainer, model, {"loss": loss.detach()}, (x, y), index)
        if index % 2:
            optimizer.zero_grad()
    callback.on_train_end(trainer, model)
    callback.teardown(trainer, model, stage="fit")
    chunks = read_trace(tmp_path / "mine")
    assert column(chunks, "step").tolist() == [0, 1, 2, 3]
    assert column(chunks, "loss").tolist() == pytest.approx(losses)
    assert column(chunks, "loss_scale").tolist() == [64.0, 64.0, 128.0, 128.0]


def test_an_exception_writes_what_is_open(tmp_path):
    model = model_of()
    trainer = SimpleNamespace(default_root_dir=str(tmp_path), global_step=0)
    callback = LightningCallback()
    callback.on_train_start(trainer, model)
    for _ in range(3):
        model(batch()[0]).sum().backward()
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, model, None, None, 0)
    callback.on_exception(trainer, model, KeyboardInterrupt())
    assert len(column(read_trace(tmp_path / "gradscale"), "step")) == 3


def test_callbacks_can_be_copied_and_have_no_other_attributes():
    for kind in (TransformersCallback, LightningCallback):
        callback = copy.deepcopy(kind(every=3))
        assert callback._options == {"every": 3}
        assert callback.on_anything_new(1, two=3) is None
        with pytest.raises(AttributeError, match="no attribute 'trainer'"):
            callback.trainer


def test_neither_framework_nor_torch_is_imported():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.modules['torch'] = None\n"
        "import gradscale.integrations\n"
        "print([m for m in ('transformers', 'lightning', 'accelerate') if m in sys.modules])"
    )
    package = str(Path(gradscale.__file__).parent.parent)
    out = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"


# ---- the real ones


def test_the_real_transformers_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model_of()

        def forward(self, x, labels):
            return {"loss": F.cross_entropy(self.layers(x), labels)}

    rows = [{"x": torch.randn(6), "labels": torch.tensor(i % 3)} for i in range(64)]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model=Model(), args=args, train_dataset=rows, callbacks=[TransformersCallback(every=2)])
    trainer.train()
    chunks = read_trace(tmp_path / "out" / "gradscale")
    assert column(chunks, "step").tolist() == list(range(6)) and chunks[0].names[0] == "layers.0.weight"
    assert (column(chunks, "amax") > 0).all()


def test_the_real_lightning_trainer(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = model_of()

        def training_step(self, batch, index):
            return F.cross_entropy(self.layers(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(48)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=5, accumulate_grad_batches=2, callbacks=[LightningCallback(every=2)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Module(), data)
    chunks = read_trace(tmp_path / "gradscale")
    assert column(chunks, "step").tolist() == list(range(5))
    assert (column(chunks, "loss") > 0).all() and (column(chunks, "amax") > 0).all()
