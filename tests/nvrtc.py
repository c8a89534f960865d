"""Compiles src/kernel/cuda/kernels.cu as users' machines and GPUs would, without a GPU.

    python tests/nvrtc.py [--wheels DIR] [--write]

NVRTC comes from PyPI's wheels, in the versions that python/constraints.txt pins: CUDA 12 for compute capabilities 7.0, 8.0, 9.0 and
10.0, CUDA 13 for 8.0, 9.0 and 10.0. Each kernel must compile without a warning and without spilling registers (exceptions below). And kernels.ptx, which is committed, must be what the oldest NVRTC makes of the source, byte for byte, for
the oldest GPU; `--write` makes it so. DIR keeps the wheels for the next time.
"""

import argparse
import ctypes
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/kernel/cuda/kernels.cu"
COPIES = [ROOT / "src/kernel/cuda/kernels.ptx", ROOT / "python/gradscale/kernels.ptx"]
#: What kernels.ptx is made with: PTX version 8.0, which every driver from 525 on understands. It is another version of a wheel
#: that constraints.txt pins, so it cannot stand there too.
OLDEST = "nvidia-cuda-nvrtc-cu12==12.0.140"
OLDEST_GPU = "compute_70"
TARGETS = {
    "nvidia-cuda-nvrtc-cu12": ["sm_70", "sm_80", "sm_90", "sm_100"],
    "nvidia-cuda-nvrtc": ["sm_80", "sm_90", "sm_100"],
}
#: Products and sums are not fused, so that errors are the same bits as on a CPU.
OPTIONS = ["--std=c++14", "--fmad=false"]
#: The first for want of 64-bit inverses beside the values; on older GPUs the patterns want a few bytes more.
MAY_SPILL = {"gradscale_errors"}
MAY_SPILL_A_LITTLE = {"sm_70": 128, "sm_80": 16}
MAY_WARN = "nvrtc: warning: Architectures prior to"  # of sm_70, which is still wanted


class Nvrtc:
    """The compiler of one wheel."""

    def __init__(self, requirement, wheels):
        place = wheels / requirement
        if not list(place.rglob("libnvrtc.so.*")):
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--target", str(place), requirement], check=True)
        (library,) = [p for p in place.rglob("libnvrtc.so.*") if ".alt." not in p.name]
        self._library = ctypes.CDLL(str(library))
        self.requirement = requirement

    def _text(self, program, what):
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, text), what)
        return text.raw

    def _check(self, code, doing):
        if code != 0:
            raise SystemExit(f"{self.requirement}, {doing}: NVRTC gave {code}")

    def compile(self, target, more=()):
        """What the source becomes for ``target``, and what the compiler said."""
        options = [option.encode() for option in [f"--gpu-architecture={target}", *OPTIONS, *more]]
        program = ctypes.c_void_p()
        source = SOURCE.read_bytes()
        created = self._library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None)
        self._check(created, "taking the source")
        code = self._library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = self._text(program, "ProgramLog").rstrip(b"\0").decode()
        if code != 0:
            raise SystemExit(f"{self.requirement} for {target}: NVRTC gave {code}\n{log}")
        result = self._text(program, "CUBIN" if target.startswith("sm_") else "PTX")
        self._library.nvrtcDestroyProgram(ctypes.byref(program))
        return result, log


def kernels():
    return set(re.findall(r"^\s*(?:extern.*)?\b(gradscale_\w+)\(", SOURCE.read_text(encoding="utf-8"), re.MULTILINE))


def check_target(compiler, target):
    """Compiles for a GPU; returns what is wrong."""
    code, log = compiler.compile(target, ["--ptxas-options=-v"])
    wrong = []
    entries = dict(re.findall(r"Compiling entry function '(\w+)'.*?\n(.*?Used.*?)(?=\n|$)", log, re.DOTALL))
    if set(entries) != kernels():
        wrong.append(f"kernels {sorted(set(entries) ^ kernels())} are missing or unknown")
    if not code.startswith(b"\x7fELF"):
        wrong.append("no machine code")
    most = 0
    for name, said in entries.items():
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", said)]
        most = max(most, *(int(n) for n in re.findall(r"Used (\d+) registers", said)))
        if max(spilled, default=0) > MAY_SPILL_A_LITTLE.get(target, 0) and name not in MAY_SPILL:
            wrong.append(f"{name} spills {max(spilled)} bytes")
    for line in log.splitlines():
        if "warning" in line and not line.startswith(MAY_WARN):
            wrong.append(line)
    print(f"{compiler.requirement:40} {target:8} {len(entries)} kernels, {len(code):7} bytes, at most {most} registers")
    return [f"{compiler.requirement} for {target}: {what}" for what in wrong]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--write", action="store_true", help="write kernels.ptx anew")
    arguments = parser.parse_args()
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "python/constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    with tempfile.TemporaryDirectory() as scratch:
        wheels = arguments.wheels or Path(scratch)
        wrong = []
        ptx, _ = Nvrtc(OLDEST, wheels).compile(OLDEST_GPU)
        ptx = ptx.rstrip(b"\0")
        print(f"{OLDEST:40} {OLDEST_GPU}: {len(ptx)} bytes of PTX")
        for copy in COPIES:
            if arguments.write:
                copy.write_bytes(ptx)
            elif copy.read_bytes() != ptx:
                wrong.append(f"{copy.relative_to(ROOT)} is not what {OLDEST} makes of the source; run it with --write")
        for wheel, targets in TARGETS.items():
            compiler = Nvrtc(f"{wheel}=={pins[wheel]}", wheels)
            for target in targets:
                wrong += check_target(compiler, target)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
