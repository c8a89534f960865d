"""Sketching the dumps of a whole cluster, in parallel, with the same bits as one machine.

::

    from gradscale.distributed import sketch
    sketch("/shared/grads", "/shared/trace")                     # a local cluster, a process a core
    sketch("/shared/grads", "/shared/trace", Client("tcp://…"))  # a cluster of Dask's

Three steps, each of use alone (on Ray, Spark, or a scheduler's job array)::

    plan(paths, out)  ──►  a task a file  ──►  sketch_one(task), anywhere, any number of times  ──►  merge(plan)

A task writes one part, by temporary name and rename, under a name that follows from its input alone: run twice, also at the same
moment, it counts once; a worker that dies leaves no half of one; and a run that was broken off goes on where it stopped.
Counts are integers and merge in the order of step, rank and path, so the trace has the same bytes however the work was spread.

Files are read with numpy, safetensors and torch (``weights_only``: no pickle is run), or by the ``gradscale`` program where a worker has
it (``GRADSCALE_BIN``, or on ``PATH``): the same counts. ``out`` lies where every worker and this process can write.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from .errors import DumpError, GradscaleError, MissingDependency, TraceError, TraceExists
from .sketch import Sketch
from .sketch import sketch as _sketch
from .trace import SCHEMA, Chunk, Samples, chunk_bytes, chunk_paths, read_chunk, write_chunk

try:
    import numpy as np
except ImportError as error:  # pragma: no cover
    raise MissingDependency("importing gradscale.distributed", "no numpy", "numpy", "pip install 'gradscale[dask]'") from error

if TYPE_CHECKING:
    import torch

__all__ = ["Plan", "Task", "merge", "plan", "sketch", "sketch_one"]

PathLike = Union[str, "os.PathLike[str]"]

_ENDINGS = (".npy", ".npz", ".safetensors", ".pt", ".pth")
_STEP_WORDS = ("step", "iter", "iteration", "update")
_DUMP_WORDS = ("grads", "gradients", "checkpoint", "ckpt", "dump", "dumps")
_SINGULAR_WORDS = ("grad", "gradient")


class Task(NamedTuple):
    """One file to sketch. Plain values, so that any scheduler can carry it."""

    #: the dump
    path: str
    #: the file to write
    part: str
    #: step and rank, by the path; the file's own metadata may still know the step
    step: Optional[int]
    rank: Optional[int]


@dataclass(frozen=True)
class Plan:
    """What is to be done for one trace."""

    #: the trace directory that `merge` makes
    out: Path
    #: where the parts go: beside ``out``, and gone once it is there
    parts: Path
    #: a task a file, by step, rank and path
    tasks: Tuple[Task, ...]


def sketch(
    paths: "Union[PathLike, Iterable[PathLike]]",
    out: PathLike,
    client: Any = None,
    *,
    retries: int = 3,
    program: Optional[str] = None,
    run_id: Optional[str] = None,
) -> Path:
    """Sketches the dumps in ``paths`` (files, or directories of them; all of one run) into the trace directory ``out``; returns it.

    ``client``: a ``distributed.Client``; by default a local cluster with a process a core, closed afterwards. ``retries``: how often a task that
    fails is tried again. ``program``: the gradscale program on the workers; by default what they find, ``""`` for pure Python.

    Raises `DumpError` naming the file that cannot be read, `TraceExists` where ``out`` is one already.
    """
    todo = plan(paths, out)
    if client is not None:
        _on_dask(client, todo, retries, program)
    else:
        try:
            from distributed import Client, LocalCluster
        except ImportError as error:
            raise MissingDependency(
                f'sketching into "{out}" on a local cluster', str(error), "dask's distributed", "pip install 'gradscale[dask]'"
            ) from error
        workers = max(1, min(os.cpu_count() or 1, len(todo.tasks)))
        with LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster, Client(cluster) as local:
            _on_dask(local, todo, retries, program)
    return merge(todo, run_id=run_id)


def plan(paths: "Union[PathLike, Iterable[PathLike]]", out: PathLike) -> Plan:
    """Finds the dumps and names a part for each. The same files give the same names, until one of them changes.

    Raises `DumpError` where there is nothing to sketch, `TraceExists` where ``out`` holds anything.
    """
    given: "Iterable[PathLike]" = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    target = Path(out).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        held = f"{len(chunk_paths(target))} chunks" if target.is_dir() else "a file"
        raise TraceExists(f'sketching into "{out}"', held, "no such directory, or an empty one", "delete it, or choose another")
    parts = target.with_name(target.name + ".parts")
    tasks: "Dict[str, Task]" = {}
    for path in given:
        for file, step, rank in _dumps(Path(path)):
            key = str(file.absolute())
            found = file.stat()
            state = f"{key}\0{found.st_size}\0{found.st_mtime_ns}"
            name = hashlib.sha256(state.encode("utf-8", "surrogateescape")).hexdigest()[:32]
            tasks.setdefault(key, Task(key, str(parts / f"{name}.safetensors"), step, rank))
    if not tasks:
        raise DumpError(f'sketching into "{out}"', "no dump in what was given", f"files with one of the endings {' '.join(_ENDINGS)}")

    def order(task: Task) -> "Tuple[int, int, int, str]":
        rank = -1 if task.rank is None else task.rank
        return (task.step is not None, task.step or 0, rank, task.path)

    return Plan(target, parts, tuple(sorted(tasks.values(), key=order)))


def sketch_one(task: Task, program: Optional[str] = None) -> str:
    """Sketches one file into its part and returns the part's path; what is there already, whole, is left as it is.

    Raises `DumpError` naming the file.
    """
    part = Path(task.part)
    if _is_whole(part):
        return task.part
    if program is None:
        program = os.environ.get("GRADSCALE_BIN") or shutil.which("gradscale") or ""
    step, found = _by_program(task.path, program) if program else _by_python(task.path)
    names = [name for name, _, _ in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DumpError(f'reading dump "{task.path}"', f"the name {twice!r} twice", "each name once")
    # The path says more than the file: a copied file keeps its metadata.
    where = task.step if task.step is not None else step
    tensors = [_tensor(name, shape, sketched.elements) for name, shape, sketched in found]
    metadata = _metadata("part", 0, tensors)
    arrays = _arrays([(where or 0, [sketched for _, _, sketched in found])], len(tensors))
    part.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(part, chunk_bytes(metadata, arrays))
    return task.part


def merge(todo: Plan, run_id: Optional[str] = None, chunk_steps: int = 100) -> Path:
    """Joins the parts into the trace ``todo.out`` and removes them; returns ``todo.out``.

    The trace appears at once, by rename, when it is complete. ``run_id`` is its name by default.

    Raises `TraceError` where a part is missing or bad.
    """
    tensors: "Dict[str, Dict[str, Any]]" = {}
    steps: "Dict[int, List[Task]]" = {}
    for task in todo.tasks:
        chunk = _part(task)
        steps.setdefault(int(chunk["step"][0]), []).append(task)
        for tensor in chunk.metadata["tensors"]:
            tensors.setdefault(tensor["name"], tensor)
    # Readers differ in the order in which they give a file's tensors.
    tensors = dict(sorted(tensors.items()))
    names = {name: n for n, name in enumerate(tensors)}
    growing = todo.out.with_name(f"{todo.out.name}.{uuid.uuid4().hex[:8]}.tmp")
    growing.mkdir(parents=True)
    try:
        order = sorted(steps)
        for number, first in enumerate(range(0, len(order), chunk_steps)):
            rows = [(step, _merged(steps[step], names)) for step in order[first : first + chunk_steps]]
            metadata = _metadata(run_id or todo.out.name, number, list(tensors.values()))
            write_chunk(growing, metadata, _arrays(rows, len(names)))
        if todo.out.is_dir():
            todo.out.rmdir()  # an empty one; anything in it is not ours to remove
        os.rename(growing, todo.out)
    except BaseException:
        shutil.rmtree(growing, ignore_errors=True)
        raise
    shutil.rmtree(todo.parts, ignore_errors=True)
    return todo.out


def _on_dask(client: Any, todo: Plan, retries: int, program: Optional[str]) -> None:
    from distributed import KilledWorker, as_completed

    # A fresh key each time: a scheduler that still remembers an older call must not answer for this one.
    call = uuid.uuid4().hex[:8]
    futures = {
        client.submit(sketch_one, task, program, key=f"gradscale-sketch-{call}-{n}", retries=retries, pure=False): task
        for n, task in enumerate(todo.tasks)
    }
    try:
        for future in as_completed(list(futures)):
            task = futures[future]
            try:
                future.result()
            except KilledWorker as error:
                raise DumpError(
                    f'sketching "{task.path}" on a cluster', f"workers that died over it ({error})", "one that finishes",
                    "give the workers more memory, or the program (GRADSCALE_BIN), which needs little",
                ) from error  # fmt: skip
            finally:
                future.release()
    finally:
        client.cancel([future for future in futures if not future.done()])


def _part(task: Task) -> Chunk:
    try:
        return read_chunk(task.part)
    except FileNotFoundError:
        raise TraceError(
            f'merging the part of "{task.path}"',
            f"no file {task.part}",
            "a part that a worker wrote",
            "the folder must be one that all workers and this process share",
        ) from None


def _is_whole(part: Path) -> bool:
    try:
        read_chunk(part)
    except (OSError, TraceError):
        return False
    return True


def _merged(tasks: Sequence[Task], names: "Dict[str, int]") -> "List[Sketch]":
    """The sketches of one step, over its ranks and files."""
    row = [Sketch.empty()] * len(names)
    for task in tasks:
        chunk = _part(task)
        for name, sketched in zip(chunk.names, chunk.sketches().sketches[0]):
            row[names[name]] = row[names[name]].merge(sketched)
    return row


def _tensor(name: str, shape: "Sequence[int]", elements: int) -> "Dict[str, Any]":
    return {
        "name": name,
        "shape": list(shape),
        "elements": elements,
        "role": "parameter",
        "produced_in": None,
        "reduction": None,
        "backward_order": None,
    }


def _metadata(run_id: str, chunk: int, tensors: "List[Dict[str, Any]]") -> "Dict[str, Any]":
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "rank": 0,
        "world_size": 1,
        "chunk": chunk,
        "tensors": tensors,
        "values": "unscaled",
        "every": 1,
        "facts": {},
    }


def _arrays(rows: "Sequence[Tuple[int, List[Sketch]]]", count: int) -> "Dict[str, np.ndarray[Any, Any]]":
    """The arrays of a chunk in which every row is sampled, and neither scale nor flag is known."""
    amax = np.full((len(rows), count), np.nan, np.float32)
    nonfinite = np.zeros((len(rows), count), np.uint8)
    for t, (_, sketches) in enumerate(rows):
        for n, sketched in enumerate(sketches):
            if sketched.elements:
                amax[t, n] = sketched.amax
                nonfinite[t, n] = sketched.nonfinite
    samples = Samples(list(range(len(rows))), [sketches for _, sketches in rows])
    return {
        "step": np.array([step for step, _ in rows], np.int64),
        "loss_scale": np.full(len(rows), np.nan),
        "found_inf": np.full(len(rows), 255, np.uint8),
        "loss": np.full(len(rows), np.nan),
        "amax": amax,
        "nonfinite": nonfinite,
        **samples.arrays(count),
    }


def _write_whole(path: Path, data: bytes) -> None:
    """Writes by a temporary name of its own and a rename: two that write the same at once cannot mix."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise


def _dumps(path: Path) -> "Iterator[Tuple[Path, Optional[int], Optional[int]]]":
    """The dumps of a file or directory, with step and rank."""
    doing = f'looking for dumps in "{path}"'
    if path.is_dir():
        if chunk_paths(path):
            raise DumpError(doing, "a trace", "dumps of gradients", "it is sketched already: gradscale report reads it")
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if not name.startswith(".") and name.lower().endswith(_ENDINGS):
                    file = Path(folder, name)
                    yield (file, *_usual(file.relative_to(path).as_posix(), path.absolute().name))
    elif path.is_file():
        if not path.name.lower().endswith(_ENDINGS):
            raise DumpError(doing, f"the name {path.name!r}", f"one of the endings {' '.join(_ENDINGS)}")
        yield (path, *_usual(path.name, None))
    else:
        raise DumpError(doing, "no such file", "a file or directory that this process can see")


def _usual(path: str, root: Optional[str]) -> "Tuple[Optional[int], Optional[int]]":
    """Step and rank by the usual names, as the program finds them: in the file's name, then its directories, nearest first."""
    *folders, file = path.split("/")
    stem, dot, ending = file.rpartition(".")
    stem = stem if dot else file
    shard = re.fullmatch(r"(?:(.*)[-_.])?(\d+)-of-(\d+)", stem, re.ASCII | re.DOTALL)
    if shard and int(shard[2]) <= int(shard[3]) < 2**32 and int(shard[3]) > 0:
        stem = shard[1] or ""
    step = _first(_number_after(stem, _STEP_WORDS), _number_after(stem, _DUMP_WORDS))
    if ending.lower() != "npy":  # an .npy's number may be its tensor's
        step = _first(step, _number_after(stem, _SINGULAR_WORDS), _all_digits(stem))
    rank = _rank(stem)
    for part in reversed(folders):
        words = (_STEP_WORDS, _DUMP_WORDS, _SINGULAR_WORDS)
        step = _first(step, *(_number_after(part, w) for w in words), _all_digits(part))
        rank = _first(rank, _rank(part))
    if root is not None:
        step = _first(step, _number_after(root, _STEP_WORDS))
        rank = _first(rank, _rank(root))
    return step, rank


def _first(*values: Optional[int]) -> Optional[int]:
    return next((value for value in values if value is not None), None)


def _rank(part: str) -> Optional[int]:
    rank = _number_after(part, ("rank",))
    return rank if rank is not None and rank < 2**32 else None


def _all_digits(part: str) -> Optional[int]:
    if re.fullmatch(r"\d+", part, re.ASCII) and int(part) < 2**64:
        return int(part)
    return None


def _number_after(part: str, words: "Sequence[str]") -> Optional[int]:
    """The number behind the last of ``words`` that begins a word: ``step_100``, ``step-100``, ``step100``."""
    found: Optional[Tuple[int, int]] = None
    for word in words:
        for match in re.finditer(rf"(?<![A-Za-z0-9]){word}[_\-.= ]?([0-9]+)", part, re.IGNORECASE | re.ASCII):
            after = part[match.end() : match.end() + 1]
            number = int(match[1])
            if not after.isalnum() and number < 2**64 and (found is None or found[0] < match.start()):
                found = (match.start(), number)
    return found[1] if found else None


_Found = List[Tuple[str, List[int], Sketch]]


def _by_program(path: str, program: str) -> "Tuple[Optional[int], _Found]":
    """Sketches with the gradscale program: the step it finds, and the tensors."""
    doing = f'sketching "{path}" with {program}'
    with tempfile.TemporaryDirectory() as folder:
        trace = os.path.join(folder, "trace")
        try:
            done = subprocess.run(
                [program, "sketch", path, "-o", trace, "--quiet", "--threads", "1"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                check=False,
            )
        except OSError as error:
            raise DumpError(doing, str(error), "the gradscale program", 'program="" reads without it') from error
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.returncode}"]
            raise DumpError(doing, said[-1], "a dump that it reads")
        found: _Found = []
        step = None
        for chunk in (read_chunk(p) for p in chunk_paths(trace)):
            step = int(chunk["step"][0])
            shapes = [t["shape"] for t in chunk.metadata["tensors"]]
            found += list(zip(chunk.names, shapes, chunk.sketches().sketches[0]))
        return step, found


def _by_python(path: str) -> "Tuple[Optional[int], _Found]":
    """Sketches with this package alone."""
    step, tensors = _read(path)
    found: _Found = []
    try:
        for name, tensor in tensors:
            # Integers and booleans have no gradient; complex and packed tensors are left out, as the program leaves them out.
            if tensor.is_floating_point() and tensor.layout is _torch().strided:
                found.append((name, list(tensor.shape), _sketch(tensor)))
    except GradscaleError:
        raise
    except Exception as error:  # whatever numpy, safetensors and torch raise over a damaged file
        raise DumpError(f'reading dump "{path}"', f"{type(error).__name__}: {error}", "a whole file of its format") from error
    return step, found


def _torch() -> Any:
    import torch

    return torch


def _read(path: str) -> "Tuple[Optional[int], Iterator[Tuple[str, torch.Tensor]]]":
    """The step that the file itself names, and its tensors one by one."""
    lower = path.lower()
    step = None
    if lower.endswith(".safetensors"):
        try:
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {}).get("step", "")
        except Exception as error:
            raise DumpError(f'reading dump "{path}"', f"{type(error).__name__}: {error}", "a whole safetensors file") from error
        step = _all_digits(text.strip())
        return step, _from_safetensors(path)
    if lower.endswith(".npz"):
        return step, _from_npz(path)
    if lower.endswith(".npy"):
        return step, _from_npy(path)
    return step, _from_pt(path)


def _from_safetensors(path: str) -> "Iterator[Tuple[str, torch.Tensor]]":
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            yield name, file.get_tensor(name)


def _of_array(array: "np.ndarray[Any, Any]") -> "torch.Tensor":
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        return _torch().zeros(0, dtype=_torch().int8)  # type: ignore[no-any-return]  # left out like an integer
    native = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)).reshape(array.shape)
    return _torch().from_numpy(native)  # type: ignore[no-any-return]


def _from_npz(path: str) -> "Iterator[Tuple[str, torch.Tensor]]":
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files:
            array = archive[name]
            if isinstance(array, np.ndarray):
                yield name, _of_array(array)


def _from_npy(path: str) -> "Iterator[Tuple[str, torch.Tensor]]":
    yield Path(path).stem, _of_array(np.load(path, allow_pickle=False, mmap_mode="r"))


def _from_pt(path: str) -> "Iterator[Tuple[str, torch.Tensor]]":
    torch = _torch()
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    entered = set()
    left: "List[Tuple[Optional[str], Any]]" = [(None, loaded)]
    while left:
        name, value = left.pop()
        if isinstance(value, torch.Tensor):
            yield (Path(path).stem if name is None else name), value.detach()
            continue
        if isinstance(value, dict):
            items = [(str(key), inner) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            items = [(str(n), inner) for n, inner in enumerate(value)]
        else:
            continue
        if id(value) in entered:
            continue
        entered.add(id(value))
        left += [(key if name is None else f"{name}.{key}", inner) for key, inner in reversed(items)]
