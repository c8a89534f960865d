"""Claims about the numbers themselves: 2, 3, 4."""

import copy
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from common import OVERFLOW, ROOT, UNDERFLOW, flat, gradients, gradscale_json, tasks
from training import trained_far
from torch import nn

from gradscale.trace import read_trace


def claim_2(options):
    """FP16's smallest and largest numbers, and where rounding sends the rest."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    finite = codes[torch.isfinite(codes)]
    positive = finite[finite > 0]

    def least(becomes):
        """The smallest positive f32 of which this is true of its FP16, by bisection over the bits."""
        low, high = 0, 0x7F800000
        while low < high:
            middle = (low + high) // 2
            value = torch.tensor([middle], dtype=torch.int32).view(torch.float32).to(torch.float16)
            low, high = (low, middle) if becomes(value) else (middle + 1, high)
        return float(torch.tensor([low], dtype=torch.int32).view(torch.float32))

    not_zero, infinite = least(lambda y: bool(y != 0)), least(lambda y: bool(torch.isinf(y)))
    # The program on the values beside the edges.
    edges = {"1e-10": 1e-10, "2^-25": UNDERFLOW, "next after 2^-25": not_zero, "65504": 65504.0, "below 65520": 65519.996, "65520": OVERFLOW}
    seen = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, value in edges.items():
            path = Path(scratch) / "one.npy"
            np.save(path, np.array([value], np.float32))
            rate = gradscale_json("analyze", path, "--scales", "1")["groups"][0]["rates"][0]
            seen[name] = next(k for k in ("underflow_to_zero", "subnormal", "normal", "overflow_to_infinity") if rate[k])
    return {
        "smallest_positive": float(positive.min()),
        "is_2_to_minus_24": float(positive.min()) == 2.0**-24,
        "largest": float(finite.max()),
        "first_f32_that_stays": not_zero,
        "is_next_after_2_to_minus_25": not_zero == float(np.nextafter(np.float32(UNDERFLOW), np.float32(1))),
        "first_f32_that_becomes_infinite": infinite,
        "program": seen,
    }


def claim_3(options):
    """FP32's range, and what it really loses in trained networks, against FP64."""
    recorded = {}
    for name in ("cnn", "transformer"):
        with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(ROOT / "experiments" / "runs" / f"{name}.zip") as archive:
            archive.extractall(scratch, [m for m in archive.namelist() if m.startswith("trace/")])
            total = zeros = subnormal = 0
            for chunk in read_trace(Path(scratch) / "trace"):
                for sketches in chunk.sketches().sketches:
                    for s in sketches:
                        total += s.elements
                        zeros += s.zeros
                        subnormal += int(s.counts[s.bins < 23 * 22].sum())  # binades -149 to -127
        recorded[name] = {"elements": total, "zeros": zeros, "subnormal": subnormal}
    far = trained_far(0, options)
    lost = nonzero = zeros = 0
    for batch in far.batches:
        single = flat(gradients(far.task, batch, options.device))
        double = copy.deepcopy(far.task)
        double.model.double()
        inputs = [t.double() if t.is_floating_point() else t for t in batch]
        buffers = [(b, b.clone()) for b in double.model.buffers()]
        found = torch.autograd.grad(_double_loss(double.model, inputs), list(double.model.parameters()))
        for buffer, before in buffers:
            buffer.data.copy_(before)
        reference = torch.cat([g.reshape(-1) for g in found])
        nonzero += int((reference != 0).sum())
        zeros += int((single == 0).sum())
        lost += int(((single == 0) & (reference != 0)).sum())
    # The smallest case in which FP32 does underflow: a class that is certain.
    logits = torch.tensor([[0.0, 110.0]], requires_grad=True)
    nn.functional.cross_entropy(logits, torch.tensor([1])).backward()
    return {
        "smallest_positive_fp32": float(np.nextafter(np.float32(0), np.float32(1))),
        "ratio_to_fp16": 2.0**-24 / 2.0**-149,
        "recorded_runs": recorded,
        "trained_far": {"loss": far.loss, "nonzero_in_fp64": nonzero, "zero_in_fp32": zeros, "nonzero_in_fp64_but_zero_in_fp32": lost},
        "certain_class": {"logit_margin": 110, "gradient_fp32": float(logits.grad[0, 0]), "gradient_exact": 1.6889e-48},
    }


def _double_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def claim_4(options):
    """Gradients of S times the loss, against S times the gradients of the loss."""
    out = {}
    for architecture, data in (("cnn", "digits"), ("transformer", "addition")):
        task = tasks.build(architecture, data, 0, options.device)
        batch = task.batch()
        for fp16 in (False, True):
            plain = flat(gradients(task, batch, options.device, 1.0, fp16))
            rows = out[f"{architecture} {'fp16' if fp16 else 'fp32'}"] = {}
            for name, scale in (("2^10", 1024.0), ("1000", 1000.0), ("2^24", 2.0**24)):
                scaled = flat(gradients(task, batch, options.device, scale, fp16))
                expected = (plain.double() * scale).float()
                there = expected != 0
                finite = torch.isfinite(scaled)
                error = float((scaled - expected)[finite].norm() / expected[finite].norm()) if bool(finite.any()) else None
                off = ((scaled - expected).abs() / expected.abs())[there & finite]
                rows[name] = {
                    "elements": len(plain),
                    "equal": int((scaled == expected).sum()),
                    "zero_before_and_not_after": int((~there & (scaled != 0)).sum()),
                    "not_finite": int((~finite).sum()),
                    "relative_error_l2": error,
                    "median_relative_difference": float(off.median()) if len(off) else None,
                    "largest_relative_difference": float(off.max()) if len(off) else None,
                }
    return out
