"""The prompts of a batch, each distinct one once, as flat arrays, and their depth-first order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cuajax.data.prefixes import Leaves, common_prefix, ranges
from cuajax.inputs.grid import positions, token_grid
from cuajax.inputs.processor import ImageSpec
from cuajax.types import Sample


class SampleError(ValueError):
    """A sample that cannot be trained on: too big for a row, or inconsistent in itself."""


@dataclass(frozen=True, slots=True)
class PackSpec:
    """The fixed shape of a microbatch, so that one compiled program serves every batch."""

    length: int  # T, tokens a row
    loss_tokens: int  # K, loss tokens a row
    images_per_row: int  # M, distinct images a row
    patches_per_image: int  # N
    rows: int  # B, rows a microbatch
    image: ImageSpec
    image_id: int  # the image placeholder's token id
    pad_id: int = 0
    merge_prefixes: bool = True  # False: every sample is its own branch ("plain")

    def __post_init__(self) -> None:
        for name in ("length", "loss_tokens", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"PackSpec.{name} is {getattr(self, name)}, must be at least 1")
        block = self.image.merge**2
        if self.patches_per_image % block or self.patches_per_image < 0:
            raise ValueError(f"PackSpec.patches_per_image is {self.patches_per_image}, must be a multiple of {block}")
        if self.images_per_row < 0:
            raise ValueError(f"PackSpec.images_per_row is {self.images_per_row}, must not be negative")


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Distinct prompts as flat arrays; `of` maps a sample to its prompt."""

    of: np.ndarray  # int64[n]
    start: np.ndarray  # int64[U]
    length: np.ndarray  # int64[U]
    after: np.ndarray  # int32[U] the position that follows
    tokens: np.ndarray  # int32[F]
    positions: np.ndarray  # int32[3,F]
    image: np.ndarray  # int32[F] number of the image, -1: text
    feature: np.ndarray  # int32[F] feature of that image
    sets: list[tuple[int, ...]]  # distinct images of each prompt
    hashes: list[str]  # of the numbered images


def catalogue(samples: list[Sample], images: Mapping[str, np.ndarray], spec: PackSpec) -> Prompts:
    """The distinct prompts (ids and images) of the samples, with their M-RoPE positions.

    `images` are uint8[H,W,3] by hash. Raises SampleError when placeholders and images disagree, KeyError for a
    missing image, ValueError for one that was not resized.
    """
    numbers: dict[tuple[bytes, tuple[str, ...]], int] = {}
    of = np.empty(len(samples), np.int64)
    first: list[Sample] = []
    for i, s in enumerate(samples):
        key = (s.prompt_ids.tobytes(), s.image_hashes)
        n = numbers.setdefault(key, len(first))
        if n == len(first):
            first.append(s)
        of[i] = n
    # Numbered by hash, so that the layout does not depend on the order of arrival.
    hashes = sorted({h for s in first for h in s.image_hashes})
    number = {h: g for g, h in enumerate(hashes)}
    grids = [token_grid(images[h].shape[0], images[h].shape[1], spec.image) for h in hashes]
    length = np.array([len(s.prompt_ids) for s in first], np.int64)
    at, after = [], []
    for s in first:
        try:
            ids, following = positions(s.prompt_ids, [grids[number[h]] for h in s.image_hashes], spec.image_id)
        except ValueError as error:
            raise SampleError(f"sample {s.name!r}: {error}") from error
        at.append(ids)
        after.append(following)
    tokens = np.concatenate([s.prompt_ids for s in first]) if first else np.zeros(0, np.int32)
    shown = [number[h] for s in first for h in s.image_hashes]
    sizes = np.array([h * w for h, w in grids], np.int64)[shown] if shown else np.zeros(0, np.int64)
    image, feature = np.full(len(tokens), -1, np.int32), np.zeros(len(tokens), np.int32)
    where = tokens == spec.image_id
    image[where] = np.repeat(np.array(shown, np.int32), sizes)
    feature[where] = ranges(np.zeros(len(sizes), np.int64), sizes)
    return Prompts(
        of=of, start=np.cumsum(length) - length, length=length, after=np.array(after, np.int32),
        tokens=tokens.astype(np.int32, copy=False), image=image, feature=feature,
        positions=np.concatenate(at, axis=1) if at else np.zeros((3, 0), np.int32),
        sets=[tuple(dict.fromkeys(number[h] for h in s.image_hashes)) for s in first], hashes=hashes,
    )  # fmt: skip


def depth_first(prompts: Prompts, kept: np.ndarray, loss: np.ndarray, spec: PackSpec) -> tuple[np.ndarray, Leaves]:
    """The kept samples in depth-first order (indices), and what the row filler needs to know of them."""
    of = prompts.of[kept]
    if spec.merge_prefixes:
        # One number per (image, feature) or token: equal numbers, equal inputs.
        width = int(prompts.feature.max(initial=0)) + 1
        is_image = prompts.image >= 0
        first_token = width * len(prompts.hashes)
        identity = np.where(is_image, prompts.image * width + prompts.feature, prompts.tokens + first_token)
        identity = identity.astype(">u4")
        raw, ends = identity.tobytes(), (prompts.start + prompts.length).tolist()
        keys = [raw[4 * a : 4 * b] for a, b in zip(prompts.start.tolist(), ends, strict=True)]
        sorted_prompts = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
        rank = np.empty(len(keys), np.int64)
        rank[sorted_prompts] = np.arange(len(keys))
        leaf = np.argsort(rank[of], kind="stable")
        chosen = of[leaf]
        fresh = np.append(True, chosen[1:] != chosen[:-1]) if len(chosen) else np.zeros(0, bool)
        shared = prompts.length[chosen]
        distinct = chosen[fresh]
        shared[fresh] = common_prefix(identity, prompts.start[distinct], prompts.length[distinct])
    else:
        leaf = np.arange(len(kept))
        chosen, shared = of, np.zeros(len(kept), np.int64)
    leaf = kept[leaf]
    return leaf, Leaves(
        length=prompts.length[chosen], shared=shared, extra=loss[leaf] - 1, loss=loss[leaf],
        images=[prompts.sets[u] for u in chosen.tolist()],
    )  # fmt: skip
