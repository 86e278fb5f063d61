"""Schedules, AdamW against hand numbers, and what Muon orthogonalises."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from cuajax.train.optimizer import make_optimizer, make_schedule, matrix_axes, muon_dimensions


def first_update(tx, grads, params) -> Any:
    return tx.update(grads, tx.init(params), params)[0]


def curve(steps, **more):
    schedule: Any = make_schedule(1.0, **more)
    return [float(schedule(i)) for i in steps]


def test_schedules_golden():
    assert curve(range(3)) == [1, 1, 1]
    # Four warm-up steps: 1/4, 2/4, 3/4, 4/4, then constant.
    assert curve(range(6), warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert curve(range(2), warmup_steps=1) == pytest.approx([1, 1])
    # Two warm-up steps, then 4 steps from 1 to end 0.2: each 0.2 less.
    got = curve(range(8), schedule="linear", warmup_steps=2, total_steps=6, end=0.2)
    assert got == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    # Cosine over 4: 0.5 * (1 + cos(pi i / 4)).
    got = curve(range(6), schedule="cosine", total_steps=4)
    assert got == pytest.approx([1, 0.853553, 0.5, 0.146447, 0, 0], abs=1e-6)


def test_adamw_golden():
    # Adam's first update is -lr * sign(g) (eps aside); decoupled decay adds -lr * wd * p, to matrices only.
    axes = {"matrix": ("embed", "ffn"), "stacked_norm": ("layers", None)}
    params = {"matrix": jnp.full((2, 2), 3.0), "stacked_norm": jnp.full((2, 2), 3.0)}
    grads = {"matrix": jnp.array([[1.0, -1], [2, -2]]), "stacked_norm": jnp.array([[1.0, -1], [2, -2]])}
    tx = make_optimizer(0.1, axes=axes, weight_decay=0.01, clip_norm=0.0)
    updates = first_update(tx, grads, params)
    sign = np.array([[1, -1], [1, -1]])
    np.testing.assert_allclose(updates["matrix"], -0.1 * sign - 0.1 * 0.01 * 3, rtol=1e-5)
    np.testing.assert_allclose(updates["stacked_norm"], -0.1 * sign, rtol=1e-5)


def test_clip_is_by_global_norm():
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    tx = make_optimizer(1.0, clip_norm=1.0, betas=(0.0, 0.0), eps=1e6)  # eps swamps the moments: update = -g / eps
    updates = first_update(tx, {"a": jnp.array([3.0]), "b": jnp.array([4.0])}, params)
    assert float(updates["a"][0]) * -1e6 == pytest.approx(0.6, rel=1e-4)
    assert float(updates["b"][0]) * -1e6 == pytest.approx(0.8, rel=1e-4)


@pytest.mark.parametrize(
    ("axes", "sides"),
    [
        (("embed", "ffn"), ((0,), (1,))),
        (("layers", "embed", "heads"), ((1,), (2,))),
        (("layers", "embed", "kv_heads", "head_dim"), ((1,), (2, 3))),
        (("layers", "heads", "head_dim", "embed"), ((1, 2), (3,))),
        (("layers", "vision_embed"), None),
        ((None,), None),
        ((), None),
        (None, None),
    ],
)
def test_matrix_axes(axes, sides):
    assert matrix_axes(axes) == sides


def test_muon_leaves_embeddings_and_vectors_to_adam():
    axes = {"embed": ("vocab", "embed"), "position": ("position", "vision_embed"), "patch": ("patch", "vision_embed"),
            "norm": ("layers", None), "gate": ("layers", "embed", "ffn")}  # fmt: skip
    got = muon_dimensions(axes)
    assert {k for k, v in got.items() if v is not None} == {"gate"}


def test_muon_orthogonalises_each_layer_of_a_stack_alone():
    # Newton-Schulz sends every singular value near 1; consistent_rms 0.2 scales by 0.2 * sqrt(max(in, out)).
    rng = np.random.default_rng(0)
    axes = {"q": ("layers", "embed", "heads", "head_dim"), "norm": ("layers", None)}
    params = {"q": jnp.zeros((3, 16, 2, 4)), "norm": jnp.ones((3, 16))}
    grads = {"q": jnp.asarray(rng.normal(size=(3, 16, 2, 4)), jnp.float32), "norm": jnp.ones((3, 16))}
    grads["q"] = grads["q"].at[1].multiply(1e3)  # one layer's size must not reach another's update
    tx = make_optimizer(1.0, name="muon", axes=axes, clip_norm=0.0)
    updates = first_update(tx, grads, params)
    values = np.linalg.svd(np.asarray(updates["q"]).reshape(3, 16, 8), compute_uv=False) / (0.2 * 4)
    assert (values > 0.5).all()
    assert (values < 1.5).all()
    alone = {k: v[:1] for k, v in grads.items()}
    small = {k: v[:1] for k, v in params.items()}
    only = first_update(tx, alone, small)
    np.testing.assert_allclose(only["q"][0], updates["q"][0], rtol=1e-4, atol=1e-5)


def test_muon_steps_are_the_size_of_adams():
    rng = np.random.default_rng(0)
    axes, params = {"w": ("embed", "ffn")}, {"w": jnp.zeros((64, 128))}
    grads = {"w": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32)}
    tx = make_optimizer(1.0, name="muon", axes=axes)
    updates = first_update(tx, grads, params)
    assert 0.1 < float(jnp.sqrt(jnp.mean(updates["w"] ** 2))) < 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "sgd"}, "name is 'sgd', expected one of adamw, muon"),
        ({"name": "muon"}, "muon with weight_decay 0.0 needs axes"),
        ({"weight_decay": 0.1}, "adamw with weight_decay 0.1 needs axes"),
        ({"clip_norm": -1}, "clip_norm is -1, expected a number finite and >= 0"),
        ({"betas": (0.9, 1.5)}, r"betas\[1\] is 1.5, expected a number in \[0, 1\]"),
        ({"weight_decay": "x"}, "weight_decay is 'x'"),
    ],
)
def test_bad_optimizer_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(1e-3, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "step"}, "schedule is 'step', expected one of constant, linear, cosine"),
        ({"schedule": "linear"}, "total_steps is 0, expected > warmup_steps"),
        ({"warmup_steps": -1}, "warmup_steps is -1, expected >= 0"),
        ({"end": 2}, r"end is 2, expected a number in \[0, 1\]"),
    ],
)
def test_bad_schedule_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(1e-3, **arguments)
    with pytest.raises(ValueError, match="learning_rate is nan"):
        make_schedule(float("nan"))
