"""What do the gradients of a real, small training run look like, and what does FP16 then really do to that run?

    python experiments/record_run.py cnn|transformer [--device cpu|cuda] [--steps 8000] [--out experiments/runs] [--every 50]

Trains the model twice from seed 0 with the same data in the same order: in FP32 through `gradscale.Recorder` (the trace), and
in real FP16, `torch.autocast` with `torch.amp.GradScaler` at PyTorch's defaults. Writes OUT/<name>.zip:

    trace/rank0000-0000NN.safetensors   the FP32 trace, loss included
    fp16.csv                            step,amax,loss_scale,found_inf,loss of the FP16 run; amax is the largest finite abs over all
                                        parameters' gradients divided by the loss scale; `inf` where the step was skipped
    about.json                          what was trained, where and how

cnn: a convolutional network with BatchNorm on scikit-learn's digits, long after its loss went below 1e-4: gradients
that vanish. transformer: a causal byte-level language model on the text of Python's own help topics: gradients that do not.
"""

import argparse
import csv
import hashlib
import io
import json
import math
import platform
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
from gradscale import Recorder  # noqa: E402

SEED = 0


class Cnn(nn.Module):
    """8x8 digits -> 10 classes."""

    def __init__(self, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(2 * width)
        self.hidden = nn.Linear(2 * width * 4, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.max_pool2d(F.relu(self.norm3(self.conv3(x))), 2)
        return self.head(F.relu(self.hidden(x.flatten(1))))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        # Biases only where they teach something: a third of qkv.bias is the key's, whose true gradient is zero.
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        attended = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Causal language model over bytes below 128."""

    def __init__(self, width=48, heads=4, layers=1, context=64):
        super().__init__()
        self.token = nn.Embedding(128, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, 128, bias=False)

    def forward(self, x):
        h = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def digits(device):
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return x.to(device), torch.tensor(data.target).to(device)


def topics(device):
    from pydoc_data.topics import topics as texts

    # Some topics are spelt with non-ASCII dashes; a byte above 127 becomes a question mark.
    text = "\n".join(texts[key] for key in sorted(texts))[:200_000]
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long().to(device)


def cnn(device):
    """The CNN's model, optimizer, batch function and what to say about it."""
    batch = 32
    x, y = digits(device)
    generator = torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    model = Cnn().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss():
        pick = torch.randint(len(x), (batch,), generator=generator).to(device)
        return F.cross_entropy(model(x[pick]), y[pick])

    about = {
        "model": "3 convolutions 3x3 (16, 32, 32 channels) with BatchNorm and ReLU, 2 max-pools, linear layers of 128 (ReLU) and 10",
        "data": f"scikit-learn digits, {len(x)} images 8x8, drawn with replacement, no augmentation",
        "optimizer": "SGD, momentum 0.9, no weight decay",
        "lr": 0.05,
        "batch": batch,
    }
    return model, optimizer, loss, about


def transformer(device):
    """The language model's parts, as `cnn`."""
    batch, context = 16, 64
    text = topics(device)
    generator = torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    model = Transformer(context=context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offsets = torch.arange(context + 1, device=device)

    def loss():
        start = torch.randint(len(text) - context - 1, (batch, 1), generator=generator).to(device)
        window = text[start + offsets]
        logits = model(window[:, :-1])
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), window[:, 1:].reshape(-1))

    about = {
        "model": "causal byte-level transformer, width 48, 4 heads, 1 layer, context 64, pre-norm, GELU",
        "data": f"pydoc_data.topics of the Python that runs this, sorted by key, first {len(text)} bytes",
        "optimizer": "AdamW, PyTorch's defaults otherwise",
        "lr": 1e-3,
        "batch": batch,
    }
    return model, optimizer, loss, about


def progress(name, kind, step, steps, loss, start):
    if step % 500 == 0 or step == steps - 1:
        seconds = time.perf_counter() - start
        print(f"{name} {kind}: step {step} of {steps}, loss {loss:.3e}, {seconds:.0f} s", file=sys.stderr, flush=True)


def record_fp32(name, build, device, steps, every, directory):
    model, optimizer, loss_of, about = build(device)
    about["parameters"] = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    run_id = hashlib.sha256(f"{name} {device} {steps} {every} {SEED}".encode()).hexdigest()[:32]  # same run, same bytes
    facts = {"model": name, "optimizer": about["optimizer"], "lr": about["lr"], "batch": about["batch"]}
    with Recorder(model, directory, every=every, chunk_steps=4000, facts=facts, precision="fp32", run_id=run_id) as recorder:
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            recorder.step(loss=loss)
            optimizer.step()
            progress(name, "fp32", step, steps, float(loss.detach()), start)
    return about


def run_fp16(name, build, device, steps):
    model, optimizer, loss_of, _ = build(device)
    scaler = torch.amp.GradScaler(device)
    start = time.perf_counter()
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["step", "amax", "loss_scale", "found_inf", "loss"])
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = loss_of()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        amax = max(float(p.grad.abs().max()) for p in model.parameters()) / scale
        finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        shown = f"{amax:.9g}" if finite else "inf"
        rows.writerow([step, shown, f"{scale:.17g}", int(not finite), f"{float(loss.detach()):.9g}"])
        progress(name, "fp16", step, steps, float(loss.detach()), start)
    return text.getvalue()


def processor(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write_zip(path, members):
    """Same members, same bytes: the timestamps are zip's first."""
    temporary = path.with_name(path.name + ".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in members:
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data, compresslevel=9)
    temporary.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=["cnn", "transformer"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--out", type=Path, default=Path("experiments/runs"))
    parser.add_argument("--every", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    build = {"cnn": cnn, "transformer": transformer}[arguments.name]
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace"
        about = record_fp32(arguments.name, build, arguments.device, arguments.steps, arguments.every, trace)
        fp16 = run_fp16(arguments.name, build, arguments.device, arguments.steps)
        about.update(
            steps=arguments.steps,
            seed=SEED,
            device=arguments.device,
            processor=processor(arguments.device),
            torch=torch.__version__,
            python=platform.python_version(),
            threads=torch.get_num_threads(),
            fp16="torch.autocast(float16) with torch.amp.GradScaler, defaults: init_scale 65536, growth_interval 2000",
            command=f"python experiments/record_run.py {arguments.name} --device {arguments.device} "
            f"--steps {arguments.steps} --every {arguments.every}",
        )
        members = [(f"trace/{p.name}", p.read_bytes()) for p in sorted(trace.glob("*.safetensors"))]
    members.append(("fp16.csv", fp16.encode()))
    members.append(("about.json", (json.dumps(about, indent=2, sort_keys=True) + "\n").encode()))
    path = arguments.out / f"{arguments.name}.zip"
    write_zip(path, members)
    print(f"{path}: {path.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
