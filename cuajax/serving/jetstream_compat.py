"""Our engine as a JetStream 0.2.2 `Engine`, and the shims without which its Driver does not run here.

Only for showing that the interface is the same: runs use cuajax.serving.scheduler. What the shims are for (found with
jax 0.10): `engine_api` imports seqio and with it TensorFlow; the orchestrator takes over the root logger at DEBUG;
its `delete_pytree` calls `jax.tree_map`, which is gone; an exception in one of its threads kills the whole process.
"""

from __future__ import annotations

import logging
import sys
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cuajax.serving.engine import DecodeState, Engine, Prefix, blank, pick
from cuajax.types import Sampling

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # what the Driver pads to


def _stub_seqio() -> None:
    """Stands in for seqio, whose import costs seconds and 800 MB, unless somebody imported the real one."""
    if "seqio" in sys.modules:
        return
    seqio, vocabularies = types.ModuleType("seqio"), types.ModuleType("seqio.vocabularies")
    for name in ("Vocabulary", "SentencePieceVocabulary"):
        setattr(vocabularies, name, type(name, (), {}))
    seqio.vocabularies = vocabularies  # type: ignore[attr-defined]
    sys.modules |= {"seqio": seqio, "seqio.vocabularies": vocabularies}


_stub_seqio()
from jetstream.engine import engine_api, tokenizer_api  # noqa: E402 (the stub comes first)


def _delete(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


def orchestrator() -> Any:
    """`jetstream.core.orchestrator` with the shims in place; errors of its threads go to threading.excepthook."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    from jetstream.core import orchestrator as module

    root.setLevel(level)
    root.handlers[:] = handlers
    shimmed: Any = module
    shimmed.delete_pytree = _delete
    shimmed.JetThread.run = threading.Thread.run
    return shimmed


class Tokenizer(tokenizer_api.Tokenizer):
    """Our tokenizer (encode, decode, pad_id) as JetStream's."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        ids = np.array([self.bos_id, *self._tokenizer.encode(s)], np.int32)
        width = pick(LENGTHS, len(ids))
        return np.pad(ids, (0, width - len(ids)), constant_values=self.pad_id), len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return -1  # answers end by their own stop ids or by length

    @property
    def bos_id(self) -> int:
        return self._tokenizer.pad_id


class JetStreamEngine(engine_api.Engine):
    """Our engine behind JetStream's surface, for token prompts without images.

    JetStream puts a BOS in front of every prompt; our policies have none, so it is dropped. `generate` returns the
    token drawn by the call before (the first one by `insert`), as JetStream's engines do.
    """

    def __init__(self, engine: Engine, tokenizer: Any, *, sampling: Sampling | None = None):
        """`sampling` is what every request gets (default: greedy)."""
        self._engine, self._tokenizer = engine, tokenizer
        self._sampling = sampling or Sampling(temperature=0.0, max_tokens=engine.buckets.answer)

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("parameters are handed to the Driver")

    def init_decode_state(self, *args: Any, **kwargs: Any) -> tuple[DecodeState, jax.Array]:
        """Our state, and how many tokens of each slot's answer were handed out."""
        return self._engine.init_decode_state(), jnp.zeros(self._engine.buckets.slots[-1], jnp.int32)

    def prefill(self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int) -> Prefix:
        buckets, ids = self._engine.buckets, np.asarray(padded_tokens)[1:true_length]
        rows, length = buckets.prompts[0], pick(buckets.lengths, len(ids))
        prompts = blank(rows, length, buckets.images[0], self._engine)
        prompts.tokens[0, : len(ids)], prompts.lengths[0] = ids, len(ids)
        prompts.positions[0] = np.arange(length)
        return self._engine.prefill(params, prompts, np.full(rows, len(ids), np.int32))

    def insert(self, prefix: Prefix, decode_state: tuple[DecodeState, jax.Array], slot: int) -> Any:
        state, sent = decode_state
        request = self._engine.pack_requests([0], [slot], [self._sampling], [self._sampling.seed or 0])
        return self._engine.insert(prefix, state, request)[0], sent.at[slot].set(0)

    def generate(self, params: Any, decode_state: tuple[DecodeState, jax.Array]) -> Any:
        state, sent = decode_state
        drawn = state.drawn + 0  # a copy: the state is donated
        # An answer that ended draws no more; the first token that is not new ends it for JetStream too.
        data = jnp.stack([state.tokens, (drawn > sent).astype(jnp.int32), drawn], axis=-1)
        state, _ = self._engine.generate(params, state, batch=self._engine.buckets.slots[-1])
        return (state, drawn), engine_api.ResultTokens(data, (0, 1), (1, 2), (2, 3), 1)

    def get_prefix_destination_sharding(self) -> Any:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def get_tokenizer(self) -> Any:
        return None

    def build_tokenizer(self, metadata: Any) -> Any:
        return Tokenizer(self._tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return self._engine.buckets.slots[-1]

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return pick(LENGTHS, self._engine.buckets.lengths[-1])

    @property
    def mesh(self) -> Any:
        return jax.sharding.Mesh(jax.devices()[:1], ("data",))

    @property
    def colocated_cpus(self) -> None:
        return None
