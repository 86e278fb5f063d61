"""Store -> optimizer batches, as Grain datasets whose state is a few integers.

A batch is a pure function of the stored records and that state: resuming at any update gives the same bytes again.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grain
import numpy as np

from cuajax.algorithms.advantages import CreditError
from cuajax.data.pack import PackSpec, PackStats, pack
from cuajax.data.records import RecordError
from cuajax.data.store import Store
from cuajax.types import Credit, Group, PackedBatch, Sample

Item = tuple[PackedBatch, dict[str, Any]]
_SLICE_SECONDS = 0.5  # of one wait, after which a stop is noticed

FORESEEN = ("invalid", "zero_variance")  # verdicts that follow from the group alone


@dataclass(frozen=True, slots=True)
class Rules:
    """Which groups make an optimizer batch.

    `first_version` is the policy version current at update 0; after that every `publish_every` updates bring one more
    (see `rebase` for a resume). Lag is that version minus the oldest token's.
    """

    groups_per_update: int
    max_lag: int = 2
    drop_zero_variance: bool = True
    min_valid: int = 2  # valid trajectories below which a group is stored but not trained
    first_version: int = 1
    publish_every: int = 1
    drop_oversize: bool = False  # leave out, and name, what cannot fit a row, instead of stopping

    def __post_init__(self) -> None:
        for name in ("groups_per_update", "publish_every", "min_valid"):
            if getattr(self, name) < 1:
                raise ValueError(f"Rules.{name} is {getattr(self, name)}, must be at least 1")
        if self.max_lag < 0:
            raise ValueError(f"Rules.max_lag is {self.max_lag}, must not be negative")


def oldest_version(group: Group) -> int | None:
    """The lowest version among the tokens of valid trajectories that are not replays; None if there are none."""
    versions = [
        s.completion.versions
        for t in group.trajectories
        if t.replay_of is None and t.outcome.status != "invalid"
        for s in t.steps
    ]
    if not versions:
        return None
    flat = np.concatenate(versions)
    return int(flat.min()) if flat.size else None


def verdict(group: Group, version: int, rules: Rules) -> str:
    """Why a group is not trained at `version`: "aged", "invalid" or "zero_variance"; "" if it is."""
    oldest = oldest_version(group)
    if oldest is not None and version - oldest > rules.max_lag:
        return "aged"
    rewards = [t.outcome.reward for t in group.valid]
    if len(rewards) < rules.min_valid:
        return "invalid"
    return "zero_variance" if rules.drop_zero_variance and all(r == rewards[0] for r in rewards) else ""


def samples_of(group: Group, credit: Credit, total: float) -> list[Sample]:
    """A group's decisions with w = u / total; those that weigh nothing are left out."""
    out = []
    for trajectory, advantages, weights in zip(group.trajectories, credit.advantages, credit.weights, strict=True):
        for step, a, u in zip(trajectory.steps, advantages, weights, strict=bool(advantages)):
            if len(u) and u.any():
                c = step.completion
                name = f"{group.id}/{trajectory.slot}/{step.index}"
                out.append(
                    Sample(step.prompt_ids, step.image_hashes, c.token_ids, c.logprobs, a, u / total, c.support, name)
                )
    return out


def rebase(state: Mapping[str, int], version: int) -> dict[str, int]:
    """The state of a resumed run whose restored params were published as `version`."""
    return {**state, "version": version, "since": state["update"]}


def experience(
    store: Store,
    credit: Callable[[Group], Credit],
    *,
    spec: PackSpec,
    rules: Rules,
    shard: tuple[int, int] = (0, 1),
    prefetch: int = 2,
    timeout: float = 3600.0,
    dropped: Callable[[int], None] = lambda seq: None,
) -> grain.IterDataset[Item]:
    """Batches of `rules.groups_per_update` usable groups in store order, as (PackedBatch, information).

    Blocks until there are enough groups: TimeoutError after `timeout` seconds (the state is unchanged, so it can be
    tried again), StopIteration once the store is finished. `shard` is (index, count) of this host: every host credits
    all groups, so that w has one denominator, and packs its own. Damaged records are skipped and counted.
    `dropped(seq)` hears, in the prefetching thread, of every group that will not be trained for a reason that whoever
    paces rollouts cannot see in it (FORESEEN): it must not be waited for.
    """
    if not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard {shard[0]} of {shard[1]}: need 0 <= index < count")
    options = {"rules": rules, "shard": shard, "timeout": timeout, "dropped": dropped}
    source = _Dataset(lambda: _Experience(store, credit, spec, **options))
    return _Dataset(lambda: _Prefetched(source, prefetch))


def supervised(
    make: Callable[[int, int], tuple[Sequence[Sample], Mapping[str, np.ndarray]]],
    *,
    spec: PackSpec,
    seed: int = 0,
    steps: int | None = None,
    prefetch: int = 2,
) -> grain.IterDataset[Item]:
    """Batches packed from `make(seed, step) -> (samples, images by hash)`, a pure function; endless without `steps`."""
    source = _Dataset(lambda: _Supervised(make, spec, seed, steps))
    return _Dataset(lambda: _Prefetched(source, prefetch))


class _Dataset(grain.IterDataset):
    """A dataset of one iterator factory."""

    def __init__(self, make: Callable[[], grain.DatasetIterator]) -> None:
        super().__init__()
        self._make = make

    def __iter__(self) -> Any:
        return self._make()


@dataclass
class _Selection:
    """Groups chosen for one update, and what was passed over on the way."""

    seq: int  # the next to read
    groups: list[tuple[int, Group, Credit]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lags: Counter[int] = field(default_factory=Counter)


class _Experience(grain.DatasetIterator):
    def __init__(
        self,
        store: Store,
        credit: Callable[[Group], Credit],
        spec: PackSpec,
        *,
        rules: Rules,
        shard: tuple[int, int],
        timeout: float,
        dropped: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._store, self._credit, self._spec, self._rules = store, credit, spec, rules
        self._dropped = dropped
        self._shard, self._timeout = shard, timeout
        self._state = {"seq": 0, "update": 0, "version": rules.first_version, "since": 0}
        self.stop = threading.Event()

    def get_state(self) -> dict[str, int]:
        return dict(self._state)

    def set_state(self, state: dict[str, int]) -> None:
        self._state = {k: int(state[k]) for k in ("seq", "update", "version", "since")}

    def version(self) -> int:
        """The version current at the next update."""
        s = self._state
        return s["version"] + (s["update"] - s["since"]) // self._rules.publish_every

    def __next__(self) -> Item:
        began = time.monotonic()
        chosen = self._select()
        waited = time.monotonic() - began
        batch, stats, lost = self._pack(chosen)
        info = self._describe(chosen, stats) | {
            "lost_images": lost, "wait_seconds": waited, "pack_seconds": time.monotonic() - began - waited,
        }  # fmt: skip
        self._state = self._state | {"seq": chosen.seq, "update": self._state["update"] + 1}
        return batch, info

    def _select(self) -> _Selection:
        chosen = _Selection(self._state["seq"])
        version = self.version()
        end = time.monotonic() + self._timeout
        while len(chosen.groups) < self._rules.groups_per_update:
            self._await(chosen, end)
            seq = chosen.seq
            chosen.seq += 1
            try:
                group = self._store.read(seq)
            except RecordError:
                chosen.counts["quarantined"] += 1
                self._dropped(seq)
                continue
            chosen.counts["read"] += 1
            chosen.counts["invalid_attempts"] += len(group.trajectories) - len(group.valid)
            why = verdict(group, version, self._rules)
            if not why:
                try:
                    credit = self._credit(group)
                except CreditError as error:
                    self._store.quarantine(f"group/{seq}", str(error))
                    why = "quarantined"
                else:
                    why = "" if credit.mass > 0 else "weightless"
            if why:
                chosen.counts[why] += 1
                if why not in FORESEEN:
                    self._dropped(seq)
                continue
            lag = version - (version if (oldest := oldest_version(group)) is None else oldest)
            chosen.counts["future"] += lag < 0
            chosen.lags[max(0, lag)] += 1
            chosen.groups.append((seq, group, credit))
        return chosen

    def _await(self, chosen: _Selection, end: float) -> None:
        while not self._store.wait(chosen.seq, min(_SLICE_SECONDS, max(0.0, end - time.monotonic()))):
            if self.stop.is_set():
                raise _Stopped("the pipeline was stopped")
            if (head := self._store.info()).done and head.seq <= chosen.seq:
                raise StopIteration
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"update {self._state['update']}: {len(chosen.groups)} of {self._rules.groups_per_update} groups "
                    f"after {self._timeout:g} s, waiting for group {chosen.seq}; passed over: {dict(chosen.counts)}"
                )

    def _pack(self, chosen: _Selection) -> tuple[PackedBatch, PackStats, int]:
        total = sum(credit.mass for _, _, credit in chosen.groups)
        own = [(g, samples_of(g, c, total)) for _, g, c in chosen.groups[self._shard[0] :: self._shard[1]]]
        images, bad = self._store.try_images(h for _, samples in own for s in samples for h in s.image_hashes)
        # A group with a lost image keeps its mass: the other hosts cannot know, and one denominator must do for all.
        usable = [s for _, s in own if not any(h in bad for one in s for h in one.image_hashes)]
        batch, stats = pack(
            [x for s in usable for x in s], images, spec=self._spec, drop_oversize=self._rules.drop_oversize
        )
        return batch, stats, len(own) - len(usable)

    def _describe(self, chosen: _Selection, stats: PackStats) -> dict[str, Any]:
        rewards: dict[str, list[float]] = defaultdict(list)
        generated = 0
        for _, group, _ in chosen.groups:
            rewards[group.task.family] += [t.outcome.reward for t in group.valid]
            generated += sum(len(s.completion.token_ids) for t in group.trajectories for s in t.steps)
        return {
            "update": self._state["update"],
            "version": self.version(),
            "seqs": [seq for seq, _, _ in chosen.groups],
            "counts": {k: v for k, v in chosen.counts.items() if v},
            "lags": dict(sorted(chosen.lags.items())),
            "rewards": {family: float(np.mean(r)) for family, r in sorted(rewards.items())},
            "tokens_generated": generated,
            "pack": stats._asdict(),
        }


class _Supervised(grain.DatasetIterator):
    def __init__(self, make: Callable[[int, int], Any], spec: PackSpec, seed: int, steps: int | None) -> None:
        super().__init__()
        self._make, self._spec, self._seed, self._steps = make, spec, seed, steps
        self._step = 0
        self.stop = threading.Event()

    def get_state(self) -> dict[str, int]:
        return {"step": self._step}

    def set_state(self, state: dict[str, int]) -> None:
        self._step = int(state["step"])

    def __next__(self) -> Item:
        if self._steps is not None and self._step >= self._steps:
            raise StopIteration
        samples, images = self._make(self._seed, self._step)
        batch, stats = pack(samples, images, spec=self._spec)
        self._step += 1
        return batch, {"step": self._step - 1, "pack": stats._asdict()}


class _Stopped(RuntimeError):
    """Ends a prefetch thread that waits for groups."""


class _Prefetched(grain.DatasetIterator):
    """Grain's thread prefetch over a source that may block; stopping it first wakes the source."""

    def __init__(self, source: _Dataset, prefetch: int) -> None:
        super().__init__()
        self._source = iter(source)
        self._inner = self._source
        if prefetch:
            # The dataset makes one iterator and must find the source's own, to be able to wake it.
            once = _Dataset(lambda: self._source)
            self._inner = iter(grain.experimental.ThreadPrefetchIterDataset(once, prefetch_buffer_size=prefetch))
        # Also at interpreter exit, where a thread that is still waiting would make noise.
        self._shut = weakref.finalize(self, _shut, self._source.stop, self._inner)

    def __next__(self) -> Item:
        return next(self._inner)

    def get_state(self) -> dict[str, int]:
        return dict(self._inner.get_state())

    def set_state(self, state: dict[str, int]) -> None:
        self._source.stop.set()
        self._inner.set_state(dict(state))
        self._source.stop.clear()

    def close(self) -> None:
        self._shut()
        self._inner = self._source  # Grain's iterator closes itself again when it is collected: let that be now
        super().close()


def _shut(stop: threading.Event, inner: grain.DatasetIterator) -> None:
    stop.set()
    inner.close()
