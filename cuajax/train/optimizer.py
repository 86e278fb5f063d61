"""Optax chains from plain arguments. Which parameter gets what is decided by its logical axes."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

NAMES = ("adamw", "muon")
SCHEDULES = ("constant", "linear", "cosine")
TABLES = frozenset({"vocab", "position", "patch"})  # embeddings and heads: Adam, as Muon's authors advise
HEADS = frozenset({"heads", "kv_heads", "head_dim"})  # together one side of an attention projection


def make_schedule(
    learning_rate: float, *, schedule: str = "constant", warmup_steps: int = 0, total_steps: int = 0, end: float = 0.0
) -> optax.Schedule:
    """Linear warm-up from 0 to learning_rate over warmup_steps, then constant, linear or cosine decay.

    total_steps counts the warm-up; linear and cosine reach end * learning_rate there. The first update already has
    learning_rate / warmup_steps. Counts good updates only: a skipped one leaves the optimizer's count as it was.
    Raises ValueError with value, limit and choices.
    """
    _within("learning_rate", learning_rate, 0.0)
    _within("end", end, 0.0, 1.0)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}, expected one of {', '.join(SCHEDULES)}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}, expected >= 0")
    decay = total_steps - warmup_steps
    if schedule != "constant" and decay < 1:
        raise ValueError(f"total_steps is {total_steps}, expected > warmup_steps ({warmup_steps}) for {schedule!r}")
    after = {
        "constant": lambda: optax.constant_schedule(learning_rate),
        "linear": lambda: optax.linear_schedule(learning_rate, end * learning_rate, decay),
        "cosine": lambda: optax.cosine_decay_schedule(learning_rate, decay, alpha=end),
    }[schedule]()
    if not warmup_steps:
        return after
    warm = optax.linear_schedule(learning_rate / warmup_steps, learning_rate, max(warmup_steps - 1, 1))
    return optax.join_schedules([warm, after], [warmup_steps])


def make_optimizer(
    learning_rate: float | optax.Schedule,
    *,
    name: str = "adamw",
    axes: Any = None,
    clip_norm: float = 1.0,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Clip by global norm (0: off), then AdamW, or Muon for matrices with Adam for everything else.

    axes: logical axes like params (a tuple of names a leaf); needed by muon, and with weight decay to spare
    vectors (stacked ones too). betas and eps are Adam's; Muon's momentum is 0.95 and its update is scaled to
    AdamW's size (arXiv:2502.16982), so one learning rate serves both.
    Raises ValueError with value, limit and choices.
    """
    if name not in NAMES:
        raise ValueError(f"name is {name!r}, expected one of {', '.join(NAMES)}")
    if not callable(learning_rate):
        _within("learning_rate", learning_rate, 0.0)
    _within("clip_norm", clip_norm, 0.0)
    _within("weight_decay", weight_decay, 0.0)
    for i, beta in enumerate(betas):
        _within(f"betas[{i}]", beta, 0.0, 1.0)
    if axes is None and (name == "muon" or weight_decay):
        raise ValueError(f"{name} with weight_decay {weight_decay} needs axes: the logical axes of the parameters")

    decayed = None if axes is None else jax.tree.map(lambda a: matrix_axes(a) is not None, axes, is_leaf=is_axes)
    clip = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    if name == "adamw":
        b1, b2 = betas
        return optax.chain(
            *clip, optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed)
        )
    rule = muon(
        learning_rate,
        eps=eps,
        weight_decay=weight_decay,
        adam_b1=betas[0],
        adam_b2=betas[1],
        muon_weight_dimension_numbers=muon_dimensions(axes),
        consistent_rms=0.2,
    )
    return optax.chain(*clip, rule)


def is_axes(node: Any) -> bool:
    """Whether a node of an axes tree is one leaf's axes: a plain tuple of names or None, or None."""
    return node is None or (type(node) is tuple and all(a is None or isinstance(a, str) for a in node))


def matrix_axes(axes: tuple[str | None, ...] | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(input dimensions, output dimensions) of a weight declared [layers?, inputs.., outputs..], None for a vector.

    Head axes belong together: (embed, heads, head_dim) maps embed to heads x head_dim.
    """
    sides: list[list[int]] = []
    heads = False
    for i, axis in enumerate(axes or ()):
        if axis == "layers":
            continue
        if axis in HEADS and heads:
            sides[-1].append(i)
        else:
            sides.append([i])
        heads = axis in HEADS
    if len(sides) != 2:
        return None
    return tuple(sides[0]), tuple(sides[1])


def muon_dimensions(axes: Any) -> Any:
    """A tree of MuonDimensionNumbers like axes; None where Adam is used (vectors, embeddings, head)."""

    def leaf(names: tuple[str | None, ...] | None) -> MuonDimensionNumbers | None:
        sides = matrix_axes(names)
        if sides is None or TABLES & set(names or ()):
            return None
        return MuonDimensionNumbers(*sides)

    return jax.tree.map(leaf, axes, is_leaf=is_axes)


def _within(name: str, value: float, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low <= value <= high or value == math.inf:
        limit = f"in [{low:g}, {high:g}]" if high < math.inf else f"finite and >= {low:g}"
        raise ValueError(f"{name} is {value!r}, expected a number {limit}")
