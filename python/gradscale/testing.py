"""Holds your loss scaler to the laws: ``gradscale check --exec`` drives it through this module.

A class by name, with real infs in a real parameter's gradient::

    gradscale check --exec "python -m gradscale.testing torch.amp.GradScaler" --policy pytorch:growth_interval=20

Your own object, from a file of three lines that is the command of ``--exec``::

    from gradscale.testing import serve
    from mine import MyScaler

    serve(MyScaler)          # or an instance: serve(MyScaler(growth_interval=8))

A scaler without an object, such as flax's ``DynamicScale``, whose every step gives a new one::

    def step(scale, found_inf):
        x = jnp.float32(jnp.inf if found_inf else 1.0)
        scale, is_finite, _, _ = scale.value_and_grad(lambda w: w * x)(jnp.float32(1.0))
        return scale, not is_finite                      # the new state, and whether the step was skipped

    serve(init=DynamicScale, step=step, scale_of=lambda scale: scale.scale,
          save=flax.serialization.to_state_dict, load=flax.serialization.from_state_dict)

What is spoken is JSON Lines, an answer a request::

    {"op":"reset","config":{...}|null}  ->  {"scale":65536.0,"config":{...}|null}     null: it takes no configuration
    {"op":"step","found_inf":true}      ->  {"scale":32768.0,"skipped":true}
    {"op":"save"}                       ->  {"state":...}
    {"op":"load","state":...}           ->  {"scale":32768.0}
    any                                 ->  {"error":"TypeError: ..."}

``load`` puts the state into a *fresh* scaler, as a restarted run does: what the state leaves out is lost. What the scaler prints
goes to stderr. Importing this module needs neither torch nor numpy; a program that imports torch may need ``--silence 30`` on
a slow disk.
"""

from __future__ import annotations

import collections
import copy
import gc
import importlib
import inspect
import json
import math
import os
import sys
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import IO, Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from .errors import GradscaleError, ScalerError

__all__ = ["answer", "main", "serve"]

Config = Mapping[str, Any]


class _Subject(ABC):
    """What the loop talks to: one scaler, made anew by each `reset` and `load`."""

    @abstractmethod
    def reset(self, config: Optional[Config]) -> Tuple[float, Optional[Config]]:
        """Starts anew; returns the scale and the part of ``config`` that was taken, None if it takes none."""

    @abstractmethod
    def step(self, found_inf: bool) -> Tuple[float, bool]:
        """One optimizer step; returns the scale for the next one and whether this one was skipped."""

    @abstractmethod
    def save(self) -> Any:
        """The state, as JSON can hold it."""

    @abstractmethod
    def load(self, state: Any) -> float:
        """Continues from ``state`` in a fresh scaler."""


# ---- objects with update()


class _Object(_Subject):
    """A scaler class (or any function that makes one), or an instance, which is copied before its first use."""

    def __init__(self, scaler: Any, fixed: Optional[Config] = None) -> None:
        self._fixed = dict(fixed or {})
        if callable(scaler) and not hasattr(scaler, "update") or inspect.isclass(scaler):
            self._factory: Optional[Callable[..., Any]] = scaler
        else:
            self._factory = None
            self._pristine = copy.deepcopy(scaler)
        self._config: Dict[str, Any] = {}
        self._driver: Any = None

    def reset(self, config: Optional[Config]) -> Tuple[float, Optional[Config]]:
        taken = None
        self._config = {}
        if self._factory is not None and config:
            taken = _taken(self._factory, config, self._fixed)
            self._config = dict(taken or {})
        self._driver = self._fresh()
        return self._driver.scale(), taken

    def step(self, found_inf: bool) -> Tuple[float, bool]:
        skipped = self._started().step(found_inf)
        return self._driver.scale(), skipped

    def save(self) -> Any:
        return _to_json(_method(self._started().scaler, "save", "state_dict", "to_state_dict")())

    def load(self, state: Any) -> float:
        self._driver = self._fresh()
        self._driver.begin()
        _method(self._driver.scaler, "load", "load_state_dict")(_from_json(state))
        return float(self._driver.scale())

    def _started(self) -> Any:
        if self._driver is None:
            self.reset(None)
        return self._driver

    def _fresh(self) -> Any:
        if self._factory is None:
            scaler = copy.deepcopy(self._pristine)
        else:
            scaler = self._factory(**{**_device_of(self._factory), **self._fixed, **self._config})
        if hasattr(scaler, "unscale_") and hasattr(scaler, "step"):
            return _Optimizing(scaler)
        return _Told(scaler)


class _Told:
    """Drives a scaler that is told whether an inf was found: ``update(found_inf)``."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self._update = _method(scaler, "step", "update", "update_scale")
        try:
            needed = inspect.signature(self._update).parameters
        except (TypeError, ValueError):
            needed = None  # type: ignore[assignment]
        if needed is not None and not needed:
            raise ScalerError(
                f"driving a {type(scaler).__name__}", f"{self._update.__name__}() without a parameter and no unscale_()",
                "update(found_inf), or torch's unscale_(), step() and update()", "give serve() its step=, init= and scale_of=",
            )  # fmt: skip

    def begin(self) -> None:
        """Nothing is made lazily here."""

    def step(self, found_inf: bool) -> bool:
        self._update(found_inf)
        return found_inf  # such a scaler leaves the skipping to the caller, who goes by the same flag

    def scale(self) -> float:
        return _scale_of(self.scaler)


class _Optimizing:
    """Drives a scaler of torch's kind: a parameter's gradient really is inf, and the optimizer says whether it was called."""

    def __init__(self, scaler: Any) -> None:
        import torch

        torch.set_num_threads(1)
        enabled = getattr(scaler, "is_enabled", None)
        if enabled is not None and not enabled():
            raise ScalerError(
                f"driving a {type(scaler).__name__}", "a disabled scaler", "an enabled one",
                "on a machine without its device, give device=cpu",
            )  # fmt: skip
        self.scaler = scaler
        device = getattr(scaler, "_device", None) or "cpu"
        self._optimizer = _optimizer(device)
        self._parameter = self._optimizer.param_groups[0]["params"][0]
        self._gradient = torch.ones(2, device=device)
        self._began = False

    def begin(self) -> None:
        """What a run does before its first step: scaling a loss makes torch's scaler create its scale."""
        if not self._began:
            self._began = True
            self.scaler.scale(self._gradient[0])

    def step(self, found_inf: bool) -> bool:
        self.begin()
        before = self._optimizer.steps
        # As backward leaves it, scaled; one element overflowed. unscale_ works in place, so each step writes it again.
        self._gradient.fill_(1.0)
        if found_inf:
            self._gradient[1] = math.inf
        self._parameter.grad = self._gradient
        self.scaler.step(self._optimizer)
        self.scaler.update()
        return bool(self._optimizer.steps == before)

    def scale(self) -> float:
        return _scale_of(self.scaler)


def _optimizer(device: Any) -> Any:
    import torch

    class Counting(torch.optim.Optimizer):
        """Counts the steps that reach it."""

        def __init__(self) -> None:
            # Not torch's own __init__: it would import the compiler (1.6 s), and put a profiler's hook around step().
            self.steps = 0
            self.defaults = {}
            self.state = collections.defaultdict(dict)
            self.param_groups = [{"params": [torch.nn.Parameter(torch.zeros(2, device=device))]}]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.steps += 1

    return Counting()


def _scale_of(scaler: Any) -> float:
    for name in ("get_scale", "scale", "loss_scale", "cur_scale"):
        value = getattr(scaler, name, None)
        if callable(value) and name == "get_scale":
            value = value()
        if value is not None and not callable(value):
            return float(value)
    raise ScalerError(
        f"reading the scale of a {type(scaler).__name__}", "no get_scale()", "get_scale(), or an attribute scale or loss_scale",
        "give serve() its init=, step= and scale_of=",
    )  # fmt: skip


def _method(scaler: Any, doing: str, *names: str) -> Callable[..., Any]:
    for name in names:
        method = getattr(scaler, name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    raise ScalerError(f"{doing}: a {type(scaler).__name__}", "no such method", " or ".join(f"{n}()" for n in names))


def _device_of(factory: Any) -> Dict[str, Any]:
    """torch's GradScaler is made for the CPU: its default device is one that may not be there."""
    torch = sys.modules.get("torch")
    amp = getattr(torch, "amp", None)
    kind = getattr(amp, "GradScaler", None)
    if kind is not None and inspect.isclass(factory) and issubclass(factory, kind):
        if "device" in inspect.signature(factory).parameters or _takes_any(factory):
            return {"device": "cpu"}
    return {}


def _takes_any(factory: Callable[..., Any]) -> bool:
    kinds = [p.kind for p in inspect.signature(factory).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _taken(factory: Callable[..., Any], config: Config, fixed: Config) -> Optional[Config]:
    """The configuration that ``factory`` is called with: all of it, or none of it."""
    wanted = {k: v for k, v in config.items() if k not in fixed}
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None
    if _takes_any(factory):
        return wanted
    known = [
        n for n, p in parameters.items() if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    foreign = [k for k in wanted if k not in known]
    if len(foreign) == len(wanted):
        return None
    if foreign:
        name = getattr(factory, "__name__", str(factory))
        raise ScalerError(
            f"configuring {name}", f"no argument {', '.join(foreign)}", f"the arguments of {name}: {', '.join(known)}",
            "wrap it in a function that takes them",
        )  # fmt: skip
    return wanted


# ---- functions


class _Functions(_Subject):
    """A scaler of functions: each step gives a new state."""

    def __init__(
        self,
        init: Callable[..., Any],
        step: Callable[[Any, bool], Tuple[Any, bool]],
        scale_of: Callable[[Any], Any],
        save: Callable[[Any], Any],
        load: Callable[[Any, Any], Any],
    ) -> None:
        self._init, self._step, self._scale_of, self._save, self._load = init, step, scale_of, save, load
        self._config: Dict[str, Any] = {}
        self._state: Any = None
        self._begun = False

    def reset(self, config: Optional[Config]) -> Tuple[float, Optional[Config]]:
        taken = _taken(self._init, config, {}) if config else None
        self._config = dict(taken or {})
        self._state, self._begun = self._init(**self._config), True
        return float(self._scale_of(self._state)), taken

    def step(self, found_inf: bool) -> Tuple[float, bool]:
        answer = self._step(self._started(), found_inf)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise ScalerError("stepping", f"a {type(answer).__name__}", "a pair: the new state, and whether the step was skipped")
        self._state, skipped = answer
        return float(self._scale_of(self._state)), bool(skipped)

    def save(self) -> Any:
        return _to_json(self._save(self._started()))

    def load(self, state: Any) -> float:
        self._state, self._begun = self._load(self._init(**self._config), _from_json(state)), True
        return float(self._scale_of(self._state))

    def _started(self) -> Any:
        if not self._begun:
            self.reset(None)
        return self._state


# ---- states as JSON


def _to_json(value: Any) -> Any:
    """``value`` as JSON can hold it: what JSON has no word for (inf, NaN, tensors, arrays, tuples) is an object with one key "$...",
    that `_from_json` turns back."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Mapping):
        if not all(isinstance(k, str) for k in value):
            return {"$items": [[_to_json(k), _to_json(v)] for k, v in value.items()]}
        return {k: _to_json(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return {"$tuple": [_to_json(v) for v in value]}
    if isinstance(value, list):
        return [_to_json(v) for v in value]
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "tolist"):
        return {"$torch": [str(value.dtype).rpartition(".")[2], _to_json(value.tolist())]}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # numpy, jax
        return {"$array": [str(value.dtype), _to_json(value.tolist())]}
    raise ScalerError("saving a state", f"a {type(value).__name__}", "numbers, text, lists, dicts and tensors", "give serve() a save=")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == "$float":
            return float(inner)
        if key == "$items":
            return {_from_json(k): _from_json(v) for k, v in inner}
        if key == "$tuple":
            return tuple(_from_json(v) for v in inner)
        if key == "$torch":
            torch = importlib.import_module("torch")
            return torch.tensor(_from_json(inner[1]), dtype=getattr(torch, inner[0]))
        if key == "$array":
            numpy = importlib.import_module("numpy")
            return numpy.array(_from_json(inner[1]), dtype=inner[0])
    return {k: _from_json(v) for k, v in value.items()}


# ---- the loop


def _scale_json(scale: float) -> Any:
    return scale if math.isfinite(scale) else repr(scale)  # "inf", "nan"


def answer(subject: _Subject, request: Any) -> Dict[str, Any]:
    """The answer to one request; whatever goes wrong inside the scaler is its terminal state."""
    try:
        op = request.get("op") if isinstance(request, dict) else None
        if op == "step":
            found_inf = request["found_inf"]
            if not isinstance(found_inf, bool):
                raise ScalerError("reading a request", f"found_inf {found_inf!r}", "true or false")
            scale, skipped = subject.step(found_inf)
            return {"scale": _scale_json(scale), "skipped": skipped}
        if op == "reset":
            scale, taken = subject.reset(request.get("config"))
            return {"scale": _scale_json(scale), "config": None if taken is None else dict(taken)}
        if op == "save":
            return {"state": subject.save()}
        if op == "load":
            return {"scale": _scale_json(subject.load(request["state"]))}
        raise ScalerError("reading a request", f"op {op!r}", "reset, step, save or load")
    except GradscaleError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def _own_stdout() -> Iterator[IO[str]]:
    """Standard output for the answers alone: what else is printed, from C too, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(kept, "w", encoding="utf-8", newline="\n", closefd=False) as out:
            yield out
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _serve(subject: _Subject, requests: IO[str], out: IO[str]) -> None:
    while True:
        line = requests.readline()  # not iteration, which would read ahead of the answers
        if not line:
            return
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except ValueError as error:
            reply: Dict[str, Any] = {"error": f"reading a request: {error}"}
        else:
            reply = answer(subject, request)
        try:
            out.write(json.dumps(reply) + "\n")
            out.flush()
        except BrokenPipeError:  # nobody listens any more
            return


def serve(
    scaler: Any = None,
    *,
    init: Optional[Callable[..., Any]] = None,
    step: Optional[Callable[[Any, bool], Tuple[Any, bool]]] = None,
    scale_of: Optional[Callable[[Any], Any]] = None,
    save: Callable[[Any], Any] = lambda state: state,
    load: Callable[[Any, Any], Any] = lambda fresh, state: state,
    config: Optional[Config] = None,
    requests: Optional[IO[str]] = None,
    answers: Optional[IO[str]] = None,
) -> None:
    """Answers ``gradscale check --exec`` for a loss scaler until the requests end.

    ``scaler``: a class or function that makes one and is called with the configuration, or an instance (copied, never used
    itself). One with ``unscale_``, ``step`` and ``update`` is driven as torch's GradScaler: a real parameter's gradient
    is inf, and the step was skipped if it did not reach the optimizer. Any other is told: ``update(found_inf)``, with
    ``get_scale()`` or an attribute ``scale`` or ``loss_scale``. Both save with ``state_dict()``, ``load_state_dict()``.
    ``config``: arguments that are always given to the class.

    Without an object: ``init(**config)`` makes a state, ``step(state, found_inf)`` returns the new state and whether the step was skipped,
    ``scale_of(state)`` its scale, ``save(state)`` what to keep, ``load(fresh_state, kept)`` the state again.

    ``requests``, ``answers``: streams in place of standard input and output.

    Raises `ScalerError` when neither an object nor the three functions are given.
    """
    if scaler is not None and init is None and step is None:
        subject: _Subject = _Object(scaler, config)
    elif scaler is None and init is not None and step is not None and scale_of is not None:
        subject = _Functions(init, step, scale_of, save, load)
    else:
        given = [n for n, v in (("scaler", scaler), ("init", init), ("step", step), ("scale_of", scale_of)) if v is not None]
        raise ScalerError("serving a scaler", " and ".join(given) or "nothing", "either a scaler, or init, step and scale_of")
    requests = sys.stdin if requests is None else requests
    if answers is not None:
        _serve(subject, requests, answers)
        return
    with _own_stdout() as out:
        _serve(subject, requests, out)


def _named(name: str) -> Any:
    """What ``package.module.attribute`` or ``package.module:attribute`` stands for."""
    parts = name.replace(":", ".").split(".")
    doing = f'loading the scaler "{name}"'
    if len(parts) < 2:
        raise ScalerError(doing, "no module", "package.module.Class, such as torch.amp.GradScaler")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name + ".").startswith(error.name + "."):
                continue  # the module itself is missing, not something it imports
            raise
        for part in parts[cut:]:
            if not hasattr(found, part):
                raise ScalerError(doing, f"no {part} in {module_name}", "package.module.Class")
            found = getattr(found, part)
        return found
    raise ScalerError(doing, f"no module {parts[0]}", "a module that can be imported", "is it installed, or in this directory?")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """``python -m gradscale.testing NAME [key=value ...]``: serves the class, function or instance of that name."""
    words: List[str] = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print("usage: python -m gradscale.testing package.module.Class [argument=value ...]\n\n" + (__doc__ or "").strip())
        return 0 if words else 2
    fixed: Dict[str, Any] = {}
    try:
        for word in words[1:]:
            key, sign, text = word.partition("=")
            if not sign or not key.isidentifier():
                raise ScalerError("reading the arguments", repr(word), "argument=value")
            try:
                fixed[key] = json.loads(text)
            except ValueError:
                fixed[key] = text
        with _own_stdout() as out:
            gc.disable()  # what an import makes stays: looking through it is a tenth of torch's import
            scaler = _named(words[0])
            gc.freeze()
            gc.enable()
            _serve(_Object(scaler, fixed), sys.stdin, out)
    except GradscaleError as error:
        print(f"gradscale.testing: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
