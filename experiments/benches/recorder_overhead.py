"""Question: what does recording cost a training step?

    python experiments/benches/recorder_overhead.py [--model transformer|cnn] [--device cpu|cuda] [--steps 600] [--rounds 7] [--every 50]

Trains the model of `record_run.py` with each way of recording and without, in turns of `--steps` steps from the same state, so that a machine
that slows down slows all of them; one thread. On a CPU the clock is the process's own CPU time, which other programs do not enter (nor does
waiting for the disk: one file each 1000 steps); on a GPU it is the wall's. Prints for each the median over the rounds of a step's time, and the ratio to plain
training within the same round (median, least, most). A sketch's cost is told apart: every step sketched, minus none, by the number of tensors.
"""

import argparse
import copy
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import record_run  # noqa: E402

from gradscale import Recorder  # noqa: E402


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def clock(device):
    return time.perf_counter() if device == "cuda" else time.process_time()


def seconds_a_step(model, optimizer, loss_of, start, device, steps, options):
    """One turn from the same state. ``options``: the recorder's, None without."""
    model.load_state_dict(start[0])
    optimizer.load_state_dict(copy.deepcopy(start[1]))
    with tempfile.TemporaryDirectory() as scratch:
        recorder = None if options is None else Recorder(model, Path(scratch) / "trace", **options)
        if recorder is not None:  # step 0 is sketched and written at once; it is paid once a run
            optimizer.zero_grad()
            loss_of().backward()
            recorder.step()
        wait(device)
        begin = clock(device)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            if recorder is not None:
                recorder.step(loss=loss)
            optimizer.step()
        wait(device)
        taken = clock(device) - begin
        if recorder is not None:
            recorder.close()
    return taken / steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=["transformer", "cnn"], default="transformer")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--every", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    build = {"transformer": record_run.transformer, "cnn": record_run.cnn}[arguments.model]
    model, optimizer, loss_of, _ = build(arguments.device)
    for _ in range(20):  # warm: allocator, optimizer state
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()
    start = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    ways = {
        "plain": None,
        "amax only": {"every": 10**9},
        f"every={arguments.every}": {"every": arguments.every},
        "every=1": {"every": 1},
        f"every={arguments.every}, activations, forward": {"every": arguments.every, "activations": ["*"], "forward": True},
    }
    times = {name: [] for name in ways}
    for round_number in range(arguments.rounds):
        for name, options in ways.items():
            steps = max(arguments.steps // 10, 10) if name == "every=1" else arguments.steps
            times[name].append(seconds_a_step(model, optimizer, loss_of, start, arguments.device, steps, options))
        print(f"round {round_number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)

    tensors = sum(1 for _ in model.parameters())
    elements = sum(p.numel() for p in model.parameters())
    print(f"{arguments.model}: {tensors} tensors, {elements} elements; {record_run.processor(arguments.device)}; torch {torch.__version__}")
    print(f"{arguments.rounds} rounds of {arguments.steps} steps, 1 thread, {arguments.device}, {'wall' if arguments.device == 'cuda' else 'CPU'} time\n")
    width = max(map(len, ways))
    print(f"{'recording':<{width}}  {'ms a step':>9}  {'overhead':>8}  {'least':>7}  {'most':>7}")
    for name in ways:
        ratios = [t / p for t, p in zip(times[name], times["plain"])]
        median = statistics.median(times[name]) * 1e3
        cells = [f"{100 * (f(ratios) - 1):+.1f} %" for f in (statistics.median, min, max)]
        print(f"{name:<{width}}  {median:>9.3f}  {cells[0]:>8}  {cells[1]:>7}  {cells[2]:>7}")
    sketch = statistics.median(a - b for a, b in zip(times["every=1"], times["amax only"])) / tensors
    amax = statistics.median(a - b for a, b in zip(times["amax only"], times["plain"])) / tensors
    print(f"\namax: {amax * 1e6:.1f} us a tensor and step; sketch: {sketch * 1e3:.2f} ms a tensor when sampled")


if __name__ == "__main__":
    main()
