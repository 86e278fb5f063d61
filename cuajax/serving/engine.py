"""Prefill, insert and generate over slots: the device side of serving, with JetStream's method names.

Everything a request needs lives in the donated `DecodeState` row of its slot; parameters are passed to every call.
Shapes are bucketed, so after `warmup` nothing compiles. Each call returns one int32 array with all there is to know,
so that a step costs one host copy:

    column  0 token | 1 bits of the float32 logprob | 2 flags | with truncation: 3 kept ids | 4.. the ids, -1 padded
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from cuajax.models import policy
from cuajax.models.policy import KV, PolicyConfig, PromptBatch
from cuajax.serving import sampling
from cuajax.types import Sampling, VisionInputs

T = TypeVar("T")

EMITTED, STOPPED, EXHAUSTED, BROKEN = 1, 2, 4, 8  # flags of a result row; BROKEN: logits were not finite
TOKEN, LOGPROB, FLAGS, COUNT, SUPPORT = range(5)  # columns of a result row
_ROW, _SLOT, _LIMIT, _TEMPERATURE, _TOP_P, _TOP_K, _SEED, _STOPS = 0, 1, 2, 3, 4, 5, 6, 8  # columns of a request row


@dataclass(frozen=True)
class Buckets:
    """The shapes that get compiled; every tuple rises. A shape is rounded up to the next bucket."""

    prompts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)  # rows of a prefill
    lengths: tuple[int, ...] = (32, 48, 64)  # prompt tokens
    slots: tuple[int, ...] = (8, 32, 128)  # rows of an insert or of a decode step; the last is the number of slots
    images: tuple[int, ...] = (0, 1)  # images a prompt
    patches: int = 64  # patches an image
    answer: int = 16  # most tokens of an answer
    stops: int = 64  # most stop ids of a request
    support: int = 256  # most ids that survive truncation

    def __post_init__(self) -> None:
        for name in ("prompts", "lengths", "slots", "images"):
            value = getattr(self, name)
            if not value or list(value) != sorted(set(value)) or value[0] < (name != "images"):
                raise ValueError(f"Buckets.{name} is {value}, must rise from {int(name != 'images')} or more")

    @property
    def capacity(self) -> int:
        """Tokens a slot's cache holds: the longest prompt and an answer (its last token needs no room)."""
        return self.lengths[-1] + self.answer - 1


class Prefix(NamedTuple):
    """Prefilled prompts: what `insert` copies into slots."""

    k: jax.Array  # [L,B,P,Hkv,D]
    v: jax.Array
    logits: jax.Array  # float32[B,V] of the first answer token
    lengths: jax.Array  # int32[B]
    positions: jax.Array  # int32[B] rope position of the first answer token


class DecodeState(NamedTuple):
    k: jax.Array  # [L,S,C,Hkv,D]
    v: jax.Array
    tokens: jax.Array  # int32[S] last token drawn
    positions: jax.Array  # int32[S] its rope position
    lengths: jax.Array  # int32[S] tokens in the cache
    drawn: jax.Array  # int32[S] tokens of the answer so far
    limit: jax.Array  # int32[S] most tokens of the answer
    done: jax.Array  # bool[S]
    stops: jax.Array  # int32[S,N] padded with -1
    knobs: sampling.Knobs


def pick(buckets: Sequence[int], need: int) -> int:
    """The smallest bucket of at least `need`. Raises ValueError when there is none."""
    at = bisect.bisect_left(buckets, need)
    if at == len(buckets):
        raise ValueError(f"{need} is above the largest bucket; buckets: {', '.join(map(str, buckets))}")
    return buckets[at]


def _float(column: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(column, jnp.float32)


def _pack(draw: sampling.Draw, flags: jax.Array, width: int) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(draw.logprob, jnp.int32)
    columns = [draw.token, bits, flags.astype(jnp.int32)] + ([draw.count] if width else [])
    head = jnp.stack(columns, axis=-1)
    return jnp.concatenate([head, draw.support], axis=-1) if width else head


class Engine:
    """A policy over slots. Holds shapes and compiled programs, never parameters or requests."""

    def __init__(self, cfg: PolicyConfig, buckets: Buckets | None = None, *, valid_vocab: int = 0, model: Any = policy):
        """`valid_vocab`: ids from here on are never sampled (0: as the config says); `model`: prefill and decode."""
        self.cfg = cfg
        self.buckets = buckets or Buckets()
        self.valid_vocab = valid_vocab or cfg.valid_vocab or cfg.vocab_size
        self.width = min(self.buckets.support, self.valid_vocab)
        self.compilations = 0  # programs traced so far
        self._model = model
        self._prefill = jax.jit(self._traced(self._prefill_fn))
        self._insert = jax.jit(self._traced(self._insert_fn), static_argnames="width", donate_argnums=1)
        self._generate = jax.jit(self._traced(self._generate_fn), static_argnames=("batch", "width"), donate_argnums=1)

    def _traced(self, fn: Any) -> Any:
        @functools.wraps(fn)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.compilations += 1  # the body runs when jit traces, and only then
            return fn(*args, **kwargs)

        return counted

    # -------------------------------------------------------------------------------------------- pure functions
    def _prefill_fn(self, params: Any, prompts: PromptBatch, positions: jax.Array) -> Prefix:
        logits, cache = self._model.prefill(params, prompts, cfg=self.cfg)
        return Prefix(cache.k, cache.v, logits, prompts.lengths, positions)

    def _insert_fn(
        self, prefix: Prefix, state: DecodeState, requests: jax.Array, *, width: int
    ) -> tuple[DecodeState, jax.Array]:
        row, slot, limit = requests[:, _ROW], requests[:, _SLOT], requests[:, _LIMIT]
        seed = jax.lax.bitcast_convert_type(requests[:, _SEED : _SEED + 2], jnp.uint32)
        knobs = sampling.Knobs(
            _float(requests[:, _TEMPERATURE]), _float(requests[:, _TOP_P]), requests[:, _TOP_K], seed
        )
        stops = requests[:, _STOPS:]
        draw_one = functools.partial(sampling.sample, valid=self.valid_vocab, width=width)
        draw = jax.vmap(draw_one)(prefix.logits[row], knobs, jnp.zeros_like(row))
        flags = self._flags(draw, jnp.ones_like(limit), limit, stops) | EMITTED
        span = prefix.k.shape[2]

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[slot].set(new, mode="drop")  # padding rows name a slot past the end

        # A free-standing slot index next to slices keeps the cache's layout: one scatter per cache.
        return DecodeState(
            k=state.k.at[:, slot, :span].set(prefix.k[:, row], mode="drop"),
            v=state.v.at[:, slot, :span].set(prefix.v[:, row], mode="drop"),
            tokens=put(state.tokens, draw.token),
            positions=put(state.positions, prefix.positions[row]),
            lengths=put(state.lengths, prefix.lengths[row]),
            drawn=put(state.drawn, jnp.ones_like(limit)),
            limit=put(state.limit, limit),
            done=put(state.done, flags != EMITTED),
            stops=put(state.stops, stops),
            knobs=jax.tree.map(put, state.knobs, knobs),
        ), _pack(draw, flags, width)

    def _flags(self, draw: sampling.Draw, drawn: jax.Array, limit: jax.Array, stops: jax.Array) -> jax.Array:
        stopped = jnp.any(draw.token[:, None] == stops, axis=-1)
        flags = jnp.where(stopped, STOPPED, 0) | jnp.where(drawn >= limit, EXHAUSTED, 0)
        return jnp.where(draw.finite, flags, BROKEN)

    def _generate_fn(self, params: Any, state: DecodeState, *, batch: int, width: int) -> tuple[DecodeState, jax.Array]:
        rows = jax.tree.map(lambda a: a[:batch], state._replace(k=state.tokens, v=state.tokens))
        cache = KV(state.k[:, :batch], state.v[:, :batch])
        logits, cache = self._model.decode(
            params, cache, rows.tokens, rows.positions, lengths=rows.lengths, cfg=self.cfg
        )
        draw = jax.vmap(functools.partial(sampling.sample, valid=self.valid_vocab, width=width))(
            logits, rows.knobs, rows.drawn
        )
        live = (~rows.done).astype(jnp.int32)
        flags = jnp.where(rows.done, 0, self._flags(draw, rows.drawn + 1, rows.limit, rows.stops) | EMITTED)
        moved = rows._replace(
            tokens=jnp.where(rows.done, rows.tokens, draw.token),
            positions=rows.positions + live,
            lengths=rows.lengths + live,
            drawn=rows.drawn + live,
            done=rows.done | (flags != EMITTED),
        )
        put = functools.partial(jax.tree.map, lambda old, new: old.at[:batch].set(new))
        state = put(state._replace(k=state.tokens, v=state.tokens), moved)._replace(
            k=state.k.at[:, :batch].set(cache.k), v=state.v.at[:, :batch].set(cache.v)
        )
        return state, _pack(draw, flags, width)

    # ---------------------------------------------------------------------------------------------------- calls
    def init_decode_state(self) -> DecodeState:
        """An empty state of `buckets.slots[-1]` slots, all done."""
        slots = self.buckets.slots[-1]
        cache = self._model.empty_cache(self.cfg, slots, self.buckets.capacity)
        knobs = sampling.Knobs(
            jnp.ones(slots), jnp.ones(slots), jnp.zeros(slots, jnp.int32), jnp.zeros((slots, 2), jnp.uint32)
        )
        counters = [jnp.zeros(slots, jnp.int32) for _ in range(5)]  # apart: a buffer can be donated only once
        stops = jnp.full((slots, self.buckets.stops), -1, jnp.int32)
        return DecodeState(*cache, *counters, done=jnp.ones(slots, bool), stops=stops, knobs=knobs)

    def prefill(self, params: Any, prompts: PromptBatch, positions: np.ndarray) -> Prefix:
        """Prompts of bucketed shape to a Prefix; positions int32[B] are those of the first answer tokens."""
        return self._prefill(params, prompts, positions)

    def insert(
        self, prefix: Prefix, state: DecodeState, requests: np.ndarray, *, truncate: bool = False
    ) -> tuple[DecodeState, jax.Array]:
        """Copies prefix rows into slots and draws first answer tokens; several slots may share one row.

        `requests` int32[n,W] comes from `pack_requests`; `state` is donated. Returns the state and results int32[n,R].
        """
        return self._insert(prefix, state, requests, width=self.width if truncate else 0)

    def generate(
        self, params: Any, state: DecodeState, *, batch: int, truncate: bool = False
    ) -> tuple[DecodeState, jax.Array]:
        """One more token for slots 0..batch-1 (`batch` a bucket); `state` is donated. Results are int32[batch,R]."""
        return self._generate(params, state, batch=batch, width=self.width if truncate else 0)

    def pack_requests(
        self, rows: Sequence[int], slots: Sequence[int], requests: Sequence[Sampling], seeds: Sequence[int]
    ) -> np.ndarray:
        """Request rows for `insert`, padded to a bucket: int32[n,W]; `seeds` are taken modulo 2^64."""
        count = len(rows)
        out = np.full((pick(self.buckets.slots, count), _STOPS + self.buckets.stops), -1, np.int32)
        out[:, _ROW], out[:, _SLOT], out[:, _LIMIT:_STOPS] = 0, self.buckets.slots[-1], 1
        out[:count, _ROW], out[:count, _SLOT] = rows, slots
        whole = [(s.max_tokens, s.top_k) for s in requests]
        out[:count, (_LIMIT, _TOP_K)] = whole
        real = np.array([(s.temperature, s.top_p) for s in requests], np.float32)
        out[:count, _TEMPERATURE : _TOP_P + 1] = real.view(np.int32)
        words = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64)
        out[:count, _SEED], out[:count, _SEED + 1] = (
            (words >> np.uint64(32)).astype(np.uint32).view(np.int32),
            (words.astype(np.uint32).view(np.int32)),
        )
        kinds = dict.fromkeys(s.stop_ids for s in requests)
        for stop_ids in kinds:
            if stop_ids:
                at = slice(count) if len(kinds) == 1 else [i for i, s in enumerate(requests) if s.stop_ids == stop_ids]
                out[at, _STOPS : _STOPS + len(stop_ids)] = stop_ids
        return out

    def warmup(self, params: Any, *, truncate: bool = False, lengths: Sequence[int] = ()) -> int:
        """Compiles every bucket (of `lengths`, if given; with truncation too, if asked) and returns their number."""
        before, state, b = self.compilations, self.init_decode_state(), self.buckets
        widths = (False, True) if truncate else (False,)
        result: Any = None
        for length in lengths or b.lengths:
            for fewest, rows in zip((1, *(n + 1 for n in b.prompts)), b.prompts, strict=False):
                if fewest > b.slots[-1]:
                    break
                for images in b.images:
                    prompts = blank(rows, length, images, self)
                    prefix = self.prefill(params, prompts, np.ones(rows, np.int32))
                for slots in b.slots[b.slots.index(pick(b.slots, fewest)) :]:
                    request = self.pack_requests([0] * slots, range(slots), [Sampling()] * slots, [0] * slots)
                    for width in widths:
                        state, result = self.insert(prefix, state, request, truncate=width)
        for slots in self.buckets.slots:
            for width in widths:
                state, result = self.generate(params, state, batch=slots, truncate=width)
        jax.block_until_ready(result)
        return self.compilations - before


def blank(rows: int, length: int, images: int, engine: Engine) -> PromptBatch:
    """A PromptBatch of one-token prompts without content: padding, and what warm-up compiles with."""
    vision, n = engine.cfg.vision, engine.buckets.patches
    return PromptBatch(
        tokens=np.zeros((rows, length), np.int32),
        positions=np.zeros((rows, 3, length), np.int32),
        lengths=np.ones(rows, np.int32),
        image_index=np.full((rows, length), -1, np.int32),
        vision=VisionInputs(
            np.zeros((rows, images, n, 3 * vision.patch**2), np.uint8),
            np.zeros((rows, images, n, 2), np.int32),
            np.zeros((rows, images, n, 4), np.int32),
            np.zeros((rows, images, n, 4), np.float32),
            np.full((rows, images, n), -1, np.int32),
        ),
    )
