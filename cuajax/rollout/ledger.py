"""The store's side of a rollout: how many groups may be under way, and how finished ones are committed."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from cuajax.types import Group

RECORD_POLL_SECONDS = 0.05
LEARNER = "learner"  # the record {"consumed": groups read} a learner in another process leaves in the store


class GroupStore(Protocol):
    """What a rollout needs of cuajax.data.store.Store."""

    def append(
        self, groups: Sequence[Group], images: Mapping[str, np.ndarray], deltas: Sequence[Mapping[str, Any]], /
    ) -> list[int]: ...
    def head(self) -> int: ...
    def deltas_from(self, start: int, stop: int, /) -> list[dict[str, Any]]: ...
    def put(self, name: str, plain: Any, /) -> None: ...
    def get(self, name: str, /) -> Any: ...


class Ledger:
    """Counts groups in flight (started, not committed) and ready (committed, not read by the learner).

    `ahead` bounds their sum. `consumed()` tells how many groups the learner has read (called in the loop, so it must
    be quick); None polls the store's learner record. Groups whose delta is `useless` are never trained, so they are
    not counted as ready: a learner whose cursor moves by whole batches would wait for ever behind them. Use it as an
    async context: it owns the store's I/O thread.
    """

    def __init__(
        self,
        store: GroupStore,
        *,
        ahead: int,
        consumed: Callable[[], int] | None,
        useless: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        self.store, self.ahead = store, ahead
        self.in_flight = 0
        self.head = 0
        self.read = 0
        self.store_s = 0.0
        self._consumed, self._useless = consumed, useless
        self._untrained: collections.deque[int] = collections.deque()  # unread useless groups, by sequence number
        self._polled = 0.0
        self._closed: collections.deque[tuple[Group, Mapping[str, np.ndarray], dict[str, Any]]] = collections.deque()
        self._commit = asyncio.Event()
        self._finished = False
        self._io = concurrent.futures.ThreadPoolExecutor(1, "rollout-store")

    async def __aenter__(self) -> Ledger:
        self.head = await self.call(self.store.head)
        await self.room()
        start = min(self.read, self.head)
        self._note(start, await self.call(self.store.deltas_from, start, self.head))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._io.shutdown()

    async def call(self, function: Callable, *args: Any) -> Any:
        """A store call in the I/O thread, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._io, function, *args)

    async def room(self) -> int:
        """How many groups may be started now: in flight + ready stays within `ahead`."""
        if self._consumed is not None:
            self.read = self._consumed()
        elif time.perf_counter() - self._polled > RECORD_POLL_SECONDS:
            record = await asyncio.get_running_loop().run_in_executor(None, self.store.get, LEARNER)
            self.read, self._polled = int((record or {"consumed": 0})["consumed"]), time.perf_counter()
        return self.ahead - self.in_flight - self.ready

    @property
    def ready(self) -> int:
        """Committed groups that the learner can still train on."""
        while self._untrained and self._untrained[0] < self.read:
            self._untrained.popleft()
        return self.head - self.read - len(self._untrained)

    def _note(self, start: int, deltas: Sequence[Mapping[str, Any]]) -> None:
        self._untrained.extend(seq for seq, delta in enumerate(deltas, start) if self._useless(delta))

    def start(self) -> None:
        self.in_flight += 1

    def close(self, group: Group, images: Mapping[str, np.ndarray], delta: dict[str, Any]) -> None:
        """Hand over a finished group; the next transaction takes it."""
        self._closed.append((group, images, delta))
        self._commit.set()

    def finish(self) -> None:
        """Let `write` end once everything handed over is committed."""
        self._finished = True
        self._commit.set()

    async def write(self, committed: Callable[[int, list[dict[str, Any]]], None]) -> None:
        """One transaction after another; each takes all groups that closed during the one before.

        `committed(head, deltas)` follows each, with the deltas of every group up to `head` that was not told before,
        those of other writers too.
        """
        while not self._finished or self._closed:
            await self._commit.wait()
            self._commit.clear()
            batch = list(self._closed)
            self._closed.clear()
            if not batch:
                continue
            began = time.perf_counter()
            deltas = await self.call(self._append, batch)
            self.store_s += time.perf_counter() - began
            self._note(self.head, deltas)
            self.head += len(deltas)
            self.in_flight -= len(batch)
            committed(self.head, deltas)

    def _append(self, batch: list[tuple[Group, Mapping[str, np.ndarray], dict[str, Any]]]) -> list[dict[str, Any]]:
        images = {digest: pixels for _, some, _ in batch for digest, pixels in some.items()}
        deltas = [delta for _, _, delta in batch]
        seqs = self.store.append([group for group, _, _ in batch], images, deltas)
        head = self.store.head()
        if seqs == list(range(self.head, head)):
            return deltas
        return self.store.deltas_from(self.head, head)


def count_start(store: GroupStore, name: str, *, seed: int, actor: str) -> tuple[str, np.random.Generator]:
    """A prefix no other start of this actor has had, and a generator of its own."""
    record = name + actor
    starts = (store.get(record) or {"starts": 0})["starts"]
    store.put(record, {"starts": starts + 1})
    return f"{actor}{starts}", np.random.default_rng([seed, starts, *actor.encode()])
