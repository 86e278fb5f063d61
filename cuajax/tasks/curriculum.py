"""Which task next: a pure fold over the pass rates of finished groups (EvoCUA-1.5's DTAC: VAS and ICS).

State and deltas are plain data, because they are stored with the groups: the state of any moment is the fold of all
deltas before it, in whatever process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cuajax.types import Group

State = dict[str, Any]  # {"units": {unit: its numbers}}; a unit is a family or a task
# {"p": EMA of the pass rate, "varied": EMA of the share of groups whose rewards differ, "n": groups folded}
TRAIN_SEEDS = (0, 1 << 30)
EVALUATION_SEEDS = (1 << 30, 1 << 31)  # never overlaps: no training task is ever an evaluation task
UNSEEN = {"p": 0.5, "varied": 0.5, "n": 0}


@dataclass(frozen=True, slots=True)
class Curriculum:
    """How tasks are drawn. Source: EvoCUA-1.5 (arXiv 2607.09773) eq. 14; beta, floor and share are ours.

    `vas` draws with weight 4 P (1 - P), at least `floor`. `varied` (ours) draws with the share of groups whose rewards
    differ, the only ones that teach: a policy that is sure of itself does a task always or never, and then P of many
    tasks says little of it. `uniform` draws all alike. With `tasks_per_family` 0 each task is new and a family's
    numbers are kept; else each family has that many tasks and a task's are. `infeasible`
    families are drawn for `infeasible_share` of the groups, evenly spread; the others share the rest.
    """

    families: tuple[str, ...]
    infeasible: tuple[str, ...] = ()
    mode: Literal["uniform", "vas", "varied"] = "vas"
    beta: float = 0.7
    floor: float = 0.05
    infeasible_share: float = 0.08
    tasks_per_family: int = 0

    def __post_init__(self) -> None:
        if not self.feasible:
            raise ValueError(f"no feasible family among {self.families}")
        unknown = set(self.infeasible) - set(self.families)
        if unknown:
            raise ValueError(f"infeasible families {sorted(unknown)} are not among {self.families}")
        if self.mode not in ("uniform", "vas", "varied"):
            raise ValueError(f"mode is {self.mode!r}, choose 'uniform', 'vas' or 'varied'")
        for name, low in (("beta", 0.0), ("floor", 1e-6), ("infeasible_share", 0.0)):
            if not low <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}, must lie in {low:g}..1")
        if not 0 <= self.tasks_per_family <= TRAIN_SEEDS[1]:
            raise ValueError(f"tasks_per_family is {self.tasks_per_family}, must lie in 0..{TRAIN_SEEDS[1]}")

    @property
    def feasible(self) -> tuple[str, ...]:
        return tuple(f for f in self.families if f not in self.infeasible)


def initial() -> State:
    return {"units": {}}


def delta(group: Group, family: str, seed: int) -> dict[str, Any]:
    """What a closed group tells: successes and valid attempts of one task, and whether their rewards differ."""
    valid = group.valid
    passed = sum(t.outcome.status == "success" for t in valid)
    invalid = len(group.trajectories) - len(valid)
    varied = len({t.outcome.reward for t in valid}) > 1
    counts = {"passed": passed, "valid": len(valid), "invalid": invalid, "varied": varied}
    return {"family": family, "seed": seed, **counts}


def unit_of(family: str, seed: int, curriculum: Curriculum) -> str:
    """The name pass rates are kept under."""
    return f"{family}/{seed}" if curriculum.tasks_per_family else family


def fold(state: State, delta: Mapping[str, Any], curriculum: Curriculum) -> State:
    """P <- beta P + (1 - beta) passed / valid, `varied` likewise; a group without a valid attempt changes nothing."""
    if not delta.get("valid"):
        return state
    unit = unit_of(delta["family"], delta["seed"], curriculum)
    old = state["units"].get(unit, UNSEEN)
    news = {"p": delta["passed"] / delta["valid"], "varied": float(delta["varied"])}
    folded = {key: curriculum.beta * old[key] + (1.0 - curriculum.beta) * new for key, new in news.items()}
    return {**state, "units": {**state["units"], unit: {**folded, "n": old["n"] + 1}}}


def weight(unit: Mapping[str, float], curriculum: Curriculum) -> float:
    """4 P (1 - P) or the share of groups whose rewards differ, at least `floor`; 1 when uniform."""
    if curriculum.mode == "uniform":
        return 1.0
    vas = curriculum.mode == "vas"
    return max(curriculum.floor, 4.0 * unit["p"] * (1.0 - unit["p"]) if vas else unit["varied"])


def wants_infeasible(index: int, curriculum: Curriculum) -> bool:
    """Whether the `index`-th group comes from the infeasible queue: exactly the share, evenly spread."""
    share = curriculum.infeasible_share if curriculum.infeasible else 0.0
    return int((index + 1) * share + 1e-9) > int(index * share + 1e-9)


def sample(
    state: State, rng: np.random.Generator, curriculum: Curriculum, *, index: int = 0, busy: Collection[str] = ()
) -> tuple[str, int]:
    """(family, training seed) of the `index`-th group: unseen units first, then by weight.

    `busy` names the units that are being tried for the first time already, so that they are not explored twice over.
    """
    families = curriculum.infeasible if wants_infeasible(index, curriculum) else curriculum.feasible
    low, high = TRAIN_SEEDS
    if curriculum.tasks_per_family:
        high = low + curriculum.tasks_per_family
        candidates = [(family, seed) for family in families for seed in range(low, high)]
    else:
        candidates = [(family, -1) for family in families]
    units = [state["units"].get(unit_of(*c, curriculum), UNSEEN) for c in candidates]
    unseen = [
        i for i, (c, u) in enumerate(zip(candidates, units, strict=True))
        if not u["n"] and unit_of(*c, curriculum) not in busy
    ]  # fmt: skip
    if unseen and curriculum.mode != "uniform":
        family, seed = candidates[unseen[int(rng.integers(len(unseen)))]]
    else:
        weights = np.array([weight(u, curriculum) for u in units])
        family, seed = candidates[int(rng.choice(len(candidates), p=weights / weights.sum()))]
    return family, int(rng.integers(low, high)) if seed < 0 else seed


def evaluation_seeds(count: int, *, start: int = 0) -> range:
    """`count` seeds for held-out tasks; no training seed is among them. Raises ValueError past their range."""
    low, high = EVALUATION_SEEDS
    if start < 0 or count < 0 or low + start + count > high:
        raise ValueError(f"evaluation seeds {start}..{start + count} are outside 0..{high - low}")
    return range(low + start, low + start + count)
