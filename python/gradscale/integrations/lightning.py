"""A callback for Lightning's ``Trainer``."""

from __future__ import annotations

from typing import Any, Dict, Optional

from ._callback import Callback

__all__ = ["LightningCallback"]


class LightningCallback(Callback):
    """Records a Lightning run: ``Trainer(..., callbacks=[LightningCallback()])``.

    ``trace``: the directory, ``gradscale`` in the trainer's ``default_root_dir`` if it is not given. Everything else goes to `Recorder`. One row an
    optimizer step, gradient accumulation included; with several optimizers in one batch, one row for all of them. The loss is that of the
    step's last batch.
    """

    _EVENTS = ("on_", "setup", "teardown", "load_state_dict")

    @property
    def state_key(self) -> str:
        """What Lightning files the callback's state under."""
        return type(self).__qualname__

    @property
    def _legacy_state_key(self) -> type:
        return type(self)

    def state_dict(self) -> Dict[str, Any]:
        """Nothing: a trace is no part of a checkpoint."""
        return {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts the recorder."""
        self._start(pl_module, getattr(trainer, "default_root_dir", None) or ".", self._scaler(trainer))
        self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *rest: Any) -> None:
        """Records the optimizer step that this batch completed, if it did."""
        if self.recorder is None or trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.recorder.step(self._scaler(trainer), loss=loss if _is_number(loss) else None)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Writes what is open."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Writes what is open."""
        self._close()

    def _scaler(self, trainer: Any) -> Optional[Any]:
        plugin = getattr(trainer, "precision_plugin", None)
        scaler = getattr(plugin, "scaler", None)
        return scaler if scaler is not None and hasattr(scaler, "get_scale") else None


def _is_number(loss: Any) -> bool:
    return isinstance(loss, (int, float)) or getattr(loss, "numel", lambda: 0)() == 1
