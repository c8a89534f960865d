"""What the callbacks share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Optional, Tuple, Union

if TYPE_CHECKING:
    from ..recorder import Recorder


class Callback:
    """Starts a recorder, makes each optimizer step a row, and closes it.

    Frameworks call methods for many more events than are of interest here: those do nothing.
    """

    #: Names that are events, and so methods that do nothing unless they are defined.
    _EVENTS: Tuple[str, ...] = ("on_",)

    def __init__(self, trace: "Union[str, os.PathLike[str], None]" = None, **recorder: Any) -> None:
        self._trace = trace
        self._options = recorder
        self.recorder: "Optional[Recorder]" = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith(type(self)._EVENTS):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> Any:  # a copy records nothing by itself
        return {**self.__dict__, "recorder": None}

    def _start(self, model: Any, directory: "Union[str, os.PathLike[str]]", scaler: Any) -> None:
        from ..recorder import Recorder

        self._close()
        trace = self._trace if self._trace is not None else os.path.join(directory, "gradscale")
        self.recorder = Recorder(model, trace, scaler=scaler, **self._options)

    def _close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
