import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from gradscale._cuda import Kernels

SHIM = Path(__file__).resolve().parents[2] / "tests" / "cuda_shim" / "shim.cpp"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """A CUDA driver whose kernels run on the host: what a GPU would do, on tensors in host memory."""
    reason = None
    if not SHIM.exists():
        reason = f"{SHIM.name} is not beside this package"
    elif shutil.which("c++") is None:
        reason = "there is no C++ compiler"
    if reason is not None:
        assert "cuda-shim" not in os.environ.get("GRADSCALE_NEED_BACKENDS", "").split(","), reason
        pytest.skip(f"the shim of CUDA: {reason}")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = "c++ -std=c++17 -O2 -ffp-contract=off -w -fPIC -shared -Wl,-soname,libcuda.so.1".split()
    subprocess.run([*command, str(SHIM), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture
def kernels(driver, monkeypatch):
    """Has the GPU's kernels count what lies in host memory."""
    made = Kernels(driver, torch.device("cpu"), lambda: 0, contextlib.nullcontext)
    for module in ("sketch", "recorder"):
        monkeypatch.setattr(f"gradscale.{module}.kernels_for", lambda device: made)
    return made


@pytest.fixture(params=["host", "device", "kernels"])
def path(request, monkeypatch):
    """Runs a test three times: as on a CPU, with the code that leaves results on a device until step(), and with the GPU's kernels."""
    if request.param != "host":
        monkeypatch.setattr("gradscale.recorder._reads_at_once", lambda tensor: False)
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    return request.param
