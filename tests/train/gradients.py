"""Gradients of one set of samples, packed, batched and sharded in many ways: run by test_gradient_identity.py.

Prints one JSON object: way -> largest relative difference of any leaf from the plain reference. With the argument
`all` every way is taken; without it those that leave out nothing a cheaper test could not have found.
"""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cuajax.algorithms import surrogate
from cuajax.data.pack import PackSpec, pack, pad_micro
from cuajax.inputs.processor import ImageSpec
from cuajax.models import policy, presets
from cuajax.train import sharding, state, step
from cuajax.types import Sample

IMAGE_ID, VOCAB, SIDE = 1, 128, 32
IMAGE = ImageSpec(min_pixels=SIDE * SIDE, max_pixels=SIDE * SIDE)
TOKENS = (SIDE // 16) ** 2


# Keeps the gradient as its state, so that the real step hands it out as it is.
def _keep(updates, state, params=None):
    return jax.tree.map(jnp.zeros_like, updates), updates


KEEP = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), _keep)


def config():
    cfg = presets.get("tiny", vocab_size=VOCAB, unroll=False, remat=False)
    return dataclasses.replace(cfg, decoder=dataclasses.replace(cfg.decoder, layers=2))


def make_samples(rng):
    """Four states of three candidates, and two attempts of three turns whose prompts grow: weights sum to 1."""
    images = {f"image{i}": rng.integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8) for i in range(6)}
    text = lambda n: rng.integers(2, VOCAB, n).astype(np.int32)  # noqa: E731
    picture = np.full(TOKENS, IMAGE_ID, np.int32)
    prompts = []
    for i in range(4):
        prompts += [(np.concatenate([picture, text(5)]), (f"image{i}",))] * 3
    for i in (4, 5):
        grown = np.concatenate([picture, text(4)])
        for _ in range(3):
            prompts.append((grown, (f"image{i}",)))
            grown = np.concatenate([grown, text(3)])
    weight = 1.0 / len(prompts)
    samples = []
    for i, (ids, hashes) in enumerate(prompts):
        k = int(rng.integers(1, 5))
        samples.append(
            Sample(
                prompt_ids=ids,
                image_hashes=hashes,
                response_ids=text(k),
                behaviour_logp=np.full(k, -np.log(VOCAB), np.float32) + rng.normal(0, 0.3, k).astype(np.float32),
                advantage=np.full(k, rng.normal(), np.float32),
                weight=np.full(k, weight / k, np.float32),
                name=f"sample{i}",
            )
        )
    return samples, images


def packed(samples, images, *, rows, length=48, loss_tokens=24, merge=True):
    spec = PackSpec(
        length=length, loss_tokens=loss_tokens, images_per_row=2, patches_per_image=(SIDE // 8) ** 2, rows=rows,
        image=IMAGE, image_id=IMAGE_ID, merge_prefixes=merge,
    )  # fmt: skip
    return pack(samples, images, spec=spec)


def regroup(batch, count):
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] * x.shape[1] // count, *x.shape[2:]), batch)


def relative(got, reference):
    """Largest over leaves of max|d| / max(max|ref|, 1e-3 x the largest leaf's max)."""
    largest = max(float(np.abs(r).max()) for r in jax.tree.leaves(reference))
    return max(
        float(np.abs(np.asarray(g) - r).max()) / max(float(np.abs(r).max()), 1e-3 * largest)
        for g, r in zip(jax.tree.leaves(got), jax.tree.leaves(reference), strict=True)
    )


def build(cfg, initial):
    """gradient(batch, mesh shape or None) -> (gradients, loss) through the real train step; one jit a mesh."""
    axes = policy.logical_axes(cfg)
    logprobs = functools.partial(policy.token_logprobs, cfg=cfg)
    loss = functools.partial(surrogate.policy_loss, kl_beta=0.01, entropy_coef=0.01)

    @functools.cache
    def on(shape):
        if shape is None:
            return None, None, step.make_train_step(logprobs, loss, KEEP)
        mesh = sharding.make_mesh(*shape, devices=jax.devices()[: int(np.prod(shape))])
        sh = sharding.state_shardings(mesh, jax.eval_shape(lambda: state.create(initial, KEEP)), axes)
        return mesh, sh, step.make_train_step(logprobs, loss, KEEP, mesh=mesh, state_shardings=sh)

    def gradient(batch, shape=None):
        mesh, sh, train = on(shape)
        current = state.create(jax.tree.map(jnp.asarray, initial), KEEP)
        if mesh is not None:
            current, batch = jax.device_put(current, sh), sharding.place(batch, mesh)
        new, metrics = train(current, batch)
        assert int(new.skipped) == 0
        return jax.tree.map(np.asarray, new.opt_state), float(metrics["loss"])

    return gradient


def main(everything):
    cfg, rng = config(), np.random.default_rng(0)
    samples, images = make_samples(rng)
    initial = policy.init(jax.random.key(0), cfg)
    initial = jax.tree.map(lambda p: np.asarray(p + 0.1 * rng.normal(size=p.shape), np.float32), initial)
    gradient = build(cfg, initial)

    plain, stats = packed(samples, images, rows=16, merge=False)
    assert stats.tokens == stats.tokens_plain  # every sample is a segment of its own
    reference, value = gradient(plain)
    merged, stats = packed(samples, images, rows=8)
    assert stats.micro == 1
    assert stats.tokens < stats.tokens_plain
    wide, _ = packed(samples, images, rows=16)
    shuffled = jax.tree.map(lambda x: x[:, np.random.default_rng(1).permutation(16)], wide)
    ways = {
        "one tree against many segments, padded rows": (wide, None),
        "permuted rows": (shuffled, None),
        "permuted samples": (packed(samples[::-1], images, rows=16)[0], None),
        "padded tokens": (packed(samples, images, rows=16, length=80, loss_tokens=40)[0], None),
        "padded microbatches": (pad_micro(merged, 2), None),
        "2 microbatches": (regroup(wide, 2), None),
        "mesh (1, 8, 1)": (wide, (1, 8, 1)),
        "mesh (2, 2, 2), 2 microbatches": (regroup(wide, 2), (2, 2, 2)),
    }
    if everything:
        ways |= {f"{n} microbatches": (regroup(wide, n), None) for n in (4, 8)}
        ways |= {f"mesh {s}": (wide, s) for s in ((1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 1, 8))}
        ways["eight rows"] = (merged, None)
    report, losses = {}, []
    for name, (batch, shape) in ways.items():
        grads, loss = gradient(batch, shape)
        report[name] = relative(grads, reference)
        losses.append(abs(loss - value) / abs(value))
    report["loss"] = max(losses)
    # The measure itself can fail: one weight of 18 changed by 1 part in 1,000 must be seen.
    heavier = [dataclasses.replace(samples[0], weight=samples[0].weight * np.float32(1.001)), *samples[1:]]
    report["changed"] = relative(gradient(packed(heavier, images, rows=16)[0])[0], reference)
    print(json.dumps(report))


if __name__ == "__main__":
    main("all" in sys.argv[1:])
