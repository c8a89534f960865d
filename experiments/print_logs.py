"""What do real loss scalers print? Logs for tests/data/logs/real, from runs on the CPU with planted overflows.

Question: does `gradscale diagnose` read what torch and DeepSpeed really print, and does it find what was planted?
Seed: 0. Command (writes the logs and expected.jsonl):

    python experiments/print_logs.py tests/data/logs/real

Needs torch (written with 2.15.0) and deepspeed (0.19.8, for its loss_scaler.py and the fused optimizer's scale update; neither
needs a GPU). The gradients are real ones of a small model under FP16 autocast; a step is made to overflow by multiplying its loss,
or its input, by a large factor, so that FP16 itself produces the inf.
"""

import contextlib
import io
import json
import logging
import math
import os
import sys
import types

import torch


def model(seed=0):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.01)


def batches(seed=0):
    """Endless batches of one linear law with a little noise: the loss falls."""
    g = torch.Generator().manual_seed(seed)
    law = torch.randn(16, 1, generator=g) / 4
    while True:
        x = torch.randn(64, 16, generator=g)
        yield x, x @ law + 0.01 * torch.randn(64, 1, generator=g)


def run(steps, scaler, say, loss_factor=lambda n, scale: 1.0, poison=lambda n: False, seed=0):
    """Trains; `say(n, loss, before, after)` prints. Returns the steps at which found_inf made the scaler skip."""
    net, opt = model(seed)
    data = batches(seed)
    skipped = []
    for n in range(1, steps + 1):
        x, y = next(data)
        if poison(n):
            x[0, 0] = float("nan")
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(net(x).float(), y)
        before = scaler.get_scale()
        # The factor grows the gradients of this step only; it is not part of the loss that is printed.
        (scaler.scale(loss) * loss_factor(n, before)).backward()
        scaler.unscale_(opt)
        found = sum(float(v) for s in scaler._per_optimizer_states.values() for v in s["found_inf_per_device"].values())
        scaler.step(opt)
        scaler.update()
        if found:
            skipped.append(n)
        say(n, float(loss.detach()), before, scaler.get_scale())
    return skipped


def over(ceiling):
    """Makes every step whose scale is above the ceiling overflow FP16, and no other."""
    return lambda n, scale: 1e9 if scale > ceiling else 1.0


@contextlib.contextmanager
def captured(path):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield
    with open(path, "w", encoding="utf-8") as f:
        f.write(text.getvalue())


def torch_logs(folder):
    """(file, expectation) of what torch.amp.GradScaler and a user's print give."""
    scaler = lambda init, interval: torch.amp.GradScaler("cpu", init_scale=float(init), growth_interval=interval)
    facts = {"format": "torch-print", "skipped_steps": None, "also": [], "exit": 0}
    made = []

    with captured(os.path.join(folder, "torch-step-line.log")):
        skipped = run(400, scaler(2**16, 2000), lambda n, loss, a, b: print(f"step {n} loss {loss:.4f} scale {b}"), over(2**10))
    # The print stands behind the update, so the first value is already halved and the first overflow unseen.
    made.append(("torch-step-line.log", dict(facts, verdict="RAMP_UP_HARMLESS", skipped_min=len(skipped) - 1,
                 first_scale=2**15, last_scale=2**10, growth_interval=None, why="six overflows at the start, then clean")))

    with captured(os.path.join(folder, "torch-tensor.log")):
        s = scaler(2**14, 25)
        skipped = run(300, s, lambda n, loss, a, b: print(s._scale), over(2**17))
    made.append(("torch-tensor.log", dict(facts, verdict="SAWTOOTH_AT_CEILING", skipped_min=len(skipped),
                 first_scale=2**14, last_scale=s.get_scale(), growth_interval=25, why="growth every 25 steps, overflow above 2^17")))

    with captured(os.path.join(folder, "torch-state-dict.log")):
        s = scaler(2**16, 2000)
        skipped = run(120, s, lambda n, loss, a, b: print(f"[{n}] loss: {loss:.4f}\n{s.state_dict()}"), over(2**20))
    made.append(("torch-state-dict.log", dict(facts, verdict="HEALTHY", skipped_min=0, first_scale=2**16, last_scale=2**16,
                 growth_interval=None, why="no overflow at all")))

    with captured(os.path.join(folder, "torch-chinese.log")):
        skipped = run(200, scaler(2**16, 2000), lambda n, loss, a, b: print(f"第{n}步 loss: {loss:.4f}\n当前缩放因子: {a}"), over(2**12))
    made.append(("torch-chinese.log", dict(facts, verdict="RAMP_UP_HARMLESS", skipped_min=len(skipped),
                 first_scale=2**16, last_scale=2**12, growth_interval=None, why="the print stands before the update")))

    with captured(os.path.join(folder, "torch-poisoned-data.log")):
        s = scaler(2**16, 2000)
        skipped = run(260, s, lambda n, loss, a, b: print(f"step {n} loss {loss:.4f} scale {b}"), over(2**14), lambda n: n > 180)
    made.append(("torch-poisoned-data.log", dict(facts, verdict="GENUINE_NONFINITE", skipped_min=len(skipped) - 2,
                 first_scale=2**15, last_scale=s.get_scale(), growth_interval=None, exit=1, also=["RAMP_UP_HARMLESS", "OVERFLOW_OUTPACES_GROWTH"],
                 why="every batch from step 181 on holds a NaN")))

    with captured(os.path.join(folder, "torch-runaway.log")):
        s = scaler(2**16, 1)
        run(200, s, lambda n, loss, a, b: print(f"{b}"), lambda n, scale: 0.0)
    made.append(("torch-runaway.log", dict(facts, verdict="SCALE_SATURATED_HIGH", skipped_min=0, first_scale=2**17,
                 last_scale=s.get_scale(), growth_interval=1, exit=0, also=["DISPLAY_ROUNDING"],
                 why="a growth interval of 1 and gradients that are all zero: nothing holds the scale; torch stops short of inf")))
    return made


class Stamp(logging.Formatter):
    """DeepSpeed's own line form with a made-up clock, so that the log is the same every time."""

    clock = 0.0

    def format(self, record):
        t = self.clock
        stamp = f"2026-01-05 10:{int(t) // 60 % 60:02d}:{int(t) % 60:02d},{int(t * 1000) % 1000:03d}"
        return f"[{stamp}] [{record.levelname}] [{record.filename}:{record.lineno}:{record.funcName}] {record.getMessage()}"


def deepspeed_logs(folder):
    """What DeepSpeed's classes print; the training loop around them is ours."""
    try:
        from deepspeed.runtime.fp16 import loss_scaler
        from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
        from deepspeed.utils import logger
    except ImportError as error:
        print(f"deepspeed is not here ({error}); its logs are left as they are", file=sys.stderr)
        return []
    stamp = Stamp()
    # One process without a communicator: the class only asks which rank prints.
    loss_scaler.dist = types.SimpleNamespace(get_rank=lambda: 0)
    logger.setLevel(logging.INFO)

    @contextlib.contextmanager
    def logged(path):
        out = open(path, "w", encoding="utf-8")
        handler = logging.StreamHandler(out)
        handler.setFormatter(stamp)
        old, logger.handlers, logger.propagate = logger.handlers, [handler], False
        stamp.clock = 0.0
        try:
            yield lambda line: print(line, file=out)
        finally:
            logger.handlers = old
            out.close()

    def train(steps, update, scale_of, say, ceiling, every=10):
        """`update(overflow)`; the gradients are real, the overflow is FP16's own."""
        net, opt = model()
        data = batches()
        skipped = 0
        for n in range(1, steps + 1):
            stamp.clock += 0.7
            x, y = next(data)
            opt.zero_grad()
            scale = scale_of()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = torch.nn.functional.mse_loss(net(x).float(), y)
            (loss * (1e9 if scale > ceiling(n) else 1.0) * scale).backward()
            overflow = any(not torch.isfinite(p.grad).all() for p in net.parameters())
            if overflow:
                skipped += 1
            else:
                for p in net.parameters():
                    p.grad /= scale
                opt.step()
            try:
                update(overflow)
            except Exception as error:
                say(f"Exception: {error}")
                return skipped - 1
            if n % every == 0:
                say(f"[Rank 0] step={n}, skipped={skipped}, lr=[0.01], mom=[0.0]")
                say(f"steps: {n} loss: {float(loss.detach()):.4f} iter time (s): 0.700 samples/sec: 91.429")
        return skipped

    made = []
    facts = {"format": "deepspeed", "also": [], "exit": 0}
    make = lambda **more: loss_scaler.DynamicLossScaler(dtype=torch.half, **more)

    with logged(os.path.join(folder, "deepspeed-hysteresis.log")) as say:
        s = make(init_scale=2**16, scale_window=50, min_scale=1, delayed_shift=2, consecutive_hysteresis=False)
        skipped = train(400, s.update_scale, lambda: s.cur_scale, say, lambda n: 2**11)
    made.append(("deepspeed-hysteresis.log", dict(facts, verdict="SAWTOOTH_AT_CEILING", skipped_steps=skipped, first_scale=2**16,
                 last_scale=2**11, growth_interval=50, also=["RAMP_UP_HARMLESS"], why="DynamicLossScaler(scale_window=50, delayed_shift=2), every scale above 2^11 overflows")))

    with logged(os.path.join(folder, "deepspeed-minimum.log")) as say:
        s = make(init_scale=2**12, scale_window=1000, min_scale=1, delayed_shift=1, consecutive_hysteresis=False)
        skipped = train(400, s.update_scale, lambda: s.cur_scale, say, lambda n: 2**12 if n < 200 else 0)
    made.append(("deepspeed-minimum.log", dict(facts, verdict="PINNED_AT_FLOOR", skipped_steps=skipped, first_scale=2**12,
                 last_scale=1, growth_interval=None, exit=1, also=["GENUINE_NONFINITE", "OVERFLOW_OUTPACES_GROWTH"], why="from step 200 on everything overflows, until the class raises")))

    with logged(os.path.join(folder, "deepspeed-fused.log")) as say:
        config = types.SimpleNamespace(dynamic_loss_scale=True, cur_scale=float(2**15), cur_iter=0, last_overflow_iter=-1,
                                       scale_factor=2.0, scale_window=100, min_loss_scale=1.0)
        stub = types.SimpleNamespace(loss_scale_config=config, verbose=True)
        skipped = train(350, lambda overflow: FP16_Optimizer._update_scale(stub, overflow), lambda: config.cur_scale, say, lambda n: 2**13)
    made.append(("deepspeed-fused.log", dict(facts, format="deepspeed-fused", verdict="SAWTOOTH_AT_CEILING", skipped_steps=skipped,
                 first_scale=2**15, last_scale=config.cur_scale, growth_interval=100, also=["RAMP_UP_HARMLESS", "HEALTHY"],
                 why="FP16_Optimizer._update_scale of the fused optimizer, window 100, ceiling 2^13")))
    return made


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else "tests/data/logs/real"
    os.makedirs(folder, exist_ok=True)
    torch.set_num_threads(1)
    made = torch_logs(folder) + deepspeed_logs(folder)
    with open(os.path.join(folder, "expected.jsonl"), "w", encoding="utf-8") as f:
        for name, facts in made:
            for key in ("first_scale", "last_scale"):
                if isinstance(facts[key], float) and math.isinf(facts[key]):
                    facts[key] = "inf"
            source = f"experiments/print_logs.py, torch {torch.__version__.split('+')[0]}"
            f.write(json.dumps({"file": name, "source": source, **facts}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
