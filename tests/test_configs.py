"""Every file in configs/ loads, says how it is run, and its pages do a whole small run."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from cuajax import program
from cuajax.config import ConfigError
from tests.launch.pages import PATIENT, ROOT, Page, finish, rows, train

FILES = sorted((ROOT / "configs").glob("*.py"))
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.py"))
TRAINING = [path for path in FILES if path.stem != "eval"]
# One update or two, with every part of the pages: warm-up where there is one, evaluation, checkpoint, report.
LEAST = ("train.updates=2", "eval.every=2", "checkpoint.every=2", "eval.tasks=10", "eval.final_tasks=10")


def load(path: Path, arg: str = "") -> program.Settings:
    return program.load(f"{path}:{arg}" if arg else str(path))


@pytest.mark.parametrize("path", [*FILES, *SWEEPS], ids=lambda path: path.stem)
def test_a_config_says_how_it_is_run(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"={path.relative_to(ROOT)}" in said
    if path in TRAINING:
        assert "Hardware: " in said and ":debug`" in said


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_a_config_is_whole_and_its_debug_form_small(path: Path) -> None:
    whole, small = load(path), load(path, "debug")
    assert set(whole) == set(small) == set(load(ROOT / "configs" / "stepo.py"))
    assert small.train.updates <= 5 < whole.train.updates
    assert small.name == f"{whole.name}_debug" and whole.name.startswith(path.stem)
    assert tuple(whole.suite.families) == tuple(load(ROOT / "configs" / "stepo.py").suite.families)


def test_the_arguments_of_grpo_choose_what_weighs_the_same() -> None:
    path = ROOT / "configs" / "grpo.py"
    chosen = {arg: load(path, arg).algo.credit.aggregate for arg in ("", "token", "naive_step")}
    assert chosen == {"": "trajectory", "token": "token", "naive_step": "naive_step"}
    with pytest.raises(ConfigError, match="one of token and naive_step"):
        load(path, "token,naive_step")


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_point_of_a_sweep_is_a_config(path: Path) -> None:
    config, points = program.load_sweep(path)
    made = [program.fingerprint(program.load(str(ROOT / config), point)) for point in points]
    assert len(set(made)) == len(made) >= 2


@PATIENT
@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_a_config_trains(path: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = finish(train(run, *(f"--config.{one}" for one in LEAST), config=f"--config={path}:debug"))
    assert "Traceback" not in said
    done = rows(run)
    assert [row["step"] for row in done] == [1, 2], said
    for row in done:
        assert row["train/grad_norm"] > 0 and row["train/skipped"] == 0 and row["train/tokens"] > 0
    if path.stem in ("stepo", "sft"):  # one that learns from attempts, one that never asks a policy
        scored = Page("evaluate", f"--run={run}", "--episodes=10", "--seed=4", "--sampled", "--samples=2", "--json",
                      log=tmp_path / "scored")  # fmt: skip
        told = json.loads(finish(scored).splitlines()[-1])
        assert told["episodes"] == 20 and told["tasks"] == 10 and told["step"] in (0, 2)
        assert 0.0 <= told["ci95"][0] <= told["success"] <= told["ci95"][1] <= 1.0
        assert told["pass@k"]["1"] == told["pass^k"]["1"] == told["success"]
