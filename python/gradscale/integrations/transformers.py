"""A callback for Hugging Face's ``Trainer``."""

from __future__ import annotations

from typing import Any, Optional

from ._callback import Callback

__all__ = ["TransformersCallback"]


class TransformersCallback(Callback):
    """Records a ``transformers.Trainer`` run: ``Trainer(..., callbacks=[TransformersCallback()])``.

    ``trace``: the directory, ``gradscale`` in the trainer's ``output_dir`` if it is not given. Everything else goes to `Recorder`. One row an
    optimizer step, gradient accumulation included. The loss scaler is the one that Accelerate put around the optimizer. A run that is resumed
    from a checkpoint is recorded from there on, and needs a directory of its own. The trainer tells its callbacks no loss of a
    single step, so there is none in the trace.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Starts the recorder."""
        self._start(model, getattr(args, "output_dir", None) or ".", scaler_of(optimizer))

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Records the optimizer step; its gradients were taken during backward, so it does not matter that they are gone."""
        if self.recorder is not None:
            self.recorder.step(scaler_of(optimizer))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes what is open."""
        self._close()


def scaler_of(optimizer: Any) -> Optional[Any]:
    """The loss scaler inside Accelerate's optimizer, if there is one."""
    scaler = getattr(optimizer, "scaler", None)
    return scaler if scaler is not None and hasattr(scaler, "get_scale") else None
