"""Runs the experiment behind each of the nineteen claims and keeps what came out.

    python experiments/claims/run.py [--only 1,7] [--again] [--device cpu|cuda] [--out experiments/claims/results.json] [--quick]

Needs torch, scikit-learn and the program: on the path, or named by GRADSCALE_BIN. Each claim's result is written as it is
finished; claims that stand in the file are passed over unless `--again`. Claims 10, 18 and 19 also read
`experiments/fidelity/results`. `--quick` is a smoke test of a minute or two (give it another `--out`): shorter runs, one seed.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

NAMES = {
    "api": (5, 12, 13, 14, 15, 17),
    "formats": (2, 3, 4),
    "training": (1, 6, 7, 8, 16, 18, 19),
    "replays": (9, 10, 11),
}


def experiments():
    """Number → function."""
    found = {}
    for name, numbers in NAMES.items():
        module = __import__(name)
        found.update({n: getattr(module, f"claim_{n}") for n in numbers})
    return dict(sorted(found.items()))


def plain(value):
    """For JSON: no NaN or infinity, nine significant digits."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else str(value)
    return value


def write(path, results):
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="LIST", help="numbers of claims, such as 1,7")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--quick", action="store_true", help="a smoke test: shorter runs, one seed")
    options = parser.parse_args()
    claims = experiments()
    try:
        wanted = [int(n) for n in options.only.split(",") if n] or list(claims)
    except ValueError:
        wanted = [0]
    unknown = [n for n in wanted if n not in claims]
    if unknown:
        parser.error(f"--only {options.only}: expected numbers from 1 to {max(claims)}, such as 1,7")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for number in wanted:
        if str(number) in results and not options.again:
            continue
        start = time.perf_counter()
        outcome = plain(claims[number](options))
        question = claims[number].__doc__.strip()
        seconds = round(time.perf_counter() - start, 1)
        results[str(number)] = {"question": question, "torch": torch.__version__, "device": options.device, "seconds": seconds, **outcome}
        write(options.out, dict(sorted(results.items(), key=lambda item: int(item[0]))))
        print(f"claim {number}: {seconds} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
