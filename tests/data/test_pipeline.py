"""An optimizer batch is a pure function of the stored records and a few integers."""

import dataclasses
import functools
import hashlib
import json
import threading
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest
from grain.checkpoint import CheckpointRestore, CheckpointSave

from cuajax.algorithms import grpo, stepo
from cuajax.data import keys
from cuajax.data.pack import PackSpec
from cuajax.data.pipeline import Rules, experience, oldest_version, rebase, supervised, verdict
from cuajax.data.store import Store
from cuajax.inputs.processor import ImageSpec
from cuajax.types import Outcome, Sample
from tests.data.experience import IMAGE_ID, fill, group

SPEC = PackSpec(
    length=128, loss_tokens=48, images_per_row=6, patches_per_image=16, rows=2,
    image=ImageSpec(patch=4, position_side=4), image_id=IMAGE_ID,
)  # fmt: skip


@pytest.fixture
def store(tmp_path):
    made = Store.open(tmp_path / "run", create=True)
    yield made
    made.close()


def batches(store, *, state=None, limit=99, spec=SPEC, **options):
    """(hash, info, state after) of each batch."""
    rules = options.pop("rules", Rules(groups_per_update=3, max_lag=99))
    credit = options.pop("credit", stepo.credit)
    iterator = iter(experience(store, credit, spec=spec, rules=rules, **options))
    if state is not None:
        iterator.set_state(state)
    out = []
    try:
        for batch, info in iterator:
            out.append((digest(batch), info, iterator.get_state()))
            if len(out) == limit:
                break
    finally:
        iterator.close()
    return out


def digest(batch):
    h = hashlib.sha256()
    for a in (*batch[:-1], *batch.vision):
        h.update(repr((a.dtype, a.shape)).encode())
        h.update(np.ascontiguousarray(a))
    return h.hexdigest()


def losses(batch):
    """Everything that is trained, sorted, without regard to where it lies."""
    keep = batch.weight != 0
    rows = [batch.targets[keep], batch.behaviour_logp[keep], batch.advantage[keep], batch.weight[keep]]
    return sorted(zip(*(a.tolist() for a in rows), strict=True))


# ------------------------------------------------------------------------------------------------ selection
def test_groups_come_in_order_and_weights_share_one_denominator(store):
    made = fill(store, 7)
    store.finish()
    out = batches(store)
    assert [info["seqs"] for _, info, _ in out] == [[0, 1, 2], [3, 4, 5]]
    assert [state for *_, state in out] == [
        {"seq": 3, "update": 1, "version": 1, "since": 0}, {"seq": 6, "update": 2, "version": 1, "since": 0},
    ]  # fmt: skip
    info = out[0][1]
    assert info["rewards"] == {"click": pytest.approx(1 / 3)}
    assert info["lags"] == {0: 3} and out[1][1]["lags"] == {1: 3}
    tokens = sum(len(s.completion.token_ids) for g in made[:3] for t in g.trajectories for s in t.steps)
    assert info["tokens_generated"] == info["pack"]["loss_tokens"] == tokens
    batch, _ = next(iter(experience(store, stepo.credit, spec=SPEC, rules=Rules(3, max_lag=99), prefetch=0)))
    assert batch.weight.sum() == pytest.approx(1.0, abs=1e-5)  # stepo: every valid trajectory weighs 1/B


def test_zero_variance_and_invalid_groups_are_replaced_and_counted(store):
    fill(store, 1)
    fill(store, 2, start=1, rewards=(1.0, 1.0, 1.0))
    fill(store, 1, start=3, rewards=(1.0, 0.0, 0.0), invalid=2)
    fill(store, 4, start=4, rewards=(1.0, 0.0, 0.0, 1.0), invalid=1)
    store.finish()
    ((_, info, state),) = batches(store)
    assert info["seqs"] == [0, 4, 5] and state["seq"] == 6
    assert info["counts"] == {"read": 6, "zero_variance": 2, "invalid": 1, "invalid_attempts": 4}
    kept = batches(store, rules=Rules(3, max_lag=99, drop_zero_variance=False), credit=grpo.credit)
    assert [i["seqs"] for _, i, _ in kept] == [[0, 1, 2], [4, 5, 6]]


def test_stale_groups_age_out_whole_and_replays_are_exempt(store):
    rules = Rules(groups_per_update=1, max_lag=2, first_version=5)
    for n, version in enumerate((5, 2, 3, 3, 4, 9)):
        fill(store, 1, start=n, version=version)
    store.finish()
    out = batches(store, rules=rules)
    # Versions 5, 6, 7: group 1 (2) is too old at update 1, groups 2 and 3 (3) as well, group 4 (4) at lag 2 is not.
    assert [i["seqs"] for _, i, _ in out] == [[0], [4], [5]]
    assert [i["version"] for _, i, _ in out] == [5, 6, 7]
    assert out[1][1]["counts"] == {"read": 4, "aged": 3} and out[1][1]["lags"] == {2: 1}
    assert out[2][1]["counts"] == {"read": 1, "future": 1}
    one, _ = group(0, version=5)
    old, _ = group(1, version=1)
    replay = dataclasses.replace(old.trajectories[0], slot=9, replay_of="t1-0")
    mixed = dataclasses.replace(one, trajectories=(*one.trajectories, replay))
    assert oldest_version(mixed) == 5 and verdict(mixed, 7, rules) == ""
    assert verdict(mixed, 8, rules) == "aged"
    only = dataclasses.replace(
        one, trajectories=(replay, dataclasses.replace(replay, slot=3, outcome=Outcome("failure")))
    )
    assert oldest_version(only) is None and verdict(only, 99, rules) == ""


def test_the_version_follows_the_publishing_and_a_rebase(store):
    fill(store, 6)
    store.finish()
    out = batches(store, rules=Rules(1, max_lag=99, first_version=3, publish_every=2))
    assert [i["version"] for _, i, _ in out] == [3, 3, 4, 4, 5, 5]
    state = rebase(out[2][2], 11)
    assert state == {"seq": 3, "update": 3, "version": 11, "since": 3}
    again = batches(store, state=state, rules=Rules(1, max_lag=99, publish_every=2))
    assert [(i["update"], i["version"]) for _, i, _ in again] == [(3, 11), (4, 11), (5, 12)]


def test_damaged_records_are_passed_over(store):
    fill(store, 6)
    bad, images = group(6)
    logprobs = np.array([np.nan], np.float32)
    step = bad.trajectories[0].steps[0]
    done = dataclasses.replace(step.completion, token_ids=np.array([2], np.int32), logprobs=logprobs)
    broken = dataclasses.replace(bad.trajectories[0], steps=(dataclasses.replace(step, completion=done),))
    store.append([dataclasses.replace(bad, trajectories=(broken, *bad.trajectories[1:]))], images)
    fill(store, 2, start=7)
    store.finish()
    kv = store.database.open_generation(store.database.generation)
    kv[keys.group(1)] = b"damaged"
    lost = store.read(3).trajectories[0].steps[0].image_hashes[0]
    del kv[keys.image(lost)]
    reader = Store.open(store.database.prefix, cache_bytes=0)
    out = batches(reader)
    assert [i["seqs"] for _, i, _ in out] == [[0, 2, 3], [4, 5, 7]]
    assert out[0][1]["counts"] == {"read": 3, "quarantined": 1} and out[0][1]["lost_images"] == 1
    assert out[1][1]["counts"] == {"read": 4, "quarantined": 1}
    assert {"group/1", "group/6", f"image/{lost}"} <= set(reader.quarantined)
    assert _same(out, batches(Store.open(store.database.prefix, cache_bytes=0)))


def _same(a, b):
    return [(h, s) for h, _, s in a] == [(h, s) for h, _, s in b]


# ------------------------------------------------------------------------------------------------ resuming
@pytest.fixture
def recorded(store):
    fill(store, 8)
    fill(store, 2, start=8, rewards=(1.0, 1.0))
    fill(store, 8, start=10, version=4)
    store.finish()
    return store


RULES = Rules(groups_per_update=2, max_lag=3)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_resuming_at_any_update_is_bit_identical(recorded, prefetch):
    whole = batches(recorded, rules=RULES, prefetch=prefetch)
    assert _same(whole, batches(recorded, rules=RULES, prefetch=0))
    assert len({h for h, *_ in whole}) == len(whole) == 7  # the last two groups age out
    fresh = Store.open(recorded.database.prefix, cache_bytes=0)
    for k in range(len(whole)):
        state = json.loads(json.dumps(whole[k][2]))
        assert _same(whole[k + 1 :], batches(fresh, state=state, rules=RULES, prefetch=prefetch))


def test_going_back_with_prefetch_running(recorded):
    iterator = iter(experience(recorded, stepo.credit, spec=SPEC, rules=RULES, prefetch=2))
    first, second = next(iterator), next(iterator)
    state = iterator.get_state()
    third = digest(next(iterator)[0])
    iterator.set_state(state)
    assert digest(next(iterator)[0]) == third
    iterator.set_state({"seq": 0, "update": 0, "version": 1, "since": 0})
    assert [digest(next(iterator)[0]) for _ in range(2)] == [digest(first[0]), digest(second[0])]
    iterator.close()


def test_orbax_saves_the_state(recorded, tmp_path):
    whole = batches(recorded, rules=RULES)
    dataset = experience(recorded, stepo.credit, spec=SPEC, rules=RULES)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        iterator = iter(dataset)
        for _ in range(3):
            next(iterator)
        manager.save(3, args=ocp.args.Composite(data=CheckpointSave(iterator)))
        manager.wait_until_finished()
        iterator.close()
        other = iter(dataset)
        manager.restore(3, args=ocp.args.Composite(data=CheckpointRestore(other)))
        assert [digest(batch) for batch, _ in other] == [h for h, *_ in whole[3:]]
        other.close()


# ------------------------------------------------------------------------------------------------ hosts
@pytest.mark.parametrize("count", [2, 3])
def test_the_shards_union_is_the_single_hosts_batch(recorded, count):
    def run(shard):
        iterator = iter(experience(recorded, grpo.credit, spec=SPEC, rules=RULES, shard=shard, prefetch=0))
        return [(batch, info, iterator.get_state()) for batch, info in iterator]

    alone = run((0, 1))
    parts = [run((i, count)) for i in range(count)]
    for k, (batch, info, state) in enumerate(alone):
        assert sorted(x for part in parts for x in losses(part[k][0])) == losses(batch)
        assert all(part[k][2] == state and part[k][1]["seqs"] == info["seqs"] for part in parts)
    with pytest.raises(ValueError, match="shard 2 of 2"):
        experience(recorded, grpo.credit, spec=SPEC, rules=RULES, shard=(2, 2))


# ------------------------------------------------------------------------------------------------ blocking
def test_it_waits_for_groups_and_ends_with_the_store(store):
    def work():
        for n in range(5):
            time.sleep(0.02)
            fill(store, 1, start=n)
        store.finish()

    thread = threading.Thread(target=work)
    thread.start()
    out = batches(store, rules=Rules(2, max_lag=99))
    thread.join()
    assert [i["seqs"] for _, i, _ in out] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_timeout_changes_nothing(store, prefetch):
    fill(store, 3)
    rules = Rules(2, max_lag=99)
    iterator = iter(experience(store, stepo.credit, spec=SPEC, rules=rules, timeout=0.1, prefetch=prefetch))
    next(iterator)
    state = iterator.get_state()
    with pytest.raises(TimeoutError, match=r"update 1: 1 of 2 groups after 0.1 s, waiting for group 3"):
        next(iterator)
    assert iterator.get_state() == state
    fill(store, 1, start=3)
    assert next(iterator)[1]["seqs"] == [2, 3]
    iterator.close()


def test_closing_does_not_wait_for_groups(store):
    fill(store, 3)
    iterator = iter(experience(store, stepo.credit, spec=SPEC, rules=Rules(2, max_lag=99)))
    next(iterator)
    time.sleep(0.05)  # the thread waits for the second batch by now
    began = time.monotonic()
    iterator.set_state(iterator.get_state())
    iterator.close()
    assert time.monotonic() - began < 5


def test_rules_are_checked():
    with pytest.raises(ValueError, match=r"Rules\.groups_per_update is 0, must be at least 1"):
        Rules(0)
    with pytest.raises(ValueError, match=r"Rules\.max_lag is -1"):
        Rules(1, max_lag=-1)


# ------------------------------------------------------------------------------------------------ supervised
def demonstrations(seed, step, *, count=6):
    rng = np.random.default_rng([seed, step])
    _, images = group(step % 3, steps=1)
    h = next(iter(images))
    ones = np.ones(2, np.float32)
    prompt = [IMAGE_ID] * 4
    samples = [
        Sample(
            np.array([*prompt, int(rng.integers(2, 9))], np.int32), (h,), rng.integers(2, 9, 2).astype(np.int32),
            0 * ones, ones, ones / (2 * count), name=f"{seed}/{step}/{i}",
        )
        for i in range(count)
    ]  # fmt: skip
    return samples, images


@pytest.mark.parametrize("prefetch", [0, 2])
def test_supervised_batches_resume_bit_identically(prefetch):
    dataset = supervised(demonstrations, spec=SPEC, seed=3, steps=6, prefetch=prefetch)
    iterator = iter(dataset)
    seen = [(digest(batch), info["step"], iterator.get_state()) for batch, info in iterator]
    iterator.close()
    assert [step for _, step, _ in seen] == list(range(6)) and seen[2][2] == {"step": 3}
    for k in range(6):
        again = iter(dataset)
        again.set_state(seen[k][2])
        assert [digest(batch) for batch, _ in again] == [h for h, *_ in seen[k + 1 :]]
        again.close()
    other = iter(supervised(functools.partial(demonstrations, count=5), spec=SPEC, seed=4, prefetch=prefetch))
    batch, _ = next(other)
    assert batch.weight.sum() == pytest.approx(1.0) and digest(batch) != seen[0][0]
    other.close()
