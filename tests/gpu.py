"""The steps of tests/gpu.sh that Python does.

    python tests/gpu.py gpu|shim --out DIR [--shim libcuda.so.1]
    python tests/gpu.py dumps --into DIR

Equality: every boundary set and any start and length, counted by the kernels and by torch's operations on the CPU; a short
training run recorded with the kernels and without. Speed: bytes a second of the sketch, against a copy on the device and against a
loop of torch's operations over 41 scales, on four kinds of data. `shim` does the same on the host, to see that it runs; its
times mean nothing.
"""

import argparse
import contextlib
import ctypes
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests")]

import gradscale._cuda  # noqa: E402
import gradscale.recorder  # noqa: E402
import gradscale.sketch  # noqa: E402
from gradscale._cuda import Kernels, kernels_for  # noqa: E402
from gradscale.recorder import _amax_of, _device_amax  # noqa: E402
from gradscale.sketch import Sketch, dense_values, device_row, row_of  # noqa: E402

HBM_BYTES_A_SECOND = 4.8e12  # of an H200
KINDS = [torch.float32, torch.float16, torch.bfloat16]


class Device:
    """A GPU, or the host in its place."""

    def __init__(self, shim):
        self.is_gpu = shim is None
        if self.is_gpu:
            self.place = torch.device("cuda", 0)
            self.kernels = kernels_for(self.place)
            if self.kernels is None:
                raise SystemExit("found no kernels on the GPU, expected them: an NVIDIA GPU, driver 525 or newer?")
        else:
            self.place = torch.device("cpu")
            self.kernels = Kernels(ctypes.CDLL(shim), self.place, lambda: 0, contextlib.nullcontext)
            self.use(self.kernels)
            torch.set_num_threads(1)
            gradscale.recorder._reads_at_once = lambda tensor: False

    def use(self, kernels):
        """Has the recorder count with ``kernels``, or without any."""
        for module in (gradscale.sketch, gradscale.recorder):
            module.kernels_for = lambda device: kernels

    def seconds(self, work, repeats):
        """Median, least and most of some runs, after two that do not count."""
        for _ in range(2):
            work()
        taken = []
        for _ in range(repeats):
            if self.is_gpu:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                work()
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end) / 1e3)
            else:
                start = time.perf_counter()
                work()
                taken.append(time.perf_counter() - start)
        return statistics.median(taken), min(taken), max(taken)


# ---- the same integers


def boundary_sets(large):
    """Named f32 tensors, the kinds of data that tests/kernel.rs draws."""
    from test_sketch import edge_codes, from_codes

    rng = np.random.default_rng(1)
    edges = from_codes(edge_codes())
    normal = torch.from_numpy(rng.standard_normal(large).astype(np.float32))
    yield "edges", edges
    yield "edges shuffled", edges[torch.from_numpy(rng.permutation(len(edges)))]
    yield "normal edges", edges[edges.abs().ge(2.0**-126) & edges.isfinite()]
    yield "random bits", torch.from_numpy(rng.integers(0, 1 << 32, large, dtype=np.uint32).view(np.float32))
    yield "normal", normal
    for value in (1.0, 0.0, -0.0, 0.5 + 2.0**-24, float("inf"), float("nan"), 2.0**-149, -3.4e38):
        yield f"all {value}", torch.full((large,), value)
    yield "two values", torch.where(normal > 0, 1.25, -0.3)
    yield "extremes", torch.where(torch.arange(large) % 2 == 0, 3.4028234e38, 2.0**-126)
    yield "with a subnormal", torch.where(torch.arange(large) % 2 == 0, 3.4028234e38, 2.0**-149)
    yield "sparse", torch.where(torch.arange(large) % 97 == 0, normal, 0.0)
    yield "zero or one magnitude", torch.where(torch.arange(large) % 3 == 0, 0.75, 0.0)
    yield "one binade", 1 + torch.from_numpy(rng.random(large, dtype=np.float32)) % 1
    yield "log-normal", torch.exp2(normal * 30)
    yield "subnormal", torch.from_numpy((rng.integers(0, 1 << 32, large, dtype=np.uint32) & 0x807FFFFF).view(np.float32))
    yield "captured in FP16", (normal * 1e-3).half().float() / 1024
    yield "powers of two", torch.exp2((normal * 9).floor())


def by_torch(tensor):
    return Sketch.from_row(device_row(dense_values(tensor)).numpy())


def by_kernels(device, tensor):
    row, absent = row_of(tensor.to(device.place))
    return Sketch.from_row(row.cpu().numpy(), absent)


def check_equal(device, large):
    from test_cuda import drawn

    count = 0

    def same(name, tensor):
        nonlocal count
        count += 1
        if by_kernels(device, tensor) != by_torch(tensor):
            raise SystemExit(f"{name}: the device counts otherwise than the CPU")
        moved = tensor.to(device.place)
        extremes = [_amax_of(int(low), int(high), bool(norm.isnan())) for low, high, norm in [_device_amax(moved), _by_torch_amax(tensor)]]
        if extremes[0] != extremes[1]:
            raise SystemExit(f"{name}: the device finds {extremes[0]}, the CPU {extremes[1]}")

    for name, tensor in boundary_sets(large):
        for dtype in KINDS:
            same(f"{name}, {dtype}", tensor.to(dtype))
    halves = gradscale._cuda._MANY_HALVES
    for many in (halves, 1):  # 16-bit elements one by one, and by pattern
        gradscale._cuda._MANY_HALVES = many
        for dtype in KINDS:
            whole = drawn(20_000, dtype)
            moved = whole.to(device.place)
            for start in range(9):
                for length in (1, 7, 31, 257, 8191, 8192, 8193, 17_001):
                    count += 1
                    row, _ = row_of(moved[start : start + length])
                    if Sketch.from_row(row.cpu().numpy()) != by_torch(whole[start : start + length]):
                        raise SystemExit(f"{dtype}, {length} elements from {start}: the device counts otherwise than the CPU")
    gradscale._cuda._MANY_HALVES = halves
    print(f"equal: {count} tensors")


def _by_torch_amax(tensor):
    kept = gradscale.recorder.kernels_for
    gradscale.recorder.kernels_for = lambda device: None
    try:
        return _device_amax(tensor)
    finally:
        gradscale.recorder.kernels_for = kept


def check_recorder(device, steps):
    """One training run, recorded with the kernels and without: the same bytes, and what each costs."""
    traces, seconds = [], []
    for kernels in (device.kernels, None):
        device.use(kernels)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        model.to(device.place)
        generator = torch.Generator().manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tempfile.TemporaryDirectory() as scratch:
            with gradscale.recorder.Recorder(model, Path(scratch) / "trace", every=5, run_id="0" * 32) as recorder:
                start = time.perf_counter()
                for _ in range(steps):
                    optimizer.zero_grad()
                    loss = model(torch.randn(32, 64, generator=generator).to(device.place)).square().mean()
                    loss.backward()
                    optimizer.step()
                    recorder.step(loss=loss)
                seconds.append((time.perf_counter() - start) / steps)
            traces.append([p.read_bytes() for p in sorted((Path(scratch) / "trace").glob("*.safetensors"))])
    device.use(device.kernels)
    if not traces[0] or traces[0] != traces[1]:
        raise SystemExit("a run recorded with the kernels differs from one recorded with torch's operations")
    print(f"equal: {steps} recorded steps; {seconds[0] * 1e3:.2f} ms a step with the kernels, {seconds[1] * 1e3:.2f} ms with torch's operations")
    return {"ms_a_step_kernels": seconds[0] * 1e3, "ms_a_step_torch": seconds[1] * 1e3}


# ---- how fast


def torch_loop(x, scales):
    """What one would write: cast at every scale and count."""
    counts = []
    for scale in scales:
        y = (x * scale).half()
        small = y.abs() < 2.0**-14
        zero = y == 0
        counts += [(zero & (x != 0)).sum(), (small & ~zero).sum(), y.isinf().sum()]
    return counts


def measure(device, elements, repeats):
    scales = [2.0**k for k in range(-8, 33)]
    data = {
        "gaussian": lambda: torch.randn(elements, device=device.place),
        "constant": lambda: torch.full((elements,), 0.0123, device=device.place),
        "zeros": lambda: torch.zeros(elements, device=device.place),
        "one binade": lambda: torch.rand(elements, device=device.place) + 1,
    }
    results = []
    source = torch.randn(elements, device=device.place)
    target = torch.empty_like(source)
    median, least, most = device.seconds(lambda: target.copy_(source), repeats)
    copy = 8 * elements / median
    if device.is_gpu:
        print(f"copy on the device: {copy / 1e12:.3f} TB/s read and written ({8 * elements / most / 1e12:.3f} to {8 * elements / least / 1e12:.3f})")
    results.append({"what": "copy", "bytes_a_second": copy})
    del source, target
    for name, make in data.items():
        for dtype in KINDS:
            x = make().to(dtype)
            size = x.element_size() * elements
            median, least, most = device.seconds(lambda: device.kernels.row(x), repeats)
            rate = size / median
            line = {
                "what": "sketch", "data": name, "dtype": str(dtype), "elements": elements, "seconds": median, "least": least, "most": most,
                "bytes_a_second": rate, "of_hbm": rate / HBM_BYTES_A_SECOND, "of_copy": rate / copy,
            }  # fmt: skip
            median, _, _ = device.seconds(lambda: device.kernels.extremes(x), repeats)
            line["extremes_of_hbm"] = size / median / HBM_BYTES_A_SECOND
            said = f"sketch, {name:10}, {str(dtype)[6:]:8}: {rate / 1e12:6.3f} TB/s ({size / most / 1e12:.3f} to {size / least / 1e12:.3f}), {100 * line['of_hbm']:5.1f} % of 4.8, {100 * line['of_copy']:5.1f} % of the copy; extremes {100 * line['extremes_of_hbm']:5.1f} % of 4.8"
            if dtype is torch.float32:
                wide = x[: elements // 4]  # the loop needs room for what it makes of it
                loop, _, _ = device.seconds(lambda: torch_loop(wide, scales), 3)
                line["times_faster_than_torch_loop"] = 4 * loop / line["seconds"]
                said += f"; {line['times_faster_than_torch_loop']:.0f} times torch's loop over 41 scales"
            print(said if device.is_gpu else f"sketch, {name}, {str(dtype)[6:]}: ran", flush=True)
            results.append(line)
            del x
    wanted = {"torch.float32": 0.80, "torch.float16": 0.70}
    for line in results[1:]:
        if device.is_gpu and line["of_hbm"] < wanted.get(line["dtype"], 0):
            print(f"below what is wanted: {line['data']} {line['dtype']}: {100 * line['of_hbm']:.1f} %, wanted {100 * wanted[line['dtype']]:.0f} %")
    return results


# ---- dumps for the program


def write_dumps(folder):
    rng = np.random.default_rng(3)
    from test_sketch import edge_codes

    edges = np.array(edge_codes(), np.uint32).view(np.float32)
    mixed = np.concatenate([edges, (rng.standard_normal(60_001) * 1e-3).astype(np.float32)])
    rng.shuffle(mixed)
    np.save(folder / "small-f32.npy", mixed)
    np.save(folder / "small-f16.npy", rng.integers(0, 1 << 16, 70_000, dtype=np.uint16).view(np.float16))
    # Several stages of four megabytes, and a last one that is odd.
    np.save(folder / "large-f32.npy", np.resize(mixed, 2_300_003))
    np.save(folder / "large-f16.npy", np.resize(mixed, 5_000_001).astype(np.float16))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["gpu", "shim", "dumps"])
    parser.add_argument("--shim", help="the host's libcuda.so.1")
    parser.add_argument("--out", type=Path, default=Path("target/gpu-results"))
    parser.add_argument("--into", type=Path)
    arguments = parser.parse_args()
    np.seterr(all="ignore")
    # With the shim loaded torch may find a driver that it has no use for.
    warnings.filterwarnings("ignore", message="CUDA initialization")
    if arguments.what == "dumps":
        write_dumps(arguments.into)
        return
    device = Device(arguments.shim if arguments.what == "shim" else None)
    check_equal(device, 1_500_000 if device.is_gpu else 20_000)
    recorded = check_recorder(device, 200 if device.is_gpu else 12)
    results = measure(device, 1 << 28 if device.is_gpu else 1 << 17, 10 if device.is_gpu else 1)
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if device.is_gpu else "host shim"}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.what}.json"
    path.write_text(json.dumps({**about, "recorder": recorded, "results": results}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
