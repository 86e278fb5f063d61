"""One learner a run directory: a lease with a heartbeat and a fencing number.

On one machine the holder's process decides; across machines a holder whose heartbeat stands still for its whole term,
by the watcher's own clock, is dead (so a clock step kills nobody). Each holder gets a larger fencing number, which the
store demands of learners, so that one that was only paused cannot write any more.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorstore as ts

from cuajax.data.database import prefix, typed
from cuajax.data.records import seal, unseal

_KEY = b"LEASE"
_TRIES = 16


class LeaseHeld(RuntimeError):
    """Another learner holds the run directory; the message names it."""


class LeaseLost(RuntimeError):
    """This learner's lease was taken over."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease; `pid` 0: nobody any more."""

    host: str
    pid: int
    started: str  # of the process, in the kernel's units: a reused pid differs
    machine: str  # boot and pid namespace: where `pid` means something
    since: float  # unix seconds
    term: float  # seconds a heartbeat lasts
    fence: int
    beat: int = 0


class Lease:
    """A held lease; `fence` goes to Store.open. A context manager that releases on exit."""

    def __init__(self, root: Any, where: str, holder: Holder, generation: bytes) -> None:
        self._root, self._where, self._holder, self._generation = root, where, holder, generation
        self._lost = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    @property
    def fence(self) -> int:
        """Larger than every earlier holder's."""
        return self._holder.fence

    def check(self) -> None:
        """Raises LeaseLost when another learner has taken over."""
        if self._lost:
            raise LeaseLost(f"the lease {self.fence} of {self._where} was taken over")

    def release(self) -> None:
        """Gives the lease back; the next learner need not wait."""
        self._stop.set()
        self._thread.join()
        if not self._lost:
            self._write(dataclasses.replace(self._holder, pid=0))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._stop.wait(self._holder.term / 3) and not self._lost:
            try:
                self._write(dataclasses.replace(self._holder, beat=self._holder.beat + 1))
            except OSError as error:  # a full or absent disk may come back; nobody else can write either
                self.trouble = str(error)

    def _write(self, holder: Holder) -> None:
        with self._lock:
            generation = _swap(self._root, holder, self._generation)
            if generation is None:
                self._lost = True
            else:
                self._holder, self._generation = holder, generation


def acquire(path: str | os.PathLike[str], *, term: float = 30.0) -> Lease:
    """Takes the lease of a run directory or URL.

    Raises LeaseHeld naming host, pid and since when a learner there is alive; one whose process is gone (same
    machine) or whose heartbeat stood still for its term (another machine: this waits that long) is taken over.
    """
    where = prefix(path)
    root = ts.KvStore.open(where).result()
    for _ in range(_TRIES):
        current, generation = _when_free(root, where)
        holder = Holder(
            host=socket.gethostname(), pid=os.getpid(), started=_started(os.getpid()) or "", machine=_machine(),
            since=time.time(), term=term, fence=current.fence + 1 if current else 1,
        )  # fmt: skip
        taken = _swap(root, holder, generation)
        if taken is not None:
            return Lease(root, where, holder, taken)
    raise LeaseHeld(f"{where}: other learners took the lease {_TRIES} times in a row")


def _when_free(root: Any, where: str) -> tuple[Holder | None, bytes]:
    """The last holder, once it is known to be gone, and the generation of its record. Raises LeaseHeld."""
    watched: Holder | None = None
    until = 0.0
    while True:
        current, generation = _read(root, where)
        if current is None or not current.pid:
            return current, generation
        if current.machine == _machine():
            if _started(current.pid) == current.started:
                raise _held(current, where)
            return current, generation
        if watched is None:
            watched, until = current, time.monotonic() + current.term
        elif (current.fence, current.beat) != (watched.fence, watched.beat):
            raise _held(current, where)
        elif time.monotonic() >= until:
            return current, generation
        time.sleep(min(0.5, current.term / 10))


def _held(holder: Holder, where: str) -> LeaseHeld:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder.since))
    return LeaseHeld(
        f"{where} is held by process {holder.pid} on {holder.host} since {since} (lease {holder.fence}); "
        f"stop it, or wait {holder.term:g} s after it has died"
    )


def _read(root: Any, where: str) -> tuple[Holder | None, bytes]:
    try:
        found = root.read(_KEY).result()
    except ValueError as error:
        raise typed(error, f"reading the lease of {where}") from error
    return (unseal(found.value, Holder, "lease") if found.state == "value" else None), found.stamp.generation


def _swap(root: Any, holder: Holder, generation: bytes) -> bytes | None:
    """Writes the lease if it is still at `generation`; the new generation, or None if it is not."""
    try:
        stamp = root.write(_KEY, seal(holder), if_equal=generation).result()
    except ValueError as error:
        raise OSError(str(typed(error, "writing the lease"))) from error
    return stamp.generation or None


def _machine() -> str:
    """Identifies the boot and the pid namespace, within which a pid is unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str | None:
    """When a process began, as the kernel counts; None if it is gone or a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
    except ProcessLookupError:
        return None
    else:
        return None if state in "ZX" else rest[18]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""
