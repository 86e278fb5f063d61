"""Scoring: which tasks, which interval, pass@k and pass^k by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cuajax import program
from cuajax.config import ConfigError
from cuajax.tasks.curriculum import TRAIN_SEEDS
from cuajax.types import Outcome, Task, Trajectory
from tests.launch.pages import ROOT

sys.path.insert(0, str(ROOT / "launch"))
import evaluate
import parts


def attempts(successes: str) -> list[Trajectory]:
    """One attempt a letter: s success, f failure, i invalid."""
    kinds = {"s": Outcome("success", 1.0), "f": Outcome("failure"), "i": Outcome("invalid")}
    return [Trajectory(f"t{i}", "task", "g", i, (), kinds[letter]) for i, letter in enumerate(successes)]


def tasks(count: int) -> list[Task]:
    return [Task(f"sim/check2/{i}", "sim", "check2", "") for i in range(count)]


def test_pass_at_k_and_pass_hat_k() -> None:
    """2 of 4, 4 of 4 and 0 of 4 attempts: pass@2 = (1 - 1/6 + 1 + 0) / 3, pass^2 = (1/6 + 1 + 0) / 3."""
    one, every = evaluate.any_and_all([2, 4, 0], 4, 2)
    assert one == pytest.approx((5 / 6 + 1 + 0) / 3)
    assert every == pytest.approx((1 / 6 + 1 + 0) / 3)


def test_a_summary_counts_invalid_attempts_apart() -> None:
    told = evaluate.summary(attempts("ssfsi"), tasks(5))
    assert (told["success"], told["episodes"], told["invalid"]) == (0.75, 4, 1)
    assert told["ci95"] == pytest.approx(parts.wilson(3, 4))
    assert "pass@k" not in told
    many = evaluate.summary(attempts("ssff" + "ssss"), tasks(2))
    assert many["pass@k"] == pytest.approx({1: 0.75, 2: (5 / 6 + 1) / 2, 4: 1.0})
    assert many["pass^k"] == pytest.approx({1: 0.75, 2: (1 / 6 + 1) / 2, 4: 0.5})
    assert many["ci95"] == pytest.approx(parts.wilson(1.5, 2))  # attempts at one task are not independent


def test_wilson_by_hand() -> None:
    """8 of 10: centre (0.8 + 1.96^2 / 20) / (1 + 1.96^2 / 10), Wilson (1927)."""
    assert parts.wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-3)
    assert parts.wilson(0, 0) == (0.0, 1.0)


def test_scored_tasks_are_no_training_tasks_and_differ_by_seed() -> None:
    config = program.load(str(ROOT / "configs" / "stepo.py"))
    suite = parts.suite(config)

    def seeds(seed: int) -> set[int]:
        start = evaluate.FIRST + seed % evaluate.BLOCKS * evaluate.BLOCK
        return {t.setup["seed"] for t in parts.held_out(config, suite, 20, start=start)}

    own = {t.setup["seed"] for start in (0, parts.FINAL) for t in parts.held_out(config, suite, 20, start=start)}
    assert min(seeds(0)) >= TRAIN_SEEDS[1] and not seeds(0) & own
    assert not seeds(0) & seeds(1) and seeds(123456789) == seeds(123456789)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    path = str(ROOT / "configs" / "eval.py")
    given = dict(run="", episodes=0, seed=-1, sampled=False, samples=0, step="", json=False)
    settings, flags = program.command_line([], default=path, **given)
    with pytest.raises(ConfigError, match="--run=DIR is missing"):
        evaluate.main(settings, **flags)
    settings, flags = program.command_line([f"--run={tmp_path}", "--sampled", "--json"], default=path, **given)
    assert flags.sampled and flags.json
    with pytest.raises(ConfigError, match="is not the config of a run"):
        evaluate.main(settings, **flags)
