"""Screenshots: content hash and lossless codec, with every size checked before anything is decoded.

A stored blob is a small header and a body: WebP-lossless, deflate for small images (a tenth of WebP's time), raw when
neither helps, or the changed patches of the previous frame when that is smaller. Decoding checks the content hash.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image as PILImage
from PIL import UnidentifiedImageError

from cuajax.types import Image

MAX_PIXELS = 7680 * 4320  # of one image
MAX_BYTES = 64 << 20  # of one encoded image
MAX_CHAIN = 16  # deltas in a row; decoding an image reads at most this many others
MIMES = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}

_HEADER = struct.Struct("<2sBBII")  # magic, format version, codec, height, width
_DELTA = struct.Struct("<32sBH")  # the base's hash, links to the nearest full image, patch side
_MAGIC, _VERSION = b"CI", 1
_RAW, _DEFLATE, _WEBP = 0, 1, 2
_IS_DELTA = 0x80  # flag on the codec of a delta's body
_SMALL = 96 * 96  # pixels up to which deflate is used
_WEBP_SIDE = 16383
_PATCH = 16


class ImageError(ValueError):
    """An image that cannot be used; the subclasses say why."""


class ImageTooLarge(ImageError):
    """More pixels or bytes than allowed (refused before decoding)."""


class ImageFormatError(ImageError):
    """Not one of the formats that are accepted here."""


class ImageCorrupt(ImageError):
    """Truncated, damaged, or not the image its hash names."""


def image_hash(pixels: np.ndarray) -> str:
    """sha256 hex of shape and bytes of uint8[H,W,3]. Raises ImageFormatError for another dtype or shape."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ImageFormatError(f"an image is uint8[H,W,3], got {pixels.dtype}{list(pixels.shape)}")
    digest = hashlib.sha256(b"%d %d 3 " % pixels.shape[:2])
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


def encode(pixels: np.ndarray, previous: Image | None = None, *, depth: int = 0) -> bytes:
    """uint8[H,W,3] -> blob, as changed patches of `previous` when that is smaller.

    `depth` is `chain_depth` of the previous frame's own blob: at MAX_CHAIN the image is stored whole.
    Raises ImageTooLarge above MAX_PIXELS.
    """
    h, w = pixels.shape[:2]
    _check_size(h, w, 0, MAX_PIXELS)
    delta = None
    if previous is not None and depth < MAX_CHAIN and previous.pixels.shape == pixels.shape:
        delta = _encode_delta(pixels, previous, depth + 1)
        if delta is not None and len(delta) * 64 < pixels.nbytes:
            return delta  # small enough that encoding the whole image is not worth its time
    codec, body = _squeeze(pixels)
    whole = _HEADER.pack(_MAGIC, _VERSION, codec, h, w) + body
    return delta if delta is not None and len(delta) < len(whole) else whole


def decode(blob: bytes, expected_hash: str, lookup: Callable[[str], np.ndarray]) -> np.ndarray:
    """Blob -> read-only uint8[H,W,3]; `lookup` gives the pixels of a delta's base by hash.

    Raises ImageCorrupt when the result is not `expected_hash`, ImageTooLarge before decoding a bomb.
    """
    codec, h, w, body = _open(blob)
    if codec & _IS_DELTA:
        base, _, side, body = _open_delta(body)
        pixels = _apply_delta(lookup(base), body, codec & ~_IS_DELTA, side=side, shape=(h, w))
    else:
        pixels = _unsqueeze(codec, body, h, w)
    if image_hash(pixels) != expected_hash:
        raise ImageCorrupt(f"image {expected_hash[:12]}... decodes to other pixels")
    pixels.flags.writeable = False
    return pixels


def base_of(blob: bytes) -> str | None:
    """Hash of the image that a delta blob builds on, None for a whole image. Raises ImageCorrupt."""
    codec, _, _, body = _open(blob)
    return _open_delta(body)[0] if codec & _IS_DELTA else None


def chain_depth(blob: bytes) -> int:
    """Links from this blob to the nearest whole image. Raises ImageCorrupt."""
    codec, _, _, body = _open(blob)
    return _open_delta(body)[1] if codec & _IS_DELTA else 0


def decode_screenshot(
    data: bytes, mime: str | None = None, *, max_pixels: int = MAX_PIXELS, max_bytes: int = MAX_BYTES
) -> np.ndarray:
    """PNG, JPEG or WebP bytes from outside -> uint8[H,W,3] RGB.

    Raises ImageFormatError (not a known format, or not the one `mime` claims), ImageTooLarge (before decoding) and
    ImageCorrupt (truncated).
    """
    if mime is not None and mime not in MIMES:
        raise ImageFormatError(f"image type {mime!r} is not one of {sorted(MIMES)}")
    if len(data) > max_bytes:
        raise ImageTooLarge(f"image of {len(data)} bytes, at most {max_bytes} are decoded")
    accepted = list(MIMES.values()) if mime is None else [MIMES[mime]]
    try:
        picture = PILImage.open(io.BytesIO(data), formats=accepted)
    except PILImage.DecompressionBombError as error:
        raise ImageTooLarge(f"{error}; at most {max_pixels} pixels are decoded") from error
    except UnidentifiedImageError as error:
        raise ImageFormatError(f"{len(data)} bytes are not {' or '.join(accepted)}") from error
    except (OSError, SyntaxError, ValueError, struct.error) as error:
        raise ImageCorrupt(f"damaged {' or '.join(accepted)} header: {error}") from error
    _check_size(picture.height, picture.width, len(data), max_pixels)
    return _load(picture)


def _check_size(h: int, w: int, size: int, max_pixels: int) -> None:
    if h * w > max_pixels or h < 1 or w < 1:
        raise ImageTooLarge(f"image of {h}x{w} pixels, 1 to {max_pixels} are allowed")
    if size > MAX_BYTES:
        raise ImageTooLarge(f"image of {size} bytes, at most {MAX_BYTES} are decoded")


def _load(picture: PILImage.Image) -> np.ndarray:
    try:
        return np.array(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError, struct.error, zlib.error) as error:
        raise ImageCorrupt(f"damaged {picture.format} of {picture.height}x{picture.width}: {error}") from error


def _squeeze(pixels: np.ndarray) -> tuple[int, bytes]:
    """The smaller of compressed and raw bytes, with its codec."""
    h, w = pixels.shape[:2]
    pixels = np.ascontiguousarray(pixels)
    if h * w <= _SMALL or max(h, w) > _WEBP_SIDE:
        codec, body = _DEFLATE, zlib.compress(pixels.data, 1)
    else:
        out = io.BytesIO()
        PILImage.fromarray(pixels).save(out, "WEBP", lossless=True, method=0, quality=0)
        codec, body = _WEBP, out.getvalue()
    return (codec, body) if len(body) < pixels.nbytes else (_RAW, pixels.tobytes())


def _unsqueeze(codec: int, body: bytes | memoryview, h: int, w: int) -> np.ndarray:
    size = h * w * 3
    if codec == _WEBP:
        pixels = decode_screenshot(bytes(body), "image/webp")
        if pixels.shape != (h, w, 3):
            raise ImageCorrupt(f"image is {pixels.shape[0]}x{pixels.shape[1]}, its header says {h}x{w}")
        return pixels
    if codec == _DEFLATE:
        inflate = zlib.decompressobj()
        try:
            body = inflate.decompress(body, size + 1)
        except zlib.error as error:
            raise ImageCorrupt(f"damaged deflate body of {h}x{w}: {error}") from error
    elif codec != _RAW:
        raise ImageCorrupt(f"image codec {codec} is not one of {[_RAW, _DEFLATE, _WEBP]}")
    if len(body) != size:
        raise ImageCorrupt(f"image body has {len(body)} bytes, {h}x{w} pixels need {size}")
    return np.frombuffer(body, np.uint8).reshape(h, w, 3)


def _open(blob: bytes) -> tuple[int, int, int, memoryview]:
    if len(blob) < _HEADER.size:
        raise ImageCorrupt(f"image blob of {len(blob)} bytes is shorter than its header")
    magic, version, codec, h, w = _HEADER.unpack_from(blob)
    if magic != _MAGIC or version != _VERSION:
        raise ImageCorrupt(f"image blob is {magic!r} version {version}, expected {_MAGIC!r} version {_VERSION}")
    _check_size(h, w, len(blob), MAX_PIXELS)
    return codec, h, w, memoryview(blob)[_HEADER.size :]


def _open_delta(body: memoryview) -> tuple[str, int, int, memoryview]:
    if len(body) < _DELTA.size:
        raise ImageCorrupt(f"image delta of {len(body)} bytes is shorter than its header")
    base, depth, side = _DELTA.unpack_from(body)
    if not side or not 1 <= depth <= MAX_CHAIN:
        raise ImageCorrupt(f"image delta with patch side {side} and depth {depth}")
    return base.hex(), depth, side, body[_DELTA.size :]


def _blocks(pixels: np.ndarray, side: int) -> np.ndarray:
    """uint8[H,W,3] -> uint8[rows,cols,side,side,3], zero padded."""
    h, w = pixels.shape[:2]
    rows, cols = -(-h // side), -(-w // side)
    if (rows * side, cols * side) != (h, w):
        padded = np.zeros((rows * side, cols * side, 3), np.uint8)
        padded[:h, :w] = pixels
        pixels = padded
    return pixels.reshape(rows, side, cols, side, 3).swapaxes(1, 2)


def _encode_delta(pixels: np.ndarray, previous: Image, depth: int) -> bytes | None:
    h, w = pixels.shape[:2]
    blocks = _blocks(pixels, _PATCH)
    changed = (blocks != _blocks(previous.pixels, _PATCH)).any((2, 3, 4))
    if changed.mean() > 0.5:
        return None
    strip = blocks[changed].reshape(-1, _PATCH, 3)
    codec, body = _squeeze(strip) if len(strip) else (_RAW, b"")
    return b"".join(
        (
            _HEADER.pack(_MAGIC, _VERSION, codec | _IS_DELTA, h, w),
            _DELTA.pack(bytes.fromhex(previous.hash), depth, _PATCH),
            np.packbits(changed).tobytes(),
            body,
        )
    )


def _apply_delta(base: np.ndarray, body: memoryview, codec: int, *, side: int, shape: tuple[int, int]) -> np.ndarray:
    h, w = shape
    if base.shape != (h, w, 3):
        raise ImageCorrupt(f"delta of {h}x{w} on a base of {base.shape[0]}x{base.shape[1]}")
    blocks = _blocks(base, side).copy()
    count = blocks.shape[0] * blocks.shape[1]
    bits, strip = body[: -(-count // 8)], body[-(-count // 8) :]
    if len(bits) * 8 < count:
        raise ImageCorrupt(f"image delta is cut inside its {count} patch flags")
    changed = np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(bool).reshape(blocks.shape[:2])
    n = int(changed.sum())
    if n:
        blocks[changed] = _unsqueeze(codec, strip, n * side, side).reshape(n, side, side, 3)
    rows, cols = blocks.shape[:2]
    return np.ascontiguousarray(blocks.swapaxes(1, 2).reshape(rows * side, cols * side, 3)[:h, :w])
