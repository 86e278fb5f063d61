"""One learner a run directory: a living holder is named, a dead one is taken over with a larger number."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cuajax.data import lease as module
from cuajax.data.lease import LeaseHeld, LeaseLost, acquire
from cuajax.data.records import seal

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from cuajax.data.lease import acquire
lease = acquire(sys.argv[1], term=0.6)
print(lease.fence, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "1\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_second_learner_is_told_who_holds_it(tmp_path, holder):
    with pytest.raises(LeaseHeld, match=rf"is held by process {holder.pid} on \S+ since 20\d\d-.* \(lease 1\)"):
        acquire(tmp_path)
    holder.send_signal(signal.SIGSTOP)  # paused is not dead
    with pytest.raises(LeaseHeld):
        acquire(tmp_path)
    holder.send_signal(signal.SIGCONT)


def test_a_killed_learner_is_taken_over_at_once(tmp_path, holder):
    holder.kill()  # not reaped yet: a zombie does not hold
    time.sleep(0.05)
    began = time.monotonic()
    with acquire(tmp_path) as lease:
        assert lease.fence == 2
        assert time.monotonic() - began < 5
    with acquire(tmp_path) as lease:
        assert lease.fence == 3


def test_a_reused_pid_does_not_hold(tmp_path):
    first = acquire(tmp_path, term=60)
    other = dataclasses.replace(first._holder, started="1")
    first._write(other)
    with acquire(tmp_path) as lease:
        assert lease.fence == 2
    with pytest.raises(LeaseHeld):
        with acquire(tmp_path):
            acquire(tmp_path)


def test_on_another_machine_the_heartbeat_decides(tmp_path, monkeypatch):
    first = acquire(tmp_path, term=0.3)
    here = module._machine
    monkeypatch.setattr(module, "_machine", lambda: "another boot")
    with pytest.raises(LeaseHeld):  # it beats
        acquire(tmp_path)
    first._stop.set()
    first._thread.join()
    began = time.monotonic()
    second = acquire(tmp_path)
    assert second.fence == first.fence + 1
    assert time.monotonic() - began >= 0.3
    monkeypatch.setattr(module, "_machine", here)
    # The first one was only paused: its next heartbeat finds out.
    first._write(dataclasses.replace(first._holder, beat=99))
    with pytest.raises(LeaseLost, match=r"lease 1 .* was taken over"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_only_one_of_many_gets_it(tmp_path):
    got, refused = [], []

    def race():
        try:
            got.append(acquire(tmp_path))
        except LeaseHeld as error:
            refused.append(error)

    threads = [threading.Thread(target=race) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 1 and len(refused) == 5
    got[0].release()


def test_a_clock_step_kills_nobody(tmp_path, monkeypatch):
    with acquire(tmp_path):
        monkeypatch.setattr(time, "time", lambda: 0.0)
        with pytest.raises(LeaseHeld):
            acquire(tmp_path)


def test_heartbeats_go_on(tmp_path):
    with acquire(tmp_path, term=0.15) as lease:
        time.sleep(0.4)
        assert lease._holder.beat >= 2
        lease.check()
    assert seal(lease._holder)
    assert lease._holder.pid == 0 and os.getpid()
