"""Question: does flax's DynamicScale keep the laws of a loss scaler, and does it do what the policy `flax` says?

    gradscale check --exec "python experiments/check_flax_scaler.py" --policy flax:growth_interval=20 --silence 60

flax's scaler is no object that changes: every step gives a new one. So it is served as functions; the gradient that is inf is a real
one, taken through `value_and_grad`. Needs flax and jax (pip install flax), and gradscale, which needs neither.
"""

import sys
from pathlib import Path

import flax.serialization
import jax
from flax.training.dynamic_scale import DynamicScale
from jax import numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
from gradscale.testing import serve  # noqa: E402


def init(growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, scale=65536.0, minimum_scale=jnp.finfo(jnp.float32).tiny):
    # The same types as after a step, or jit would compile twice.
    return DynamicScale(
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        fin_steps=jnp.int32(0),
        scale=jnp.float32(scale),
        minimum_scale=minimum_scale if minimum_scale is None else float(minimum_scale),
    )


@jax.jit
def taken(scale, x):
    scale, is_finite, _, _ = scale.value_and_grad(lambda w: w * x)(jnp.float32(1.0))
    return scale, is_finite


FINITE, INFINITE = jnp.float32(1.0), jnp.float32(jnp.inf)


def step(scale, found_inf):
    scale, is_finite = taken(scale, INFINITE if found_inf else FINITE)
    return scale, not is_finite  # flax only says so; to skip the step is up to the training loop


def load(fresh, state):
    scale = flax.serialization.from_state_dict(fresh, state)
    return scale.replace(fin_steps=jnp.int32(scale.fin_steps), scale=jnp.float32(scale.scale))


if __name__ == "__main__":
    serve(init=init, step=step, scale_of=lambda scale: scale.scale, save=flax.serialization.to_state_dict, load=load)
