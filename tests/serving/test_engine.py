"""The engine against the policy's own forward pass, at every bucket."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from cuajax.inputs import grid
from cuajax.models import policy
from cuajax.serving.engine import Buckets, pick
from cuajax.types import Completion, Prompt, Sampling

from .conftest import BUCKETS, SPEC, World, local, same

FORWARD: Any = jax.jit(policy.prefill, static_argnames="cfg")


def forward_logprobs(world: World, prompt: Prompt, tokens: np.ndarray, length: int = 32) -> np.ndarray:
    """Log-probability of each token from a prefill of everything before it: float[K]."""
    rows = len(tokens)
    ids = np.zeros((rows, length), np.int32)
    positions = np.zeros((rows, 3, length), np.int32)
    index = np.full((rows, length), -1, np.int32)
    lengths = np.zeros(rows, np.int32)
    grids = [grid.token_grid(image.pixels.shape[0], image.pixels.shape[1], SPEC) for image in prompt.images]
    start, after = grid.positions(prompt.token_ids, grids, world.tokenizer.image_id)
    n = len(prompt.token_ids)
    for k in range(rows):
        ids[k, : n + k] = np.concatenate([prompt.token_ids, tokens[:k]])
        positions[k, :, :n], positions[k, :, n : n + k] = start, after + np.arange(k)
        index[k, :n] = grid.image_index(prompt.token_ids, world.tokenizer.image_id, [0] * len(grids))
        lengths[k] = n + k
    images = [image.pixels for image in prompt.images] or [np.zeros((32, 32, 3), np.uint8)]
    one = grid.vision_inputs(images, SPEC, patches=BUCKETS.patches)
    vision = type(one)(*(np.broadcast_to(a[None], (rows, *a.shape)) for a in one))
    batch = policy.PromptBatch(ids, positions, lengths, index, vision)
    logits, _ = FORWARD(world.params, batch, cfg=world.cfg)
    logits = np.asarray(logits, np.float64)[:, : world.tokenizer.vocab_size]
    logp = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    return logp[np.arange(rows), tokens]


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("words", [7, 18])  # one length bucket each
@pytest.mark.parametrize("count", [1, 7])  # one batch bucket each, of prefill, insert and decode
def test_decode_agrees_with_forward(world: World, start: Any, image: bool, words: int, count: int) -> None:
    items = [
        (world.prompt(seed, words=words, image=image), Sampling(max_tokens=BUCKETS.answer, seed=seed))
        for seed in range(count)
    ]
    for (prompt, _), answer in zip(items, local(start(), items), strict=True):
        assert isinstance(answer, Completion)
        assert len(answer.token_ids) == BUCKETS.answer
        assert np.abs(answer.logprobs - forward_logprobs(world, prompt, answer.token_ids)).max() <= 1e-5


def test_batch_mates_change_nothing(world: World, start: Any) -> None:
    scheduler = start()
    mixed = [
        Sampling(max_tokens=5, seed=11),
        Sampling(temperature=0.0, max_tokens=3),
        Sampling(top_k=3, max_tokens=6, seed=2),
        Sampling(temperature=0.6, top_p=0.7, max_tokens=4, seed=1),
        Sampling(max_tokens=1, seed=9),
    ]
    items = [(world.prompt(i, words=5 + 2 * i, image=i % 2 == 0), s) for i, s in enumerate(mixed)]
    together = local(scheduler, items)
    alone = [local(scheduler, [item])[0] for item in items]
    assert all(same(a, b) for a, b in zip(together, alone, strict=True))
    for answer, s in zip(together, mixed, strict=True):
        truncated = s.temperature > 0 and (s.top_k > 0 or s.top_p < 1)
        assert (answer.support is not None) == truncated
        if truncated:
            assert all(t in ids for t, ids in zip(answer.token_ids, answer.support.ids, strict=True))
            assert (answer.support.count <= (s.top_k or BUCKETS.support)).all()


def test_identical_prompts_prefill_once(world: World, start: Any) -> None:
    scheduler = start()
    items = [(world.prompt(seed // 3), Sampling(max_tokens=4, seed=seed)) for seed in range(6)]
    shared = local(scheduler, items)
    stats = scheduler.snapshot()
    assert (stats["requests"], stats["prefilled"], stats["deduplicated"]) == (6, 2, 4)
    assert all(same(answer, local(scheduler, [item])[0]) for answer, item in zip(shared, items, strict=True))
    assert len({tuple(a.token_ids) for a in shared[:3]}) > 1  # one row, three answers
    # The hash is only a claim: equal hashes over different pixels share nothing.
    prompt, other = world.prompt(0), world.prompt(1)
    liar = Prompt(prompt.token_ids, (type(other.images[0])(prompt.images[0].hash, other.images[0].pixels),))
    first, second = local(scheduler, [(prompt, items[0][1]), (liar, items[0][1])])
    assert same(first, shared[0])
    assert not same(first, second)


def test_stop_ids_and_limits(world: World, start: Any) -> None:
    scheduler, prompt = start(), world.prompt(4)
    whole = local(scheduler, [(prompt, Sampling(max_tokens=6, seed=5))])[0]
    assert whole.finish_reason == "length"
    for at in (0, 2, 5):
        stop = int(whole.token_ids[at])
        cut = local(scheduler, [(prompt, Sampling(max_tokens=6, seed=5, stop_ids=(stop,)))])[0]
        end = whole.token_ids.tolist().index(stop) + 1
        assert cut.token_ids.tolist() == whole.token_ids[:end].tolist()
        assert cut.finish_reason == "stop"
        assert cut.versions.tolist() == [0] * end


def test_ids_past_the_tokenizer_are_never_drawn(world: World, start: Any) -> None:
    answers = local(start(), [(world.prompt(i), Sampling(temperature=50.0, max_tokens=6)) for i in range(40)])
    drawn = np.concatenate([a.token_ids for a in answers])
    assert drawn.max() < world.tokenizer.vocab_size < world.cfg.vocab_size
    assert len({tuple(a.token_ids) for a in answers}) > 1  # without a seed the server draws one


def test_nothing_compiles_after_warm_up(world: World, start: Any) -> None:
    scheduler, before = start(), world.engine.compilations
    rng = np.random.default_rng(0)
    for count in (1, 3, 20):
        items = [
            (
                world.prompt(int(rng.integers(9)), words=int(rng.integers(1, 20)), image=bool(rng.integers(2))),
                Sampling(top_k=int(rng.integers(4)), max_tokens=int(rng.integers(1, 7))),
            )
            for _ in range(count)
        ]
        assert all(isinstance(answer, Completion) for answer in local(scheduler, items))
    assert world.engine.compilations == before == scheduler.snapshot()["compilations"]


def test_buckets() -> None:
    assert [pick((1, 4, 8), n) for n in (1, 2, 4, 5, 8)] == [1, 4, 4, 8, 8]
    with pytest.raises(ValueError, match="buckets: 1, 4, 8"):
        pick((1, 4, 8), 9)
    with pytest.raises(ValueError, match="must rise"):
        Buckets(prompts=(4, 2))
