"""Screenshot -> the uint8 pixels a vision tower is fed (done once; sampler and trainer share the result)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image as PILImage

MAX_ASPECT = 200  # Qwen processors refuse anything thinner


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """How a vision tower cuts an image; the defaults are the tiny policy's.

    `patch` pixels a side; `merge` patches a side become one feature; `temporal` frames a patch spans (a still image
    is repeated, inside the model); `position_side` is the side of the learned position table (0: none); `min_pixels`
    and `max_pixels` bound the resized area; `window` is the attention window's side in features (0: whole image).
    """

    patch: int = 8
    merge: int = 2
    temporal: int = 2
    position_side: int = 8
    min_pixels: int = 16 * 16
    max_pixels: int = 256 * 256
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    window: int = 0

    def __post_init__(self) -> None:
        for name, low in (("patch", 1), ("merge", 1), ("temporal", 1), ("position_side", 0), ("window", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"ImageSpec.{name} is {getattr(self, name)}, must be at least {low}")
        if not 0 < self.min_pixels <= self.max_pixels:
            raise ValueError(f"ImageSpec: need 0 < min_pixels ({self.min_pixels}) <= max_pixels ({self.max_pixels})")

    @property
    def factor(self) -> int:
        """Pixels a side of one feature: height and width are multiples of it."""
        return self.patch * self.merge


@functools.lru_cache(maxsize=1024)
def smart_resize(h: int, w: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Qwen-VL's target size: multiples of `factor`, area within the limits, aspect ratio nearly kept.

    Raises ValueError for an empty image or an aspect ratio above 200. Source: Qwen2-VL image processor
    (rounds half to even, as Python does).
    """
    if min(h, w) < 1:
        raise ValueError(f"image size {h}x{w} is empty")
    if max(h, w) > MAX_ASPECT * min(h, w):
        raise ValueError(f"image size {h}x{w} has an aspect ratio above {MAX_ASPECT}")
    out_h, out_w = round(h / factor) * factor, round(w / factor) * factor
    if out_h * out_w > max_pixels:
        beta = math.sqrt(h * w / max_pixels)
        out_h, out_w = math.floor(h / beta / factor) * factor, math.floor(w / beta / factor) * factor
    elif out_h * out_w < min_pixels:
        beta = math.sqrt(min_pixels / (h * w))
        out_h, out_w = math.ceil(h * beta / factor) * factor, math.ceil(w * beta / factor) * factor
    return max(factor, out_h), max(factor, out_w)


def resize(screenshot: np.ndarray, spec: ImageSpec) -> np.ndarray:
    """uint8[H,W,3] -> uint8[H',W',3] by PIL's bicubic filter; the same array when the size already fits.

    Raises ValueError for another shape or dtype.
    """
    if screenshot.ndim != 3 or screenshot.shape[2] != 3 or screenshot.dtype != np.uint8:
        raise ValueError(f"screenshot is {screenshot.dtype}{list(screenshot.shape)}, must be uint8[H,W,3]")
    h, w = screenshot.shape[:2]
    size = smart_resize(h, w, factor=spec.factor, min_pixels=spec.min_pixels, max_pixels=spec.max_pixels)
    if size == (h, w):
        return screenshot
    image = PILImage.fromarray(np.ascontiguousarray(screenshot))
    return np.asarray(image.resize((size[1], size[0]), PILImage.Resampling.BICUBIC))
