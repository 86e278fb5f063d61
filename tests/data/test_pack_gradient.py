"""Packing changes neither a log-probability nor the gradient: merged, plain and one-by-one agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cuajax.data.images import image_hash
from cuajax.data.pack import PackSpec, pack
from cuajax.inputs.processor import ImageSpec
from cuajax.models import policy, presets
from cuajax.types import Sample

IMAGE_ID = 1
TINY = presets.get("tiny", vocab_size=32)
CFG = dataclasses.replace(TINY, decoder=dataclasses.replace(TINY.decoder, layers=2))
IMAGE = ImageSpec(patch=8, merge=2, position_side=8)


@jax.jit
@functools.partial(jax.value_and_grad, has_aux=True)
def gradient(params, micro):
    logp, _ = policy.token_logprobs(params, micro, cfg=CFG)
    return jnp.sum(micro.weight * logp), logp


def samples_and_images():
    """Two screens; candidates of one state, later steps that contain an earlier response, one-token answers."""
    rng = np.random.default_rng(0)
    screens = [rng.integers(0, 256, (32, 32, 3)).astype(np.uint8) for _ in range(2)]
    images = {image_hash(p): p for p in screens}
    hashes = list(images)
    out = []

    def add(hs, text, response):
        ids = np.array([*[IMAGE_ID] * (4 * len(hs)), *text], np.int32)
        k = len(response)
        floats = rng.normal(size=(3, k)).astype(np.float32)
        out.append(Sample(ids, tuple(hs), np.array(response, np.int32), *floats, None, f"g/{len(out)}/0"))

    for k in (3, 1, 2, 3):
        add(hashes[:1], [2, 3, 4], rng.integers(5, 30, k))
    first = out[0].response_ids.tolist()
    add(hashes[:1], [2, 3, 4, *first, 7], [8, 9])
    add(hashes[::-1], [2, 3], [5, 6, 7])
    add(hashes[::-1], [2, 9, 9], [6])
    return out, images


def loss_and_gradient(samples, images, **changes):
    spec = PackSpec(
        length=64, loss_tokens=24, images_per_row=2, patches_per_image=16, rows=1, image=IMAGE, image_id=IMAGE_ID,
        **changes,
    )  # fmt: skip
    batch, stats = pack(samples, images, spec=spec)
    params = policy.init(jax.random.key(0), CFG)
    total = None
    logps = {}
    for i in range(stats.micro):
        micro = jax.tree.map(lambda a, i=i: a[i], batch)
        (_, logp), grads = gradient(params, micro)
        keep = micro.weight != 0
        logps |= dict(zip(micro.behaviour_logp[keep].tolist(), np.asarray(logp)[keep].tolist(), strict=True))
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    return logps, total


@pytest.fixture(scope="module")
def one_by_one():
    samples, images = samples_and_images()
    parts = [loss_and_gradient([s], images) for s in samples]
    logps = {k: v for part, _ in parts for k, v in part.items()}
    return logps, jax.tree.map(lambda *g: sum(g), *(g for _, g in parts))


@pytest.mark.parametrize("merge", [True, False])
def test_gradients_agree(one_by_one, merge):
    samples, images = samples_and_images()
    logps, grads = loss_and_gradient(samples, images, merge_prefixes=merge)
    want_logps, want = one_by_one
    assert logps.keys() == want_logps.keys()
    np.testing.assert_allclose([logps[k] for k in want_logps], list(want_logps.values()), atol=2e-5)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want))
    for got, ref in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        scale = max(float(jnp.abs(ref).max()), 1e-3 * largest)
        assert float(jnp.abs(got - ref).max()) / scale < 1e-4
