"""What clients, server and scheduler say to each other: typed faults, requests, and the bodies on the wire. No jax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from cuajax.types import Completion, Prompt, Sampling

SERVICE = "cuajax.Policy"


# ----------------------------------------------------------------------------------------------------- faults
class PolicyError(Exception):
    """A decision could not be made. `code` is the gRPC status name; `retryable`: nothing has happened yet."""

    code = "INTERNAL"
    retryable = False


class InvalidRequest(PolicyError):
    code = "INVALID_ARGUMENT"


class ResourceExhausted(PolicyError):
    code = "RESOURCE_EXHAUSTED"
    retryable = True


class DeadlineExceeded(PolicyError):
    code = "DEADLINE_EXCEEDED"


class Unavailable(PolicyError):
    code = "UNAVAILABLE"
    retryable = True


class Unauthenticated(PolicyError):
    code = "UNAUTHENTICATED"


class BadWeights(PolicyError):
    """The offered parameters do not fit or are not finite; the ones before them keep serving."""

    code = "FAILED_PRECONDITION"


class StaleVersion(PolicyError):
    """A version that is not above the serving one."""

    code = "OUT_OF_RANGE"


class EngineFault(PolicyError):
    code = "INTERNAL"


FAULTS: dict[str, type[PolicyError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest, ResourceExhausted, DeadlineExceeded, Unavailable, Unauthenticated, BadWeights, StaleVersion,
        EngineFault,
    )
}  # fmt: skip


def fault(code: str, message: str) -> PolicyError:
    """The typed error of a status name."""
    return FAULTS.get(code, EngineFault)(message)


# --------------------------------------------------------------------------------------------------- requests
Result = Completion | PolicyError | int  # int: one more token of a streamed answer
Sink = Callable[[list[tuple[Any, Result]]], None]  # gets (handle, result) pairs; must not raise nor block


@dataclass(slots=True, eq=False)
class Request:
    """One decision under way; its mutable part belongs to the scheduler thread."""

    prompt: Prompt
    sampling: Sampling
    sink: Sink
    handle: Any
    deadline: float | None = None  # time.monotonic
    stream: bool = False  # also deliver every token as it comes
    state: Literal["waiting", "active", "finished"] = "waiting"
    submitted: float = 0.0  # time.perf_counter
    seed: int | None = None
    slot: int = -1
    left: int = 0  # decode steps not yet dispatched
    attempts: int = 0
    layout: Any = None  # positions and feature rows, from Prompts.screen
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[np.ndarray] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """Body of a Generate call."""

    id: str  # names the batch for Cancel
    items: list[tuple[Prompt, Sampling]]


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """One item's end: exactly one of `completion` and `code` is set."""

    index: int
    completion: Completion | None = None
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    id: str
    indices: list[int]


@dataclass(frozen=True, slots=True)
class WeightsHeader:
    """First message of SetWeights: what follows, byte for byte."""

    version: int
    mode: str
    leaves: list[tuple[str, str, list[int]]]  # name, dtype, shape; their bytes follow in this order
