"""Attempts in flight, kept in the store, so that a restart re-issues exactly what was lost.

A claim is durable before its attempt begins; its entry goes in the very transaction that stores its group. What lies
between is recorded as it becomes worth keeping: an executed attempt keeps its trajectory, so that a restart can
evaluate it without running it again.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cuajax.data import keys
from cuajax.data.blobs import Encoded, stage
from cuajax.data.database import Head
from cuajax.data.records import RecordError, seal, unseal
from cuajax.data.store import Store
from cuajax.types import Group, Task, Trajectory

Stage = Literal["claimed", "executing", "executed", "evaluated", "committed"]
STAGES: tuple[Stage, ...] = ("claimed", "executing", "executed", "evaluated", "committed")


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """One slot of one group, on its way; `trajectory` is there from "executed" on."""

    id: str
    group_id: str
    slot: int
    task: Task
    stage: Stage = "claimed"
    trajectory: Trajectory | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What makes it unique in a run."""
        return self.group_id, self.slot


class Journal:
    """The attempts that this process has claimed; safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._unsaved: set[tuple[str, int]] = set()
        store.on_commit.append(self._committed)

    def claim(self, attempts: Sequence[Attempt]) -> None:
        """Records attempts before they are run: durable on return, one transaction for all."""
        with self._lock:
            self._attempts |= {a.key: a for a in attempts}
            self._unsaved |= {a.key for a in attempts}
            self.flush()

    def executing(self, group_id: str, slot: int) -> None:
        """The attempt has begun; written with the next durable entry."""
        self._advance(group_id, slot, "executing")

    def executed(self, trajectory: Trajectory, pixels: Mapping[str, np.ndarray]) -> None:
        """The attempt ended and is not scored yet: its trajectory and images are durable on return."""
        self._advance(trajectory.group_id, trajectory.slot, "executed", trajectory)
        self.flush(pixels)

    def evaluated(self, trajectory: Trajectory) -> None:
        """The attempt is scored; durable with its group, or by `flush`."""
        self._advance(trajectory.group_id, trajectory.slot, "evaluated", trajectory)

    def abandon(self, attempts: Iterable[Attempt], reason: str) -> None:
        """Drops attempts that will not be trained (their group aged, the task was withdrawn), counted by reason."""
        gone = list(attempts)

        def edit(kv: Any, head: Head) -> Head:
            for a in gone:
                del kv[keys.attempt(a.group_id, a.slot)]
            return dataclasses.replace(head, edits=head.edits + 1)

        with self._lock:
            for a in gone:
                self._attempts.pop(a.key, None)
                self._unsaved.discard(a.key)
            if gone:
                self._store.transact(edit, f"abandoning {len(gone)} attempts")
        self._store.counters[f"abandoned_{reason}"] += len(gone)

    def flush(self, pixels: Mapping[str, np.ndarray] | None = None) -> None:
        """Makes every entry durable, with the images that their trajectories need."""
        pixels = pixels or {}
        encoded: Encoded = {}
        written: dict[str, int] = {}
        with self._lock:
            entries = [self._attempts[k] for k in sorted(self._unsaved)]
            if not entries:
                return

            def edit(kv: Any, head: Head) -> Head:
                hub = self._store.hub
                known = hub.at(self._store.database.generation)
                kept = [Group(a.group_id, a.task, (a.trajectory,)) for a in entries if a.trajectory]
                new = stage(kv, kept, pixels, known=known, cached=hub.images.get, encoded=encoded)
                written.clear()
                written.update({h: depth for h, (_, depth, _) in new.items()})
                for h, (blob, _, _) in new.items():
                    kv[keys.image(h)] = blob
                for a in entries:
                    kv[keys.attempt(a.group_id, a.slot)] = seal(a, deflate=a.trajectory is not None)
                return dataclasses.replace(head, edits=head.edits + 1, journal=True)

            self._store.transact(edit, f"journaling {len(entries)} attempts")
            self._store.hub.at(self._store.database.generation).update(written)
            self._unsaved.clear()

    def pending(self) -> list[Attempt]:
        """What a restart has to finish, by key: every journaled attempt whose slot is not in a stored group.

        "claimed" and "executing" ones are to be run again, "executed" ones to be evaluated, "evaluated" ones to be
        added to their group. A damaged entry is quarantined and left out.
        """
        found = []
        for key in self._store.database.keys(keys.JOURNAL):
            name = key.decode()
            data = self._store.fetch([key], name)[0]
            if data is None:
                continue
            try:
                attempt = unseal(data, Attempt, name)
            except RecordError as error:
                self._store.quarantine(name, str(error))
                continue
            if attempt.slot not in self._store.slots(attempt.group_id):
                found.append(attempt)
        with self._lock:
            self._attempts = {a.key: a for a in found} | self._attempts
        return sorted(found, key=lambda a: a.key)

    def _advance(self, group_id: str, slot: int, stage: Stage, trajectory: Trajectory | None = None) -> None:
        with self._lock:
            attempt = self._attempts.get((group_id, slot))
            if attempt is None:
                raise KeyError(f"attempt {group_id}/{slot} was never claimed")
            if STAGES.index(stage) < STAGES.index(attempt.stage):
                raise ValueError(f"attempt {group_id}/{slot} is {attempt.stage}, cannot go back to {stage}")
            self._attempts[attempt.key] = dataclasses.replace(
                attempt, stage=stage, trajectory=trajectory or attempt.trajectory
            )
            self._unsaved.add(attempt.key)

    def _committed(self, group: Group) -> None:
        with self._lock:
            for t in group.trajectories:
                self._attempts.pop((group.id, t.slot), None)
                self._unsaved.discard((group.id, t.slot))
