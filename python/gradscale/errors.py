"""What can go wrong, as exceptions that carry facts.

Every message has one shape: what was being done: found X, expected Y; how to fix it.
"""

from __future__ import annotations

from typing import Optional, Tuple, Type

__all__ = [
    "DumpError",
    "GradscaleError",
    "MissingDependency",
    "ModelError",
    "ProbeError",
    "ProgramError",
    "RecorderClosed",
    "ScalerConflict",
    "ScalerError",
    "SketchError",
    "TraceError",
    "TraceExists",
]


class GradscaleError(Exception):
    """The base of every error of this package.

    ``doing``, ``found``, ``expected`` and ``fix`` are kept as attributes, so a caller can act on them
    without reading the sentence.
    """

    def __init__(self, doing: str, found: str, expected: str, fix: Optional[str] = None) -> None:
        self.doing = doing
        self.found = found
        self.expected = expected
        self.fix = fix
        sentence = f"{doing}: found {found}, expected {expected}"
        super().__init__(sentence if fix is None else f"{sentence}; {fix}")

    def __reduce__(self) -> "Tuple[Type[GradscaleError], Tuple[str, str, str, Optional[str]]]":
        # An exception is pickled with its message alone, and made again from that; a worker's error would not come back.
        return type(self), (self.doing, self.found, self.expected, self.fix)


class DumpError(GradscaleError, ValueError):
    """A dump of gradients cannot be read."""


class MissingDependency(GradscaleError, ImportError):
    """A package this function needs is not installed."""


class ModelError(GradscaleError, ValueError):
    """The model cannot be recorded as it is."""


class ProbeError(GradscaleError, ValueError):
    """A probe cannot be run on this model."""


class ProgramError(GradscaleError, RuntimeError):
    """The gradscale program is not there, or could not do what was asked."""


class RecorderClosed(GradscaleError, RuntimeError):
    """A recorder was used after ``close()``."""


class ScalerConflict(GradscaleError, ValueError):
    """Several loss scalers with different scales: one step has one loss_scale."""


class ScalerError(GradscaleError, ValueError):
    """A loss scaler cannot be driven the way it was given to `gradscale.testing`."""


class SketchError(GradscaleError, ValueError):
    """A sketch was asked of something that is no real floating-point tensor, or a merge does not fit."""


class TraceError(GradscaleError, ValueError):
    """A trace chunk is torn, foreign or inconsistent."""


class TraceExists(GradscaleError, FileExistsError):
    """The directory already holds the chunks of another run."""
