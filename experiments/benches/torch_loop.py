#!/usr/bin/env python3
"""What one writes without gradscale: a loop of torch over the scales, and one of numpy.

    python3 -m venv venv && venv/bin/pip install torch numpy
    venv/bin/python experiments/benches/torch_loop.py [--elements 16777216] [--rounds 5] [--threads 1]

For each of 41 scales, 2^-8 to 2^32: multiply, cast to half, count zeros and infinities. Prints the median nanoseconds an element
(all 41 scales together) of each loop as JSON, which `cargo bench --bench ratios -- replay` takes in GRADSCALE_TORCH_LOOP.
"""
import argparse
import json
import statistics
import time

import numpy as np


def measure(loop, data, rounds):
    loop(data)
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        loop(data)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e9 / len(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    scales = [2.0**k for k in range(-8, 33)]
    rng = np.random.default_rng(0)
    signs = rng.choice(np.array([-1, 1], dtype=np.float32), args.elements)
    array = np.exp2(rng.normal(-12, 2, args.elements)).astype(np.float32) * signs
    answer = {"elements": args.elements, "scales": len(scales), "threads": args.threads}

    def numpy_loop(x):
        with np.errstate(over="ignore", under="ignore"):
            for scale in scales:
                y = (x * np.float32(scale)).astype(np.float16)
                np.count_nonzero(y == 0), np.count_nonzero(np.isinf(y))

    # numpy's conversion is slow enough for a part to do.
    part = array[: args.elements // 16]
    answer["numpy_ns_per_element"] = measure(numpy_loop, part, max(1, args.rounds // 2))
    answer["numpy"] = np.__version__
    try:
        import torch
    except ImportError:
        print(json.dumps(answer))
        return
    torch.set_num_threads(args.threads)

    def torch_loop(x):
        for scale in scales:
            y = (x * scale).half()
            int((y == 0).sum()), int(torch.isinf(y).sum())

    answer["torch_ns_per_element"] = measure(torch_loop, torch.from_numpy(array), args.rounds)
    answer["torch"] = torch.__version__
    print(json.dumps(answer))


main()
