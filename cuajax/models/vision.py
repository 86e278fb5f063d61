"""The vision tower of Qwen3-VL (arXiv 2511.21631): patches to features, with DeepStack side outputs.

Everything that depends on an image's grid arrives precomputed in `VisionInputs`, so one compiled program serves
every grid of a bucket. Images are a flat leading axis here: I images of N patches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from cuajax.models.layers import Leaf, Params, attend, frequencies, layer_norm, linear, rotate, stack
from cuajax.types import VisionInputs

EPS = 1e-6
QUIET = 0.2  # initial scale of a block's outputs: patches start out as themselves, which a small policy learns faster
CHANNELS = 3


@dataclass(frozen=True)
class VisionConfig:
    hidden: int
    depth: int
    heads: int
    ffn: int
    patch: int = 16  # pixels a side
    merge: int = 2  # patches a side that become one feature
    temporal: int = 2  # frames a patch spans; a still image is repeated
    position_side: int = 48  # side of the learned position table
    deepstack: tuple[int, ...] = ()  # blocks whose output also enters the decoder
    rope_theta: float = 1e4
    mean: float = 0.5
    std: float = 0.5


def declare(cfg: VisionConfig, out: int) -> dict:
    """Every leaf of the tower; `out` is the decoder's width."""
    d, merged = cfg.hidden, cfg.hidden * cfg.merge**2

    def dense(n_in: int, n_out: int, a: str | None, b: str | None, *, gain: float = 1.0) -> dict:
        return {"w": Leaf((n_in, n_out), (a, b), gain * n_in**-0.5), "b": Leaf((n_out,), (b,), "zeros")}

    def norm(n: int) -> dict:
        return {"w": Leaf((n,), (None,), "ones"), "b": Leaf((n,), (None,), "zeros")}

    def merger(norm_size: int) -> dict:
        return {
            "norm": norm(norm_size),
            "fc1": dense(merged, merged, "vision_embed", "ffn"),
            "fc2": dense(merged, out, "ffn", "embed"),
        }

    block = {
        "norm1": norm(d),
        "qkv": dense(d, 3 * d, "vision_embed", "heads"),
        "out": dense(d, d, "heads", "vision_embed", gain=QUIET),
        "norm2": norm(d),
        "fc1": dense(d, cfg.ffn, "vision_embed", "ffn"),
        "fc2": dense(cfg.ffn, d, "ffn", "vision_embed", gain=QUIET),
    }
    tree = {
        "patch": dense(CHANNELS * cfg.temporal * cfg.patch**2, d, "patch", "vision_embed"),
        "position": Leaf((cfg.position_side**2, d), ("position", "vision_embed"), 0.5),
        "blocks": stack(cfg.depth, block),
        "merger": merger(d),
    }
    if cfg.deepstack:
        tree["deepstack"] = stack(len(cfg.deepstack), merger(merged))
    return tree


def _embed(params: Params, vision: VisionInputs, cfg: VisionConfig, dtype: jnp.dtype) -> jax.Array:
    """uint8 patches -> [I,N,hidden]. The repeated frames of a still image fold into one sum over the kernel's time."""
    kernel = params["patch"]["w"].reshape(CHANNELS, cfg.temporal, cfg.patch**2, cfg.hidden).sum(1)
    x = (vision.patches.astype(dtype) / 255.0 - cfg.mean) / cfg.std
    x = x @ kernel.reshape(-1, cfg.hidden).astype(dtype) + params["patch"]["b"].astype(dtype)
    position = jnp.einsum("...kd,...k->...d", params["position"][vision.taps], vision.tap_weights)
    return x + position.astype(dtype)


def _block(x: jax.Array, p: Params, angles: jax.Array, mask: jax.Array, *, cfg: VisionConfig) -> jax.Array:
    n, length, d = x.shape
    q, k, v = jnp.split(linear(layer_norm(x, p["norm1"], EPS), p["qkv"]), 3, axis=-1)
    heads = (n, length, cfg.heads, d // cfg.heads)
    q, k = rotate(q.reshape(heads), angles), rotate(k.reshape(heads), angles)
    x = x + linear(attend(q, k, v.reshape(heads), mask), p["out"])
    return x + linear(jax.nn.gelu(linear(layer_norm(x, p["norm2"], EPS), p["fc1"]), approximate=True), p["fc2"])


def _merge(x: jax.Array, p: Params, cfg: VisionConfig, *, norm_after: bool) -> jax.Array:
    """[I,N,hidden] -> [I,N/merge^2,out]; DeepStack's mergers normalise after the shuffle, the main one before."""
    merged = (x.shape[0], x.shape[1] // cfg.merge**2, cfg.merge**2 * cfg.hidden)
    x = layer_norm(x.reshape(merged), p["norm"], EPS) if norm_after else layer_norm(x, p["norm"], EPS).reshape(merged)
    return linear(jax.nn.gelu(linear(x, p["fc1"]), approximate=False), p["fc2"])


def encode(params: Params, vision: VisionInputs, cfg: VisionConfig, *, dtype: jnp.dtype, remat: bool) -> jax.Array:
    """Images to features [1+J,I,N/merge^2,out]: the merged features, then the J DeepStack levels.

    `vision` has leading axis [I] (uint8 patches in merge-block order).
    """
    x = _embed(params, vision, cfg, dtype)
    freqs = frequencies(cfg.hidden // cfg.heads // 2, cfg.rope_theta)
    angles = (vision.hw[..., None].astype(jnp.float32) * freqs).reshape(*vision.hw.shape[:-1], -1)
    mask = (vision.segments[:, :, None] == vision.segments[:, None, :]) & (vision.segments[:, None, :] >= 0)
    block = functools.partial(_block, cfg=cfg)
    block = jax.checkpoint(block) if remat else block
    side = []
    for i in range(cfg.depth):
        x = block(x, jax.tree.map(lambda a, i=i: a[i], params["blocks"]), angles, mask)
        if i in cfg.deepstack:
            j = cfg.deepstack.index(i)
            side.append(_merge(x, jax.tree.map(lambda a, j=j: a[j], params["deepstack"]), cfg, norm_after=True))
    return jnp.stack([_merge(x, params["merger"], cfg, norm_after=False), *side])
