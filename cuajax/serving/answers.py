"""Result rows of the engine becoming answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cuajax.serving import engine as eng
from cuajax.serving.messages import EngineFault, PolicyError, Request, Result, Sink
from cuajax.types import Completion, Sampling, Support


class Flight(NamedTuple):
    """A dispatched engine call whose results are not read yet."""

    kind: str  # "prefill" or "decode"
    results: Any  # int32[n,R] on device
    owners: Sequence[Request | None]  # of its first rows
    version: int


class Landed(NamedTuple):
    """What one call brought: tokens were appended to their requests, and some requests ended."""

    ended: list[tuple[Request, Completion | PolicyError]]
    tokens: list[tuple[Request, int]]  # of streamed requests
    first: list[Request]  # that got their first token


def truncates(sampling: Sampling) -> bool:
    """Whether a request needs the compiled variant with top-k and top-p."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1.0)


def land(flight: Flight, results: np.ndarray) -> Landed:
    """Appends the tokens of a read flight, results int32[n,R], to their requests and says which ended and how."""
    count, version = len(flight.owners), flight.version
    rows = results[:count, : eng.COUNT].tolist()
    logprobs = results[:count, eng.LOGPROB].view(np.float32).tolist()
    out = Landed([], [], [])
    for at, request in enumerate(flight.owners):
        token, _, flags = rows[at]
        if request is None or not flags or request.state != "active":  # a slot that is free, or was freed meanwhile
            continue
        if flags & eng.BROKEN:
            out.ended.append((request, EngineFault(f"the logits of token {len(request.tokens)} are not finite")))
            continue
        if not request.tokens:
            out.first.append(request)
        request.tokens.append(token)
        request.logprobs.append(logprobs[at])
        request.versions.append(version)
        if results.shape[1] > eng.COUNT and truncates(request.sampling):
            kept = results[at, eng.SUPPORT : eng.SUPPORT + results[at, eng.COUNT]]
            request.kept = [*(request.kept or ()), kept]
        if request.stream:
            out.tokens.append((request, token))
        if flags & eng.STOPPED:
            out.ended.append((request, completion(request, "stop")))
        elif flags & eng.EXHAUSTED:
            out.ended.append((request, completion(request, "length")))
    return out


def completion(request: Request, reason: Any) -> Completion:
    """The answer so far; `reason` as in Completion.finish_reason."""
    support = None
    if request.kept:
        count = np.array([len(kept) for kept in request.kept], np.int32)
        ids = np.full((len(count), int(count.max())), -1, np.int32)
        for row, kept in zip(ids, request.kept, strict=True):
            row[: len(kept)] = kept
        support = Support(ids, count)
    return Completion(
        np.array(request.tokens, np.int32),
        np.array(request.logprobs, np.float32),
        np.array(request.versions, np.int32),
        reason,
        support,
    )


def deliver(results: Sequence[tuple[Request, Result]]) -> None:
    """Hands results to their sinks, one call a sink."""
    out: dict[Sink, list[tuple[Any, Result]]] = {}
    for request, result in results:
        out.setdefault(request.sink, []).append((request.handle, result))
    for sink, pairs in out.items():
        sink(pairs)
