"""The codec gives back the same pixels or says why not, and refuses bombs before decoding them."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PILImage

from cuajax.data import images
from cuajax.data.images import ImageCorrupt, ImageFormatError, ImageTooLarge, decode_screenshot, image_hash
from cuajax.types import Image


def picture(seed, h, w, *, noise=False):
    rng = np.random.default_rng(seed)
    if noise:
        return rng.integers(0, 256, (h, w, 3)).astype(np.uint8)
    pixels = np.full((h, w, 3), 240, np.uint8)
    for _ in range(4):
        y, x = rng.integers(0, h), rng.integers(0, w)
        pixels[y : y + h // 3 + 1, x : x + w // 3 + 1] = rng.integers(0, 256, 3)
    return pixels


def nothing(h):
    raise AssertionError(f"asked for {h}")


def encoded(pixels, form):
    out = io.BytesIO()
    PILImage.fromarray(pixels).save(out, form)
    return out.getvalue()


sizes = st.tuples(st.integers(1, 130), st.integers(1, 130))


@given(st.integers(0, 99), sizes, st.booleans())
def test_a_whole_image_comes_back(seed, size, noise):
    pixels = picture(seed, *size, noise=noise)
    blob = images.encode(pixels)
    assert images.base_of(blob) is None
    assert len(blob) <= pixels.nbytes + 16
    back = images.decode(blob, image_hash(pixels), nothing)
    np.testing.assert_array_equal(back, pixels)
    assert not back.flags.writeable


@given(st.integers(0, 99), sizes, st.integers(0, 60))
def test_a_delta_comes_back(seed, size, changed):
    before = picture(seed, *size, noise=True)
    after = before.copy()
    after.reshape(-1)[:changed] ^= 255
    base = Image(image_hash(before), before)
    blob = images.encode(after, base)
    looked = {base.hash: before}
    np.testing.assert_array_equal(images.decode(blob, image_hash(after), looked.__getitem__), after)
    if min(size) > 40:
        assert images.base_of(blob) == base.hash and images.chain_depth(blob) == 1
        assert len(blob) < before.nbytes // 4


def test_a_chain_of_deltas_ends_in_a_whole_image():
    previous, depth = Image(image_hash(picture(0, 64, 64)), picture(0, 64, 64)), 0
    depths = []
    for i in range(images.MAX_CHAIN + 3):
        pixels = previous.pixels.copy()
        pixels[i, i] ^= 255
        blob = images.encode(pixels, previous, depth=depth)
        depth = images.chain_depth(blob)
        depths.append(depth)
        previous = Image(image_hash(pixels), pixels)
    assert depths == [*range(1, images.MAX_CHAIN + 1), 0, 1, 2]


def test_hash_depends_on_shape_and_bytes():
    a = picture(1, 8, 16)
    assert image_hash(a) != image_hash(a.reshape(16, 8, 3))
    assert image_hash(a[::-1]) == image_hash(np.ascontiguousarray(a[::-1])) != image_hash(a)
    for bad in (a.astype(np.float32), a[..., :2], a[0]):
        with pytest.raises(ImageFormatError, match="an image is uint8"):
            image_hash(bad)


@given(st.integers(0, 20), st.integers(0, 10**6), st.booleans())
def test_damage_is_noticed(seed, where, big):
    pixels = picture(seed, 100, 120) if big else picture(seed, 20, 30)
    blob = bytearray(images.encode(pixels))
    blob[where % len(blob)] ^= 1 << where % 8
    try:
        back = images.decode(bytes(blob), image_hash(pixels), nothing)
    except (ImageCorrupt, ImageTooLarge, ImageFormatError):
        return
    np.testing.assert_array_equal(back, pixels)  # a bit that does not matter to the decoder


def test_truncation_and_a_wrong_hash_are_noticed():
    pixels = picture(3, 100, 120)
    blob = images.encode(pixels)
    for n in (0, 5, 16, len(blob) // 2, len(blob) - 1):
        with pytest.raises((ImageCorrupt, ImageFormatError)):
            images.decode(blob[:n], image_hash(pixels), nothing)
    with pytest.raises(ImageCorrupt, match="decodes to other pixels"):
        images.decode(blob, image_hash(picture(4, 100, 120)), nothing)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "JPEG"])
def test_screenshots_from_outside(form):
    pixels = picture(5, 40, 50)
    got = decode_screenshot(encoded(pixels, form), f"image/{form.lower()}")
    assert got.shape == pixels.shape and got.dtype == np.uint8
    if form == "PNG":
        np.testing.assert_array_equal(got, pixels)
        np.testing.assert_array_equal(decode_screenshot(encoded(pixels, form)), pixels)


def test_wrong_mime_empty_and_truncated_screenshots():
    png = encoded(picture(5, 40, 50), "PNG")
    with pytest.raises(ImageFormatError, match="are not JPEG"):
        decode_screenshot(png, "image/jpeg")
    with pytest.raises(ImageFormatError, match="'text/html' is not one of"):
        decode_screenshot(png, "text/html")
    with pytest.raises(ImageFormatError):
        decode_screenshot(b"")
    for n in (20, 40, len(png) // 2):
        with pytest.raises((ImageCorrupt, ImageFormatError)):
            decode_screenshot(png[:n])


def _png_header(h, w):
    """A PNG that promises h x w pixels and holds none."""
    body = b"IHDR" + struct.pack(">IIBBBBB", w, h, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    data = b"IDAT" + zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs_are_refused_before_decoding():
    for h, w in ((20_000, 20_000), (10_000, 10_000), (6_000, 6_000)):
        with pytest.raises(ImageTooLarge, match="pixels"):
            decode_screenshot(_png_header(h, w))
    with pytest.raises(ImageTooLarge, match="1000 bytes, at most 999"):
        decode_screenshot(b"x" * 1000, max_bytes=999)
    header = struct.pack("<2sBBII", b"CI", 1, 1, 60_000, 60_000)
    with pytest.raises(ImageTooLarge):
        images.decode(header + zlib.compress(b"\0" * 10**6), "0" * 64, nothing)
    # A body that inflates to more than its header says is cut off, not inflated.
    header = struct.pack("<2sBBII", b"CI", 1, 1, 4, 4)
    with pytest.raises(ImageCorrupt, match="49 bytes, 4x4 pixels need 48"):
        images.decode(header + zlib.compress(b"\0" * 10**7), "0" * 64, nothing)
