"""Scalers of one's own, served to `gradscale check --exec`."""

import io
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from plain_scaler import Plain
from program import needs_program, run_json
from wrong_scalers import ForgetsTracker, StepsAnyway

import gradscale
from gradscale.errors import ScalerError
from gradscale.testing import _from_json, _to_json, serve

HERE = Path(__file__).resolve().parent
PACKAGE = str(Path(gradscale.__file__).parent.parent)
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([PACKAGE, str(HERE)])}
RESET, SAVE = {"op": "reset", "config": None}, {"op": "save"}
CLEAN, OVERFLOW = ({"op": "step", "found_inf": flag} for flag in (False, True))


def talk(requests, *args, **kwargs):
    """The answers to ``requests``."""
    lines = io.StringIO("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in requests))
    out = io.StringIO()
    serve(*args, requests=lines, answers=out, **kwargs)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def reset(**config):
    return {"op": "reset", "config": config}


def test_torchs_scaler_meets_real_infs():
    config = {"init_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    answers = talk([reset(**config), CLEAN, CLEAN, OVERFLOW, CLEAN, OVERFLOW], torch.amp.GradScaler)
    assert answers[0] == {"scale": 1024.0, "config": config}
    assert [(a["scale"], a["skipped"]) for a in answers[1:]] == [
        (1024.0, False), (4096.0, False), (1024.0, True), (1024.0, False), (256.0, True),
    ]  # fmt: skip


def test_an_instance_is_copied_and_takes_no_configuration():
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    answers = talk([reset(growth_interval=2), OVERFLOW, RESET], scaler)
    assert answers == [{"scale": 16.0, "config": None}, {"scale": 8.0, "skipped": True}, {"scale": 16.0, "config": None}]
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("subject", [torch.amp.GradScaler, Plain])
def test_a_state_is_loaded_into_a_fresh_scaler(subject):
    key = "interval" if subject is Plain else "growth_interval"
    start = [reset(**{key: 3}), CLEAN, CLEAN]
    state = talk([*start, SAVE], subject)[-1]["state"]
    direct = talk([*start, CLEAN], subject)[-1]["scale"]
    # Another history between: none of it may show.
    other = [reset(**{key: 3}), OVERFLOW, CLEAN, {"op": "load", "state": state}, CLEAN]
    answers = talk(other, subject)
    assert answers[-2]["scale"] == direct / 2 and answers[-1]["scale"] == direct


def test_what_a_state_leaves_out_is_lost():
    class Forgetful(Plain):
        def state_dict(self):
            return {"loss_scale": self.loss_scale}

    # Loaded into the same object, the two clean steps before would still be there.
    answers = talk([RESET, CLEAN, CLEAN, {"op": "load", "state": {"loss_scale": 8.0}}, CLEAN, CLEAN, CLEAN], Forgetful)
    assert [a["scale"] for a in answers[-3:]] == [8.0, 8.0, 16.0]


def test_a_scaler_that_is_told():
    answers = talk([reset(interval=2), CLEAN, CLEAN, OVERFLOW], Plain)
    assert [a["scale"] for a in answers] == [8.0, 8.0, 16.0, 8.0] and answers[-1]["skipped"]
    assert talk([reset(growth_interval=2), CLEAN, CLEAN], Plain)[-1]["scale"] == 8.0, "a foreign key alone is not taken"
    assert talk([reset(growth_interval=2)], Plain)[0]["config"] is None
    assert talk([reset(interval=1)], Plain, config={"scale": 2.0})[0]["scale"] == 2.0


def test_half_a_configuration_is_an_error_that_names_what_is_foreign():
    (answer,) = talk([reset(interval=2, hysteresis=3)], Plain)
    assert "found no argument hysteresis, expected the arguments of Plain: interval, scale" in answer["error"]


def test_functions_with_a_state():
    def step(state, found_inf):
        scale, clean = state
        if found_inf:
            return (scale / 2, 0), True
        return ((scale * 2, 0) if clean == 1 else (scale, clean + 1)), False

    functions = {"init": lambda scale=32.0: (scale, 0), "step": step, "scale_of": lambda state: state[0]}
    answers = talk([reset(scale=4.0), CLEAN, SAVE, CLEAN, OVERFLOW], **functions)
    assert [a.get("scale") for a in answers] == [4.0, 4.0, None, 8.0, 4.0] and answers[-1]["skipped"] is True
    back = talk([reset(scale=4.0), {"op": "load", "state": answers[2]["state"]}, CLEAN], **functions)
    assert back[1:] == [{"scale": 4.0}, {"scale": 8.0, "skipped": False}]
    (_, answer) = talk([RESET, CLEAN], **{**functions, "step": lambda state, found_inf: state[0]})
    assert "found a float, expected a pair" in answer["error"]


def test_what_goes_wrong_is_an_answer_and_not_the_end():
    answers = talk(
        ["not json\n", "\n", "[1]\n", {"op": "jump"}, {"op": "step"}, {"op": "step", "found_inf": 1}, {"op": "load"}, RESET],
        torch.amp.GradScaler,
    )
    assert ["error" in a for a in answers] == [True] * 6 + [False]
    assert "expected reset, step, save or load" in answers[1]["error"] and "true or false" in answers[4]["error"]


def test_a_terminal_state_is_the_implementations_own_error():
    answers = talk([reset(growth_interval=None), CLEAN, RESET, CLEAN], torch.amp.GradScaler)
    assert answers[1]["error"].startswith("TypeError: ") and "growth_interval" in answers[1]["error"]
    assert answers[3] == {"scale": 65536.0, "skipped": False}


def test_scalers_that_cannot_be_driven_are_named():
    class Mute:
        def update(self):
            pass

    assert "update() without a parameter and no unscale_()" in talk([RESET], Mute)[0]["error"]
    assert "found a disabled scaler" in talk([RESET], lambda: torch.amp.GradScaler("cpu", enabled=False))[0]["error"]
    for kwargs in ({}, {"init": dict}, {"scaler": Plain, "init": dict}):
        with pytest.raises(ScalerError, match="expected either a scaler, or init, step and scale_of"):
            serve(**kwargs)


def test_states_survive_json():
    import numpy as np

    state = {
        "a": [1, 2.5, True, None, "x"], "inf": math.inf, "tuple": (1, (2,)), 3: "int key",
        "torch": torch.tensor([1.0, math.inf], dtype=torch.float16), "numpy": np.float32(0.1), "nan": [math.nan],
    }  # fmt: skip
    back = _from_json(json.loads(json.dumps(_to_json(state), allow_nan=False)))
    assert list(back) == list(state)
    assert back["torch"].dtype == torch.float16 and torch.equal(back["torch"], state["torch"])
    assert back["numpy"] == np.float32(0.1) and back["numpy"].dtype == np.float32 and math.isnan(back["nan"][0])
    same = ("a", "inf", "tuple", 3)
    assert [back[k] for k in same] == [state[k] for k in same] and isinstance(back["tuple"][1], tuple)
    with pytest.raises(ScalerError, match="found a object"):
        _to_json(object())


def test_an_infinite_scale_is_a_text():
    class Infinite(Plain):
        loss_scale = math.inf

        def __init__(self):
            self.interval, self.clean = 1, 0

    assert talk([RESET], Infinite) == [{"scale": "inf", "config": None}]


def test_bugs_of_torchs_kind_show_in_the_answers():
    start = [reset(init_scale=8.0, growth_interval=3)]
    right, wrong = (talk([*start, OVERFLOW], kind)[-1] for kind in (torch.amp.GradScaler, StepsAnyway))
    assert right == {"scale": 4.0, "skipped": True} and wrong == {"scale": 4.0, "skipped": False}
    for kind, scale in ((torch.amp.GradScaler, 16.0), (ForgetsTracker, 8.0)):
        state = talk([*start, CLEAN, CLEAN, SAVE], kind)[-1]["state"]
        assert talk([*start, {"op": "load", "state": state}, CLEAN], kind)[-1]["scale"] == scale


def test_steps_are_fast():
    requests = [reset(growth_interval=20)] + [CLEAN, CLEAN, OVERFLOW] * 2000
    start = time.perf_counter()
    talk(requests, torch.amp.GradScaler)
    assert time.perf_counter() - start < 6, "under 1000 steps a second"


# ---- as a program


def program(*arguments, requests=(), code=0):
    done = subprocess.run(
        [sys.executable, "-m", "gradscale.testing", *arguments], input="".join(json.dumps(r) + "\n" for r in requests),
        capture_output=True, text=True, env=ENVIRONMENT, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done
    return done


def test_answers_alone_are_on_stdout(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import os, sys\nprint('imported')\n"
        "class Loud:\n"
        "    scale = 4.0\n"
        "    def __init__(self, extra=''): print('made', extra); os.write(1, b'raw\\n')\n"
        "    def update(self, found_inf): print('updated')\n"
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([PACKAGE, str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-m", "gradscale.testing", "loud.Loud", "extra=yes"], input=json.dumps(RESET) + "\n" + json.dumps(CLEAN) + "\n",
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"scale": 4.0, "config": None}, {"scale": 4.0, "skipped": False},
    ]  # fmt: skip
    assert all(word in done.stderr for word in ("imported", "made yes", "raw", "updated"))


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["torchh.amp.GradScaler"], 2, "found no module torchh"),
        (["json.nothing"], 2, "found no nothing in json"),
        (["GradScaler"], 2, "expected package.module.Class"),
        (["json.loads", "oops"], 2, "found 'oops', expected argument=value"),
    ],
)
def test_names_that_lead_nowhere_are_named(arguments, code, words):
    done = program(*arguments, code=code)
    assert words in done.stderr and done.stdout == ""


def test_usage():
    assert "usage: python -m gradscale.testing" in program("--help").stdout
    assert "usage:" in program(code=2).stdout


def test_it_works_without_torch(tmp_path):
    code = (
        "import sys, io; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "from gradscale.testing import serve\n"
        "class S:\n    scale = 2.0\n    def update(self, found_inf): self.scale /= 2\n"
        "serve(S)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(OVERFLOW) + "\n", capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert json.loads(done.stdout) == {"scale": 1.0, "skipped": True}


# ---- under gradscale check


def check(name, *arguments, status=0):
    # torch takes seconds to import where everything runs at once.
    command = f'"{sys.executable}" -m gradscale.testing {name}'
    document = run_json("check", "--exec", command, "--silence", "60", *arguments, status=status, env=ENVIRONMENT)
    return document, [p["name"] for p in document["properties"] if not p["passed"]]


@needs_program
def test_torchs_own_scaler_is_the_policy_to_the_bit():
    document, broken = check("torch.amp.GradScaler", "--policy", "pytorch:growth_interval=20", "--cases", "20")
    assert document["passed"] and broken == []
    same = next(p for p in document["properties"] if p["name"] == "same_as_policy")
    assert same["cases"] == 20


@needs_program
def test_a_broken_subclass_is_found():
    document, broken = check("wrong_scalers.KeepsCounting", "--policy", "pytorch:growth_interval=5", "--cases", "3", status=1)
    assert not document["passed"] and "never_grows_early" in broken
    one = next(p["counterexample"] for p in document["properties"] if p["name"] == "never_grows_early")
    assert 1 in one["found_inf"] and len(one["found_inf"]) <= 12
