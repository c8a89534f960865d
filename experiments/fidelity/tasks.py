"""The small models and data sets that the experiments train: three architectures, seven data sets, nothing to download.

    task = build("transformer", "addition", seed=0)
    batch = task.batch()                 # the next one; the same seed gives the same sequence of batches
    loss = task.loss(batch)              # a scalar tensor, in whatever autocast context it is called
    task.evaluate()                      # mean FP32 loss over a fixed sample of the data

A task's model, first batch and all later ones depend on `seed` alone, so an FP32 and an FP16 run of one seed start from the same bits
and see the same data. The models are small because FP16 arithmetic on a CPU is emulated: some milliseconds a step.
"""

import math
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional as F

ARCHITECTURES = {
    "transformer": ("text", "addition", "sorting"),
    "cnn": ("digits", "stripes", "blobs"),
    "rnn": ("digits", "counting"),
}


class Block(nn.Module):
    """Pre-norm causal attention and MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.probabilities = nn.Identity()  # changes nothing; shows a recorder the gradient inside attention, which no other module has
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        attended = self.probabilities(scores.masked_fill(mask, float("-inf")).softmax(-1)) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Causal model over a small vocabulary: tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, vocabulary, length, width=24, heads=2, layers=2):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x):
        h = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Cnn(nn.Module):
    """Images (batch, 1, 8, 8) to `outputs` numbers, with a residual block."""

    def __init__(self, outputs, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(2 * width)
        self.head = nn.Linear(2 * width * 4, outputs)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(x + self.norm2(self.conv2(x)))
        x = F.max_pool2d(F.relu(self.norm3(self.conv3(x))), 2)
        return self.head(x.flatten(1))


class Lstm(nn.Module):
    """An LSTM whose cell is written from linear layers: `nn.LSTM` doesn't run in FP16 on a CPU.

    Vectors (batch, length, inputs) to logits (batch, length, outputs).
    """

    def __init__(self, inputs, outputs, width=24):
        super().__init__()
        self.width = width
        self.gates_x = nn.Linear(inputs, 4 * width)
        self.gates_h = nn.Linear(width, 4 * width, bias=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], self.width)
        states = []
        for step in self.gates_x(x).unbind(1):
            i, f, g, o = (step + self.gates_h(h)).chunk(4, 1)
            c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return self.head(torch.stack(states, 1))


# ---- data: each function gives (inputs, targets) of a whole data set, or a sampler of batches

TEXT_LENGTH = 16


def text():
    """Bytes of Python's own help topics, sorted by key; above 127 a question mark."""
    from pydoc_data.topics import topics

    joined = "\n".join(topics[key] for key in sorted(topics))[:100_000]
    return torch.frombuffer(bytearray(joined.encode("ascii", "replace")), dtype=torch.uint8).long()


def addition(count, generator):
    """`37+45=082`: digits 0 to 9, + is 10, = is 11; only what follows = is judged."""
    a, b = torch.randint(100, (2, count), generator=generator)
    s = a + b
    ten, eleven = torch.full_like(a, 10), torch.full_like(a, 11)
    return torch.stack([a // 10, a % 10, ten, b // 10, b % 10, eleven, s // 100, s // 10 % 10, s % 10], 1), 6


def sorting(count, generator):
    """Six digits, a mark (10), the same digits in order; only what follows the mark is judged."""
    digits = torch.randint(10, (count, 6), generator=generator)
    mark = torch.full((count, 1), 10)
    return torch.cat([digits, mark, digits.sort(1).values], 1), 7


def digits():
    """scikit-learn's 1,797 images 8x8 of ten classes, 0 to 1."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)


def stripes(count, generator):
    """Noisy 8x8 gratings at one of eight angles, with any phase."""
    angle = torch.randint(8, (count,), generator=generator)
    phase = 6.2832 * torch.rand(count, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    theta = math.pi / 8 * angle[:, None, None]
    wave = torch.sin(1.6 * (x * theta.cos() + y * theta.sin()) + phase)
    return wave + 0.3 * torch.randn(count, 8, 8, generator=generator), angle


def blobs(count, generator):
    """8x8 images of one to five soft spots; the target is their summed brightness over 10, a regression."""
    y, x = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    spots = 7 * torch.rand(count, 5, 2, generator=generator)
    there = torch.arange(5) <= torch.randint(5, (count, 1), generator=generator)
    brightness = there * (0.5 + torch.rand(count, 5, generator=generator))
    distance = (x - spots[..., 0, None, None]) ** 2 + (y - spots[..., 1, None, None]) ** 2
    return (brightness[..., None, None] * torch.exp(-distance / 2)).sum(1), brightness.sum(1) / 10


def counting(count, generator):
    """Twelve random digits 0 to 4, one-hot; the target at each place is the running sum modulo 5."""
    numbers = torch.randint(5, (count, 12), generator=generator)
    return F.one_hot(numbers, 5).float(), numbers.cumsum(1) % 5


@dataclass
class Task:
    """What a run needs. `batch` advances the data; `loss` and `evaluate` do not."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[], Any]
    loss: Callable[[Any], torch.Tensor]
    evaluate: Callable[[], float]
    parameters: int = 0


def build(architecture, data, seed=0, device="cpu"):
    """The task of that name. Raises ValueError for an architecture or data set that isn't listed in `ARCHITECTURES`."""
    if data not in ARCHITECTURES.get(architecture, ()):
        known = ", ".join(f"{a}/{d}" for a, names in ARCHITECTURES.items() for d in names)
        raise ValueError(f'choosing a task: found "{architecture}/{data}", expected one of {known}')
    generator = torch.Generator().manual_seed(1000 + seed)
    fixed = torch.Generator().manual_seed(99)  # what `evaluate` looks at, and the data sets themselves: the same for every seed
    torch.manual_seed(seed)
    model, draw, loss_of, size = {"transformer": _transformer, "cnn": _cnn, "rnn": _rnn}[architecture](data, fixed)
    model = model.to(device)
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.02 if data == "blobs" else 0.05, momentum=0.9)
        if architecture == "cnn"
        else torch.optim.AdamW(model.parameters(), lr=3e-3)
    )
    held = [t.to(device) for t in draw(512, fixed)]

    def evaluate():
        training = model.training
        model.eval()
        with torch.no_grad():
            value = float(loss_of(model, held))
        model.train(training)
        return value

    return Task(
        model,
        optimizer,
        lambda: [t.to(device) for t in draw(size, generator)],
        lambda batch: loss_of(model, batch),
        evaluate,
        sum(p.numel() for p in model.parameters()),
    )


def _transformer(data, fixed):
    if data == "text":
        letters = text()
        offsets = torch.arange(TEXT_LENGTH + 1)

        def draw(count, generator):
            start = torch.randint(len(letters) - TEXT_LENGTH - 1, (count, 1), generator=generator)
            return [letters[start + offsets]]

        model, first, size = Transformer(128, TEXT_LENGTH), 1, 8
    else:
        make = {"addition": addition, "sorting": sorting}[data]
        rows, first = make(1, torch.Generator())
        model, size = Transformer(12, rows.shape[1] - 1), 16

        def draw(count, generator):
            return [make(count, generator)[0]]

    def loss_of(model, batch):
        tokens = batch[0]
        logits = model(tokens[:, :-1])[:, first - 1 :]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), tokens[:, first:].reshape(-1))

    return model, draw, loss_of, size


def _cnn(data, fixed):
    images, targets = digits() if data == "digits" else {"stripes": stripes, "blobs": blobs}[data](2000, fixed)
    images = images[:, None]

    def draw(count, generator):
        pick = torch.randint(len(images), (count,), generator=generator)
        return [images[pick], targets[pick]]

    def loss_of(model, batch):
        outputs = model(batch[0]).float()
        return F.mse_loss(outputs[:, 0], batch[1]) if data == "blobs" else F.cross_entropy(outputs, batch[1])

    return Cnn({"digits": 10, "stripes": 8, "blobs": 1}[data]), draw, loss_of, 16


def _rnn(data, fixed):
    if data == "digits":  # a row of the image a time step, judged at the last
        images, targets = digits()

        def draw(count, generator):
            pick = torch.randint(len(images), (count,), generator=generator)
            return [images[pick], targets[pick][:, None]]

        model = Lstm(8, 10)
    else:

        def draw(count, generator):
            return list(counting(count, generator))

        model = Lstm(5, 5)

    def loss_of(model, batch):
        logits = model(batch[0])[:, -batch[1].shape[1] :]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), batch[1].reshape(-1))

    return model, draw, loss_of, 16
