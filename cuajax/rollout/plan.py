"""What a rollout is asked for and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from cuajax.rollout.episode import Limits, Record
from cuajax.types import Trajectory


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a rollout. `retries` attempts a group may be re-queued; `dead_groups` in a row stop the service."""

    group_size: int = 8
    groups_per_update: int = 8
    max_lag: int = 2
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    replace_zero_variance: bool = True  # dynamic sampling: a group with equal rewards makes room for a fresh one
    retries: int = 8
    dead_groups: int = 16  # groups in a row without one valid attempt: a fault that does not pass
    seed: int = 0
    actor: str = ""  # prefix of group ids, one per process that writes to a store
    journal: bool = True  # claim attempts in the store first, so that a restart re-issues what was lost
    reuse_envs: bool = False  # a reset leaves no trace (the sim); else one sandbox per attempt
    warm_envs: int = 0
    limits: Limits = field(default_factory=Limits)
    stall_seconds: float = 60.0
    poll_seconds: float = 0.01

    def __post_init__(self) -> None:
        for name, low in (("group_size", 2), ("groups_per_update", 1), ("max_lag", 0), ("dead_groups", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least {low}")

        if self.actor[-1:].isdigit():
            raise ValueError(f"actor {self.actor!r} must not end in a digit: starts are numbered after it")

    @property
    def ahead(self) -> int:
        """Groups that may be in flight or unread at once."""
        return (self.max_lag + 1) * self.groups_per_update


@dataclass(slots=True)
class Stats:
    """Counts and summed seconds since the start; over all attempts, so seconds may exceed the wall clock."""

    attempts: int = 0
    decisions: int = 0
    tokens: int = 0
    parse_errors: int = 0
    invalid: int = 0
    requeued: int = 0
    duplicates: int = 0
    groups: int = 0
    short_groups: int = 0  # closed with fewer valid attempts than slots
    valid: int = 0
    passed: int = 0
    reward: float = 0.0
    prepare_s: float = 0.0
    env_s: float = 0.0
    prompt_s: float = 0.0
    policy_s: float = 0.0
    evaluate_s: float = 0.0
    paced_s: float = 0.0  # wall-clock in which the learner's reading held new groups back

    def count(self, record: Record, trajectory: Trajectory) -> None:
        self.attempts += 1
        self.decisions += len(trajectory.steps)
        for step in trajectory.steps:
            self.tokens += len(step.completion.token_ids)
            self.parse_errors += step.parse_error is not None
        status = trajectory.outcome.status
        self.invalid += status == "invalid"
        if status != "invalid":
            self.valid += 1
            self.passed += status == "success"
            self.reward += trajectory.outcome.reward
        seconds = record.seconds
        self.prepare_s += seconds.get("prepare", 0.0)
        self.env_s += seconds.get("env", 0.0)
        self.prompt_s += seconds.get("prompt", 0.0)
        self.policy_s += seconds.get("policy", 0.0)
        self.evaluate_s += seconds.get("evaluate", 0.0)
