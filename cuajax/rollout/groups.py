"""Counting the attempts of one task to G. Pure: a group always closes, full or, after its retries, short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from cuajax.types import Group, Task, Trajectory


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group being filled: at most one trajectory a slot, `retries` re-queued attempts at most."""

    id: str
    task: Task
    size: int
    retries: int = 0  # most attempts that may be re-queued
    slots: Mapping[int, Trajectory] = field(default_factory=dict)
    voided: tuple[str, ...] = ()  # ids of invalid attempts that were re-queued

    def __post_init__(self) -> None:
        if self.size < 1 or self.retries < 0:
            raise ValueError(f"group of {self.size} with {self.retries} retries: need at least 1 and 0")


class Added(NamedTuple):
    """What adding a trajectory led to.

    `requeue`: its slot must be tried again; `closed`: `group` is complete and takes nothing more.
    """

    open: OpenGroup
    verdict: Literal["waiting", "requeue", "closed", "duplicate"]
    group: Group | None = None


def add(group: OpenGroup, trajectory: Trajectory) -> Added:
    """Count one finished attempt; a second one of a slot, or of an id, changes nothing.

    Raises ValueError for another group's trajectory or a slot outside the group.
    """
    if trajectory.group_id != group.id or not 0 <= trajectory.slot < group.size:
        raise ValueError(
            f"attempt {trajectory.id} is of group {trajectory.group_id!r} slot {trajectory.slot},"
            f" this is group {group.id!r} with slots 0..{group.size - 1}"
        )
    if trajectory.slot in group.slots or trajectory.id in group.voided:
        return Added(group, "duplicate")
    if trajectory.outcome.status == "invalid" and len(group.voided) < group.retries:
        return Added(replace(group, voided=(*group.voided, trajectory.id)), "requeue")
    group = replace(group, slots={**group.slots, trajectory.slot: trajectory})
    if len(group.slots) < group.size:
        return Added(group, "waiting")
    return Added(group, "closed", Group(group.id, group.task, tuple(group.slots[i] for i in range(group.size))))


def backoff(tries: int) -> float:
    """Seconds before a slot's next try, doubling up to 5 s: whoever failed may be restarting."""
    return min(0.05 * 2.0 ** (tries - 1), 5.0)
