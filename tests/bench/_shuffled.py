"""Trains the run of a directory with each group's verdicts shuffled among its attempts: a control, not a program.

python -m tests.bench._shuffled RUN_DIR
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuajax import program
from cuajax.types import Credit, Group
from tests.bench import _runs


def shuffled(group: Group) -> Group:
    """The group with the outcomes of its valid attempts permuted; the same permutation whenever it is read."""
    outcomes = [t.outcome for t in group.valid]
    random.Random(group.id).shuffle(outcomes)
    mixed = iter(outcomes)
    return replace(group, trajectories=tuple(
        t if t.outcome.status == "invalid" else replace(t, outcome=next(mixed)) for t in group.trajectories
    ))  # fmt: skip


class Blind:
    """A credit function that is told who did what, but not how it ended; counts its groups."""

    def __init__(self, credit: Callable[[Group], Credit]) -> None:
        self._credit, self.groups = credit, 0

    def __call__(self, group: Group) -> Credit:
        self.groups += 1
        return self._credit(shuffled(group))


def main(run_dir: str) -> Any:
    sys.path.insert(0, str(_runs.LAUNCH))
    import parts
    import train

    config = program.load_resolved(run_dir)
    credit = Blind(parts.credit(config))
    parts.credit = lambda given: credit
    status = train.main(config, run_dir)
    if not status and not credit.groups:  # the page no longer takes its credit from there
        Path(run_dir, "result.json").unlink()
        raise SystemExit("no group passed through the shuffling: this was not a control")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
