"""The policy: a vision tower, a decoder and a vocabulary head, as pure functions over one parameter tree.

Trainer and sampler share every function here; only the cache differs, so that a token has one log-probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from cuajax.models import decoder, vision
from cuajax.models.decoder import KV, DecoderConfig
from cuajax.models.layers import MASKED, Leaf, Params, gather_rows, is_leaf
from cuajax.models.vision import VisionConfig
from cuajax.types import PackedBatch, VisionInputs


@dataclass(frozen=True)
class PolicyConfig:
    """Dimensions of a policy; hashable, so that it can be a static argument of jit."""

    vocab_size: int  # rows of the embedding
    vision: VisionConfig
    decoder: DecoderConfig
    tied: bool = True  # the head is the embedding, transposed
    valid_vocab: int = 0  # tokens the tokenizer knows; later rows are never sampled nor scored. 0: all
    dtype: str = "float32"  # of activations and matmuls; parameters stay float32
    remat: bool = True
    unroll: bool = False  # unroll the scan over layers (small models on CPU)
    logit_chunk: int = 1024  # loss tokens whose logits exist at a time
    embed_std: float = 0.02  # initial scale of token embeddings

    def __post_init__(self) -> None:
        if sum(self.decoder.mrope) != self.decoder.head_dim // 2:
            raise ValueError(
                f"mrope sections {self.decoder.mrope} must sum to head_dim/2 = {self.decoder.head_dim // 2}"
            )
        if self.decoder.heads % self.decoder.kv_heads:
            raise ValueError(f"heads {self.decoder.heads} is not a multiple of kv_heads {self.decoder.kv_heads}")
        if len(self.vision.deepstack) > self.decoder.layers:
            raise ValueError(f"{len(self.vision.deepstack)} DeepStack levels for {self.decoder.layers} decoder layers")
        if not 0 <= self.valid_vocab <= self.vocab_size:
            raise ValueError(f"valid_vocab {self.valid_vocab} is outside 0..{self.vocab_size}")


class PromptBatch(NamedTuple):
    tokens: Any  # int32[B,P], padded on the right
    positions: Any  # int32[B,3,P]
    lengths: Any  # int32[B]
    image_index: Any  # int32[B,P] row of the prompt's feature bank, -1: text
    vision: VisionInputs  # leading axes [B,M]


# ------------------------------------------------------------------------------------------------- parameters
def declare(cfg: PolicyConfig) -> dict:
    """The one list of leaves; shapes, shardings and initial values derive from it."""
    d = cfg.decoder.hidden
    tree = {
        "vision": vision.declare(cfg.vision, d),
        "embed": Leaf((cfg.vocab_size, d), ("vocab", "embed"), cfg.embed_std),
        "decoder": decoder.declare(cfg.decoder),
    }
    if not cfg.tied:
        tree["head"] = Leaf((cfg.vocab_size, d), ("vocab", "embed"), 0.02)
    return tree


def init(key: jax.Array, cfg: PolicyConfig) -> dict:
    """Float32 parameters from a PRNG key."""
    leaves, treedef = jax.tree.flatten(declare(cfg), is_leaf=is_leaf)
    keys = jax.random.split(key, len(leaves))
    return treedef.unflatten([leaf.make(k, jnp.float32) for leaf, k in zip(leaves, keys, strict=True)])


def abstract(cfg: PolicyConfig) -> dict:
    """The parameter tree as jax.ShapeDtypeStruct, without allocating."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), declare(cfg), is_leaf=is_leaf)


def logical_axes(cfg: PolicyConfig) -> dict:
    """The parameter tree as tuples of logical axis names."""
    return jax.tree.map(lambda p: p.axes, declare(cfg), is_leaf=is_leaf)


# ---------------------------------------------------------------------------------------------------- forward
def _inputs(
    params: Params, tokens: jax.Array, image_index: jax.Array, inputs: VisionInputs, *, cfg: PolicyConfig
) -> tuple[jax.Array, jax.Array]:
    """Token embeddings [B,T,d] with image features in their places, and DeepStack inputs [J,B,T,d]."""
    dtype = jnp.dtype(cfg.dtype)
    x = params["embed"][tokens].astype(dtype)
    levels = len(cfg.vision.deepstack)
    batch, images = inputs.patches.shape[:2]
    if images == 0:
        return x, jnp.zeros((levels, *x.shape), dtype)
    flat = VisionInputs(*(a.reshape(batch * images, *a.shape[2:]) for a in inputs))
    features = vision.encode(params["vision"], flat, cfg.vision, dtype=dtype, remat=cfg.remat)
    bank = features.reshape(1 + levels, batch, -1, features.shape[-1])  # [1+J,B,M*N',d]
    is_image = (image_index >= 0)[..., None]
    placed = jax.vmap(lambda level: jnp.where(is_image, gather_rows(level, jnp.maximum(image_index, 0)), 0))(bank)
    return jnp.where(is_image, placed[0], x), placed[1:]


def logits(params: Params, hidden: jax.Array, cfg: PolicyConfig) -> jax.Array:
    """hidden [...,d] -> float32[...,V]; rows past the tokenizer's length are masked."""
    head = params["embed"] if cfg.tied else params["head"]
    out = jnp.einsum("...d,vd->...v", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    if cfg.valid_vocab and cfg.valid_vocab < cfg.vocab_size:
        out = jnp.where(jnp.arange(cfg.vocab_size) < cfg.valid_vocab, out, MASKED)
    return out


def hidden_states(params: Params, batch: PackedBatch, *, cfg: PolicyConfig) -> jax.Array:
    """Final hidden states [B,T,d] of packed rows."""
    chex.assert_rank([batch.tokens, batch.positions, batch.subtree_end, batch.image_index], [2, 3, 2, 2])
    x, side = _inputs(params, batch.tokens, batch.image_index, batch.vision, cfg=cfg)
    return decoder.forward(
        params["decoder"], x, batch.positions, batch.subtree_end,
        side=side, cfg=cfg.decoder, remat=cfg.remat, unroll=cfg.unroll,
    )[0]  # fmt: skip


def token_logprobs(
    params: Params, batch: PackedBatch, *, cfg: PolicyConfig, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy of the sampling distribution at every loss token: two float32[B,K].

    The hidden states of the targets' parents are gathered before the head, which then runs in rematerialised chunks:
    no [B,T,V] array exists. With `batch.support` both renormalise over the recorded kept ids (-1: no truncation).
    Temperature divides logits exactly as the sampler does.
    """
    chex.assert_equal_shape([batch.targets, batch.target_parent, batch.weight])
    states = gather_rows(hidden_states(params, batch, cfg=cfg), batch.target_parent)
    rows, d = batch.targets.size, states.shape[-1]
    chunk = min(cfg.logit_chunk, rows)
    padding = -rows % chunk

    def pad(a: jax.Array) -> jax.Array:
        a = a.reshape(rows, *a.shape[2:])
        return jnp.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1)).reshape(
            (rows + padding) // chunk, chunk, *a.shape[1:]
        )

    @jax.checkpoint
    def score(part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, target, support = part
        return _score(logits(params, h, cfg) / temperature, target, support)

    parts = (pad(states.reshape(*batch.targets.shape, d)), pad(batch.targets), pad(batch.support))
    if rows + padding == chunk:
        logp, entropy = score(jax.tree.map(lambda a: a[0], parts))
    else:
        logp, entropy = jax.lax.map(score, parts)
    shape = batch.targets.shape
    return logp.reshape(-1)[:rows].reshape(shape), entropy.reshape(-1)[:rows].reshape(shape)


def _score(scores: jax.Array, target: jax.Array, support: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits float32[N,V], target int32[N], support int32[N,S] -> log-probability and entropy float32[N].

    In the sampler's order: scores - logsumexp(scores) would round at the size of the logits, not of the answer.
    """
    shift, total = _mass(scores)
    kept_entropy, truncated = jnp.zeros_like(total), jnp.zeros_like(total, bool)
    if support.shape[-1]:
        kept = jnp.where(support >= 0, jnp.take_along_axis(scores, jnp.maximum(support, 0), axis=-1), MASKED)
        truncated = jnp.any(support >= 0, axis=-1)
        kept_shift, kept_total = _mass(kept)
        kept_logp = kept - kept_shift[:, None] - kept_total[:, None]
        kept_entropy = -jnp.sum(jnp.where(support >= 0, jnp.exp(kept_logp) * kept_logp, 0.0), axis=-1)
        shift, total = jnp.where(truncated, kept_shift, shift), jnp.where(truncated, kept_total, total)
    logp = scores - shift[:, None] - total[:, None]
    entropy = -jnp.sum(jnp.exp(logp) * jnp.where(scores > MASKED / 2, logp, 0.0), axis=-1)
    entropy = jnp.where(truncated, kept_entropy, entropy)
    return jnp.take_along_axis(logp, target[:, None], axis=-1)[:, 0], entropy


def _mass(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(largest score, log of the sum of exp(score - largest)), both [N]."""
    shift = jax.lax.stop_gradient(scores.max(axis=-1))
    return shift, jnp.log(jnp.sum(jnp.exp(scores - shift[:, None]), axis=-1))


# -------------------------------------------------------------------------------------------------- generation
def empty_cache(cfg: PolicyConfig, batch: int, capacity: int) -> KV:
    """A zeroed cache of `batch` rows and `capacity` tokens."""
    shape = (cfg.decoder.layers, batch, capacity, cfg.decoder.kv_heads, cfg.decoder.head_dim)
    return KV(jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype))


def prefill(params: Params, prompts: PromptBatch, *, cfg: PolicyConfig) -> tuple[jax.Array, KV]:
    """Prompts to the next token's logits float32[B,V] and their keys and values [L,B,P,Hkv,D]."""
    chex.assert_equal_shape([prompts.tokens, prompts.image_index])
    x, side = _inputs(params, prompts.tokens, prompts.image_index, prompts.vision, cfg=cfg)
    index = jnp.arange(prompts.tokens.shape[1])[None]
    ends = jnp.where(index < prompts.lengths[:, None], prompts.lengths[:, None], index + 1)
    hidden, cache = decoder.forward(
        params["decoder"], x, prompts.positions, ends, side=side, cfg=cfg.decoder, remat=False, unroll=cfg.unroll
    )
    last = jnp.take_along_axis(hidden, (prompts.lengths - 1)[:, None, None], axis=1)[:, 0]
    return logits(params, last, cfg), cache


def decode(
    params: Params, cache: KV, tokens: jax.Array, positions: jax.Array, *, lengths: jax.Array, cfg: PolicyConfig
) -> tuple[jax.Array, KV]:
    """One step of every row: tokens, rope positions and lengths int32[B] -> logits float32[B,V] and the cache."""
    x = params["embed"][tokens].astype(jnp.dtype(cfg.dtype))
    hidden, cache = decoder.decode(
        params["decoder"], cache, x, positions, lengths=lengths, cfg=cfg.decoder, unroll=cfg.unroll
    )
    return logits(params, hidden, cfg), cache
