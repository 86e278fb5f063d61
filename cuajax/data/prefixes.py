"""Which samples share which prompt prefix, and which of them share a row.

Everything here is index arithmetic on flat arrays: prompts are compared as sequences of identities, where a text token
is its id and an image token is (image, feature), so equal identities mean equal hidden states in a causal model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CELLS = 1 << 22  # most cells of one comparison matrix
_EARLIEST_CUT = 0.75  # of a row's tokens: a cut earlier than this would cost more than the prefix it saves


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What one row holds: tokens, loss tokens and distinct images."""

    tokens: int
    loss_tokens: int
    images: int


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """Samples in depth-first order of their prompts (all arrays [n], in that order)."""

    length: np.ndarray  # prompt tokens
    shared: np.ndarray  # leading prompt tokens in common with the sample before
    extra: np.ndarray  # response tokens that are laid out (all but the last)
    loss: np.ndarray  # loss tokens
    images: Sequence[tuple[int, ...]]  # distinct images of each prompt


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The chosen order: positions in `Leaves`, their row, and the prefix each shares with its row neighbour."""

    order: np.ndarray
    row: np.ndarray
    shared: np.ndarray
    count: int


def ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Concatenation of arange(start[i], start[i] + length[i])."""
    total = int(length.sum())
    if not total:
        return np.zeros(0, np.int64)
    before = np.cumsum(length) - length
    return np.repeat(start - before, length) + np.arange(total)


def common_prefix(identity: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """int64[n]: leading identities that sequence i has in common with sequence i-1 (0 for the first).

    Sequence i is identity[start[i] : start[i] + length[i]].
    """
    out = np.zeros(len(start), np.int64)
    if len(start) < 2:
        return out
    bound = np.minimum(length[1:], length[:-1])
    width = max(1, int(bound.max()))
    columns = np.arange(width)
    step = max(1, _CELLS // width)
    for a in range(0, len(bound), step):
        some = slice(a, a + step)
        n = bound[some, None]
        at = np.minimum(columns, np.maximum(n - 1, 0))
        differ = identity[start[:-1][some, None] + at] != identity[start[1:][some, None] + at]
        differ |= columns >= n
        out[1:][some] = np.where(differ.any(1), differ.argmax(1), n[:, 0])
    return out


def fill_rows(leaves: Leaves, limits: Limits) -> Rows:
    """Places every leaf in a row: whole trees first-fit by decreasing size, a tree that is too big in pieces."""
    if not len(leaves.length):
        empty = np.zeros(0, np.int64)
        return Rows(empty, empty, empty, 0)
    roots = np.flatnonzero(leaves.shared == 0)
    bounds = np.append(roots, len(leaves.length))
    # A leaf costs what it adds behind its neighbour; the first of a piece costs its whole prompt.
    added = np.cumsum(np.concatenate([[0], leaves.length - leaves.shared + leaves.extra]))
    loss = np.cumsum(np.concatenate([[0], leaves.loss]))
    pieces: list[tuple[int, int, frozenset[int]]] = []
    for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        seen = frozenset(leaves.images[a]).union(*leaves.images[a + 1 : b])
        fits = added[b] - added[a] <= limits.tokens and loss[b] - loss[a] <= limits.loss_tokens
        if fits and len(seen) <= limits.images:
            pieces.append((a, b, seen))
        else:
            pieces += _split(leaves, limits, a, b)
    return _first_fit(leaves, limits, pieces)


def _split(leaves: Leaves, limits: Limits, a: int, b: int) -> list[tuple[int, int, frozenset[int]]]:
    """Cuts a tree's leaves [a,b) into runs that fit a row, where the repeated prefix is short."""
    length, shared = leaves.length[a:b].tolist(), leaves.shared[a:b].tolist()
    extra, loss = leaves.extra[a:b].tolist(), leaves.loss[a:b].tolist()
    pieces = []
    first = 0
    while first < b - a:
        tokens, losses, seen = length[first] + extra[first], loss[first], set(leaves.images[a + first])
        cut, end = 0, first + 1
        while end < b - a:
            grown = tokens + length[end] - shared[end] + extra[end]
            images = seen.union(leaves.images[a + end])
            if grown > limits.tokens or losses + loss[end] > limits.loss_tokens or len(images) > limits.images:
                break
            if tokens >= _EARLIEST_CUT * limits.tokens and (not cut or shared[end] <= shared[cut]):
                cut = end
            tokens, losses, seen, end = grown, losses + loss[end], images, end + 1
        if end < b - a and cut and shared[cut] < shared[end]:
            end = cut
            seen = set().union(*leaves.images[a + first : a + end])
        pieces.append((a + first, a + end, frozenset(seen)))
        first = end
    return pieces


def _first_fit(leaves: Leaves, limits: Limits, pieces: list[tuple[int, int, frozenset[int]]]) -> Rows:
    start = np.array([p[0] for p in pieces])
    stop = np.array([p[1] for p in pieces])
    added = np.cumsum(np.concatenate([[0], leaves.length - leaves.shared + leaves.extra]))
    loss = np.cumsum(np.concatenate([[0], leaves.loss]))
    tokens = added[stop] - added[start] + leaves.shared[start]
    losses = loss[stop] - loss[start]
    free_tokens, free_losses = np.zeros(len(pieces), np.int64), np.zeros(len(pieces), np.int64)
    banks: list[set[int]] = []
    placed = np.zeros(len(pieces), np.int64)
    for i in np.argsort(-tokens, kind="stable").tolist():
        n = len(banks)
        need = pieces[i][2]
        for r in np.flatnonzero((free_tokens[:n] >= tokens[i]) & (free_losses[:n] >= losses[i])).tolist():
            if len(banks[r] | need) <= limits.images:
                break
        else:
            r = n
            banks.append(set())
            free_tokens[r], free_losses[r] = limits.tokens, limits.loss_tokens
        banks[r] |= need
        free_tokens[r] -= tokens[i]
        free_losses[r] -= losses[i]
        placed[i] = r
    return _in_rows(leaves, start, stop, placed)


def _in_rows(leaves: Leaves, start: np.ndarray, stop: np.ndarray, placed: np.ndarray) -> Rows:
    """Rows in order, the pieces of a row in depth-first order, so that pieces of one tree meet again."""
    by_row = np.lexsort((start, placed))
    start, stop, row = start[by_row], stop[by_row], placed[by_row]
    tree = np.cumsum(leaves.shared == 0)
    shared = leaves.shared.copy()
    for i in range(len(start)):
        a = start[i]
        if i and row[i] == row[i - 1] and tree[a] == tree[stop[i - 1] - 1]:
            shared[a] = leaves.shared[stop[i - 1] : a + 1].min()
        else:
            shared[a] = 0
    order = ranges(start, stop - start)
    return Rows(order, np.repeat(row, stop - start), shared[order], int(row[-1]) + 1)
