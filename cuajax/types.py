"""The nouns: everything that crosses a room boundary is one of these frozen records.

Dimension letters: P prompt tokens, K response tokens, G group size, S steps of a trajectory, H W screen pixels;
in a packed batch B rows, T tokens a row, K loss tokens a row, M images a row, N patches an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

FORMAT_VERSION = 1  # of every record on disk and on the wire; a reader refuses any other by name

ActionKind = Literal[
    "click", "double_click", "right_click", "drag", "scroll", "type", "key", "move", "wait", "terminate"
]
ACTION_KINDS: tuple[str, ...] = (
    "click", "double_click", "right_click", "drag", "scroll", "type", "key", "move", "wait", "terminate",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- task
@dataclass(frozen=True, slots=True)
class Material:
    """One input file of a task; `gold` materials never reach the actor."""

    name: str
    role: Literal["input", "gold"]
    sha256: str


@dataclass(frozen=True, slots=True)
class Task:
    """What an attempt is asked to do. Its acceptance is a separate host-only record of the suite."""

    id: str  # unique and stable, e.g. "sim/check2/17"
    suite: str
    family: str  # what curriculum and reports group by
    instruction: str
    setup: Mapping[str, Any] = field(default_factory=dict)  # msgpack-able, private to the suite
    budget: int = 10  # most decisions of one attempt
    feasible: bool = True
    tags: tuple[str, ...] = ()
    materials: tuple[Material, ...] = ()


# ------------------------------------------------------------------------------------------ seeing, acting
@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    screenshot: np.ndarray  # uint8[H,W,3] RGB; treated as read-only
    text: str | None = None  # accessibility tree or DOM, where an adapter gives one


@dataclass(frozen=True, slots=True)
class Action:
    """One GUI action. Positions are fractions of the screen in [0,1]; unused fields keep their defaults."""

    kind: ActionKind
    x: float | None = None
    y: float | None = None
    x2: float | None = None  # end of a drag
    y2: float | None = None
    button: str = "left"
    text: str = ""  # of "type"
    keys: tuple[str, ...] = ()  # of "key": one chord, e.g. ("ctrl", "a") or ("tab",)
    dx: float = 0.0  # of "scroll": notches, positive right / down
    dy: float = 0.0
    seconds: float = 0.0  # of "wait"
    status: Literal["", "success", "failure"] = ""  # of "terminate"


@dataclass(frozen=True, slots=True)
class Call:
    """One thing a decision ran: a GUI action, or a function/MCP tool with its result."""

    action: Action | None = None
    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    result: str = ""


# ------------------------------------------------------------------------------------------- policy traffic
@dataclass(frozen=True, slots=True, eq=False)
class Image:
    hash: str  # sha256 hex of shape and bytes (cuajax.data.images.image_hash)
    pixels: np.ndarray  # uint8[H,W,3], exactly what the processor feeds the model


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Exactly what a policy is conditioned on; image placeholders in `token_ids` follow the order of `images`."""

    token_ids: np.ndarray  # int32[P]
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int = 16
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None  # None: the server draws one


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """The token ids a truncated distribution kept, per position."""

    ids: np.ndarray  # int32[K,M], padded with -1
    count: np.ndarray  # int32[K]


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    token_ids: np.ndarray  # int32[K], as sampled (a stop token is included)
    logprobs: np.ndarray  # float32[K], of the distribution sampled from; NaN-free
    versions: np.ndarray  # int32[K], policy version of each token
    finish_reason: Literal["stop", "length", "cancelled"]
    support: Support | None = None


# ------------------------------------------------------------------------------------------------ experience
@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One decision: the prompt as sent, the answer as sampled, and what it did."""

    index: int
    prompt_ids: np.ndarray  # int32[P]
    image_hashes: tuple[str, ...]  # the prompt's images, in order
    completion: Completion
    calls: tuple[Call, ...] = ()  # run in order
    parse_error: str | None = None
    screen_hash: str = ""  # the full screenshot this decision saw
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds: policy, env, prompt


@dataclass(frozen=True, slots=True)
class Outcome:
    """`invalid` means the world failed (sandbox, validator, judge): it is never a reward of 0."""

    status: Literal["success", "failure", "invalid"]
    reward: float = 0.0  # in [0,1]
    reason: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    id: str
    task_id: str
    group_id: str
    slot: int
    steps: tuple[Step, ...]
    outcome: Outcome
    replay_of: str | None = None
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds: prepare, execute, evaluate


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """G attempts at one task, or (with `state`) G one-step candidates of one state."""

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
    state: tuple[str, int] | None = None  # (trajectory id, step index) of a PRM group

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.outcome.status != "invalid")


# ------------------------------------------------------------------------------------------ credit and batches
class Credit(NamedTuple):
    """What an algorithm decides for one group, before the batch's denominator is known.

    Indexed [trajectory][step] over `group.trajectories`; an untrained trajectory has an empty list.
    """

    advantages: list[list[np.ndarray]]  # float32[K] per step
    weights: list[list[np.ndarray]]  # float32[K] per step: `u`, before division by the batch's total mass
    mass: float  # what this group adds to the denominator (trajectories, steps or tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One decision as training data: w = u / total mass is already applied."""

    prompt_ids: np.ndarray  # int32[P]
    image_hashes: tuple[str, ...]
    response_ids: np.ndarray  # int32[K]
    behaviour_logp: np.ndarray  # float32[K]
    advantage: np.ndarray  # float32[K]
    weight: np.ndarray  # float32[K]
    support: Support | None = None
    name: str = ""  # "<group>/<slot>/<step>", for error messages


class VisionInputs(NamedTuple):
    """Images as the vision tower takes them; leading axes are free ([I] in serving, [B,M] in a batch).

    Everything that depends on an image's grid is computed on the host (cuajax.inputs.grid).
    Patches come in merge-block order: each run of merge^2 patches becomes one feature.
    """

    patches: Any  # uint8[...,N,C*P*P] channel-major pixels of each patch
    hw: Any  # int32[...,N,2] row and column of each patch
    taps: Any  # int32[...,N,4] rows of the position table to interpolate
    tap_weights: Any  # float32[...,N,4]
    segments: Any  # int32[...,N] attention segment (image, frame or window); -1 padding


class PackedBatch(NamedTuple):
    """Rows of prefix trees. Token j is visible to token i iff j <= i < subtree_end[j]."""

    tokens: Any  # int32[B,T]
    positions: Any  # int32[B,3,T] M-RoPE time, row, column
    subtree_end: Any  # int32[B,T]
    image_index: Any  # int32[B,T] row of the row's feature bank ([M*N/merge^2]), -1: a text token
    targets: Any  # int32[B,K] token id scored at each loss position
    target_parent: Any  # int32[B,K] index of the token whose hidden state predicts it
    behaviour_logp: Any  # float32[B,K]
    advantage: Any  # float32[B,K]
    weight: Any  # float32[B,K], 0 on padding
    prox_logp: Any  # float32[B,K] proximal logprobs (`decoupled`), zeros otherwise
    ref_logp: Any  # float32[B,K] reference logprobs (KL), zeros otherwise
    support: Any  # int32[B,K,S] kept ids padded with -1; S=0 when nothing was truncated
    vision: VisionInputs


# -------------------------------------------------------------------------------------------------- protocols
class Env(Protocol):
    """A sandbox an attempt acts in. Faults raise cuajax.sandbox.env.SandboxError, never a reward."""

    async def reset(self, task: Task) -> Observation: ...
    async def step(self, action: Action) -> Observation: ...
    async def close(self) -> None: ...


class Suite(Protocol):
    """A source of tasks with its sandboxes and its validators."""

    name: str
    families: tuple[str, ...]

    def task(self, family: str, seed: int) -> Task: ...
    async def provision(self) -> Env: ...
    async def evaluate(self, task: Task, env: Env, last: Action | None) -> Outcome:
        """Scores the end state; `last` is the attempt's final action, or None if it took none."""
        ...


class ProcessRewardModel(Protocol):
    async def score(self, task: Task, history: Sequence[Step], screenshot: np.ndarray, candidate: Step) -> Outcome:
        """1 iff the candidate is a right next decision after `history`; transport faults are `invalid`."""
        ...


class PolicyClient(Protocol):
    """Where decisions come from. Faults raise cuajax.serving.client.PolicyError."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Completion: ...
