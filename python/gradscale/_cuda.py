"""Counting on an NVIDIA GPU where the gradient lies: the program's own kernels, launched on torch's current stream.

``kernels.ptx`` is a copy of the program's (a test of both holds them equal; the source is ``src/kernel/cuda/kernels.cu``). The driver,
which torch has loaded already, translates it for its GPU; nothing else of CUDA is needed. A kernel is given the tensor's own
memory, and its result stays on the device until the recorder's one read-back. Where anything is missing (no CUDA, ROCm, MPS, an
old driver) there are no kernels, and torch's operations give the same integers.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Dict, Optional, Tuple

if TYPE_CHECKING:
    import torch

__all__ = ["Kernels", "kernels_for"]

_PTX = Path(__file__).with_name("kernels.ptx")

# As kernels.cu has them.
_HEAD = 8
_BIN_COUNT = 6094
_MOST_PACKED = 1 << 21
_SKETCH_SHARED_BYTES = (2 * 5632 + 12) * 4
_KINDS = {"torch.float32": (0, "f32"), "torch.float16": (1, "f16"), "torch.bfloat16": (2, "bf16")}
#: 16-bit elements are counted by pattern from here on: below, clearing and emptying 128 kB of counters a block outweighs them.
_MANY_HALVES = 1 << 20
#: Elements that a block should have at least.
_WORTH_A_BLOCK = 1 << 14
#: A block counts in 32 bits.
_MOST_A_BLOCK = 1 << 31

_MULTIPROCESSORS, _CAPABILITY_MAJOR, _SHARED_OPTIN = 16, 75, 97
_MAX_DYNAMIC_SHARED = 8


_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64


class _Refused(Exception):
    """The driver did not do what it was asked."""


class _Kernel:
    def __init__(self, function: ctypes.c_void_p, threads: int, shared_bytes: int, fills: int) -> None:
        self.function = function
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.fills = fills


class Kernels:
    """The kernels on one device, whose context is current while this is made.

    ``driver``: ``libcuda.so.1``. ``stream``: gives the stream to launch on. ``entered``: makes the device's context current.

    Raises `_Refused` or `AttributeError` where the driver, the GPU or the kernels are not as needed.
    """

    def __init__(
        self,
        driver: Any,
        device: "torch.device",
        stream: Callable[[], int],
        entered: "Callable[[], ContextManager[Any]]",
        ordinal: int = 0,
    ) -> None:
        import torch

        self._driver = driver
        self._device = device
        self._stream = stream
        self._entered = entered
        handle = ctypes.c_int()
        self._ask("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(ordinal))
        if self._attribute(handle, _CAPABILITY_MAJOR) < 7:
            raise _Refused("a GPU older than compute capability 7.0")
        self._multiprocessors = self._attribute(handle, _MULTIPROCESSORS)
        shared = max(self._attribute(handle, _SHARED_OPTIN), 48 << 10)
        self._module = ctypes.c_void_p()
        # The text is translated before the call returns.
        self._ask("cuModuleLoadData", ctypes.byref(self._module), ctypes.c_char_p(_PTX.read_bytes() + b"\0"))
        self._sketch = {
            kind: self._kernel(f"gradscale_sketch_{kind}", 512, _SKETCH_SHARED_BYTES) for _, kind in _KINDS.values()
        }
        # Magnitudes of 16-bit patterns that a block counts in one pass over the data: all of them where 128 kB can be had.
        self._window = 1 << (min(shared // 4, 1 << 15).bit_length() - 1)
        self._patterns = self._kernel("gradscale_patterns", 1024, self._window * 4)
        self._to_sketch = self._kernel("gradscale_patterns_to_sketch", 256, 0)
        self._extremes = self._kernel("gradscale_extremes", 256, 12)
        head = [0, 0, 0, 0, 0, 0x7FFFFFFF, 0, 32767]
        self._empty = {
            size: torch.tensor(head + [0] * (size - _HEAD), dtype=torch.int64).to(device)
            for size in (_HEAD + _BIN_COUNT, _HEAD + 2 * _BIN_COUNT)
        }
        self._no_extremes = torch.tensor([0x7FFFFFFF, -0x80000000, 0], dtype=torch.int32).to(device)

    def row(self, values: "torch.Tensor") -> "torch.Tensor":
        """The sketch of flat, contiguous f32, f16 or bf16 ``values``: what `sketch.device_row` gives. Waits for nothing."""
        import torch

        number, kind = _KINDS[str(values.dtype)]
        count = values.numel()
        packed = count <= _MOST_PACKED
        with self._entered():
            row = self._empty[_HEAD + (1 if packed else 2) * _BIN_COUNT].clone()
            if number == 0 or count < _MANY_HALVES:
                kernel = self._sketch[kind]
                self._launch(kernel, self._blocks(kernel, count), values, _u64(count), row, _u32(packed))
            else:
                patterns = torch.zeros(1 << 16, dtype=torch.int64, device=self._device)
                blocks = self._blocks(self._patterns, count)
                for first in range(0, 1 << 15, self._window):
                    self._launch(self._patterns, blocks, values, _u64(count), patterns, _u32(first), _u32(self._window))
                self._launch(self._to_sketch, 256, patterns, _u32(number), _u64(count), row, _u32(packed))
        return row

    def extremes(self, values: "torch.Tensor") -> "Tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        """What the recorder's ``_device_amax`` gives, for the same ``values`` as `row`, of which there is at least one."""
        import torch

        with self._entered():
            result = self._no_extremes.clone()
            count = values.numel()
            kind = _u32(_KINDS[str(values.dtype)][0])
            self._launch(self._extremes, self._blocks(self._extremes, count), values, _u64(count), kind, result)
        return result[0], result[1], result[2].view(torch.float32)

    def _ask(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            raise _Refused(f"{name} gave {code}")

    def _attribute(self, handle: ctypes.c_int, which: int) -> int:
        value = ctypes.c_int()
        self._ask("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(which), handle)
        return value.value

    def _kernel(self, name: str, threads: int, shared_bytes: int) -> _Kernel:
        function = ctypes.c_void_p()
        self._ask("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
        if shared_bytes > 48 << 10:
            self._ask("cuFuncSetAttribute", function, ctypes.c_int(_MAX_DYNAMIC_SHARED), ctypes.c_int(shared_bytes))
        side_by_side = ctypes.c_int()
        self._ask(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(side_by_side), function, ctypes.c_int(threads), ctypes.c_size_t(shared_bytes),
        )  # fmt: skip
        return _Kernel(function, threads, shared_bytes, max(1, self._multiprocessors * side_by_side.value))

    def _blocks(self, kernel: _Kernel, count: int) -> int:
        """As many as run side by side, no more than have something to do, and enough that none counts beyond 32 bits."""
        return max(1, min(kernel.fills, -(-count // _WORTH_A_BLOCK)), -(-count // _MOST_A_BLOCK))

    def _launch(self, kernel: _Kernel, blocks: int, *arguments: Any) -> None:
        """Puts a kernel on torch's stream. Of tensors their address is passed; they are used in the stream's order, so their memory
        may go back to torch's allocator at once."""
        values = [a if isinstance(a, (_u32, _u64)) else ctypes.c_void_p(a.data_ptr()) for a in arguments]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self._ask(
            "cuLaunchKernel", kernel.function, _u32(blocks), _u32(1), _u32(1), _u32(kernel.threads), _u32(1), _u32(1),
            _u32(kernel.shared_bytes),
            ctypes.c_void_p(self._stream()), addresses, None,
        )  # fmt: skip


_known: "Dict[Any, Optional[Kernels]]" = {}


def kernels_for(device: "torch.device") -> Optional[Kernels]:
    """The kernels on ``device``, or None where there are none. It is asked of the driver once."""
    if device.type != "cuda":
        return None
    if device not in _known:
        _known[device] = _find(device)
    return _known[device]


def _find(device: "torch.device") -> Optional[Kernels]:
    import torch

    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    place = torch.device("cuda", ordinal)

    def stream() -> int:
        return int(torch.cuda.current_stream(place).cuda_stream)

    def entered() -> "ContextManager[Any]":
        # Hooks run on a thread whose device is the gradient's already.
        return contextlib.nullcontext() if torch.cuda.current_device() == ordinal else torch.cuda.device(place)

    try:
        driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(place):
            torch.cuda.current_stream(place).synchronize()  # the context exists from here on
            return Kernels(driver, place, stream, entered, ordinal)
    except (OSError, AttributeError, _Refused):
        return None
