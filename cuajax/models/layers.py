"""The parts every tower is made of: leaf declarations, norms, linear maps, rotary embedding, tree attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = Mapping[str, Any]
MASKED = -1e30  # finite, so that a fully masked row stays NaN-free
ROWS = 17  # of a product, at least: with fewer, XLA's CPU backend adds up in another order


@dataclass(frozen=True)
class Leaf:
    """One parameter, declared once: its abstract shape, sharding and initial value all derive from this line."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical axis names, see train/sharding.py
    init: str | float  # "fan_in", "zeros", "ones", or the standard deviation of a normal

    def make(self, key: jax.Array, dtype: Any) -> jax.Array:
        """The initial value. Raises ValueError on an unknown `init`."""
        if isinstance(self.init, float):
            return self.init * jax.random.normal(key, self.shape, dtype)
        if self.init == "fan_in":
            return self.shape[-2] ** -0.5 * jax.random.normal(key, self.shape, dtype)
        if self.init in ("zeros", "ones"):
            return jnp.full(self.shape, float(self.init == "ones"), dtype)
        raise ValueError(f"unknown init {self.init!r}; choices: fan_in, zeros, ones, or a float")


def is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)


def stack(count: int, layer: Any) -> Any:
    """Declarations of `count` equal layers with a leading layer axis, ready for `lax.scan`."""
    return jax.tree.map(lambda p: Leaf((count, *p.shape), ("layers", *p.axes), p.init), layer, is_leaf=is_leaf)


def linear(x: jax.Array, p: Params) -> jax.Array:
    """x [..., in] -> [..., out] in x's dtype."""
    y = x @ p["w"].astype(x.dtype)
    return y + p["b"].astype(x.dtype) if "b" in p else y


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32.

    The mean is a product with ones: the order of a reduction may depend on the other axes' lengths, a product's does
    not, and so sampler and trainer get the same bits.
    """
    y = x.astype(jnp.float32)
    squares = jnp.matmul(y * y, jnp.ones((x.shape[-1], 1)), precision="highest")
    return (y * jax.lax.rsqrt(squares / x.shape[-1] + eps) * weight).astype(x.dtype)


def layer_norm(x: jax.Array, p: Params, eps: float) -> jax.Array:
    """Layer norm over the last axis, in float32."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * p["w"] + p["b"]).astype(x.dtype)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary embedding of x [..., H, D] by angles [..., D/2], the two halves of D forming the pairs."""
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def frequencies(dim: int, theta: float) -> jax.Array:
    """Inverse rotary frequencies float32[dim/2]."""
    return theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention: q [B,Q,H,D], k v [B,C,Hkv,D], mask bool[B,Q,C] -> [B,Q,H*D]; softmax in float32.

    A decoded token gets the same bits as in a training row: softmax's denominator is one more column of the values
    (see `rms_norm`), and single queries are padded to `ROWS`.
    """
    b, n, heads, dim = q.shape
    kv_heads, group = k.shape[2], heads // k.shape[2]
    padding = max(0, -(-ROWS // group) - n)
    if padding:
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
        mask = jnp.pad(mask, ((0, 0), (0, padding), (0, 0)), mode="edge")
    q = q.reshape(b, n + padding, kv_heads, group, dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) * dim**-0.5
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    shares = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))).astype(v.dtype)
    values = jnp.concatenate([v, jnp.ones((*v.shape[:-1], 1), v.dtype)], axis=-1)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", shares, values, preferred_element_type=jnp.float32)
    return (out[..., :-1] / out[..., -1:]).astype(v.dtype)[:, :n].reshape(b, n, heads * dim)


def tree_mask(subtree_end: jax.Array, start: jax.Array | int, rows: int) -> jax.Array:
    """Visibility bool[B,rows,T] of queries start..start+rows: token j is seen by i iff j <= i < subtree_end[j]."""
    i = start + jnp.arange(rows)
    j = jnp.arange(subtree_end.shape[1])
    return (j[None, None] <= i[None, :, None]) & (i[None, :, None] < subtree_end[:, None, :])


def tree_attention(q: jax.Array, k: jax.Array, v: jax.Array, subtree_end: jax.Array, *, block: int) -> jax.Array:
    """Attention under a prefix-tree mask, a block of queries at a time so that no [T,T] buffer outlives a block.

    Shapes: q [B,T,H,D], k v [B,T,Hkv,D], subtree_end int32[B,T] -> [B,T,H*D].
    """
    length = q.shape[1]
    if length <= block:
        return attend(q, k, v, tree_mask(subtree_end, 0, length))
    if length % block:
        raise ValueError(f"row length {length} is not a multiple of the attention block {block}")

    @jax.checkpoint
    def one(start: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(q, start, block, axis=1)
        return attend(part, k, v, tree_mask(subtree_end, start, block))

    out = jax.lax.map(one, jnp.arange(0, length, block))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], length, -1)


def gather_rows(bank: jax.Array, index: jax.Array) -> jax.Array:
    """bank [B,N,D], index int32[B,T] -> [B,T,D]."""
    return jnp.take_along_axis(bank, index[..., None], axis=1)


def scan_layers(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, layers: Any, *, unroll: bool) -> Any:
    """`lax.scan` of `body(carry, layer)` over stacked layers."""
    return jax.lax.scan(body, carry, layers, unroll=True if unroll else 1)
