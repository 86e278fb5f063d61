import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuajax.inputs.grid import image_index, image_tokens, positions, token_grid, vision_inputs
from cuajax.inputs.processor import ImageSpec, resize, smart_resize

SPEC = ImageSpec()


def noise(h, w, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (h, w, 3), dtype=np.uint8)


# ---------------------------------------------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("size", "factor", "low", "high", "want"),
    [
        ((1080, 1920), 32, 65536, 16777216, (1088, 1920)),  # Qwen3-VL: 60x34 features
        ((1080, 1920), 28, 3136, 12845056, (1092, 1932)),  # Qwen2.5-VL: 69x39
        ((1000, 1000), 32, 65536, 16777216, (992, 992)),  # PRO-CUA's viewport
        ((48, 80), 32, 1, 10**9, (64, 64)),  # 1.5 and 2.5 both round to even
        ((64, 64), 16, 256, 65536, (64, 64)),
        ((10, 1000), 28, 3136, 10**6, (28, 560)),  # rounds to zero rows, so grows
        ((4000, 4000), 16, 256, 65536, (256, 256)),
        ((8, 8), 16, 4096, 65536, (64, 64)),
    ],
)
def test_smart_resize_goldens(size, factor, low, high, want):
    assert smart_resize(*size, factor=factor, min_pixels=low, max_pixels=high) == want


def test_smart_resize_refuses():
    with pytest.raises(ValueError, match="aspect ratio above 200"):
        smart_resize(1, 201, factor=16, min_pixels=1, max_pixels=10**6)
    with pytest.raises(ValueError, match="0x5 is empty"):
        smart_resize(0, 5, factor=16, min_pixels=1, max_pixels=10**6)


@given(st.integers(1, 600), st.integers(1, 600))
@settings(max_examples=100, deadline=None)
def test_smart_resize_is_a_fixed_point_and_fits(h, w):
    if max(h, w) > 100 * min(h, w):
        return
    limits = dict(factor=16, min_pixels=1024, max_pixels=65536)
    out = smart_resize(h, w, **limits)
    assert out[0] % 16 == out[1] % 16 == 0 and out[0] * out[1] >= 1024
    if min(out) > 16:
        assert out[0] * out[1] <= 65536
    assert smart_resize(*out, **limits) == out


def test_resize_keeps_a_fitting_array_and_refuses_others():
    image = noise(64, 64)
    assert resize(image, SPEC) is image
    assert resize(noise(60, 70), SPEC).shape == (64, 64, 3)
    for bad in (image[..., 0], image.astype(np.float32), noise(64, 64)[..., :2]):
        with pytest.raises(ValueError, match="uint8"):
            resize(bad, SPEC)


# -------------------------------------------------------------------------------------------------- patches
def test_patches_are_channel_major_in_merge_block_order():
    image = noise(32, 48)
    v = vision_inputs([image], SPEC)
    assert v.patches.shape == (1, 24, 192) and v.hw.shape == (1, 24, 2)
    assert v.hw[0, :8].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    for n in range(24):
        row, col = v.hw[0, n]
        cell = image[8 * row : 8 * row + 8, 8 * col : 8 * col + 8]
        np.testing.assert_array_equal(v.patches[0, n], cell.transpose(2, 0, 1).reshape(-1))
    assert (v.segments == 0).all() and image_tokens(32, 48, SPEC) == 6 and token_grid(32, 48, SPEC) == (2, 3)


def test_interpolation_against_a_direct_computation():
    spec = ImageSpec(position_side=5)
    v = vision_inputs([noise(64, 48)], spec)
    table = np.random.default_rng(1).normal(size=(25, 3)).astype(np.float32)
    got = (table[v.taps[0]] * v.tap_weights[0][..., None]).sum(1)
    grid = table.reshape(5, 5, 3)
    for n, (row, col) in enumerate(v.hw[0]):
        y, x = row * 4 / 7, col * 4 / 5
        y0, x0 = min(int(y), 3), min(int(x), 3)
        fy, fx = y - y0, x - x0
        top = grid[y0, x0] * (1 - fx) + grid[y0, x0 + 1] * fx
        low = grid[y0 + 1, x0] * (1 - fx) + grid[y0 + 1, x0 + 1] * fx
        np.testing.assert_allclose(got[n], top * (1 - fy) + low * fy, atol=1e-5)
    np.testing.assert_allclose(v.tap_weights.sum(-1), 1, atol=1e-6)


def test_matching_table_is_the_identity():
    v = vision_inputs([noise(64, 64)], SPEC)  # 8x8 patches, an 8x8 table
    first = (v.tap_weights[0].argmax(-1)[:, None] == np.arange(4)).nonzero()[1]
    rows = v.taps[0][np.arange(64), first]
    assert rows.tolist() == (v.hw[0, :, 0] * 8 + v.hw[0, :, 1]).tolist()


def test_padding_and_mixed_sizes_equal_each_image_alone():
    images = [noise(64, 64, 1), noise(32, 64, 2), noise(64, 64, 3), noise(16, 16, 4)]
    mixed = vision_inputs(images, SPEC, patches=80)
    for i, image in enumerate(images):
        alone = vision_inputs([image], SPEC, patches=80)
        for got, want in zip(mixed, alone, strict=True):
            np.testing.assert_array_equal(got[i], want[0])
    n = 64 * 64 // 64
    assert (mixed.segments[0, n:] == -1).all() and not mixed.patches[0, n:].any() and not mixed.tap_weights[0, n:].any()


def test_windows_number_the_cells_of_merged_patches():
    v = vision_inputs([noise(96, 64)], ImageSpec(window=2))  # 6x4 features, windows of 2x2
    row, col = v.hw[0, :, 0] // 4, v.hw[0, :, 1] // 4
    assert v.segments[0].tolist() == (row * 2 + col).tolist()


def test_errors_name_the_numbers():
    with pytest.raises(ValueError, match=r"60x64 px.*multiples of 16"):
        vision_inputs([noise(60, 64)], SPEC)
    with pytest.raises(ValueError, match="64 patches does not fit 32"):
        vision_inputs([noise(64, 64)], SPEC, patches=32)
    assert vision_inputs([], SPEC, patches=4).patches.shape == (0, 4, 192)


# ------------------------------------------------------------------------------------------------ positions
def test_positions_of_text_image_text_image():
    ids = np.array([5, 1, 1, 1, 1, 1, 1, 6, 7, 1, 1, 8], np.int32)
    pos, following = positions(ids, [(2, 3), (2, 1)], 1)
    assert pos[0].tolist() == [0, 1, 1, 1, 1, 1, 1, 4, 5, 6, 6, 8]
    assert pos[1].tolist() == [0, 1, 1, 1, 2, 2, 2, 4, 5, 6, 7, 8]
    assert pos[2].tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 6, 8]
    assert following == 9 and pos.dtype == np.int32


@given(st.lists(st.one_of(st.integers(1, 4), st.tuples(st.integers(1, 4), st.integers(1, 4))), max_size=6))
@settings(max_examples=200, deadline=None)
def test_positions_equal_a_token_by_token_walk(parts):
    """An int is so many text tokens, a pair an image's grid."""
    ids, grids, want, current = [], [], [], 0
    for part in parts:
        if isinstance(part, int):
            ids += [7] * part
            want += [(current + i,) * 3 for i in range(part)]
            current += part
        else:
            h, w = part
            ids += [1] * (h * w)
            grids.append(part)
            want += [(current, current + r, current + c) for r in range(h) for c in range(w)]
            current += max(h, w)
    pos, following = positions(np.array(ids, np.int32), grids, 1)
    assert pos.T.tolist() == [list(p) for p in want] and following == current


def test_positions_without_images_and_with_adjacent_ones():
    pos, following = positions(np.array([5, 6, 7], np.int32), [], 1)
    assert pos.tolist() == [[0, 1, 2]] * 3 and following == 3
    pos, following = positions(np.ones(5, np.int32), [(2, 2), (1, 1)], 1)
    assert pos[0].tolist() == [0, 0, 0, 0, 2] and following == 3


@pytest.mark.parametrize(("ids", "grids"), [([1, 1, 5], [(1, 1)]), ([1, 5, 1], [(1, 2)]), ([5], [(1, 1)])])
def test_positions_refuse_a_mismatch(ids, grids):
    with pytest.raises(ValueError, match="placeholders"):
        positions(np.array(ids, np.int32), grids, 1)


def test_image_index():
    ids = np.array([1, 1, 5, 1, 1, 6], np.int32)
    assert image_index(ids, 1, [0, 16]).tolist() == [0, 1, -1, 16, 17, -1]
    assert image_index(ids, 1, [4, 0], counts=[1, 3]).tolist() == [4, 0, -1, 1, 2, -1]
    assert image_index(np.array([5, 6]), 1, []).tolist() == [-1, -1]
    with pytest.raises(ValueError, match="4 image placeholders"):
        image_index(ids, 1, [0, 16, 32])
