"""Prompts as they come to the batches a policy is prefilled with; the host side of admission, all NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cuajax.inputs import grid
from cuajax.inputs.processor import ImageSpec
from cuajax.models.policy import PromptBatch
from cuajax.serving.engine import Buckets, pick
from cuajax.serving.messages import InvalidRequest, Request
from cuajax.types import Prompt, Sampling, VisionInputs

LAYOUTS = 4096  # cached; text prompts with their images in the same places share one


class Layout(NamedTuple):
    """What depends on where the images are, not on what they show."""

    positions: np.ndarray  # int32[3,P]
    image_index: np.ndarray  # int32[P]
    next_position: int
    shape: tuple[int, int]  # (images, length) bucket


class Batch(NamedTuple):
    """Requests of one bucket: what the engine prefills, and which row each request starts from."""

    requests: list[Request]
    rows: list[int]  # of the prefill, per request
    prompts: PromptBatch
    positions: np.ndarray  # int32[B] of the first answer token


class Prompts:
    """Checks and batches prompts for one policy."""

    def __init__(self, buckets: Buckets, spec: ImageSpec, *, image_id: int, vocab_size: int, support: int):
        """`vocab_size`: rows of the embedding; `support`: most ids a truncated distribution may keep."""
        self.buckets, self.spec, self.image_id = buckets, spec, image_id
        self.vocab_size, self.support = vocab_size, support
        self._layouts: dict[tuple, Layout] = {}
        self._sampling: tuple[object, ...] = ()

    # ------------------------------------------------------------------------------------------------- checks
    def _check_sampling(self, s: Sampling) -> None:
        knobs = (s.temperature, s.top_p, s.top_k, s.max_tokens, s.stop_ids)
        if knobs == self._sampling:  # traffic is monotonous: nearly always the previous request's
            return
        b = self.buckets
        if not (math.isfinite(s.temperature) and s.temperature >= 0):
            raise InvalidRequest(f"temperature {s.temperature} must be finite and 0 or more")
        if not 0 < s.top_p <= 1:
            raise InvalidRequest(f"top_p {s.top_p} must be in (0, 1]")
        if not 0 <= s.top_k <= self.support:
            raise InvalidRequest(f"top_k {s.top_k} must be in 0..{self.support} (0: off)")
        if not 1 <= s.max_tokens <= b.answer:
            raise InvalidRequest(f"max_tokens {s.max_tokens} must be in 1..{b.answer}")
        if not isinstance(s.stop_ids, tuple) or len(s.stop_ids) > b.stops:
            raise InvalidRequest(f"{len(s.stop_ids)} stop ids, must be a tuple of at most {b.stops}")
        if not all(0 <= i < self.vocab_size for i in s.stop_ids):
            raise InvalidRequest(f"stop ids {s.stop_ids} must be in 0..{self.vocab_size - 1}")
        self._sampling = knobs

    def _layout(self, prompt: Prompt) -> Layout:
        tokens = prompt.token_ids
        key = ((tokens == self.image_id).tobytes(), *[image.pixels.shape for image in prompt.images])
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = self._new_layout(prompt)
        return layout

    def _new_layout(self, prompt: Prompt) -> Layout:
        b, spec = self.buckets, self.spec
        length, images = len(prompt.token_ids), len(prompt.images)
        if not 1 <= length <= b.lengths[-1]:
            raise InvalidRequest(f"prompt of {length} tokens, must have 1..{b.lengths[-1]}")
        if images > b.images[-1]:
            raise InvalidRequest(f"prompt with {images} images, at most {b.images[-1]} are served")
        for image in prompt.images:
            shape = image.pixels.shape
            if len(shape) != 3 or shape[2] != 3:
                raise InvalidRequest(f"image {list(shape)} must be [H,W,3]")
            if shape[0] * shape[1] > b.patches * spec.patch**2:
                raise InvalidRequest(f"image {shape[0]}x{shape[1]} px, at most {b.patches} patches of {spec.patch} px")
        try:
            grids = [grid.token_grid(i.pixels.shape[0], i.pixels.shape[1], spec) for i in prompt.images]
            positions, after = grid.positions(prompt.token_ids, grids, self.image_id)
            step = b.patches // spec.merge**2
            index = grid.image_index(
                prompt.token_ids, self.image_id, [step * i for i in range(images)], counts=[h * w for h, w in grids]
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        return Layout(positions, index, after, (pick(b.images, images), pick(b.lengths, length)))

    def _check(self, request: Request) -> None:
        prompt = request.prompt
        tokens = prompt.token_ids
        if tokens.ndim != 1 or tokens.dtype.kind != "i":
            raise InvalidRequest(f"token_ids are {tokens.dtype}{list(tokens.shape)}, must be int32[P]")
        for image in prompt.images:
            if image.pixels.dtype != np.uint8:
                raise InvalidRequest(f"image pixels are {image.pixels.dtype}, must be uint8")
        self._check_sampling(request.sampling)
        seed = request.sampling.seed
        if not (seed is None or isinstance(seed, int)):
            raise InvalidRequest(f"seed {seed!r} must be an int or None")
        request.layout = self._layout(prompt)

    def screen(self, requests: Sequence[Request]) -> tuple[list[Request], list[tuple[Request, InvalidRequest]]]:
        """Splits requests into good ones, with their layouts set, and refused ones with the reason."""
        good, refused = [], []
        for request in requests:
            try:
                self._check(request)
                good.append(request)
            except InvalidRequest as error:
                refused.append((request, error))
            except (TypeError, AttributeError, OverflowError) as error:  # fields of the wrong type
                refused.append((request, InvalidRequest(f"not a request: {error}")))
        if good:
            flat = np.concatenate([r.prompt.token_ids for r in good])
            if flat.min() < 0 or flat.max() >= self.vocab_size:
                kept = []
                for request in good:
                    ids = request.prompt.token_ids
                    if ids.min() < 0 or ids.max() >= self.vocab_size:
                        bad = int(ids[(ids < 0) | (ids >= self.vocab_size)][0])
                        refused.append((request, InvalidRequest(f"token id {bad} is outside 0..{self.vocab_size - 1}")))
                    else:
                        kept.append(request)
                good = kept
        return good, refused

    # ----------------------------------------------------------------------------------------------- batches
    def batches(self, requests: Sequence[Request]) -> list[Batch]:
        """Screened requests grouped by bucket; identical prompts (tokens and pixels) share one prefill row."""
        groups: dict[tuple[int, int], list[Request]] = {}
        for request in requests:
            groups.setdefault(request.layout.shape, []).append(request)
        out = []
        for (images, length), group in groups.items():
            first: dict[tuple, int] = {}
            unique: list[Request] = []
            rows = []
            for request in group:
                prompt = request.prompt
                key = (prompt.token_ids.tobytes(), *[image.hash for image in prompt.images])
                row = first.get(key)
                if row is None or not _same_pixels(prompt, unique[row].prompt):  # a hash is the sender's claim
                    row = first[key] = len(unique)
                    unique.append(request)
                rows.append(row)
            most = self.buckets.prompts[-1]
            for start in range(0, len(unique), most):
                part = [i for i, row in enumerate(rows) if start <= row < start + most]
                prompts, positions = self._assemble(unique[start : start + most], images, length)
                out.append(Batch([group[i] for i in part], [rows[i] - start for i in part], prompts, positions))
        return out

    def _assemble(self, unique: Sequence[Request], images: int, length: int) -> tuple[PromptBatch, np.ndarray]:
        size = pick(self.buckets.prompts, len(unique))
        lengths = np.ones(size, np.int32)
        lengths[: len(unique)] = [len(r.prompt.token_ids) for r in unique]
        inside = np.arange(length) < lengths[: len(unique), None]
        tokens = np.zeros((size, length), np.int32)
        positions = np.zeros((size, 3, length), np.int32)
        index = np.full((size, length), -1, np.int32)
        after = np.ones(size, np.int32)
        tokens[: len(unique)][inside] = np.concatenate([r.prompt.token_ids for r in unique])
        by_layout: dict[int, tuple[Layout, list[int]]] = {}
        for i, request in enumerate(unique):
            by_layout.setdefault(id(request.layout), (request.layout, []))[1].append(i)
        for layout, rows in by_layout.values():
            n = layout.positions.shape[1]
            positions[rows, :, :n], index[rows, :n], after[rows] = (
                layout.positions, layout.image_index, layout.next_position,
            )  # fmt: skip
        vision = self._vision([r.prompt for r in unique], size, images)
        return PromptBatch(tokens, positions, lengths, index, vision), after

    def _vision(self, prompts: Sequence[Prompt], size: int, images: int) -> VisionInputs:
        n = self.buckets.patches
        rows = [i for i, p in enumerate(prompts) for _ in p.images]
        places = [m for p in prompts for m in range(len(p.images))]
        out = VisionInputs(
            np.zeros((size, images, n, 3 * self.spec.patch**2), np.uint8),
            np.zeros((size, images, n, 2), np.int32),
            np.zeros((size, images, n, 4), np.int32),
            np.zeros((size, images, n, 4), np.float32),
            np.full((size, images, n), -1, np.int32),
        )
        if rows:
            flat = grid.vision_inputs([image.pixels for p in prompts for image in p.images], self.spec, patches=n)
            at = (slice(len(rows)), 0) if images == 1 and len(rows) == len(prompts) else (rows, places)
            for target, source in zip(out, flat, strict=True):
                target[at] = source
        return out


def _same_pixels(a: Prompt, b: Prompt) -> bool:
    return all(
        x.pixels is y.pixels or np.array_equal(x.pixels, y.pixels) for x, y in zip(a.images, b.images, strict=True)
    )
