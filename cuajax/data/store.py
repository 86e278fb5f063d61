"""The run's durable experience: groups by sequence number, images by content hash, small named records.

Keys of the OCDBT database: `head`, `group/<seq:012d>`, `delta/<seq:012d>`, `image/<sha256>`, `slot/<group id>`,
`record/<name>`, `journal/<group id>/<slot>`.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cuajax.data import compaction, keys
from cuajax.data.blobs import Encoded, load, stage
from cuajax.data.cache import Hub
from cuajax.data.database import Database, Head, StoreError, StoreFenced, typed
from cuajax.data.records import MissingImages, RecordError, RecordMissing, seal, unseal
from cuajax.types import Group

POLL_SECONDS = 0.03  # how often a waiter looks for another process's commits
_BUDGET_EVERY = 64  # appends between looks at the disk


class Store:
    """A handle on a run's store; threads may share it, and several processes append where the file system has locks."""

    def __init__(self, database: Database, *, fence: int, budget_bytes: int, cache_bytes: int) -> None:
        self.database = database
        self.fence = fence
        self.budget_bytes = budget_bytes
        self.counters: Counter[str] = Counter()
        self.quarantined: dict[str, str] = {}  # record -> why it cannot be read
        self.hub = Hub.of(database.prefix, cache_bytes)
        self.on_commit: list[Callable[[Group], None]] = []  # told of every group this handle has stored
        self._appends = 0
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        fence: int = 0,
        budget_bytes: int = 0,
        cache_bytes: int = 256 << 20,
    ) -> Store:
        """Opens the store of a directory or URL (gs://, s3://).

        `fence` is the learner's lease number (actors give none); `budget_bytes` the disk size above which groups
        below `retain` are compacted away (0: never); `cache_bytes` 0 reads everything from disk.
        Raises StoreError when there is none and `create` is off.
        """
        return cls(Database(path, create=create), fence=fence, budget_bytes=budget_bytes, cache_bytes=cache_bytes)

    def close(self) -> None:
        """Wakes the waiters and lets go of the generation."""
        self._closed = True
        with self.hub.changed:
            self.hub.changed.notify_all()
        self.database.release()

    # ---------------------------------------------------------------------------------------------- writing
    def append(
        self, groups: Sequence[Group], images: Mapping[str, np.ndarray], deltas: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Commits all groups in one atomic transaction; returns their sequence numbers.

        `images` are screenshots by hash, of which those not yet stored are written; `deltas[i]` is the curriculum delta
        of `groups[i]`. A (group id, slot) already stored is left out; a group of nothing else is a no-op that
        returns its earlier number. Raises MissingImages for a group whose images are nowhere, StoreFull,
        StoreDenied, StoreConflict; after any of them nothing is written.
        """
        if deltas and len(deltas) != len(groups):
            raise ValueError(f"{len(deltas)} deltas for {len(groups)} groups")
        commit = _Commit(self, groups, images, deltas)
        head = self.transact(commit.edit, f"appending {len(groups)} groups")
        self._remember(commit)
        self.hub.announce(head.seq)
        self._keep_budget()
        return commit.result

    def transact(self, edit: Callable[[Any, Head], Head | None], doing: str) -> Head:
        """Database.transact under this handle's lease. Raises StoreFenced when a newer learner has taken over."""

        def fenced(kv: Any, head: Head) -> Head | None:
            if self.fence and head.fence > self.fence:
                raise StoreFenced(f"{doing}: lease {self.fence} was taken over by lease {head.fence}")
            new = edit(kv, head)
            return new if new is None or not self.fence else dataclasses.replace(new, fence=self.fence)

        with self.hub.writing:
            return self.database.transact(fenced, doing=doing)

    def _remember(self, commit: _Commit) -> None:
        self.hub.at(self.database.generation).update({h: depth for h, (_, depth, _) in commit.blobs.items()})
        for h, (blob, _, _) in commit.blobs.items():
            self.hub.images.put(h, commit.images[h], commit.images[h].nbytes)
            self.counters["images"] += 1
            self.counters["image_bytes"] += len(blob)
        for seq, group, size in commit.added:
            self.hub.groups.put(seq, group, 4 * size)
            self.counters["groups"] += 1
            self.counters["group_bytes"] += size
            for listener in self.on_commit:
                listener(group)
        self.counters["duplicates"] += len(commit.groups) - len(commit.added)

    def put(self, name: str, plain: Any) -> None:
        """Writes a small named record: any msgpack-able value."""

        def edit(kv: Any, head: Head) -> Head:
            kv[keys.record(name)] = seal(plain)
            return dataclasses.replace(head, edits=head.edits + 1)

        self.transact(edit, f"writing record {name!r}")

    def new_version(self) -> int:
        """The next policy version: 1, 2, ...; never given out twice, by any process."""
        edit = lambda kv, head: dataclasses.replace(head, version=head.version + 1, edits=head.edits + 1)  # noqa: E731
        return self.transact(edit, "taking a policy version").version

    def retain(self, seq: int) -> None:
        """Tells compaction that groups from `seq` on are needed: the cursor of the oldest kept checkpoint."""
        edit = lambda kv, head: dataclasses.replace(head, retain=max(seq, head.retain), edits=head.edits + 1)  # noqa: E731
        self.transact(edit, f"retaining from group {seq}")

    def finish(self) -> None:
        """Marks the end of experience: waiters for more groups return."""
        edit = lambda kv, head: dataclasses.replace(head, done=True, edits=head.edits + 1)  # noqa: E731
        self.hub.announce(self.transact(edit, "marking the end").seq)

    def compact(self, keep_from_seq: int) -> int:
        """Copies groups from `keep_from_seq` on, and what they use, into a new generation; returns bytes freed.

        The old generation is deleted once no handle in any process holds it. Returns 0 when another process is
        compacting or there is nothing to drop.
        """
        with self.hub.writing:
            return compaction.compact(self.database, keep_from_seq, self.counters)

    def _keep_budget(self) -> None:
        self._appends += 1
        if not self.budget_bytes or self._appends % _BUDGET_EVERY or self.disk_bytes() <= self.budget_bytes:
            return
        self.counters["over_budget"] += 1
        head = self.database.refresh()
        if head.retain > head.first:
            self.compact(head.retain)

    # ---------------------------------------------------------------------------------------------- reading
    def head(self) -> int:
        """How many groups were ever appended: the next sequence number."""
        return self.info().seq

    def info(self) -> Head:
        """All counters of the store."""
        return self.database.refresh()

    def disk_bytes(self) -> int:
        """Bytes on the local disk."""
        return self.database.disk_bytes()

    def read(self, seq: int) -> Group:
        """The group of a sequence number.

        Raises RecordMissing (not yet there, or compacted away) or RecordCorrupt; either is counted and kept in
        `quarantined`, so that a reader can go on with the next.
        """
        group = self.hub.groups.get(seq)
        if group is None:
            data = self.fetch([keys.group(seq)], f"group {seq}")[0]
            try:
                if data is None:
                    raise RecordMissing(f"group {seq} is not in the store")
                group = unseal(data, Group, f"group {seq}")
            except RecordError as error:
                self.quarantine(f"group/{seq}", str(error))
                raise
            self.counters["bytes_read"] += len(data)
            self.hub.groups.put(seq, group, 4 * len(data))
        return group

    def load_images(self, hashes: Iterable[str]) -> dict[str, np.ndarray]:
        """Read-only uint8[H,W,3] by hash. Raises MissingImages naming those that are lost or damaged."""
        found, bad = self.try_images(hashes)
        if bad:
            raise MissingImages(bad, "loading images")
        return found

    def try_images(self, hashes: Iterable[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """The images that can be decoded, and why the others cannot (they are quarantined)."""
        wanted = dict.fromkeys(hashes)
        found, bad, blobs = load(lambda k: self.fetch(k, "images"), self.hub.images.get, wanted)
        for h, blob in blobs.items():
            self.counters["bytes_read"] += len(blob)
            if h in found:
                self.hub.images.put(h, found[h], found[h].nbytes)
        for h, why in bad.items():
            self.quarantine(f"image/{h}", why)
        return {h: found[h] for h in wanted if h in found}, bad

    def get(self, name: str) -> Any:
        """A named record's value, None if there is none. Raises RecordCorrupt."""
        data = self.fetch([keys.record(name)], f"record {name!r}")[0]
        return None if data is None else unseal(data, Any, f"record {name!r}")  # type: ignore[arg-type]

    def slots(self, group_id: str) -> dict[int, int]:
        """Stored slots of a group and the sequence number each came with; {} for an unknown group."""
        return _slots(self.fetch([keys.slot(group_id)], f"slots of {group_id}")[0] or b"", group_id)

    def deltas(self, seq: int) -> dict[str, Any]:
        """The curriculum delta committed with a group; {} if it had none."""
        return self.deltas_from(seq, seq + 1)[0]

    def deltas_from(self, start: int, stop: int) -> list[dict[str, Any]]:
        """The deltas of groups [start, stop), for a fold; damaged ones are quarantined and read as {}."""
        found: list[dict[str, Any]] = []
        for i, data in enumerate(self.fetch([keys.delta(s) for s in range(start, stop)], "deltas"), start):
            found.append({})
            if data is not None:
                try:
                    found[-1] = unseal(data, dict, f"delta {i}")
                except RecordError as error:
                    self.quarantine(f"delta/{i}", str(error))
        return found

    def wait(self, seq: int, timeout: float) -> bool:
        """Waits at most `timeout` seconds until group `seq` is there; False when it is not (or none will come)."""
        end = time.monotonic() + timeout
        while self.hub.seq <= seq:
            head = self.info()
            self.hub.announce(head.seq)
            left = end - time.monotonic()
            if head.seq > seq:
                break
            if head.done or self._closed or left <= 0:
                return False
            with self.hub.changed:
                if self.hub.seq <= seq and not self._closed:
                    self.hub.changed.wait(min(left, POLL_SECONDS))
        return True

    def quarantine(self, name: str, reason: str) -> None:
        """Remembers and counts a record that cannot be used."""
        if name not in self.quarantined:
            self.counters["quarantined"] += 1
        self.quarantined[name] = reason

    def fetch(self, wanted: Sequence[bytes], what: str) -> list[bytes | None]:
        """Values of keys, None where missing; looks again where a compaction has moved them."""
        for _ in range(3):
            generation = self.database.generation
            futures = [self.database.read(k) for k in wanted]
            values: list[bytes | None] | None = []
            failure: Exception | None = None
            try:
                values = [v.value if v.state == "value" else None for v in (f.result() for f in futures)]
            except ValueError as error:
                failure = typed(error, f"reading {what}")
            if failure is None and None not in values:
                return values
            self.database.refresh()
            if self.database.generation == generation:
                if failure is not None:
                    raise failure
                return values
        raise StoreError(f"reading {what}: the store keeps moving")


class _Commit:
    """One append: what it takes to run its transaction again, and what became of it."""

    def __init__(
        self,
        store: Store,
        groups: Sequence[Group],
        images: Mapping[str, np.ndarray],
        deltas: Sequence[Mapping[str, Any]],
    ) -> None:
        self.groups, self.images, self.deltas = groups, images, deltas
        self._store = store
        self._sealed = [seal(g, deflate=True) for g in groups]
        self._encoded: Encoded = {}  # outlives a retry
        self.result: list[int] = []
        self.added: list[tuple[int, Group, int]] = []
        self.blobs: Encoded = {}

    def edit(self, kv: Any, head: Head) -> Head | None:
        """The transaction: every read comes before the first write (see Database.transact)."""
        self.result, self.added = [], []
        stored = [(g.id, kv.read(keys.slot(g.id))) for g in self.groups]
        hub = self._store.hub
        known = hub.at(self._store.database.generation)
        self.blobs = stage(kv, self.groups, self.images, known=known, cached=hub.images.get, encoded=self._encoded)
        slots = {gid: _slots(future.result().value, gid) for gid, future in stored}
        for i, group in enumerate(self.groups):
            self._add(kv, head, i, taken=slots[group.id])
        for h, (blob, _, _) in self.blobs.items():
            kv[keys.image(h)] = blob
        if not self.added and not self.blobs:
            return None
        return dataclasses.replace(head, seq=head.seq + len(self.added), edits=head.edits + 1)

    def _add(self, kv: Any, head: Head, i: int, *, taken: dict[int, int]) -> None:
        group = self.groups[i]
        new = tuple(t for t in group.trajectories if t.slot not in taken)
        if not new:
            self.result.append(max(taken.values(), default=-1))
            return
        seq, data = head.seq + len(self.added), self._sealed[i]
        if len(new) < len(group.trajectories):
            group = dataclasses.replace(group, trajectories=new)
            data = seal(group, deflate=True)
        kv[keys.group(seq)] = data
        if self.deltas and self.deltas[i]:
            kv[keys.delta(seq)] = seal(self.deltas[i])
        taken.update((t.slot, seq) for t in new)
        kv[keys.slot(group.id)] = seal(taken)
        if head.journal:
            for t in new:
                del kv[keys.attempt(group.id, t.slot)]
        self.added.append((seq, group, len(data)))
        self.result.append(seq)


def _slots(data: bytes, group_id: str) -> dict[int, int]:
    return unseal(data, dict[int, int], f"slots of {group_id}") if data else {}
