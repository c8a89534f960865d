"""Record the gradients of a training run, to find out what FP16 loss scaling would do to them.

Three lines record a run::

    recorder = gradscale.Recorder(model, "trace/")
    ...
    recorder.step(scaler, loss=loss)      # once an optimizer step, anywhere between backward and zero_grad

What is wrong with the gradients of this very step, ``gradscale.explain(model, scaler)`` says in the live process.

The ``gradscale`` program reads the directory (``gradscale report trace/``). This package only writes it (and reads it
back, ``gradscale.open``); it needs no Rust. torch is imported when the first thing that needs
it is used, so ``import gradscale`` works without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import GradscaleError
from .explain import explain  # here, so that the name means the function, also once its module has been imported

if TYPE_CHECKING:
    from .notebook import open as open
    from .recorder import Recorder as Recorder

__version__ = "0.1.0"
# Without `open`: a star import must not hide Python's own.
__all__ = ["GradscaleError", "Recorder", "__version__", "explain"]


def __getattr__(name: str) -> Any:
    if name == "Recorder":
        from .recorder import Recorder

        return Recorder
    if name == "open":
        from .notebook import open

        return open
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
