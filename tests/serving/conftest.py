"""One small real policy, compiled once, behind as many schedulers as the tests want."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from cuajax.inputs.processor import ImageSpec
from cuajax.inputs.tokenizer import CompactTokenizer
from cuajax.models import policy, presets
from cuajax.serving.client import LocalClient
from cuajax.serving.engine import Buckets, Engine
from cuajax.serving.prompts import Prompts
from cuajax.serving.scheduler import Scheduler
from cuajax.types import Completion, Image, Prompt, Sampling

BUCKETS = Buckets(
    prompts=(4,), lengths=(12, 24), slots=(2, 8), images=(0, 1), patches=16, answer=6, stops=4, support=16
)
SPEC = ImageSpec()


class World(NamedTuple):
    cfg: Any
    params: Any
    other: Any  # a second set of parameters
    engine: Engine
    tokenizer: CompactTokenizer

    def prompt(self, seed: int = 0, *, words: int = 6, image: bool = True) -> Prompt:
        """A random prompt; with an image it is 32x32 pixels, 4 tokens."""
        rng = np.random.default_rng(seed)
        ids = rng.integers(30, self.tokenizer.vocab_size, words)
        if not image:
            return Prompt(ids.astype(np.int32))
        pixels = rng.integers(0, 256, (32, 32, 3)).astype(np.uint8)
        name = hashlib.sha256(pixels.tobytes()).hexdigest()
        return Prompt(np.array([self.tokenizer.image_id] * 4 + [*ids], np.int32), (Image(name, pixels),))

    def scheduler(self, engine: Any = None, **settings: Any) -> Scheduler:
        prompts = Prompts(
            BUCKETS, SPEC, image_id=self.tokenizer.image_id, vocab_size=self.cfg.vocab_size, support=self.engine.width
        )
        return Scheduler(engine or self.engine, self.params, prompts, **settings).start()


@pytest.fixture(scope="session")
def world() -> World:
    tokenizer = CompactTokenizer()
    cfg = presets.get("tiny", vocab_size=tokenizer.vocab_size + 3)
    cfg = dataclasses.replace(cfg, decoder=dataclasses.replace(cfg.decoder, layers=2))
    init: Any = jax.jit(policy.init, static_argnums=1)
    params, other = (init(jax.random.key(seed), cfg) for seed in (0, 1))
    engine = Engine(cfg, BUCKETS, valid_vocab=tokenizer.vocab_size)
    engine.warmup(params, truncate=True)
    return World(cfg, params, other, engine, tokenizer)


@pytest.fixture
def start(world: World) -> Iterator[Callable[..., Scheduler]]:
    """Starts schedulers that end with the test."""
    started: list[Scheduler] = []

    def begin(engine: Any = None, **settings: Any) -> Scheduler:
        started.append(world.scheduler(engine, **settings))
        return started[-1]

    yield begin
    for scheduler in started:
        scheduler.stop()


def ask(client: Any, items: list[tuple[Prompt, Sampling]]) -> list[Completion | BaseException]:
    """All answers of one tick, faults included."""

    async def run() -> list[Completion | BaseException]:
        return await asyncio.gather(*(client.generate(*item) for item in items), return_exceptions=True)

    return asyncio.run(run())


def local(scheduler: Scheduler, items: list[tuple[Prompt, Sampling]]) -> list[Any]:
    """`ask` through a LocalClient."""
    return ask(LocalClient(scheduler), items)


def same(a: Completion, b: Completion, tolerance: float = 1e-5) -> bool:
    """Equal tokens and ends, and logprobs within the tolerance."""
    return (
        a.token_ids.tolist() == b.token_ids.tolist()
        and a.finish_reason == b.finish_reason
        and bool(np.allclose(a.logprobs, b.logprobs, atol=tolerance, rtol=0))
    )
