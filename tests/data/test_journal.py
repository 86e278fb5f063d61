"""A restart re-issues exactly what was lost: no attempt skipped, none run or trained twice."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuajax.data import keys
from cuajax.data.journal import STAGES, Attempt, Journal
from cuajax.data.records import MissingImages
from cuajax.data.store import Store
from tests.data.experience import group, hashes, same

ROOT = Path(__file__).parents[2]


def attempts(one):
    return [Attempt(t.id, t.group_id, t.slot, one.task) for t in one.trajectories]


def open_again(path):
    store = Store.open(path, cache_bytes=0)
    return store, Journal(store)


def test_the_life_of_an_attempt(tmp_path):
    store = Store.open(tmp_path, create=True)
    journal = Journal(store)
    one, images = group(0)
    journal.claim(attempts(one))
    journal.executing("g0", 0)
    journal.executed(one.trajectories[1], images)
    journal.evaluated(one.trajectories[2])
    journal.flush(images)
    later, after = open_again(tmp_path)
    found = after.pending()
    assert [(a.slot, a.stage) for a in found] == [(0, "executing"), (1, "executed"), (2, "evaluated")]
    assert found[0].trajectory is None and found[0].task == one.task
    # What was executed can be evaluated from the store alone.
    wanted = [h for s in found[1].trajectory.steps for h in s.image_hashes]
    assert set(later.load_images(wanted)) == set(wanted) <= set(hashes(one))
    # Storing the group clears its entries, in the same transaction.
    later.append([one], images)
    assert open_again(tmp_path)[1].pending() == []
    assert not later.database.keys(keys.JOURNAL)
    assert same(later.read(0), one)


def test_an_entry_of_a_stored_slot_is_not_issued_again(tmp_path):
    store = Store.open(tmp_path, create=True)
    one, images = group(0)
    store.append([one], images)
    Journal(store).claim(attempts(one))  # a claim that came late
    assert Journal(store).pending() == []


def test_what_does_not_fit_is_refused(tmp_path):
    store = Store.open(tmp_path, create=True)
    journal = Journal(store)
    one, images = group(0)
    with pytest.raises(KeyError, match="g0/0 was never claimed"):
        journal.executing("g0", 0)
    journal.claim(attempts(one))
    with pytest.raises(MissingImages):
        journal.executed(one.trajectories[0], {})
    journal.executed(one.trajectories[0], images)
    with pytest.raises(ValueError, match="is executed, cannot go back to executing"):
        journal.executing("g0", 0)


def test_abandoned_attempts_are_counted(tmp_path):
    store = Store.open(tmp_path, create=True)
    journal = Journal(store)
    one, _ = group(0)
    journal.claim(attempts(one))
    journal.abandon(attempts(one)[:2], "aged")
    assert [a.slot for a in journal.pending()] == [2]
    assert store.counters["abandoned_aged"] == 2


def test_a_damaged_entry_is_quarantined(tmp_path):
    store = Store.open(tmp_path, create=True)
    journal = Journal(store)
    one, _ = group(0)
    journal.claim(attempts(one))
    store.database.open_generation(store.database.generation)[keys.attempt("g0", 1)] = b"damaged"
    assert [a.slot for a in journal.pending()] == [0, 2]
    assert list(store.quarantined) == ["journal/g0/1"]


KILLED = """
import os, signal, sys
from cuajax.data.journal import Attempt, Journal
from cuajax.data.store import Store
from tests.data.experience import group
store = Store.open(sys.argv[1], create=True)
journal = Journal(store)
for n in range(4):
    one, images = group(n)
    journal.claim([Attempt(t.id, t.group_id, t.slot, one.task) for t in one.trajectories])
    for t in one.trajectories:
        journal.executing(t.group_id, t.slot)
        journal.executed(t, images)
        if n == 2 and t.slot == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        journal.evaluated(t)
    store.append([one], images)
"""


def test_kill_9_loses_only_what_was_running(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -9
    store, journal = open_again(tmp_path)
    assert store.head() == 2
    # Slot 0 joins its group, slot 1 is evaluated, slot 2 is run; nothing else is done again.
    assert [(a.group_id, a.slot, a.stage) for a in journal.pending()] == [
        ("g2", 0, "evaluated"), ("g2", 1, "executed"), ("g2", 2, "claimed"),
    ]  # fmt: skip


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from(STAGES)), max_size=12))
def test_any_history_accounts_for_every_claim(tmp_path_factory, history):
    path = tmp_path_factory.mktemp("journal")
    store = Store.open(path, create=True)
    journal = Journal(store)
    made = [group(n) for n in range(3)]
    for one, _ in made:
        journal.claim(attempts(one))
    stage = dict.fromkeys(((n, s) for n in range(3) for s in range(3)), "claimed")
    for n, slot, to in history:
        one, images = made[n]
        if STAGES.index(to) < STAGES.index(stage[n, slot]) or stage[n, slot] == "committed":
            continue
        if to == "executing":
            journal.executing(one.id, slot)
        elif to == "executed":
            journal.executed(one.trajectories[slot], images)
        elif to == "evaluated":
            journal.evaluated(one.trajectories[slot])
            journal.flush(images)
        elif to == "committed":
            store.append([one], images)
            stage.update({(n, s): "committed" for s in range(3)})
        stage[n, slot] = to
    journal.flush()
    found = {(a.group_id, a.slot): a.stage for a in open_again(path)[1].pending()}
    assert found == {(f"g{n}", s): to for (n, s), to in stage.items() if to != "committed"}
