"""The learner's verbs, where a whole run does not reach."""

import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
import learner


class _Never:
    """Batches that do not come; told to stop at the third try."""

    def __init__(self) -> None:
        self.tries = 0

    @property
    def requested(self) -> bool:
        return self.tries >= 3

    def __next__(self):
        self.tries += 1
        raise TimeoutError

    def __iter__(self):
        return self


@pytest.mark.parametrize(("actors", "warned"), [(None, 1), (types.SimpleNamespace(check=lambda: None), 0)])
def test_a_learner_whose_rollouts_are_elsewhere_says_that_none_come(monkeypatch, caplog, actors, warned):
    ticks = iter([0.0, 1.0, 31.0, 59.0])
    monkeypatch.setattr(learner.time, "monotonic", lambda: next(ticks))
    never, renewed = _Never(), []
    got = learner.next_batch(never, actors, never, store=None, waiting=lambda: renewed.append(1))
    assert got == (None, {}) and len(renewed) == 3
    assert [("rollout.py" in r.message) for r in caplog.records] == [True] * warned
