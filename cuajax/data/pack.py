"""Samples -> PackedBatch: one prefix tree per batch row, laid out depth first.

Conditioning tokens merge where everything before them is equal, so the hidden state is the same; a token that carries
loss is laid out once per sample. A target is scored from its parent's hidden state, so a response's last token is
never laid out. Source of the visibility rule: architecture of this project; token j is visible to i iff
j <= i < subtree_end[j].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cuajax.data.layout import lay_out, loss_fields, token_fields, vision_fields
from cuajax.data.prefixes import Limits, fill_rows
from cuajax.data.prompts import PackSpec, Prompts, SampleError, catalogue, depth_first
from cuajax.inputs.grid import image_tokens
from cuajax.types import PackedBatch, Sample, VisionInputs


class PackStats(NamedTuple):
    """What packing did; `tokens_plain` is what the same samples take without merging."""

    samples: int
    prompts: int  # distinct prompts
    tokens: int
    tokens_plain: int
    loss_tokens: int
    images: int  # images encoded, summed over rows
    rows: int  # rows with anything in them
    micro: int
    fill: float  # tokens over the capacity of the used rows
    dropped: tuple[str, ...]  # samples that do not fit, by name


def pack(
    samples: Sequence[Sample], images: Mapping[str, np.ndarray], *, spec: PackSpec, drop_oversize: bool = False
) -> tuple[PackedBatch, PackStats]:
    """Samples and their resized screenshots uint8[H,W,3] by hash -> one PackedBatch of leading axes [n_micro, B].

    n_micro is a power of two; rows without samples have weight 0. The result depends on the samples alone, not on
    where they lie. A sample that does not fit a row raises SampleError naming it, or with `drop_oversize` is left
    out and named in the statistics; a missing image raises KeyError.
    """
    samples = list(samples)
    prompts, fits = _admit(samples, images, spec, drop_oversize)
    kept = np.flatnonzero(fits)
    loss = np.array([len(s.response_ids) for s in samples], np.int64)
    leaf, leaves = depth_first(prompts, kept, loss, spec)
    rows = fill_rows(leaves, Limits(spec.length, spec.loss_tokens, spec.images_per_row))
    layout = lay_out(prompts, leaf, loss, rows)
    micro = 1 << max(0, -(-rows.count // spec.rows) - 1).bit_length()
    total = micro * spec.rows
    tree = token_fields(samples, prompts, layout, spec=spec, total=total)
    index, vision, encoded = vision_fields(images, prompts, layout, spec=spec, total=total)
    tree["image_index"] = index
    flat = PackedBatch(vision=vision, **tree, **loss_fields(samples, layout, spec=spec, total=total))
    used = int((layout.new + layout.loss - 1).sum())
    plain = int((prompts.length[prompts.of[kept]] + loss[kept] - 1).sum())
    stats = PackStats(
        samples=len(kept), prompts=len(np.unique(prompts.of[kept])), tokens=used, tokens_plain=plain,
        loss_tokens=int(loss[kept].sum()), images=encoded, rows=rows.count, micro=micro,
        fill=used / max(1, rows.count * spec.length),
        dropped=tuple(samples[i].name for i in np.flatnonzero(~fits)),
    )  # fmt: skip
    return _split_micro(flat, micro, spec.rows), stats


def pad_micro(batch: PackedBatch, micro: int) -> PackedBatch:
    """The batch with empty microbatches appended up to `micro` (hosts of one step must agree on their number)."""
    have = batch.tokens.shape[0]
    if micro < have:
        raise ValueError(f"batch has {have} microbatches, cannot become {micro}")
    length = batch.tokens.shape[-1]

    def grow(a: np.ndarray, fill: object = 0) -> np.ndarray:
        tail = np.empty((micro - have, *a.shape[1:]), a.dtype)
        tail[...] = fill
        return np.concatenate([a, tail])

    fills = {"subtree_end": np.arange(1, length + 1, dtype=np.int32), "image_index": -1, "support": -1}
    grown = {k: grow(v, fills.get(k, 0)) for k, v in batch._asdict().items() if k != "vision"}
    vision = {k: grow(v, -1 if k == "segments" else 0) for k, v in batch.vision._asdict().items()}
    return PackedBatch(vision=VisionInputs(**vision), **grown)


def _admit(
    samples: list[Sample], images: Mapping[str, np.ndarray], spec: PackSpec, drop: bool
) -> tuple[Prompts, np.ndarray]:
    """Catalogues the prompts and finds the samples that fit a row."""
    for s in samples:
        k = len(s.response_ids)
        if not k or not len(s.prompt_ids):
            raise SampleError(f"sample {s.name!r} has {len(s.prompt_ids)} prompt and {k} response tokens; both need 1")
        if not len(s.behaviour_logp) == len(s.advantage) == len(s.weight) == k:
            raise SampleError(
                f"sample {s.name!r}: {k} response tokens, but {len(s.behaviour_logp)} logprobs, "
                f"{len(s.advantage)} advantages and {len(s.weight)} weights"
            )
    prompts = catalogue(samples, images, spec)
    loss = np.array([len(s.response_ids) for s in samples], np.int64)
    tokens = prompts.length[prompts.of] + loss - 1
    pictures = np.array([len(s) for s in prompts.sets], np.int64)[prompts.of]
    sizes = [images[h].shape for h in prompts.hashes]
    patches = [image_tokens(h, w, spec.image) * spec.image.merge**2 for h, w, _ in sizes]
    largest = np.array([max((patches[g] for g in s), default=0) for s in prompts.sets], np.int64)[prompts.of]
    wants = np.stack([tokens, loss, pictures, largest])
    limits = np.array([spec.length, spec.loss_tokens, spec.images_per_row, spec.patches_per_image])
    fits = np.logical_and.reduce(wants <= limits[:, None])
    if not fits.all() and not drop:
        i = int(np.flatnonzero(~fits)[0])
        have = ", ".join(
            f"{n} of {m} {what}"
            for n, m, what in zip(
                wants[:, i], limits, ("tokens", "loss tokens", "images", "patches an image"), strict=True
            )
        )
        raise SampleError(f"sample {samples[i].name!r} does not fit a row: it takes {have}")
    return prompts, fits


def _split_micro(flat: PackedBatch, micro: int, rows: int) -> PackedBatch:
    def lead(a: np.ndarray) -> np.ndarray:
        return a.reshape(micro, rows, *a.shape[1:])

    fields = {k: lead(v) for k, v in flat._asdict().items() if k != "vision"}
    return PackedBatch(vision=VisionInputs(*(lead(a) for a in flat.vision)), **fields)
