"""Where each sample lies in its row, and the arrays of a PackedBatch that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cuajax.data.prefixes import Rows, ranges
from cuajax.data.prompts import PackSpec, Prompts
from cuajax.inputs.grid import vision_inputs
from cuajax.types import Sample, VisionInputs


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where each sample (in packed order) lies in its row."""

    sample: np.ndarray  # int64[n] index into the samples
    prompt: np.ndarray  # int64[n]
    row: np.ndarray
    shared: np.ndarray  # prompt tokens laid out by earlier samples
    new: np.ndarray  # prompt tokens laid out here
    loss: np.ndarray  # response tokens
    offset: np.ndarray  # first token of this sample's own block
    slot: np.ndarray  # first loss position


def lay_out(prompts: Prompts, leaf: np.ndarray, loss: np.ndarray, rows: Rows) -> Layout:
    """Puts the samples `leaf` (in depth-first order, with `loss[sample]` response tokens) into the chosen rows."""
    sample = leaf[rows.order]
    prompt = prompts.of[sample]
    new = prompts.length[prompt] - rows.shared
    k = loss[sample]

    def within_row(size: np.ndarray) -> np.ndarray:
        before = np.cumsum(size) - size
        return before - before[np.searchsorted(rows.row, rows.row)]

    return Layout(sample, prompt, rows.row, rows.shared, new, k, within_row(new + k - 1), within_row(k))


def _prompt_ends(prompts: Prompts, layout: Layout) -> np.ndarray:
    """subtree_end of every laid out prompt token, in packed order.

    Read from the last sample backwards: the subtree of depth d ends where the next sample leaves the path at or
    above d. `until[d]` holds that place for the path of the sample at hand.
    """
    out = np.empty(int(layout.new.sum()), np.int32)
    until = np.zeros(int(prompts.length.max(initial=0)) + 1, np.int32)
    ends = layout.offset + layout.new + layout.loss - 1
    length = prompts.length[layout.prompt].tolist()
    stop = len(out)
    row, offset, shared, new = layout.row.tolist(), layout.offset.tolist(), layout.shared.tolist(), layout.new.tolist()
    last = -1
    for i in range(len(row) - 1, -1, -1):
        if row[i] != last:
            until[:] = ends[i]
            last = row[i]
        if new[i]:
            out[stop - new[i] : stop] = until[shared[i] : length[i]]
            stop -= new[i]
        if i and row[i - 1] == last:
            until[shared[i] : length[i - 1]] = offset[i]
    return out


def token_fields(
    samples: list[Sample], prompts: Prompts, layout: Layout, *, spec: PackSpec, total: int
) -> dict[str, np.ndarray]:
    """tokens, positions and subtree_end of `total` rows."""
    t = spec.length
    tokens = np.full(total * t, spec.pad_id, np.int32)
    at = np.zeros((3, total * t), np.int32)
    end = np.tile(np.arange(1, t + 1, dtype=np.int32), total)
    base = layout.row * t + layout.offset
    source, target = _prompt_gather(prompts, layout, spec)
    tokens[target] = prompts.tokens[source]
    at[:, target] = prompts.positions[:, source]
    end[target] = _prompt_ends(prompts, layout)
    chain = layout.loss - 1
    target = ranges(base + layout.new, chain)
    tokens[target] = _gather([samples[i].response_ids[:-1] for i in layout.sample.tolist()], np.int32)
    at[:, target] = np.repeat(prompts.after[layout.prompt], chain) + ranges(np.zeros_like(chain), chain)
    end[target] = np.repeat(layout.offset + layout.new + chain, chain)
    at = at.reshape(3, total, t).transpose(1, 0, 2)
    return {
        "tokens": tokens.reshape(total, t),
        "positions": np.ascontiguousarray(at),
        "subtree_end": end.reshape(total, t),
    }


def _prompt_gather(prompts: Prompts, layout: Layout, spec: PackSpec) -> tuple[np.ndarray, np.ndarray]:
    """Flat source (prompt token) and target (row * T + offset) of every laid out prompt token."""
    source = ranges(prompts.start[layout.prompt] + layout.shared, layout.new)
    return source, ranges(layout.row * spec.length + layout.offset, layout.new)


def _gather(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def loss_fields(samples: list[Sample], layout: Layout, *, spec: PackSpec, total: int) -> dict[str, np.ndarray]:
    """Everything indexed by loss position."""
    k, n = spec.loss_tokens, layout.loss
    target = ranges(layout.row * k + layout.slot, n)
    chosen = [samples[i] for i in layout.sample.tolist()]

    def place(values: np.ndarray, dtype: type) -> np.ndarray:
        out = np.zeros(total * k, dtype)
        out[target] = values
        return out.reshape(total, k)

    # The prompt's last token was laid out by the latest sample that added any: forward fill.
    index = np.arange(len(n))
    owner = np.maximum.accumulate(np.where(layout.new > 0, index, 0)) if len(n) else index
    parent = np.repeat(layout.offset + layout.new - 1, n) + ranges(np.zeros_like(n), n)
    parent[np.cumsum(n) - n] = (layout.offset + layout.new - 1)[owner]
    floats = {
        "behaviour_logp": _gather([s.behaviour_logp for s in chosen], np.float32),
        "advantage": _gather([s.advantage for s in chosen], np.float32),
        "weight": _gather([s.weight for s in chosen], np.float32),
    }
    zeros = np.zeros((total, k), np.float32)
    return {
        "targets": place(_gather([s.response_ids for s in chosen], np.int32), np.int32),
        "target_parent": place(parent, np.int32),
        **{name: place(values, np.float32) for name, values in floats.items()},
        "prox_logp": zeros,
        "ref_logp": zeros.copy(),
        "support": _support(chosen, target, total, k),
    }


def _support(chosen: list[Sample], target: np.ndarray, total: int, k: int) -> np.ndarray:
    """int32[rows,K,S] kept ids; S is a power of two, so that few shapes are compiled."""
    width = max((s.support.ids.shape[1] for s in chosen if s.support is not None), default=0)
    width = 1 << (width - 1).bit_length() if width else 0
    out = np.full((total * k, width), -1, np.int32)
    if width:
        at = 0
        for s in chosen:
            n = len(s.response_ids)
            if s.support is not None:
                ids = s.support.ids
                keep = np.arange(ids.shape[1]) < s.support.count[:, None]
                out[target[at : at + n], : ids.shape[1]] = np.where(keep, ids, -1)
            at += n
    return out.reshape(total, k, width)


def vision_fields(
    images: Mapping[str, np.ndarray], prompts: Prompts, layout: Layout, *, spec: PackSpec, total: int
) -> tuple[np.ndarray, VisionInputs, int]:
    """image_index [rows,T], the rows' image banks [rows,M,...], and how many images those hold."""
    m, n = spec.images_per_row, spec.patches_per_image
    source, target = _prompt_gather(prompts, layout, spec)
    image = prompts.image[source]
    pick = image >= 0
    source, target, image = source[pick], target[pick], image[pick]
    count = max(1, len(prompts.hashes))
    entries, which = np.unique(target // spec.length * count + image, return_inverse=True)
    row = entries // count
    slot = np.arange(len(entries)) - np.searchsorted(row, row)
    index = np.full(total * spec.length, -1, np.int32)
    index[target] = slot[which] * (n // spec.image.merge**2) + prompts.feature[source]
    seen, shown = np.unique(entries % count, return_inverse=True)
    bank = vision_inputs([images[prompts.hashes[g]] for g in seen.tolist()], spec.image, patches=n)
    at = row * m + slot

    def spread(a: np.ndarray, fill: int) -> np.ndarray:
        shape = (total * m, *a.shape[1:])
        out = np.full(shape, fill, a.dtype) if fill else np.zeros(shape, a.dtype)
        out[at] = a[shown]
        return out.reshape(total, m, *a.shape[1:])

    vision = VisionInputs(**{k: spread(v, -1 if k == "segments" else 0) for k, v in bank._asdict().items()})
    return index.reshape(total, spec.length), vision, len(entries)
