"""Each cause is planted, and must be found."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradscale import Recorder, explain
from gradscale.errors import ModelError
from gradscale.explain import CAUSES, Explanation

NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.head(F.relu(self.second(self.drop(x))))


class Step:
    """A model, a batch, and its backward at a loss scale under autocast to FP16."""

    def __init__(self, scale=2.0**12, edit=None, x=None, y=None, loss=F.cross_entropy, **scaler):
        torch.manual_seed(4)
        self.model = Net()
        if edit:
            edit(self.model)
        self.x = torch.randn(16, 8) if x is None else x
        self.y = torch.randint(0, 4, (16,)) if y is None else y
        self.loss_function = loss
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, **scaler)

    def loss(self):
        with torch.autocast("cpu", torch.float16):
            return self.loss_function(self.model(self.x), self.y)

    def backward(self):
        self.scaler.scale(self.loss()).backward()
        return self

    def explain(self, probe=True, **kwargs):
        return explain(self.model, self.scaler, probe=self.backward if probe else None, **kwargs)


def kill(fraction):
    """The ReLU after the first layer is dead for most units, whatever the input."""

    def edit(model):
        with torch.no_grad():
            model.norm.bias[: int(32 * fraction)] = -100.0

    return edit


def test_a_healthy_step():
    step = Step().backward()
    answer = step.explain()
    # ReLU and dropout leave true zeros here and there; what counts is that FP16 flushed next to nothing.
    assert answer.underflow_fraction < 0.01 and answer.cause in ("healthy", "true_zeros")
    assert not answer.skipped and answer.first_nonfinite is None and answer.loss_scale == 2.0**12 and answer.probed


def test_underflow_by_a_tiny_loss_scale():
    # Small gradients, as late in a run, at a scale that is small but has not collapsed.
    step = Step(scale=1.0, loss=lambda out, y: F.cross_entropy(out, y) * 1e-6).backward()
    answer = step.explain()
    assert answer.cause == "underflow" and answer.underflow_fraction > 0.2
    assert "larger loss scale, 2^" in answer.try_next
    step.model.zero_grad()
    random = torch.get_rng_state()  # dropout: the probe draws again
    answer = step.explain()
    facts = {t.name: t for t in answer.tensors}
    torch.set_rng_state(random)
    step.backward()
    for name, p in step.model.named_parameters():
        assert facts[name].zeros == int((p.grad == 0).sum())
        assert facts[name].true_zeros + facts[name].flushed == facts[name].zeros
    assert step.explain(probe=False).cause == "cannot_tell"
    assert "cannot tell without a probe" in str(step.explain(probe=False))
    assert "underflow: " in str(answer) and "flushed" in str(answer)
    # What it advises helps.
    advised = int(answer.try_next.split("2^")[1].split()[0])
    better = Step(scale=2.0**advised, loss=step.loss_function).backward().explain()
    assert better.underflow_fraction < answer.underflow_fraction / 5


def test_true_zeros_of_a_dead_relu():
    step = Step(edit=kill(0.75)).backward()
    answer = step.explain()
    assert answer.cause == "true_zeros"
    first = next(t for t in answer.tensors if t.name == "first.weight")
    assert first.zeros >= 0.75 * first.elements and first.flushed < 0.01 * first.zeros
    assert step.explain(probe=False).cause == "cannot_tell"


def test_true_zeros_in_fp32_need_no_probe():
    step = Step(edit=kill(0.75))
    step.loss_function(step.model(step.x), step.y).backward()
    answer = explain(step.model)
    assert answer.cause in ("true_zeros", "cannot_tell") and answer.loss_scale is None
    big = nn.Linear(64, 64)
    F.relu(big(torch.randn(4, 64)) - 100 * (torch.arange(64) < 40)).square().mean().backward()
    assert explain(big).cause == "true_zeros"


def test_a_collapsed_scale_after_many_skips():
    step = Step(scale=2.0**16)
    for _ in range(44):  # a broken loader hands out NaN for a while
        step.optimizer.zero_grad()
        good, step.x = step.x, step.x * NAN
        step.model.eval()
        step.backward()
        step.scaler.step(step.optimizer)
        step.scaler.update()
        step.model.train()
        step.x = good
    step.optimizer.zero_grad()
    assert step.scaler.get_scale() == 2.0**-28
    step.backward()
    answer = step.explain()
    assert answer.cause == "collapsed_scale" and "underflow" in answer.also and answer.loss_scale == 2.0**-28
    assert not answer.skipped and "2^-28" in str(answer)
    assert step.explain(probe=False).cause == "collapsed_scale"


def test_a_small_scale_that_large_gradients_need_is_not_collapsed():
    step = Step(scale=2.0**-4, loss=lambda out, y: F.cross_entropy(out.float(), y) * 2.0**19).backward()
    answer = step.explain()
    assert answer.cause != "collapsed_scale" and max(t.amax for t in answer.tensors) > 300


def test_forward_overflow_of_fp16_activations():
    def large(model):
        with torch.no_grad():
            model.second.weight.mul_(1e5)

    step = Step(edit=large).backward()
    answer = step.explain()
    assert answer.cause == "forward_overflow" and answer.skipped
    first = answer.first_nonfinite
    assert (first.name, first.phase, first.what) == ("second", "forward", "output") and "inf" in first.kind
    assert "no loss scale cures it" in str(answer)
    # Without a probe the loss tells the phase, and nothing tells the cause.
    blind = step.explain(probe=False, loss=step.loss())
    assert blind.cause == "cannot_tell" and blind.first_nonfinite.phase == "forward"
    assert step.explain(probe=False).first_nonfinite.phase is None


def test_nan_data():
    x = torch.randn(16, 8)
    x[3, 2] = NAN
    step = Step(x=x).backward()
    answer = step.explain()
    assert answer.cause == "not_a_scale_problem" and answer.skipped and "batch itself" in answer.why
    assert (answer.first_nonfinite.phase, answer.first_nonfinite.what) == ("forward", "input")


def test_nan_targets():
    step = Step(y=torch.full((16, 4), NAN), loss=F.mse_loss).backward()
    answer = step.explain()
    assert answer.cause == "not_a_scale_problem" and answer.first_nonfinite.what == "loss"


def test_nan_parameters():
    step = Step()
    with torch.no_grad():
        step.model.second.bias[0] = NAN
    answer = step.backward().explain(probe=False)
    assert answer.cause == "not_a_scale_problem" and answer.first_nonfinite.name == "second.bias"


def test_a_backward_that_is_nan_in_fp32_too():
    class Root(nn.Linear):
        def forward(self, x):
            return (super().forward(x) * 0).sqrt()  # the derivative at 0

    model = Root(4, 4)

    def backward():
        model(torch.ones(2, 4)).sum().backward()

    backward()
    answer = explain(model, probe=backward)
    assert answer.cause == "not_a_scale_problem" and answer.first_nonfinite.phase == "backward"


@pytest.mark.parametrize("when", ["after backward", "after unscale_", "after step", "after update"])
def test_gradient_overflow_at_a_scale_that_is_too_high(when):
    step = Step(scale=2.0**24).backward()
    if when == "after unscale_":
        step.scaler.unscale_(step.optimizer)
    elif when != "after backward":
        step.scaler.step(step.optimizer)
        if when == "after update":
            step.scaler.update()
    answer = step.explain()
    assert answer.cause == "gradient_overflow" and answer.skipped, answer
    assert answer.first_nonfinite.phase == "backward" and answer.first_nonfinite.order_known
    assert "a scale up to about 2^" in answer.why
    blind = step.explain(probe=False, loss=step.loss())
    assert blind.cause == "cannot_tell" and blind.first_nonfinite.phase == "backward"


def test_the_scale_before_the_backoff_is_tried():
    step = Step(scale=2.0**12)
    step.model.eval()  # no dropout: the batch overflows at one scale and fits at half of it
    step.backward()
    while all(torch.isfinite(p.grad).all() for p in step.model.parameters()):
        step.optimizer.zero_grad()
        step.scaler.update(step.scaler.get_scale() * 2)
        step.backward()
    step.scaler.step(step.optimizer)
    step.scaler.update()
    scale = step.scaler.get_scale()
    answer = step.explain()
    assert answer.cause == "gradient_overflow" and step.scaler.get_scale() == scale, answer
    step.optimizer.zero_grad()
    assert step.backward().explain().cause != "gradient_overflow"


def test_a_probe_of_another_batch_is_told():
    step = Step(x=torch.full((16, 8), NAN)).backward()
    step.x = torch.randn(16, 8)
    answer = step.explain()
    assert answer.cause == "cannot_tell" and "the probe's forward and backward were finite" in answer.why
    assert answer.first_nonfinite.kind == "nan" and "cannot tell: " in str(answer)


def test_the_order_of_backward_is_the_recorders_without_a_probe(tmp_path):
    class Swapped(nn.Module):
        """Registered in the order in which backward reaches them, which is not the usual one."""

        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.last(self.first(x))

    model = Swapped()
    with Recorder(model, tmp_path) as recorder:
        model(torch.ones(1, 4)).sum().backward()
        recorder.step()
        for p in model.parameters():
            p.grad[0, 0] = INF
        assert explain(model, recorder=recorder).first_nonfinite.name == "last.weight"
        guessed = explain(model)
        assert guessed.first_nonfinite.name == "first.weight" and not guessed.first_nonfinite.order_known
        assert "order guessed" in str(guessed)


def test_nothing_is_changed():
    step = Step().backward()
    before = copy.deepcopy(step.model.state_dict())
    gradients = {n: p.grad.clone() for n, p in step.model.named_parameters()}
    held = {n: p.grad for n, p in step.model.named_parameters()}
    scaler, random = step.scaler.state_dict(), torch.get_rng_state()
    step.explain()
    assert all(torch.equal(v, before[k]) for k, v in step.model.state_dict().items())
    assert all(p.grad is held[n] and torch.equal(p.grad, gradients[n]) for n, p in step.model.named_parameters())
    assert step.scaler.state_dict() == scaler and torch.equal(torch.get_rng_state(), random)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in step.model.modules())
    assert torch.autograd.backward.__module__ == "torch.autograd"
    with pytest.raises(ZeroDivisionError):
        explain(step.model, step.scaler, probe=lambda: 1 / 0)
    assert torch.equal(torch.get_rng_state(), random) and all(p.grad is held[n] for n, p in step.model.named_parameters())


def test_a_number_for_a_scaler_and_half_parameters():
    model = nn.Linear(4, 4).half()

    def backward():
        (model(torch.ones(2, 4).half()).sum() * 1e-4 * 1e-4).backward()

    backward()
    answer = explain(model, 2.0**5, probe=backward)
    assert answer.loss_scale == 32.0 and not answer.probed and answer.cause in CAUSES


def test_what_cannot_be_explained_is_refused():
    with pytest.raises(ModelError, match="found no parameter with a gradient"):
        explain(nn.Linear(2, 2))


def test_the_name_is_the_function():
    import gradscale.explain  # noqa: F401

    assert callable(gradscale.explain) and isinstance(Step().backward().explain(False), Explanation)
