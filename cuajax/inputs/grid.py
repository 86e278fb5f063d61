"""Everything about a prompt that depends on image grids, computed on the host in NumPy.

A grid is the number of patches (rows, columns) of an image; merge^2 neighbouring patches become one feature and one
placeholder token. One compiled program then serves every grid of a padded bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cuajax.inputs.processor import ImageSpec
from cuajax.types import VisionInputs


class _Constants(NamedTuple):
    hw: np.ndarray  # int32[N,2]
    taps: np.ndarray  # int32[N,4]
    tap_weights: np.ndarray  # float32[N,4]
    segments: np.ndarray  # int32[N]


def _patch_grid(h: int, w: int, spec: ImageSpec) -> tuple[int, int]:
    if h % spec.factor or w % spec.factor or not h or not w:
        raise ValueError(f"image {h}x{w} px: both sides must be multiples of {spec.factor}; resize() it first")
    return h // spec.patch, w // spec.patch


def image_tokens(h: int, w: int, spec: ImageSpec) -> int:
    """Placeholder tokens (= features) of an h x w pixel image. Raises ValueError if its size was not resized."""
    rows, cols = _patch_grid(h, w, spec)
    return rows * cols // spec.merge**2


def token_grid(h: int, w: int, spec: ImageSpec) -> tuple[int, int]:
    """Rows and columns of features of an h x w pixel image: what `positions` takes."""
    rows, cols = _patch_grid(h, w, spec)
    return rows // spec.merge, cols // spec.merge


def _axis(index: np.ndarray, count: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Two taps and their weights along one axis, align_corners: patch 0 -> row 0, the last patch -> row side-1."""
    at = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    low = np.floor(at).astype(np.int32)
    frac = at - low
    return np.stack([low, np.minimum(low + 1, side - 1)], -1), np.stack([1 - frac, frac], -1)


@functools.lru_cache(maxsize=512)
def _constants(rows: int, cols: int, *, merge: int, side: int, window: int, length: int) -> _Constants:
    """The arrays of one grid, padded to `length` patches and made read-only."""
    count = rows * cols
    if count > length:
        raise ValueError(f"an image of {rows}x{cols} = {count} patches does not fit {length} patches")

    def block(a: np.ndarray) -> np.ndarray:
        return a.reshape(rows // merge, merge, cols // merge, merge).transpose(0, 2, 1, 3).reshape(-1)

    grid = np.indices((rows, cols), dtype=np.int32)
    row, col = block(grid[0]), block(grid[1])
    hw = np.zeros((length, 2), np.int32)
    hw[:count, 0], hw[:count, 1] = row, col
    taps, weights = np.zeros((length, 4), np.int32), np.zeros((length, 4), np.float32)
    if side:
        row_taps, row_weights = _axis(row, rows, side)
        col_taps, col_weights = _axis(col, cols, side)
        taps[:count] = (row_taps[:, :, None] * side + col_taps[:, None, :]).reshape(-1, 4)
        weights[:count] = (row_weights[:, :, None] * col_weights[:, None, :]).reshape(-1, 4)
    segments = np.full(length, -1, np.int32)
    if window:
        across = -(-cols // (merge * window))
        segments[:count] = row // (merge * window) * across + col // (merge * window)
    else:
        segments[:count] = 0
    for a in (hw, taps, weights, segments):
        a.flags.writeable = False
    return _Constants(hw, taps, weights, segments)


def _cut(images: Sequence[np.ndarray], rows: int, cols: int, spec: ImageSpec) -> np.ndarray:
    """Equal sized images -> uint8[I,N,3*P*P]."""
    m, p, count = spec.merge, spec.patch, len(images)
    blocks = np.stack(images).reshape(count, rows // m, m, p, cols // m, m, p, 3)
    return np.ascontiguousarray(blocks.transpose(0, 1, 4, 2, 5, 7, 3, 6)).reshape(count, rows * cols, 3 * p * p)


def vision_inputs(images: Sequence[np.ndarray], spec: ImageSpec, *, patches: int | None = None) -> VisionInputs:
    """Resized images uint8[H,W,3] -> VisionInputs with leading axis [I], padded to `patches` (None: the largest).

    The grid constants may be read-only views shared by all images. Raises ValueError for an image that was not
    resized or does not fit. Interpolation: Qwen3-VL position table (bilinear, align_corners).
    """
    grids = [_patch_grid(image.shape[0], image.shape[1], spec) for image in images]
    kinds = dict.fromkeys(grids)
    length = max((r * c for r, c in kinds), default=0) if patches is None else patches
    args = {"merge": spec.merge, "side": spec.position_side, "window": spec.window, "length": length}
    count = len(images)
    if len(kinds) == 1:
        (rows, cols) = grids[0]
        const = _constants(rows, cols, **args)
        cut = _cut(images, rows, cols, spec)
        if rows * cols < length:
            full = np.zeros((count, length, cut.shape[2]), np.uint8)
            full[:, : rows * cols] = cut
            cut = full
        return VisionInputs(cut, *(np.broadcast_to(a, (count, *a.shape)) for a in const))
    out = VisionInputs(
        np.zeros((count, length, 3 * spec.patch**2), np.uint8),
        np.zeros((count, length, 2), np.int32),
        np.zeros((count, length, 4), np.int32),
        np.zeros((count, length, 4), np.float32),
        np.full((count, length), -1, np.int32),
    )
    for rows, cols in kinds:
        const = _constants(rows, cols, **args)
        at = [i for i, grid in enumerate(grids) if grid == (rows, cols)]
        out.patches[at, : rows * cols] = _cut([images[i] for i in at], rows, cols, spec)
        for target, a in zip(out[1:], const, strict=True):
            target[at] = a
    return out


@functools.lru_cache(maxsize=4096)
def _positions(length: int, starts: tuple[int, ...], grids: tuple[tuple[int, int], ...]) -> tuple[np.ndarray, int]:
    out = np.empty((3, length), np.int32)
    current = at = 0
    for start, (h, w) in zip(starts, grids, strict=True):
        out[:, at:start] = np.arange(current, current + start - at, dtype=np.int32)
        current += start - at
        at = start + h * w
        row, col = np.divmod(np.arange(h * w, dtype=np.int32), w)
        out[0, start:at], out[1, start:at], out[2, start:at] = current, current + row, current + col
        current += max(h, w)
    out[:, at:] = np.arange(current, current + length - at, dtype=np.int32)
    out.flags.writeable = False
    return out, current + length - at


def positions(token_ids: np.ndarray, grids: Sequence[tuple[int, int]], image_id: int) -> tuple[np.ndarray, int]:
    """M-RoPE ids of a prompt: int32[P] tokens -> (read-only int32[3,P] time, row, column; the next text position).

    `grids` are (rows, columns) of features, one an image, in prompt order; an image at position c takes time c, row
    c+i, column c+j, and the text after it goes on at c+max(rows, columns). Raises ValueError when the placeholders
    and the grids disagree. Source: Qwen2-VL (arXiv 2409.12191).
    """
    where = np.flatnonzero(np.asarray(token_ids) == image_id)
    starts, taken = [], 0
    for h, w in grids:
        n = h * w
        run = where[taken : taken + n]
        if len(run) < n or run[-1] - run[0] != n - 1:
            raise ValueError(f"image {len(starts)} needs {n} placeholders in a row, the prompt has {len(where)} in all")
        starts.append(int(run[0]))
        taken += n
    if taken != len(where):
        raise ValueError(f"{len(where)} image placeholders in the prompt, {taken} expected from {len(grids)} grids")
    return _positions(len(token_ids), tuple(starts), tuple(grids))


def image_index(
    token_ids: np.ndarray, image_id: int, offsets: Sequence[int], *, counts: Sequence[int] | None = None
) -> np.ndarray:
    """Which feature row each placeholder takes: int32[P] tokens -> int32[P], -1 at text tokens.

    `offsets[i]` is the first feature row of the prompt's i-th image and `counts[i]` its number of features (None:
    all the same). Raises ValueError when the placeholders do not add up.
    """
    tokens = np.asarray(token_ids)
    out = np.full(tokens.shape, -1, np.int32)
    where = np.flatnonzero(tokens == image_id)
    if counts is None:
        each = len(where) // len(offsets) if offsets else 0
        counts = [each] * len(offsets)
    if sum(counts) != len(where) or len(counts) != len(offsets):
        raise ValueError(f"{len(where)} image placeholders, but {len(offsets)} images with {list(counts)} features")
    at = 0
    for offset, n in zip(offsets, counts, strict=True):
        out[where[at : at + n]] = np.arange(offset, offset + n, dtype=np.int32)
        at += n
    return out
