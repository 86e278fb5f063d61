"""Packing is exact: every sample finds its own prompt and response on its path, and nothing else."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuajax.data.pack import PackSpec, SampleError, pack, pad_micro
from cuajax.inputs.grid import positions, token_grid, vision_inputs
from cuajax.inputs.processor import ImageSpec
from cuajax.types import Sample, Support

IMAGE_ID = 1
SPEC = ImageSpec(patch=2, merge=2, position_side=4, min_pixels=16, max_pixels=1024)
# Two grids: one placeholder and two placeholders.
SCREENS = [np.random.default_rng(i).integers(0, 256, (4, 4 if i % 2 else 8, 3)).astype(np.uint8) for i in range(5)]
HASHES = [hashlib.sha256(bytes([i])).hexdigest() for i in range(len(SCREENS))]
IMAGES = dict(zip(HASHES, SCREENS, strict=True))


def spec(**changes) -> PackSpec:
    base = dict(length=40, loss_tokens=24, images_per_row=4, patches_per_image=8, rows=2, image=SPEC, image_id=IMAGE_ID)
    return PackSpec(**(base | changes))


def sample(parts, response, *, name="g/0/0", support=None) -> Sample:
    """`parts`: text token ids, or ('image', number)."""
    ids, hashes = [], []
    for part in parts:
        if isinstance(part, tuple):
            rows, cols = token_grid(*SCREENS[part[1]].shape[:2], SPEC)
            ids += [IMAGE_ID] * (rows * cols)
            hashes.append(HASHES[part[1]])
        else:
            ids.append(part)
    k = len(response)
    rng = np.random.default_rng([*name.encode(), k])
    floats = rng.normal(size=(3, k)).astype(np.float32)
    return Sample(np.array(ids, np.int32), tuple(hashes), np.array(response, np.int32), *floats, support, name)


part = st.one_of(st.integers(2, 4), st.tuples(st.just("image"), st.integers(0, len(SCREENS) - 1)))
prompt = st.lists(part, min_size=1, max_size=8).filter(lambda p: len({x for x in p if isinstance(x, tuple)}) <= 3)


@st.composite
def batches(draw):
    prompts = draw(st.lists(prompt, min_size=1, max_size=6))
    prompts += [draw(st.sampled_from(prompts)) + draw(st.lists(st.integers(2, 4), max_size=3)) for _ in range(4)]
    prompts = [p for p in prompts if len({x for x in p if isinstance(x, tuple)}) <= 4]
    responses = st.lists(st.integers(2, 6), min_size=1, max_size=5)
    count = draw(st.integers(0, 16))
    return [sample(draw(st.sampled_from(prompts)), draw(responses), name=f"g/{i}/0") for i in range(count)]


def unpack(batch, one: PackSpec):
    """What each loss token sees, read off the visibility rule: {(path, target): list of (row, floats)}."""
    flat = [a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]) for a in batch[:-1]]
    tokens, at, end, index, targets, parent, logp, adv, weight, *_ = flat
    bank = one.patches_per_image // SPEC.merge**2
    patches = np.asarray(batch.vision.patches).reshape(len(tokens), -1, *batch.vision.patches.shape[-2:])
    segments = np.asarray(batch.vision.segments).reshape(len(tokens), -1, one.patches_per_image)
    found = {}
    for r in range(len(tokens)):
        for k in np.flatnonzero(weight[r]):
            i = parent[r, k]
            j = np.arange(one.length)
            seen = (j <= i) & (i < end[r])
            path = []
            for t in j[seen]:
                picture = b""
                if index[r, t] >= 0:
                    slot, feature = divmod(int(index[r, t]), bank)
                    picture = patches[r, slot].tobytes() + segments[r, slot].tobytes() + bytes([feature])
                path.append((int(tokens[r, t]), tuple(at[r, :, t].tolist()), picture))
            key = (tuple(path), int(targets[r, k]), float(logp[r, k]), float(adv[r, k]), float(weight[r, k]))
            found[key] = found.get(key, 0) + 1
    return found


def expected(samples, one: PackSpec):
    """The same from each sample alone, as a plain sequence."""
    found = {}
    for s in samples:
        grids = [token_grid(*IMAGES[h].shape[:2], SPEC) for h in s.image_hashes]
        at, after = positions(s.prompt_ids, grids, IMAGE_ID)
        vision = vision_inputs([IMAGES[h] for h in s.image_hashes], SPEC, patches=one.patches_per_image)
        path, where = [], 0
        features = [(n, f) for n, (h, w) in enumerate(grids) for f in range(h * w)]
        for t, token in enumerate(s.prompt_ids):
            picture = b""
            if token == IMAGE_ID:
                n, f = features[where]
                picture = np.ascontiguousarray(vision.patches[n]).tobytes() + vision.segments[n].tobytes() + bytes([f])
                where += 1
            path.append((int(token), tuple(at[:, t].tolist()), picture))
        for k, target in enumerate(s.response_ids):
            key = (tuple(path), int(target), *(float(a[k]) for a in (s.behaviour_logp, s.advantage, s.weight)))
            found[key] = found.get(key, 0) + 1
            path.append((int(target), (after + k,) * 3, b""))
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches(), st.booleans(), st.sampled_from([24, 40]), st.sampled_from([6, 24]))
def test_each_loss_token_sees_exactly_its_own_sequence(samples, merge, length, losses):
    one = spec(merge_prefixes=merge, length=length, loss_tokens=losses)
    batch, stats = pack(samples, IMAGES, spec=one, drop_oversize=True)
    kept = [s for s in samples if s.name not in stats.dropped]
    assert unpack(batch, one) == expected(kept, one)
    assert stats.samples == len(kept)
    assert stats.tokens <= stats.tokens_plain
    micro = batch.tokens.shape[0]
    assert micro & (micro - 1) == 0 and batch.tokens.shape[1:] == (one.rows, length)
    assert batch.weight.shape == (micro, one.rows, losses)
    np.testing.assert_allclose(batch.weight.sum(), sum(s.weight.sum() for s in kept), atol=1e-4)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_samples_changes_nothing(samples, random):
    one = spec(length=60)
    shuffled = list(samples)
    random.shuffle(shuffled)
    a, stats = pack(samples, IMAGES, spec=one)
    b, other = pack(shuffled, IMAGES, spec=one)
    assert unpack(a, one) == unpack(b, one)
    assert stats.prompts == other.prompts


def test_padding_sees_nothing_and_weighs_nothing():
    one = spec()
    batch, stats = pack([sample([2, 3], [4, 5])], IMAGES, spec=one)
    assert stats.rows == 1 and stats.tokens == 3
    end = batch.subtree_end.reshape(-1, 40)
    assert (end[0, 3:] == np.arange(4, 41)).all() and (end[1] == np.arange(1, 41)).all()
    assert batch.weight[0, 0, 2:].sum() == 0 and batch.weight[0, 1].sum() == 0
    assert (batch.image_index == -1).all()
    assert (batch.vision.segments == -1).all()


def test_candidates_of_one_state_share_the_prompt_and_drop_the_last_token():
    image_prompt = [("image", 0), ("image", 1), 2, 3]
    group = [sample(image_prompt, [4, 5, 6], name=f"g/{i}/0") for i in range(8)]
    batch, stats = pack(group, IMAGES, spec=spec())
    assert stats.tokens == 5 + 8 * 2 and stats.tokens_plain == 8 * 7 and stats.prompts == 1
    # Identical responses are laid out once each: a token that carries loss never merges.
    assert (batch.target_parent[0, 0, :24:3] == 4).all()
    one_token, stats = pack([sample([2], [4], name=f"g/{i}/0") for i in range(3)], IMAGES, spec=spec())
    assert stats.tokens == 1 and (one_token.target_parent == 0).all()


def test_a_later_prompt_contains_an_earlier_response_as_context():
    first = sample([2, 3], [4, 5], name="g/0/0")
    later = sample([2, 3, 4, 5, 2], [6], name="g/0/1")
    batch, stats = pack([first, later], IMAGES, spec=spec())
    assert stats.tokens == 2 + 1 + 3
    assert unpack(batch, spec()) == expected([first, later], spec())


def test_a_tree_longer_than_a_row_is_split_where_the_prefix_is_short():
    branches = [sample([2, 2, 3 + i // 4, 9, 9, 9, 9, 10 + i], [4, 5], name=f"g/{i}/0") for i in range(12)]
    one = spec(length=20)
    batch, stats = pack(branches, IMAGES, spec=one)
    assert unpack(batch, one) == expected(branches, one)
    assert stats.rows == 3 and stats.tokens == 3 * (7 + 4 * 2)


def test_what_cannot_fit_is_named_with_numbers():
    long = sample([2] * 45, [4], name="g7/3/1")
    with pytest.raises(SampleError, match=r"'g7/3/1' does not fit a row: it takes 45 of 40 tokens, 1 of 24 loss"):
        pack([long], IMAGES, spec=spec())
    batch, stats = pack([long, sample([2], [4])], IMAGES, spec=spec(), drop_oversize=True)
    assert stats.dropped == ("g7/3/1",) and (batch.weight != 0).sum() == 1
    with pytest.raises(SampleError, match="0 prompt"):
        pack([sample([], [4])], IMAGES, spec=spec())
    with pytest.raises(SampleError, match="needs 2 placeholders"):
        pack([replace(sample([1], [4]), image_hashes=(HASHES[0],))], IMAGES, spec=spec())


def test_a_row_closes_when_its_image_bank_is_full():
    many = [sample([("image", i), 2], [3], name=f"g/{i}/0") for i in range(5)]
    batch, stats = pack(many, IMAGES, spec=spec(images_per_row=2))
    assert stats.rows == 3 and stats.images == 5
    assert unpack(batch, spec(images_per_row=2)) == expected(many, spec())


def test_support_is_padded_to_a_power_of_two():
    kept = Support(np.array([[7, 8, 9], [7, 5, 5]], np.int32), np.array([3, 1], np.int32))
    batch, _ = pack([sample([2], [7, 7], support=kept), sample([3], [4])], IMAGES, spec=spec())
    rows = {tuple(r) for r in batch.support.reshape(-1, 4).tolist()}
    assert rows == {(7, 8, 9, -1), (7, -1, -1, -1), (-1, -1, -1, -1)}
    assert pack([sample([2], [7])], IMAGES, spec=spec())[0].support.shape[-1] == 0


def test_hosts_can_agree_on_the_number_of_microbatches():
    batch, _ = pack([sample([("image", 0)], [4])], IMAGES, spec=spec())
    padded = pad_micro(batch, 4)
    empty, _ = pack([], IMAGES, spec=spec())
    for have, want in zip(padded[:-1], empty[:-1], strict=True):
        assert have.shape[0] == 4 and (have[1:] == want).all()
    for have, want in zip(padded.vision, empty.vision, strict=True):
        assert (have[1:] == want).all()
    with pytest.raises(ValueError, match="cannot become 2"):
        pad_micro(padded, 2)
