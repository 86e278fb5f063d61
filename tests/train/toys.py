"""A two-matrix policy over packed batches, for tests of the step that need no real model."""

import jax
import jax.numpy as jnp
import numpy as np

from cuajax.types import PackedBatch, VisionInputs

AXES = {"embed": ("vocab", "embed"), "w": ("layers", "embed", "ffn"), "scale": (None,)}
VOCAB, WIDTH = 12, 8


def params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"embed": (VOCAB, WIDTH), "w": (2, WIDTH, WIDTH), "scale": (WIDTH,)}
    return {k: jnp.asarray(rng.normal(0, 0.5, s), jnp.float32) for k, s in shapes.items()}


def logprobs(params, batch):
    """logp and entropy f32[B,K] of a bag of one token."""
    hidden = params["embed"][batch.tokens] * params["scale"]
    hidden = jnp.tanh(hidden @ params["w"][0]) @ params["w"][1]
    hidden = jnp.take_along_axis(hidden, batch.target_parent[..., None], 1)
    scores = jax.nn.log_softmax((hidden @ params["embed"].T).astype(jnp.float32))
    entropy = -(jnp.exp(scores) * scores).sum(-1)
    return jnp.take_along_axis(scores, batch.targets[..., None], -1)[..., 0], entropy


def microbatches(count=1, rows=4, length=6, losses=5, seed=0):
    """PackedBatch [count, rows, ...] of NumPy arrays; its weights sum to 1."""
    rng = np.random.default_rng(seed)
    lead = (count, rows)
    whole = lambda high, *s: rng.integers(0, high, (*lead, *s)).astype(np.int32)  # noqa: E731
    real = lambda *s: rng.normal(size=(*lead, *s)).astype(np.float32)  # noqa: E731
    weight = rng.uniform(0.1, 1, (*lead, losses)).astype(np.float32)
    vision = VisionInputs(
        patches=np.zeros((*lead, 0, 4, 12), np.uint8),
        hw=np.zeros((*lead, 0, 4, 2), np.int32),
        taps=np.zeros((*lead, 0, 4, 4), np.int32),
        tap_weights=np.zeros((*lead, 0, 4, 4), np.float32),
        segments=np.zeros((*lead, 0, 4), np.int32),
    )
    return PackedBatch(
        tokens=whole(VOCAB, length),
        positions=np.zeros((*lead, 3, length), np.int32),
        subtree_end=np.full((*lead, length), length, np.int32),
        image_index=np.full((*lead, length), -1, np.int32),
        targets=whole(VOCAB, losses),
        target_parent=whole(length, losses),
        behaviour_logp=-np.abs(real(losses)) - 2,
        advantage=real(losses),
        weight=weight / weight.sum(),
        prox_logp=np.zeros((*lead, losses), np.float32),
        ref_logp=np.zeros((*lead, losses), np.float32),
        support=np.zeros((*lead, losses, 0), np.int32),
        vision=vision,
    )


def regroup(batch, count):
    """The same rows as [count, rows / count, ...]."""
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] * x.shape[1] // count, *x.shape[2:]), batch)
