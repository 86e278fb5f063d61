"""What one update reads and replaces."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from flax import struct


@struct.dataclass
class TrainState:
    """Everything the train step owns; params are float32 masters whatever the compute dtype."""

    step: Any  # int32[] updates attempted, skipped ones included
    params: Any
    opt_state: Any
    skipped: Any  # int32[] non-finite updates in a row; 0 after a good one


def create(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """A state at step 0. The train step donates it: hand over params nobody else still reads."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        skipped=jnp.zeros((), jnp.int32),
    )


def split(state: TrainState) -> tuple[Any, dict[str, Any]]:
    """(params, everything else): the two items of a checkpoint. Works on abstract states and shardings too."""
    return state.params, {"step": state.step, "skipped": state.skipped, "opt_state": state.opt_state}


def join(params: Any, rest: dict[str, Any]) -> TrainState:
    """The inverse of `split`."""
    return TrainState(params=params, **rest)
