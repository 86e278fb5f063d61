"""Copying the live part of a store into a new generation, while others read and append."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import tensorstore as ts

from cuajax.data import blobs, images, keys
from cuajax.data.database import Database, Head, StoreConflict, typed
from cuajax.data.records import RecordError, seal, unseal
from cuajax.types import Group

_BATCH = 256  # records copied in one commit
_ROUNDS = 20  # of catching up with appends of other processes
_PATIENCE = 3  # rounds after which they are asked to pause


def compact(database: Database, keep_from: int, counters: Counter[str]) -> int:
    """Keeps groups from `keep_from` on with their deltas and images, all slots, records and journal entries.

    Returns the bytes that the new generation takes less; 0 when another process is compacting or nothing would go.
    Damaged records are left behind and counted. Raises StoreConflict when appends outrun it, StoreFull, StoreDenied.
    """
    head = database.refresh()
    database.delete_unused()
    if keep_from <= head.first:
        return 0
    lock = _lock(database)
    if lock is False:
        return 0
    try:
        size = database.disk_bytes()
        name = _next_name(database)
        target = database.open_generation(name)
        _clear(target, name)
        _move(database, target, name, keep_from=min(keep_from, head.seq), counters=counters)
        database.set_current(name)
        database.move_to(name)
        database.delete_unused()
        counters["compactions"] += 1
        return max(0, size - database.disk_bytes())
    finally:
        if lock is not None:
            os.close(lock)


def _lock(database: Database) -> int | bool | None:
    """One compaction at a time: a lock file on a local disk, the learner's lease elsewhere."""
    if database.local is None:
        return None
    lock = os.open(database.local / "compact.lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    return lock


def _next_name(database: Database) -> str:
    return f"gen-{int(database.generation.removeprefix('gen-')) + 1:06d}"


def _clear(target: Any, name: str) -> None:
    """Drops what a compaction that was killed half way left under this name."""
    try:
        target.delete_range(ts.KvStore.KeyRange()).result()
    except ValueError as error:
        raise typed(error, f"clearing generation {name}") from error


def _move(database: Database, target: Any, name: str, *, keep_from: int, counters: Counter[str]) -> None:
    """Copies until a copy is complete at the moment the old head is sealed with the new generation's name."""
    start = keep_from
    copied: set[str] = set()
    for round_ in range(_ROUNDS):
        head = _head(database, pause=round_ >= _PATIENCE)
        ids = _copy_groups(database, target, start, head.seq, copied=copied, counters=counters)
        slots = database.keys(keys.SLOT) if round_ == 0 else [keys.slot(i) for i in ids]
        _copy(database, target, slots)
        for small in (keys.RECORD, keys.JOURNAL):
            _mirror(database, target, small)
        _write(
            target,
            {
                keys.HEAD: seal(
                    dataclasses.replace(head, first=keep_from, retain=max(keep_from, head.retain), pause=False)
                )
            },
            name,
        )
        start = head.seq

        def finish(_: Any, now: Head, complete: Head = head) -> Head | None:
            return dataclasses.replace(now, next=name) if now == complete else None

        if database.transact(finish, doing="switching generations", polite=False).next == name:
            return
    raise StoreConflict(f"compaction: appends went on through {_ROUNDS} rounds of copying")


def _head(database: Database, *, pause: bool) -> Head:
    """The counters to catch up with, after asking other writers to wait."""
    if not pause:
        return database.head()
    return database.transact(
        lambda _, head: dataclasses.replace(head, pause=True), doing="asking writers to pause", polite=False
    )


def _copy_groups(
    database: Database, target: Any, start: int, stop: int, *, copied: set[str], counters: Counter[str]
) -> list[str]:
    """Copies groups [start, stop) with their deltas and images; returns their ids."""
    ids = []
    for a in range(start, stop, _BATCH):
        some = range(a, min(a + _BATCH, stop))
        data = _read(database, [keys.group(s) for s in some])
        groups = []
        for key in list(data):
            try:
                groups.append(unseal(data[key], Group, key.decode()))
            except RecordError:
                counters["dropped_damaged"] += 1
                del data[key]
        data |= _read(database, [keys.delta(s) for s in some])
        ids += [g.id for g in groups]
        wanted = [h for h in blobs.frames(groups)[0] if h not in copied]
        while wanted:  # a delta needs its base, which may need another
            found = _read(database, [keys.image(h) for h in wanted])
            copied.update(wanted)
            data |= found
            wanted = list(dict.fromkeys(b for b in map(_base, found.values()) if b and b not in copied))
        _write(target, data, "groups")
    return ids


def _base(blob: bytes) -> str | None:
    try:
        return images.base_of(blob)
    except images.ImageError:
        return None


def _read(database: Database, wanted: list[bytes]) -> dict[bytes, bytes]:
    """The values that exist and can be read."""
    futures = [(k, database.read(k)) for k in wanted]
    found = {}
    for key, future in futures:
        try:
            value = future.result()
        except ValueError as error:
            if not isinstance(typed(error, ""), RecordError):
                raise typed(error, f"copying {key.decode()}") from error
            continue
        if value.state == "value":
            found[key] = value.value
    return found


def _chunks(wanted: list[bytes]) -> Iterator[list[bytes]]:
    for a in range(0, len(wanted), 4 * _BATCH):
        yield wanted[a : a + 4 * _BATCH]


def _copy(database: Database, target: Any, wanted: list[bytes]) -> None:
    for some in _chunks(wanted):
        _write(target, _read(database, some), "slots")


def _mirror(database: Database, target: Any, start: bytes) -> None:
    """Makes the keys under `start` the same in both generations, deletions included."""
    try:
        target.delete_range(ts.KvStore.KeyRange(start, start[:-1] + bytes([start[-1] + 1]))).result()
    except ValueError as error:
        raise typed(error, f"clearing {start.decode()}") from error
    _copy(database, target, database.keys(start))


def _write(target: Any, data: dict[bytes, bytes], what: str) -> None:
    if not data:
        return
    txn = ts.Transaction(atomic=True)
    kv = target.with_transaction(txn)
    for key, value in data.items():
        kv[key] = value
    try:
        txn.commit_async().result()
    except ValueError as error:
        raise typed(error, f"copying {what}") from error
