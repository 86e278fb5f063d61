"""Image blobs of a store: which ones an append has to write, and how a set of them is read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cuajax.data import images, keys
from cuajax.data.images import ImageError
from cuajax.data.records import MissingImages
from cuajax.types import Group, Image

Encoded = dict[str, tuple[bytes, int, str]]  # hash -> blob, links to a whole image, base ("" for a whole image)


def frames(groups: Sequence[Group]) -> tuple[dict[str, str], set[str]]:
    """Every image the groups name -> the frame before it in its trajectory ("": none); and the prompts' images."""
    before: dict[str, str] = {}
    prompts: set[str] = set()
    for group in groups:
        for trajectory in group.trajectories:
            last = screen = ""
            for step in trajectory.steps:
                for h in step.image_hashes:
                    if h != last:
                        before.setdefault(h, last)
                        last = h
                prompts.update(step.image_hashes)
                if step.screen_hash and step.screen_hash != screen:
                    before.setdefault(step.screen_hash, screen)
                    screen = step.screen_hash
    return before, prompts


def stage(
    kv: Any,
    groups: Sequence[Group],
    pixels: Mapping[str, np.ndarray],
    *,
    known: dict[str, int],
    cached: Callable[[str], np.ndarray | None],
    encoded: Encoded,
) -> Encoded:
    """The blobs that have to be written with `groups`, reading what is stored already through `kv`.

    `known` are hashes stored in this generation (more are added); `encoded` keeps work across retries.
    Raises MissingImages when a prompt's image is neither given nor stored, ImageCorrupt when pixels belie their hash.
    """
    before, prompts = frames(groups)
    for h in pixels:
        before.setdefault(h, "")
    reads = [(h, kv.read(keys.image(h))) for h in before if h not in known and (h in prompts or h in pixels)]
    absent = []
    for h, future in reads:
        data = future.result()
        if data.state == "value" and (depth := _depth(data.value)) is not None:
            known[h] = depth
        else:
            absent.append(h)
    lost = {h: "neither given nor stored" for h in absent if h not in pixels}
    if lost:
        ids = [g.id for g in groups if any(h in lost for t in g.trajectories for s in t.steps for h in s.image_hashes)]
        raise MissingImages(lost, f"appending groups {ids}")
    out: Encoded = {}
    for h in absent:
        entry = encoded.get(h)
        if entry is None or (entry[2] and entry[2] not in known and entry[2] not in out):
            entry = encoded[h] = _encode(h, pixels, before[h], known=known, cached=cached, out=out)
        out[h] = entry
    return out


def _depth(blob: bytes) -> int | None:
    """Links to a whole image, None when the header is damaged (it is then written again)."""
    try:
        return images.chain_depth(blob)
    except ImageError:
        return None


def _encode(
    h: str,
    pixels: Mapping[str, np.ndarray],
    base: str,
    *,
    known: Mapping[str, int],
    cached: Callable[[str], np.ndarray | None],
    out: Encoded,
) -> tuple[bytes, int, str]:
    if images.image_hash(pixels[h]) != h:
        raise images.ImageCorrupt(f"image given as {h[:12]}... has hash {images.image_hash(pixels[h])[:12]}...")
    depth = out[base][1] if base in out else known.get(base)
    previous = None
    if depth is not None:
        given = pixels[base] if base in pixels else cached(base)
        previous = None if given is None else Image(base, given)
    blob = images.encode(pixels[h], previous, depth=depth or 0)
    depth = images.chain_depth(blob)
    return blob, depth, base if depth else ""


def load(
    fetch: Callable[[Sequence[bytes]], Sequence[bytes | None]],
    cached: Callable[[str], np.ndarray | None],
    hashes: Iterable[str],
) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, bytes]]:
    """Reads images and the bases of their deltas: the pixels by hash, why others failed, and the blobs read."""
    wanted = list(hashes)
    found: dict[str, np.ndarray] = {}
    bad: dict[str, str] = {}
    blobs: dict[str, bytes] = {}
    todo = wanted
    for _ in range(images.MAX_CHAIN + 1):
        unread = []
        for h in todo:
            memory = cached(h)
            if memory is None:
                unread.append(h)
            else:
                found[h] = memory
        todo = []
        for h, blob in zip(unread, fetch([keys.image(h) for h in unread]) if unread else (), strict=True):
            try:
                if blob is None:
                    raise ImageError("missing")
                base = images.base_of(blob)
            except ImageError as error:
                bad[h] = str(error)
                continue
            blobs[h] = blob
            if base is not None and base not in blobs and base not in found and base not in bad:
                todo.append(base)
        todo = list(dict.fromkeys(todo))
        if not todo:
            break

    def pixels_of(h: str) -> np.ndarray:
        if h in found:
            return found[h]
        if h in bad or h not in blobs:
            raise ImageError(f"its base {h[:12]} is unusable: {bad.get(h, 'missing')}")
        blob = blobs[h]
        base = images.base_of(blob)
        if base in blobs and images.chain_depth(blobs[base]) >= images.chain_depth(blob):
            raise ImageError(f"its base {base[:12]} is no closer to a whole image")
        found[h] = images.decode(blob, h, pixels_of)
        return found[h]

    for h in wanted:
        if h not in bad:
            try:
                pixels_of(h)
            except ImageError as error:
                bad[h] = str(error)
    return found, {h: bad[h] for h in wanted if h in bad}, blobs
