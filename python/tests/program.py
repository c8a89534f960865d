"""The `gradscale` program, for the tests that hold both halves side by side.

``GRADSCALE_BIN`` names it. Where that is unset, tests that need it are skipped, with a line on stderr; ``GRADSCALE_REQUIRE_BIN=1`` makes
that a failure.
"""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = os.environ.get("GRADSCALE_BIN")


def _needed():
    if PROGRAM:
        return False
    if os.environ.get("GRADSCALE_REQUIRE_BIN"):
        raise RuntimeError("GRADSCALE_REQUIRE_BIN is set: found no GRADSCALE_BIN, expected the path of the gradscale program")
    print("gradscale: GRADSCALE_BIN is not set; the tests against the program are SKIPPED", file=sys.__stderr__)
    return True


needs_program = pytest.mark.skipif(_needed(), reason="GRADSCALE_BIN is not set: not compared with the program")


def run(*arguments, status=0, **kwargs):
    """Runs the program; returns its stdout."""
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=120, **kwargs)
    assert done.returncode == status, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def run_json(*arguments, status=0, **kwargs):
    """Runs the program; returns the one JSON document it prints."""
    return json.loads(run(*arguments, "--json", status=status, **kwargs))
