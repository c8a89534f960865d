"""Process groups for tests: gloo on the CPU, ports chosen by the system."""

import importlib
import multiprocessing
import os
import sys
import traceback

import torch


def _main(function, rank, world_size, store, arguments):
    code = 1
    try:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
        function(rank, world_size, *arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a forked child must not run the parent's exit handlers


def start(function, world_size, store, *arguments):
    """Starts the ranks; ``function(rank, world_size, *arguments)`` runs in each."""
    # A fork needs no second import of torch, which takes seconds; where CUDA is, only a fresh process may use it.
    fork = not torch.cuda.is_available()
    if fork:  # what DDP and FSDP2 import late takes seconds too, in each rank
        for name in ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"):
            importlib.import_module(name)
    context = multiprocessing.get_context("fork" if fork else "spawn")
    ranks = [
        context.Process(target=_main, args=(function, rank, world_size, str(store), arguments), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    return ranks


def finish(ranks, codes=None):
    """Waits for the ranks, and expects their exit codes (0)."""
    for process in ranks:
        process.join(60)
    seen = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert seen == (codes or [0] * len(ranks)), seen


def run(function, world_size, store, *arguments):
    """Runs ``function`` on every rank to its end."""
    finish(start(function, world_size, store, *arguments))
