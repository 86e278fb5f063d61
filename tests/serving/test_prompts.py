"""Prompts to batches, on the host."""

from __future__ import annotations

import dataclasses

import numpy as np

from cuajax.inputs import grid
from cuajax.inputs.processor import ImageSpec
from cuajax.serving.engine import Buckets
from cuajax.serving.messages import Request
from cuajax.serving.prompts import Prompts
from cuajax.types import Image, Prompt, Sampling

SPEC = ImageSpec()
BUCKETS = Buckets(prompts=(2, 4), lengths=(8, 16), slots=(8,), images=(0, 1, 2), patches=32, answer=4)
IMAGE = 1


def request(ids: list[int], *images: np.ndarray) -> Request:
    named = tuple(Image(str(hash(pixels.tobytes())), pixels) for pixels in images)
    return Request(Prompt(np.array(ids, np.int32), named), Sampling(max_tokens=2), lambda _: None, None)


def test_images_of_several_sizes() -> None:
    rng = np.random.default_rng(0)
    small, wide = (rng.integers(0, 256, shape).astype(np.uint8) for shape in ((32, 32, 3), (16, 64, 3)))
    work = [
        request([7, *[IMAGE] * 4, 8, *[IMAGE] * 4, 9], small, wide),
        request([*[IMAGE] * 4, 9, *[IMAGE] * 4, 5, 6, 4], wide, small),
        request([*[IMAGE] * 4, 5, 6], small),
        request([5, 6, 7]),
        request([9]),
        request([9]),
        request([8]),
    ]
    prompts = Prompts(BUCKETS, SPEC, image_id=IMAGE, vocab_size=50, support=8)
    good, refused = prompts.screen(work)
    assert (good, refused) == (work, [])
    batches = {b.requests[0].layout.shape: b for b in prompts.batches(good)}
    assert set(batches) == {(2, 16), (1, 8), (0, 8)}
    text = batches[0, 8]
    assert text.rows == [0, 1, 1, 2]
    assert text.prompts.tokens.shape == (4, 8)
    assert text.prompts.lengths.tolist() == [3, 1, 1, 1]
    assert text.prompts.vision.patches.shape == (4, 0, 32, 192)
    two = batches[2, 16]
    assert two.rows == [0, 1]
    alone = grid.vision_inputs([small, wide], SPEC, patches=32)
    for got, want in zip(two.prompts.vision, alone, strict=True):
        assert (got[0] == want).all()
        assert (got[1] == want[::-1]).all()
    ids = work[0].prompt.token_ids
    positions, after = grid.positions(ids, [(2, 2), (1, 4)], IMAGE)
    assert (two.prompts.positions[0, :, : len(ids)] == positions).all()
    assert two.positions[0] == after
    assert two.prompts.image_index[0, : len(ids)].tolist() == [-1, 0, 1, 2, 3, -1, 8, 9, 10, 11, -1]


def test_more_prompts_than_a_batch_holds() -> None:
    work = [request([n // 2]) for n in range(11)]
    prompts = Prompts(dataclasses.replace(BUCKETS, images=(0,)), SPEC, image_id=IMAGE, vocab_size=50, support=8)
    work = [dataclasses.replace(r, prompt=Prompt(r.prompt.token_ids + 2)) for r in work]
    batches = prompts.batches(prompts.screen(work)[0])
    assert [b.prompts.tokens.shape[0] for b in batches] == [4, 2]
    assert [b.rows for b in batches] == [[0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1]]
    for batch in batches:
        first = batch.prompts.tokens[batch.rows, 0]
        assert first.tolist() == [int(r.prompt.token_ids[0]) for r in batch.requests]
