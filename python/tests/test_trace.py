"""Chunks on disk: what is written is read back, and what is broken is named."""

import json
import struct

import numpy as np
import pytest
import torch

from gradscale.errors import TraceError
from gradscale.sketch import sketch
from gradscale.trace import Samples, chunk_name, chunk_paths, read_chunk, read_trace, write_chunk


def metadata(chunk=0, rank=0, count=2, run_id="ab"):
    return {
        "run_id": run_id,
        "rank": rank,
        "world_size": 1,
        "chunk": chunk,
        "tensors": [{"name": f"t{n}"} for n in range(count)],
        "values": "unscaled",
        "every": 1,
        "facts": {},
    }


def arrays(steps=3, count=2, rows=(0, 2), probe=False):
    samples = Samples(list(rows), [[sketch(torch.randn(50)), sketch(torch.zeros(3))] for _ in rows])
    return {
        "step": np.arange(steps),
        "loss_scale": np.full(steps, np.nan),
        "found_inf": np.zeros(steps, np.uint8),
        "loss": np.full(steps, np.nan),
        "amax": np.ones((steps, count), np.float32),
        "nonfinite": np.zeros((steps, count), np.uint8),
        **samples.arrays(count),
        **(samples.arrays(count, "probe_") if probe else {}),
    }


def test_what_is_written_is_read_back(tmp_path):
    a = arrays(probe=True)
    write_chunk(tmp_path, metadata(), a)
    chunk = read_chunk(tmp_path / "rank0000-000000.safetensors")
    assert chunk.metadata == {**metadata(), "schema": "gradscale.trace/1"}
    assert all((chunk[n].tobytes(), chunk[n].dtype, chunk[n].shape) == (v.tobytes(), v.dtype, v.shape) for n, v in a.items())
    assert [s.to_rows() for s in chunk.sketches().sketches[1]] == [s.to_rows() for s in chunk.sketches("probe_").sketches[1]]


def test_a_chunk_without_samples(tmp_path):
    write_chunk(tmp_path, metadata(), arrays(rows=()))
    chunk = read_trace(tmp_path)[0]
    assert chunk["indptr"].tolist() == [0] and chunk["zeros"].shape == (0, 2)


def test_no_temporary_file_is_left_and_leftovers_are_passed_over(tmp_path):
    (tmp_path / "rank0000-000001.safetensors.tmp").write_bytes(b"torn")
    write_chunk(tmp_path, metadata(), arrays())
    assert [p.name for p in chunk_paths(tmp_path)] == [chunk_name(0, 0)]
    assert len(list(tmp_path.iterdir())) == 2
    assert len(read_trace(tmp_path)) == 1


def test_same_data_gives_the_same_bytes(tmp_path):
    a = arrays()
    first = write_chunk(tmp_path, metadata(), a).read_bytes()
    again = write_chunk(tmp_path, metadata(), dict(reversed(a.items()))).read_bytes()
    assert first == again


def test_a_file_cut_anywhere_is_a_trace_error(tmp_path):
    path = write_chunk(tmp_path, metadata(), arrays())
    data = path.read_bytes()
    for length in [0, 7, 8, 100, *range(9, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(TraceError, match="rank0000-000000.safetensors"):
            read_chunk(path)


def test_a_header_longer_than_the_file_is_said_to_be(tmp_path):
    path = tmp_path / chunk_name(0, 0)
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(TraceError, match=f"found a header of {1 << 62} bytes in a file of 10, expected a header inside the file"):
        read_chunk(path)


def test_any_byte_flipped_in_the_header_is_no_other_exception(tmp_path):
    path = write_chunk(tmp_path, metadata(), arrays())
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for at in range(0, 8 + length, 5):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :])
        try:
            read_chunk(path)
        except TraceError:
            pass


@pytest.mark.parametrize(
    "change, message",
    [
        ({"step": np.array([0, 2, 2])}, 'array "step": found values out of order'),
        ({"amax": np.ones((3, 3), np.float32)}, r'array "amax": found <f4 \[3, 3\], expected <f4 \[3, 2\]'),
        ({"loss": np.zeros(3, np.float32)}, 'array "loss"'),
        ({"sampled": np.array([0, 3])}, 'array "sampled"'),
        ({"bins": np.zeros(0, np.uint16)}, 'array "bins"'),
        ({"indptr": np.array([0, 9, 2, 3, 4])}, 'array "indptr"'),
    ],
)
def test_an_inconsistent_array_is_named(tmp_path, change, message):
    write_chunk(tmp_path, metadata(), {**arrays(), **change})
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path)


def test_descending_bins_are_named(tmp_path):
    a = arrays()
    a["bins"] = a["bins"][::-1].copy()
    write_chunk(tmp_path, metadata(), a)
    with pytest.raises(TraceError, match='array "bins": found bins out of order'):
        read_trace(tmp_path)


def test_foreign_files_and_schemas_are_named(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / chunk_name(0, 0)
    save_file({"w": np.zeros(3)}, path)
    with pytest.raises(TraceError, match="found no gradscale metadata"):
        read_chunk(path)
    save_file({"w": np.zeros(3)}, path, {"gradscale": json.dumps({"schema": "gradscale.trace/9"})})
    with pytest.raises(TraceError, match="found schema 'gradscale.trace/9', expected schema 'gradscale.trace/1'; upgrade"):
        read_chunk(path)


def test_a_missing_chunk_and_a_foreign_run_are_named(tmp_path):
    with pytest.raises(TraceError, match="found no chunk of rank 0"):
        read_trace(tmp_path)
    write_chunk(tmp_path, metadata(0), arrays())
    write_chunk(tmp_path, metadata(2), arrays())
    with pytest.raises(TraceError, match=r"found chunks \[0, 2\], expected 0..1"):
        read_trace(tmp_path)
    write_chunk(tmp_path, metadata(1, run_id="cd"), arrays())
    with pytest.raises(TraceError, match="expected one run"):
        read_trace(tmp_path)
    write_chunk(tmp_path, metadata(0, rank=1), arrays())
    assert len(read_trace(tmp_path, rank=1)) == 1
