"""Writes the small fixtures beside it: the same gradients raw, as TensorBoard events, as W&B JSON and as msprobe JSON.

    pip install torch==2.15.* tensorboard==2.21.* numpy && python write.py

W&B, TensorFlow and msprobe are not needed: what TF2's `tf.summary.histogram` writes (rows of left, right, count), what `wandb.watch` computes (`torch.histc` over 64 bins between min and max) and what
msprobe's `dump.json` holds (max, min, mean, norm) is computed here.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter

HERE = Path(__file__).resolve().parent


def gradients(step):
    """Tensors where bounds are hard: wide, tiny, zeros, ties, single elements, one sign, inf and NaN."""
    draw = np.random.default_rng(17 + step)
    normal = draw.standard_normal
    wide = (np.exp(4 * normal(4000) - 14) * np.sign(normal(4000))).astype(np.float32)
    sparse = (1e-4 * normal(3000)).astype(np.float32)
    sparse[draw.random(3000) < 0.4] = 0
    ties = np.ldexp(np.float32(1), np.arange(-45, 10)).astype(np.float32)
    blown = (1e3 * normal(200)).astype(np.float32)
    if step == 1:
        blown[7] = np.inf
    tensors = {
        "conv.weight": (1e-3 * normal(2048)).astype(np.float32),
        "wide.weight": wide,
        "sparse.weight": sparse,
        "ties.weight": np.concatenate([ties, np.nextafter(ties, np.float32(0)), -ties]),
        "conv.bias": (2e-11 * normal(64)).astype(np.float32),
        "zero.bias": np.zeros(32, np.float32),
        "one.bias": np.array([3e-6 + step * 1e-7], np.float32),
        "positive.weight": (1e-5 + 1e-6 * np.abs(normal(500))).astype(np.float32),
        "blown.weight": blown,
    }
    return tensors


def bins_of(values):
    flat = torch.from_numpy(values)
    flat = flat[torch.isfinite(flat)]
    low, high = flat.min().item(), flat.max().item()
    if low == high:
        return [float(flat.numel())], [low, high]
    counts = flat.histc(bins=64, min=low, max=high)
    return counts.tolist(), torch.linspace(low, high, 65).tolist()


def tf2_summary(tag, values):
    low, high = float(values.min()), float(values.max())
    if low == high:
        # One value: one bin of width 1 around it.
        rows = [[low - 0.5, low + 0.5, values.size]]
    else:
        counts, edges = np.histogram(values.astype(np.float64), bins=30, range=(low, high))
        rows = np.stack([edges[:-1], edges[1:], counts], axis=1)
    tensor = tensor_util.make_tensor_proto(np.array(rows, np.float64))
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="histograms"))
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


def wandb(values, packed):
    counts, bins = bins_of(values)
    if packed and len(counts) > 1:
        packed_bins = {"min": bins[0], "size": bins[1] - bins[0], "count": len(counts)}
        return {"_type": "histogram", "values": [int(c) for c in counts], "packedBins": packed_bins}
    return {"_type": "histogram", "values": counts, "bins": bins}


def msprobe(values):
    tensor = torch.from_numpy(values)
    return {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": list(values.shape),
        "Max": tensor.max().item(),
        "Min": tensor.min().item(),
        "Mean": tensor.mean().item(),
        "Norm": torch.linalg.vector_norm(tensor).item(),
        "requires_grad": False,
    }


def main():
    for name in ("raw", "tensorboard", "tensorboard_tf2", "msprobe"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    (HERE / "raw").mkdir()
    history = []
    with SummaryWriter(HERE / "tensorboard") as torch_writer, SummaryWriter(HERE / "tensorboard_tf2") as tf2:
        for step in (0, 1):
            tensors = gradients(step)
            np.savez_compressed(HERE / "raw" / f"step_{step:06}.npz", **{f"gradients/{k}": v for k, v in tensors.items()})
            row = {"_step": step, "loss": 0.5, "parameters/conv.weight": wandb(tensors["conv.weight"], False)}
            dump = {"Module.conv.Conv2d.forward.0": {"input_args": [msprobe(tensors["conv.weight"])]}}
            for name, values in tensors.items():
                torch_writer.add_histogram(f"gradients/{name}", values, step)
                if np.isfinite(values).all():
                    tf2.file_writer.add_summary(tf2_summary(f"gradients/{name}", values), step)
                row[f"gradients/{name}"] = wandb(values, packed=step == 1)
                layer, parameter = name.rsplit(".", 1)
                dump[f"Module.{layer}.Layer.parameters_grad"] = {
                    **dump.get(f"Module.{layer}.Layer.parameters_grad", {}),
                    parameter: [msprobe(values)],
                }
            torch_writer.add_histogram("weights/conv.weight", tensors["conv.weight"], step)
            torch_writer.add_scalar("train/loss", 0.5, step)
            torch_writer.add_scalar("amp/loss_scale", 65536.0 / 2**step, step)
            torch_writer.add_scalar("amp/found_inf", float(step), step)
            history.append(row)
            folder = HERE / "msprobe" / f"step{step}" / "rank0"
            folder.mkdir(parents=True)
            document = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None, "data": dump}
            (folder / "dump.json").write_text(json.dumps(document, indent=1) + "\n")
    for folder in ("tensorboard", "tensorboard_tf2"):
        for file in (HERE / folder).iterdir():
            # The writer puts clock, host and process into the name.
            file.rename(file.with_name("events.out.tfevents.1700000000.host.1.0"))
    (HERE / "wandb-history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    (HERE / "wandb-summary.json").write_text(json.dumps(history[-1]) + "\n")


if __name__ == "__main__":
    main()
