"""One OCDBT database per generation of a run's store, and atomic transactions on the current one.

A generation's `head` record is read and rewritten by every transaction, so writers are serialised by it. On a local
disk they take turns by a lock file besides: when the commits of two processes meet, TensorStore 0.1.86 may crash one of
them instead of refusing it. Compaction writes a new generation and, as its last act, names it in the old one's head
(`next`); whoever reads that head moves over. A handle holds a shared file lock on its generation, which is deleted only
when nobody holds one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tensorstore as ts

from cuajax.data.keys import HEAD
from cuajax.data.records import RecordCorrupt, seal, unseal

RETRIES = 64  # of one transaction against other writers
_PAUSE_SECONDS = 5.0  # a writer waits at most this long for a compaction, or for its turn
_CURRENT = b"CURRENT"
_OS_ERROR = re.compile(r"os_error_code=\\?'(\d+)\\?'")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


class StoreError(RuntimeError):
    """The store cannot do what was asked; the subclasses say why. Nothing was written."""


class StoreFull(StoreError):
    """No space left (disk, quota or file size)."""


class StoreDenied(StoreError):
    """No permission, or a read-only file system."""


class StoreConflict(StoreError):
    """Other writers won every retry."""


class StoreFenced(StoreError):
    """A learner with a newer lease has taken over."""


@dataclass(frozen=True, slots=True)
class Head:
    """The counters of a store."""

    seq: int = 0  # the next group's sequence number
    first: int = 0  # the oldest one kept
    version: int = 0  # policy versions given out
    retain: int = 0  # compaction keeps groups from here on
    fence: int = 0  # of the newest learner lease
    edits: int = 0  # transactions so far
    journal: bool = False  # attempts have been journaled
    done: bool = False  # no more groups will come
    pause: bool = False  # a compaction asks writers to let it catch up
    next: str = ""  # the generation that replaced this one


def typed(error: Exception, doing: str) -> Exception:
    """TensorStore's error as one of ours, by its status code and errno."""
    text = str(error)
    found = _OS_ERROR.search(text)
    code = int(found.group(1)) if found else 0
    if code in _FULL or text.startswith("RESOURCE_EXHAUSTED"):
        return StoreFull(f"{doing}: no space left: {text}")
    if code in _DENIED or text.startswith(("PERMISSION_DENIED", "UNAUTHENTICATED")):
        return StoreDenied(f"{doing}: not permitted: {text}")
    if text.startswith("ABORTED"):
        return StoreConflict(f"{doing}: {text}")
    if not re.match("[A-Z_]+: ", text) or text.startswith(("DATA_LOSS", "OUT_OF_RANGE")):  # no code: invalid data
        return RecordCorrupt(f"{doing}: {text}")
    return StoreError(f"{doing}: {text}")


def prefix(path: str | os.PathLike[str]) -> str:
    """A directory, or a URL such as gs://bucket/run, as a TensorStore URL that ends in a slash."""
    text = os.fspath(path)
    if "://" not in text:
        text = "file://" + os.path.abspath(text)
    return text.rstrip("/") + "/"


class Database:
    """A handle on the current generation."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False) -> None:
        self.prefix = prefix(path)
        self.local = Path(self.prefix.removeprefix("file://")) if self.prefix.startswith("file://") else None
        self.generation = ""
        self.conflicts = 0
        self._moving = threading.RLock()
        self._pin: _Pin | None = None
        self._root = ts.KvStore.open(self.prefix).result()
        name = self._read_current()
        if not name:
            if not create:
                raise StoreError(f"no store at {self.prefix}; create=True makes one")
            name = "gen-000001"
            self._initialise(name)
        self.move_to(name)
        while (head := self.head()).next:  # a compaction that was killed before it updated CURRENT
            self.move_to(head.next)

    # ------------------------------------------------------------------------------------------- generations
    def _read_current(self) -> str:
        try:
            return self._root.read(_CURRENT).result().value.decode()
        except ValueError as error:
            raise typed(error, f"opening {self.prefix}") from error

    def set_current(self, name: str) -> None:
        """Where the next opener starts."""
        try:
            self._root.write(_CURRENT, name.encode()).result()
        except ValueError as error:
            raise typed(error, f"naming generation {name}") from error

    def open_generation(self, name: str) -> Any:
        """The key-value store of one generation, which need not exist yet."""
        spec = {
            "driver": "ocdbt",
            "base": f"{self.prefix}{name}/",
            "config": {"max_decoded_node_bytes": 1 << 16},  # small nodes: a commit rewrites those it touches
            "cache_pool": {"total_bytes_limit": 16 << 20},
        }
        try:
            return ts.KvStore.open(spec).result()
        except ValueError as error:
            raise typed(error, f"opening generation {name} of {self.prefix}") from error

    def _initialise(self, name: str) -> None:
        kv = self.open_generation(name)
        doing = f"creating a store at {self.prefix}"
        txn = ts.Transaction(atomic=True, repeatable_read=True)
        try:
            with self._turn(doing):
                if kv.with_transaction(txn).read(HEAD).result().state == "missing":
                    kv.with_transaction(txn)[HEAD] = seal(Head())
                txn.commit_async().result()
        except ValueError as error:
            if not isinstance(typed(error, ""), StoreConflict):  # a conflict: someone else made it just now
                raise typed(error, doing) from error
        self.set_current(name)

    def move_to(self, name: str) -> None:
        """Opens and pins a generation, releasing the one held."""
        with self._moving:
            if name != self.generation:
                self._move_to(name)

    def _move_to(self, name: str) -> None:
        for _ in range(RETRIES):
            pin = self._lock(name)
            if pin is not False:
                kv = self.open_generation(name)
                if _value(kv.read(HEAD), f"opening {self.prefix}{name}"):
                    self._pin, self._kv, self.generation = pin, kv, name
                    return
            time.sleep(0.01)  # deleted in this moment: somebody has moved CURRENT on
            name = self._read_current()
        raise StoreError(f"generation {name} of {self.prefix} has no head")

    def _lock(self, name: str) -> _Pin | Literal[False] | None:
        """The shared lock; None where there are no locks; False if the generation is being deleted."""
        if self.local is None:
            return None
        try:
            return _Pin(self.local / name / "pin", fcntl.LOCK_SH)
        except (FileNotFoundError, BlockingIOError):
            return False
        except PermissionError:
            return None  # a reader that may not lock; it finds the next generation all the same

    def release(self) -> None:
        """Lets go of the generation held."""
        self._pin = None

    def generations(self) -> list[str]:
        """Names of the generations on a local disk, oldest first."""
        return sorted(p.name for p in self.local.glob("gen-*")) if self.local else [self.generation]

    def delete_unused(self) -> int:
        """Deletes generations older than the current one that no handle holds; how many went."""
        gone = 0
        if self.local is None:
            return gone
        for name in self.generations():
            if name >= self.generation:
                continue
            try:
                pin = _Pin(self.local / name / "pin", fcntl.LOCK_EX)
            except (FileNotFoundError, BlockingIOError):
                continue
            shutil.rmtree(self.local / name, ignore_errors=True)
            del pin
            gone += 1
        return gone

    def disk_bytes(self) -> int:
        """Bytes of the current generation's files; 0 where the store is not on a local disk."""
        if self.local is None:
            return 0
        total = 0
        for folder, _, names in os.walk(self.local / self.generation):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # a lock file of a commit that has just ended
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total

    # ---------------------------------------------------------------------------------------------- reading
    def read(self, key: bytes) -> Any:
        """A future of the key's value in the current generation."""
        return self._kv.read(key)

    def keys(self, start: bytes) -> list[bytes]:
        """All keys that begin with `start`, in order."""
        try:
            return self._kv.list(ts.KvStore.KeyRange(start, _after(start))).result()
        except ValueError as error:
            raise typed(error, f"listing {start.decode()}") from error

    def head(self) -> Head:
        """The counters, as committed last in this generation. Raises StoreError when it was deleted."""
        data = _value(self._kv.read(HEAD), "reading head")
        if not data:
            raise StoreError(f"generation {self.generation} of {self.prefix} was deleted")
        return unseal(data, Head, "head")

    def refresh(self) -> Head:
        """The counters, after moving to the generation that replaced this one, if any."""
        try:
            head = self.head()
        except StoreError:
            name = self._read_current()
            if name in ("", self.generation):
                raise
            self.move_to(name)
            head = self.head()
        while head.next:
            self.move_to(head.next)
            head = self.head()
        return head

    # ---------------------------------------------------------------------------------------------- writing
    def transact(self, edit: Callable[[Any, Head], Head | None], *, doing: str, polite: bool = True) -> Head:
        """Runs `edit(kv, head) -> new head` in one atomic transaction; None from it writes nothing.

        `edit` runs again when another writer committed in between; a `polite` writer first lets a compaction catch
        up. Raises StoreConflict after RETRIES, StoreFull, StoreDenied, and whatever `edit` raises. `edit` must not
        read a key it has written: TensorStore 0.1.86 then commits an empty value.
        """
        patience = time.monotonic() + _PAUSE_SECONDS
        conflicts = 0
        while conflicts < RETRIES:
            try:
                with self._turn(doing):
                    done = self._attempt(edit, polite=polite, pausing=polite and time.monotonic() < patience)
            except ValueError as error:
                if type(error) is not ValueError:  # the edit's own; TensorStore's have no type
                    raise
                if not str(error).startswith("ABORTED"):
                    raise typed(error, doing) from error
                self.conflicts += 1
                conflicts += 1
                time.sleep(random.uniform(0, min(0.05, 0.001 * 2**conflicts)))
            else:
                if done is not None:
                    return done
                time.sleep(0.002)
        raise StoreConflict(f"{doing}: lost to other writers {RETRIES} times")

    def _attempt(self, edit: Callable[[Any, Head], Head | None], *, polite: bool, pausing: bool) -> Head | None:
        """One transaction; None where it has to wait for a compaction, or was begun on a replaced generation."""
        txn = ts.Transaction(atomic=True, repeatable_read=True)
        kv = self._kv.with_transaction(txn)
        try:
            data = kv.read(HEAD).result().value
            head = unseal(data, Head, "head") if data else Head(next="deleted")
            if head.next:
                self.refresh()
                return None
            if pausing and head.pause:
                return None
            new = edit(kv, head)
            if new is None:
                return head
            # Whoever ran out of patience clears the request: its compaction was killed.
            kv[HEAD] = seal(dataclasses.replace(new, pause=False) if polite and new.pause else new)
            txn.commit_async().result()
            return new
        finally:
            txn.abort()

    @contextlib.contextmanager
    def _turn(self, doing: str) -> Iterator[None]:
        """Holds the writers' lock. A process that is stopped with it holds others up only for a moment."""
        if self.local is None:
            yield
            return
        try:
            self.local.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.local / "write.lock", os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            kind = StoreFull if error.errno in _FULL else StoreDenied if error.errno in _DENIED else StoreError
            raise kind(f"{doing}: {error}") from error
        try:
            patience = time.monotonic() + _PAUSE_SECONDS
            while not _locked(lock) and time.monotonic() < patience:
                time.sleep(0.001)
            yield
        finally:
            os.close(lock)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Pin:
    """A locked file, let go of with the object. Raises BlockingIOError when somebody holds another kind of lock."""

    def __init__(self, path: Path, kind: int) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(self._fd, kind | fcntl.LOCK_NB)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _value(future: Any, doing: str) -> bytes:
    """The value read, b"" if there is none. Raises one of our errors."""
    try:
        return future.result().value
    except ValueError as error:
        raise typed(error, doing) from error


def _after(start: bytes) -> bytes:
    """The first key after all that begin with `start`."""
    return start[:-1] + bytes([start[-1] + 1])
