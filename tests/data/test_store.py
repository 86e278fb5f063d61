"""What was acknowledged is there, once, whole, for everybody; what is damaged is named and passed over."""

import dataclasses
import itertools
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cuajax.data import keys
from cuajax.data.database import StoreConflict, StoreDenied, StoreError, StoreFenced, StoreFull, typed
from cuajax.data.images import ImageCorrupt, image_hash
from cuajax.data.records import MissingImages, RecordCorrupt, RecordMissing, RecordVersionError, seal, unseal
from cuajax.data.store import Store
from tests.data.experience import fill, group, hashes, same, screen

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path):
    made = Store.open(tmp_path / "run", create=True)
    yield made
    made.close()


def cold(store: Store) -> Store:
    """Another handle that remembers nothing: what is on disk."""
    return Store.open(store.database.prefix, cache_bytes=0)


def overwrite(store: Store, key: bytes, value: bytes | None) -> None:
    """Damages one record behind the store's back."""
    kv = store.database.open_generation(store.database.generation)
    if value is None:
        del kv[key]
    else:
        kv[key] = value


def raw(store: Store, key: bytes) -> bytes:
    return store.database.read(key).result().value


# ------------------------------------------------------------------------------------------------ round trips
def test_groups_and_images_come_back_from_disk(store):
    made = [group(n, steps=3) for n in range(5)]
    images = {h: p for _, some in made for h, p in some.items()}
    assert store.append([g for g, _ in made], images, [{"n": n} for n in range(5)]) == [0, 1, 2, 3, 4]
    for reader in (store, cold(store)):
        assert reader.head() == 5
        for n, (one, some) in enumerate(made):
            back = reader.read(n)
            assert same(back, one)
            for h, pixels in reader.load_images(hashes(back)).items():
                np.testing.assert_array_equal(pixels, some[h])
        assert reader.deltas(3) == {"n": 3}
        assert reader.deltas_from(0, 5) == [{"n": n} for n in range(5)]
    assert store.counters["groups"] == 5 and store.counters["images"] == len(images)
    assert cold(store).try_images(images)[0].keys() == images.keys()


def test_an_image_is_stored_once(store):
    one, images = group(0)
    store.append([one], images)
    other = dataclasses.replace(one, id="other")
    store.append([other], images)
    store.append([dataclasses.replace(one, id="third")], {})  # already stored: need not be given again
    assert store.counters["images"] == len(images)
    reopened = Store.open(store.database.prefix, cache_bytes=0)
    reopened.append([dataclasses.replace(one, id="fourth")], images)
    assert reopened.counters["images"] == 0


def test_a_group_without_its_images_is_refused_whole(store):
    one, images = group(0)
    with pytest.raises(MissingImages, match=r"appending groups \['g0'\]: 4 images .*neither given nor stored"):
        store.append([group(1)[0], one], group(1)[1])
    wrong = dict(zip(images, reversed(images.values()), strict=True))
    with pytest.raises(ImageCorrupt, match="has hash"):
        store.append([one], wrong)
    assert store.head() == 0
    assert store.append([one], images) == [0]


def test_duplicates_are_no_ops(store):
    one, images = group(0, rewards=(1.0, 0.0, 0.0, 1.0))
    early = dataclasses.replace(one, trajectories=one.trajectories[:2])
    assert store.append([early], images) == [0]
    assert store.append([early], images) == [0]
    assert store.append([early, early], images) == [0, 0]
    assert store.head() == 1 and store.counters["duplicates"] == 3
    # A late delivery brings only the slots that are new.
    assert store.append([one, one], images, [{"late": 1}, {"late": 2}]) == [1, 1]
    assert [t.slot for t in cold(store).read(1).trajectories] == [2, 3]
    assert store.slots("g0") == {0: 0, 1: 0, 2: 1, 3: 1}
    assert store.deltas_from(0, 3) == [{}, {"late": 1}, {}]


def test_named_records_and_versions(store):
    store.put("cursor", {"seq": 3, "names": ["a", "b"]})
    assert cold(store).get("cursor") == {"seq": 3, "names": ["a", "b"]}
    assert store.get("nothing") is None
    other = cold(store)
    taken = [s.new_version() for s in (store, other, other, store)]
    assert taken == [1, 2, 3, 4]
    assert Store.open(store.database.prefix).new_version() == 5
    assert store.info().version == 5


def test_the_first_error_says_what_to_do(tmp_path):
    with pytest.raises(StoreError, match="create=True"):
        Store.open(tmp_path / "nothing")
    with pytest.raises(ValueError, match="1 deltas for 2 groups"):
        Store.open(tmp_path, create=True).append([group(0)[0], group(1)[0]], {}, [{}])


# ------------------------------------------------------------------------------------------------ many writers
WRITER = """
import sys
from cuajax.data.store import Store
from tests.data.experience import group
path, start, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = Store.open(path, create=True)
for n in range(start, start + count):
    one, images = group(n)
    shared, more = group(10_000 + n % 5)  # both writers store these, too
    seqs = store.append([one, shared], images | more, [{"n": n}, {}])
    print(n, seqs[0], store.new_version())
print("conflicts", store.database.conflicts, file=sys.stderr)
"""


def test_two_writer_processes_lose_nothing_and_never_meet(tmp_path):
    starts, count = (0, 100), 25
    commands = [[sys.executable, "-c", WRITER, str(tmp_path), str(s), str(count)] for s in starts]
    running = [
        subprocess.Popen(c, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands
    ]
    outputs = [p.communicate(timeout=60) for p in running]
    assert all(p.returncode == 0 for p in running), outputs
    assert [err.splitlines()[-1] for _, err in outputs] == ["conflicts 0"] * 2  # TensorStore may crash at one
    rows = [tuple(map(int, line.split())) for out, _ in outputs for line in out.splitlines()]
    store = Store.open(tmp_path, cache_bytes=0)
    assert store.head() == 2 * count + 5
    assert sorted(v for _, _, v in rows) == list(range(1, 2 * count + 1))
    assert len({seq for _, seq, _ in rows}) == 2 * count
    for n, seq, _ in rows:
        one, images = group(n)
        assert same(store.read(seq), one) and store.deltas(seq) == {"n": n}
        assert store.load_images(images).keys() == images.keys()
    assert len({store.read(s).id for s in range(store.head())}) == store.head()


def test_a_writer_that_is_stopped_with_its_turn_holds_others_up_only_for_a_moment(store, monkeypatch):
    monkeypatch.setattr("cuajax.data.database._PAUSE_SECONDS", 0.2)
    with store.database._turn("holding"):
        began = time.monotonic()
        cold(store).put("x", 1)
        assert time.monotonic() - began >= 0.2
    assert store.get("x") == 1


def test_threads_share_a_handle(store):
    def work(start):
        fill(store, 8, start=start)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert store.head() == 32
    assert {cold(store).read(s).id for s in range(32)} == {f"g{100 * i + n}" for i in range(4) for n in range(8)}


def test_a_learner_that_lost_its_lease_cannot_write(tmp_path):
    old = Store.open(tmp_path, create=True, fence=1)
    actor = Store.open(tmp_path)
    assert old.new_version() == 1
    new = Store.open(tmp_path, fence=2)
    assert new.new_version() == 2
    for act in (old.new_version, old.finish, lambda: old.put("cursor", 1), lambda: old.append(*_args(7))):
        with pytest.raises(StoreFenced, match="lease 1 was taken over by lease 2"):
            act()
    assert actor.append(*_args(7)) == [0]
    assert new.info().version == 2 and not new.info().done


def _args(n):
    one, images = group(n)
    return [one], images


# ------------------------------------------------------------------------------------------------ waiting
def test_waiting(store):
    assert not store.wait(0, 0.01)
    other = cold(store)  # stands for another process: it has a hub of its own
    for writer, reader in ((store, store), (store, other), (other, store)):
        head = store.head()
        timer = threading.Timer(0.05, writer.append, _args(head))
        timer.start()
        began = time.monotonic()
        assert reader.wait(head, 10)
        assert time.monotonic() - began < 5
        timer.join()
    assert not store.wait(3, 0.05)
    threading.Timer(0.05, other.finish).start()
    began = time.monotonic()
    assert not store.wait(3, 10) and time.monotonic() - began < 5
    assert store.info().done and store.wait(2, 0)


# ------------------------------------------------------------------------------------------------ damage
def test_a_bit_flip_or_truncation_is_quarantined_and_the_rest_goes_on(store):
    made = fill(store, 6)
    data = raw(store, keys.group(1))
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    overwrite(store, keys.group(1), bytes(flipped))
    overwrite(store, keys.group(2), raw(store, keys.group(2))[:-7])
    overwrite(store, keys.group(3), b"")
    overwrite(store, keys.group(4), None)
    reader = cold(store)
    for seq, error in ((1, RecordCorrupt), (2, RecordCorrupt), (3, RecordCorrupt), (4, RecordMissing)):
        for _ in range(2):
            with pytest.raises(error, match=f"group {seq}"):
                reader.read(seq)
    assert same(reader.read(5), made[5]) and same(reader.read(0), made[0])
    assert reader.counters["quarantined"] == 4
    assert set(reader.quarantined) == {f"group/{n}" for n in (1, 2, 3, 4)}


def test_every_bit_of_a_record_is_covered():
    one, _ = group(0, steps=1, rewards=(1.0,))
    data = seal(one, deflate=True)
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= 1 << i % 8
        with pytest.raises((RecordCorrupt, RecordVersionError)):
            unseal(bytes(damaged), type(one))


def test_an_unknown_format_version_is_refused_by_name():
    data = bytearray(seal({"a": 1}))
    data[2] = 9
    with pytest.raises(RecordVersionError, match="cursor: format version 9, this program reads 1"):
        unseal(bytes(data), dict, "cursor")


def test_lost_and_damaged_images_are_named(store):
    made = fill(store, 3, steps=4)
    wanted = hashes(made[0])
    first, damaged = wanted[0], hashes(made[1])[0]
    overwrite(store, keys.image(first), None)  # the base of the later frames' deltas
    blob = bytearray(raw(store, keys.image(damaged)))
    blob[-1] ^= 1
    overwrite(store, keys.image(damaged), bytes(blob))
    reader = cold(store)
    with pytest.raises(MissingImages, match="loading images") as error:
        reader.load_images(itertools.chain(wanted, hashes(made[1])))
    assert {first, damaged} <= set(error.value.hashes)
    found, bad = reader.try_images(h for g in made for h in hashes(g))
    assert first in bad and damaged in bad
    assert set(hashes(made[2])) <= set(found)
    for h, pixels in found.items():
        assert image_hash(pixels) == h
    assert f"image/{first}" in reader.quarantined
    # The image heals when it is delivered again.
    healing = cold(store)
    pixels = screen(0)
    assert image_hash(pixels) == first
    healing.append([dataclasses.replace(made[0], id="again")], {first: pixels})
    assert set(cold(store).load_images(wanted)) == set(wanted)


def test_a_damaged_database_file_is_a_typed_error(store, tmp_path):
    fill(store, 3)
    store.close()
    for path in (tmp_path / "run").rglob("d/*"):
        data = bytearray(path.read_bytes())
        for i in range(0, len(data), 50):
            data[i] ^= 255
        path.write_bytes(data)
    with pytest.raises((StoreError, RecordCorrupt)):
        Store.open(tmp_path / "run", cache_bytes=0).read(0)


# ------------------------------------------------------------------------------------------------ the disk
FULL = """
import resource, signal, sys
from cuajax.data.database import StoreFull
from cuajax.data.store import Store
from tests.data.experience import group
store = Store.open(sys.argv[1])
one, images = group(500, rewards=(1.0, 0.0) * 20, steps=3)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
try:
    store.append([one], images)
except StoreFull as error:
    print("full:", error, file=sys.stderr)
else:
    raise SystemExit("no error")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert store.head() == 2
assert store.append([one], images) == [2]
"""


def test_a_full_disk_is_a_typed_error_and_nothing_is_lost(store):
    made = fill(store, 2)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    code = [sys.executable, "-c", FULL, store.database.prefix]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "no space left" in done.stderr
    reader = cold(store)
    assert reader.head() == 3 and same(reader.read(1), made[1])
    assert same(reader.read(2), group(500, rewards=(1.0, 0.0) * 20, steps=3)[0])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("RESOURCE_EXHAUSTED: quota", StoreFull),
        ("INTERNAL: Error writing \"x\": No space left on device [os_error_code='28']", StoreFull),
        ("FAILED_PRECONDITION: x [os_error_code='13']", StoreDenied),
        ("PERMISSION_DENIED: x", StoreDenied),
        ("UNKNOWN: Read-only file system [os_error_code='30']", StoreDenied),
        ("ABORTED: Generation mismatch", StoreConflict),
        ("DATA_LOSS: x", RecordCorrupt),
        ("UNAVAILABLE: x", StoreError),
    ],
)
def test_errors_have_types(text, error):
    got = typed(ValueError(text), "appending")
    assert type(got) is error and "appending" in str(got)


# ------------------------------------------------------------------------------------------------ compaction
def test_compaction_keeps_what_is_needed(store):
    made = fill(store, 12, steps=4)
    store.put("cursor", 7)
    version = store.new_version()
    size = store.disk_bytes()
    assert store.compact(8) > 0
    reader = cold(store)
    assert reader.info().first == 8 and reader.head() == 12 and reader.disk_bytes() < size
    for seq in range(8, 12):
        assert same(reader.read(seq), made[seq]) and reader.deltas(seq)["n"] == seq
        assert set(reader.load_images(hashes(made[seq]))) == set(hashes(made[seq]))
    with pytest.raises(RecordMissing):
        reader.read(7)
    assert reader.get("cursor") == 7 and reader.new_version() == version + 1
    # A late duplicate of a group that is gone is still a duplicate.
    one, images = group(2, steps=4)
    assert store.append([one], images) == [2] and store.head() == 12
    fill(store, 2, start=12)
    assert cold(store).read(13).id == "g13"
    assert store.compact(5) == 0  # nothing older than 8 is left


def test_compaction_never_pulls_a_store_from_under_a_reader(store):
    made = fill(store, 10, steps=3)
    reader, other = cold(store), cold(store)
    assert reader.head() == 10
    store.compact(9)
    assert store.database.generation != reader.database.generation
    for seq in range(10):  # it goes on with what it had
        assert same(reader.read(seq), made[seq])
    assert set(reader.load_images(hashes(made[0]))) == set(hashes(made[0]))
    fill(store, 2, start=10)
    assert reader.wait(11, 5)  # looking at the head moves it over
    assert reader.database.generation == store.database.generation
    assert reader.read(11).id == "g11"
    assert other.append(*_args(12)) == [12]  # so does writing
    assert same(cold(store).read(12), group(12)[0])
    store.compact(11)
    assert len(store.database.generations()) <= 3
    for handle in (reader, other, store):
        handle.head()
    store.database.delete_unused()
    assert store.database.generations() == [store.database.generation]


def test_a_reader_whose_generation_is_gone_finds_the_new_one(store):
    made = fill(store, 6)
    reader = cold(store)
    reader.database.release()  # a reader without locks, as on an object store
    store.compact(4)
    assert len(store.database.generations()) == 1
    assert same(reader.read(5), made[5])


def test_compaction_goes_on_while_others_append(store):
    fill(store, 10)
    code = [sys.executable, "-c", WRITER, store.database.prefix, "1000", "30"]
    writer = subprocess.Popen(code, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    done = 0
    while writer.poll() is None:
        head = store.head()
        if head > 12 + 5 * done:
            store.compact(head - 8)
            done += 1
        time.sleep(0.002)
    out, err = writer.communicate()
    assert writer.returncode == 0, err
    reader = cold(store)
    first = reader.info().first
    assert done and first > 0
    stored = {reader.read(s).id for s in range(first, reader.head())}
    rows = [tuple(map(int, line.split())) for line in out.splitlines()]
    assert {f"g{n}" for n, seq, _ in rows if seq >= first} <= stored
    assert reader.head() == 10 + 30 + 5


def test_a_killed_compaction_changes_nothing(store, monkeypatch):
    fill(store, 6)
    half = store.database.open_generation("gen-000002")
    half[keys.group(5)] = b"half copied"
    half[keys.HEAD] = seal({})
    store.compact(3)
    assert store.database.generation == "gen-000002" and cold(store).read(5).id == "g5"

    # Killed after the old head was sealed, before CURRENT was updated.
    def killed(self, name):
        raise InterruptedError

    monkeypatch.setattr(type(store.database), "set_current", killed)
    with pytest.raises(InterruptedError):
        store.compact(5)
    monkeypatch.undo()
    later = Store.open(store.database.prefix, cache_bytes=0)
    assert later.database.generation == "gen-000003" and later.read(5).id == "g5" and later.info().first == 5


def test_a_killed_compaction_holds_writers_up_only_for_a_moment(store, monkeypatch):
    monkeypatch.setattr("cuajax.data.database._PAUSE_SECONDS", 0.1)
    store.database.transact(lambda _, head: dataclasses.replace(head, pause=True), doing="test", polite=False)
    began = time.monotonic()
    fill(store, 1)
    assert time.monotonic() - began >= 0.1
    assert not store.info().pause and cold(store).read(0).id == "g0"


def test_a_damaged_record_is_left_behind(store):
    fill(store, 4)
    overwrite(store, keys.group(2), b"xx")
    store.compact(1)
    reader = cold(store)
    assert store.counters["dropped_damaged"] == 1
    assert reader.read(3).id == "g3"
    with pytest.raises(RecordMissing):
        reader.read(2)


def test_the_disk_is_measured_while_files_come_and_go(store, monkeypatch):
    fill(store, 2)
    size, walk = store.disk_bytes(), os.walk
    assert size > 0
    monkeypatch.setattr(os, "walk", lambda top: [(a, b, [*names, "gone.__lock"]) for a, b, names in walk(top)])
    assert store.disk_bytes() == size


def test_the_budget_compacts_up_to_what_is_retained(tmp_path, monkeypatch):
    monkeypatch.setattr("cuajax.data.store._BUDGET_EVERY", 5)
    store = Store.open(tmp_path, create=True, budget_bytes=30_000)
    for n in range(60):
        store.append(*_args(n))
        if n % 10 == 9:
            store.retain(n - 3)
    assert store.counters["compactions"] >= 1
    assert 0 < store.info().first <= store.info().retain
    for seq in range(store.info().retain, 60):
        assert cold(store).read(seq).id == f"g{seq}"
    without = Store.open(tmp_path / "other", create=True, budget_bytes=1000)
    for n in range(12):
        without.append(*_args(n))  # nothing may be dropped before it is retained from somewhere
    assert without.info().first == 0 and without.counters["over_budget"]
    shutil.rmtree(tmp_path / "other")
