"""The language decoder of Qwen3-VL: pre-norm GQA with q/k norm, interleaved M-RoPE, SwiGLU, DeepStack inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cuajax.models.layers import (
    Leaf,
    Params,
    attend,
    frequencies,
    linear,
    rms_norm,
    rotate,
    scan_layers,
    stack,
    tree_attention,
)


@dataclass(frozen=True)
class DecoderConfig:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_theta: float = 5e6
    mrope: tuple[int, int, int] = (24, 20, 20)  # rotary frequencies given to time, row, column
    eps: float = 1e-6
    block: int = 512  # queries attended at a time
    qk_gain: float = 1.0  # initial q/k norm weight; above 1 sharpens attention of small models


class KV(NamedTuple):
    k: jax.Array  # [L,B,C,Hkv,D]
    v: jax.Array  # [L,B,C,Hkv,D]


def declare(cfg: DecoderConfig) -> dict:
    """Every leaf of the decoder's layers and final norm (the embedding and head belong to the policy)."""
    d, q, kv = cfg.hidden, cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    residual = (2 * cfg.layers) ** -0.5  # keeps the residual stream's variance near that of its input
    layer = {
        "norm1": Leaf((d,), (None,), "ones"),
        "q": {"w": Leaf((d, q), ("embed", "heads"), "fan_in")},
        "k": {"w": Leaf((d, kv), ("embed", "kv_heads"), "fan_in")},
        "v": {"w": Leaf((d, kv), ("embed", "kv_heads"), "fan_in")},
        "q_norm": Leaf((cfg.head_dim,), (None,), "ones"),
        "k_norm": Leaf((cfg.head_dim,), (None,), "ones"),
        "out": {"w": Leaf((q, d), ("heads", "embed"), residual * q**-0.5)},
        "norm2": Leaf((d,), (None,), "ones"),
        "gate": {"w": Leaf((d, cfg.ffn), ("embed", "ffn"), "fan_in")},
        "up": {"w": Leaf((d, cfg.ffn), ("embed", "ffn"), "fan_in")},
        "down": {"w": Leaf((cfg.ffn, d), ("ffn", "embed"), residual * cfg.ffn**-0.5)},
    }
    return {"layers": stack(cfg.layers, layer), "norm": Leaf((d,), (None,), "ones")}


def mrope_angles(positions: jax.Array, cfg: DecoderConfig) -> jax.Array:
    """Interleaved M-RoPE: positions int32[B,3,T] -> angles float32[B,T,D/2].

    Frequency 3i+1 (i < rows' share) turns with the row, 3i+2 with the column, every other with time.
    """
    index = jnp.arange(cfg.head_dim // 2)
    axis = jnp.where((index % 3 == 1) & (index < 3 * cfg.mrope[1]), 1, 0)
    axis = jnp.where((index % 3 == 2) & (index < 3 * cfg.mrope[2]), 2, axis)
    chosen = jnp.moveaxis(positions, 1, 2)[..., axis]  # [B,T,D/2]
    return chosen.astype(jnp.float32) * frequencies(cfg.head_dim, cfg.rope_theta)


def _qkv(x: jax.Array, p: Params, angles: jax.Array, cfg: DecoderConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    b, t, _ = x.shape
    h = rms_norm(x, p["norm1"], cfg.eps)
    q = rms_norm(linear(h, p["q"]).reshape(b, t, cfg.heads, cfg.head_dim), p["q_norm"] * cfg.qk_gain, cfg.eps)
    k = rms_norm(linear(h, p["k"]).reshape(b, t, cfg.kv_heads, cfg.head_dim), p["k_norm"], cfg.eps)
    return rotate(q, angles), rotate(k, angles), linear(h, p["v"]).reshape(k.shape)


def _mlp(x: jax.Array, p: Params, cfg: DecoderConfig) -> jax.Array:
    h = rms_norm(x, p["norm2"], cfg.eps)
    return x + linear(jax.nn.silu(linear(h, p["gate"])) * linear(h, p["up"]), p["down"])


def forward(
    params: Params, x: jax.Array, positions: jax.Array, subtree_end: jax.Array, *,
    side: jax.Array, cfg: DecoderConfig, remat: bool, unroll: bool,
) -> tuple[jax.Array, KV]:  # fmt: skip
    """Embeddings x [B,T,d] to final hidden states [B,T,d] and every layer's keys and values.

    positions int32[B,3,T]; subtree_end int32[B,T] (token j is seen by i iff j <= i < subtree_end[j]);
    side [J,B,T,d] is added after the first J layers (DeepStack features at image tokens, zero elsewhere).
    """
    angles = mrope_angles(positions, cfg)

    def layer(x: jax.Array, p: Params) -> tuple[jax.Array, KV]:
        q, k, v = _qkv(x, p, angles, cfg)
        x = x + linear(tree_attention(q, k, v, subtree_end, block=cfg.block), p["out"])
        return _mlp(x, p, cfg), KV(k, v)

    layer = jax.checkpoint(layer) if remat else layer
    first = side.shape[0]
    caches = []
    for i in range(first):
        x, kv = layer(x, jax.tree.map(lambda a, i=i: a[i], params["layers"]))
        x = x + side[i]
        caches.append(jax.tree.map(lambda a: a[None], kv))
    if first < cfg.layers:
        x, kv = scan_layers(layer, x, jax.tree.map(lambda a: a[first:], params["layers"]), unroll=unroll)
        caches.append(kv)
    return rms_norm(x, params["norm"], cfg.eps), jax.tree.map(lambda *a: jnp.concatenate(a), *caches)


def decode(
    params: Params, cache: KV, x: jax.Array, positions: jax.Array, *, lengths: jax.Array,
    cfg: DecoderConfig, unroll: bool,
) -> tuple[jax.Array, KV]:  # fmt: skip
    """One token a row: x [B,d], positions int32[B] (text: one number for all three axes), lengths int32[B].

    Writes each row's key and value at its `lengths` and attends to 0..lengths. Returns hidden [B,d] and the cache.
    """
    angles = mrope_angles(jnp.broadcast_to(positions[:, None, None], (x.shape[0], 3, 1)), cfg)
    rows = jnp.arange(x.shape[0])
    mask = (jnp.arange(cache.k.shape[2])[None] <= lengths[:, None])[:, None]

    def layer(x: jax.Array, slot: tuple[Params, KV]) -> tuple[jax.Array, KV]:
        p, kv = slot
        q, k, v = _qkv(x, p, angles, cfg)
        kv = KV(kv.k.at[rows, lengths].set(k[:, 0]), kv.v.at[rows, lengths].set(v[:, 0]))
        return _mlp(x + linear(attend(q, kv.k, kv.v, mask), p["out"]), p, cfg), kv

    x, cache = scan_layers(layer, x[:, None], (params["layers"], cache), unroll=unroll)
    return rms_norm(x[:, 0], params["norm"], cfg.eps), cache
