import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(params=["host", "device"])
def path(request, monkeypatch):
    """Runs a test twice: as on a CPU, and with the code that leaves results on a device until step()."""
    if request.param == "device":
        monkeypatch.setattr("gradscale.recorder._reads_at_once", lambda tensor: False)
    return request.param
