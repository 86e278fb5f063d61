"""The benchmark runner: names are files, the last line is JSON."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from cuajax import config, program
from cuajax.sandbox.sim.suite import SimEnv, SimSuite
from cuajax.types import Group, Outcome, Task, Trajectory
from tests.bench import __main__ as bench
from tests.bench import _runs, _shuffled, ablate, controls, seeds
from tests.bench import main as wall_clock


def test_every_benchmark_has_a_first_line_and_a_main() -> None:
    for name, doc in bench.names().items():
        assert doc.endswith("."), f"tests/bench/{name}.py: the docstring's first line says what it measures"


def test_the_last_line_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = ModuleType("fake")
    module.__dict__["main"] = lambda argv: {"speed": float(argv[0])}
    monkeypatch.setattr(bench, "names", lambda: {"fake": "Measures nothing."})
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    assert bench.main(["fake", "2"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"bench": "fake", "speed": 2.0}


def test_an_unknown_name_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["no_such_benchmark"]) == 2
    assert "choices" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- benchmarks of whole runs
def _group(rewards: list[float | None]) -> Group:
    """Attempts with these rewards; None: invalid."""
    outcomes = [Outcome("invalid") if r is None else Outcome("success" if r else "failure", reward=r) for r in rewards]
    made = tuple(Trajectory(f"g/{i}", "t", "g", i, (), outcome) for i, outcome in enumerate(outcomes))
    return Group("g", Task("t", "sim", "f", "go"), made)


def test_shuffling_moves_verdicts_and_nothing_else() -> None:
    group = _group([1.0, 0.0, None, 0.0, 0.0, 0.0, 1.0, 0.0])
    mixed = _shuffled.shuffled(group)
    before, after = ([t.outcome.reward for t in g.valid] for g in (group, mixed))
    assert sorted(before) == sorted(after)
    assert before != after
    assert after == [t.outcome.reward for t in _shuffled.shuffled(group).valid], "a batch is read again on resume"
    assert [t.id for t in mixed.trajectories] == [t.id for t in group.trajectories]
    assert mixed.trajectories[2].outcome.status == "invalid"


def test_a_blank_screen_hides_the_screen_and_not_the_score() -> None:
    async def run() -> Outcome:
        suite = ablate.BlankSuite(SimSuite())
        task, env = suite.task("check2", 3), await suite.provision()
        assert isinstance(env, ablate.BlankEnv)
        assert isinstance(env.inner, SimEnv)
        seen = await env.reset(task)
        while (action := suite.inner.oracle(env.inner)).kind != "terminate":
            assert (seen.screenshot == ablate.GREY).all()
            seen = await env.step(action)
        assert (seen.screenshot == ablate.GREY).all()
        return await suite.evaluate(task, env, None)

    assert asyncio.run(run()).status == "success"
    assert [task.instruction for task in ablate.wordless([SimSuite().task("type", 1)])] == [""]


def _row(update: int, **seconds: float) -> dict:
    stages = {f"seconds/learner/{stage}": spent for stage, spent in seconds.items()}
    return {"step": update, "rate/updates": 0.5, "rate/tokens": 100.0, "data/read": 4, "data/pack_s": 0.5} | stages


def test_books_of_the_wall_clock_balance_or_are_told() -> None:
    rows = [_row(1, step=1.5, idle=0.5), _row(2, step=1.0, idle=1.0)]
    assert wall_clock.walls(rows) == 4.0
    assert wall_clock.unbalanced(wall_clock.stages(rows), 4.0) == {}
    assert wall_clock.rates(rows)["tokens_per_s"] == 100.0
    rows[1]["seconds/learner/idle"] = 0.0
    assert wall_clock.unbalanced(wall_clock.stages(rows), 4.0) == {"learner": 0.75}


def test_a_control_begins_where_reinforcement_began(tmp_path: Path) -> None:
    run_dir, to = tmp_path / "run", tmp_path / "controls" / "run-shuffled"
    (run_dir / _runs.START / "0").mkdir(parents=True)
    program.save_resolved(run_dir, config.experiment("x", algo=config.algo("stepo")))
    rows = [{"step": 0, "eval/success": 0.25}, {"step": 1, "eval/success": 0.5}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "result.json").write_text(json.dumps({"updates": 7, "target": 450}))  # its success was enough
    controls.branch(_runs.Run.of(run_dir), to)
    begun = _runs.Run.of(to)
    assert begun.start == 0.25 and begun.config.train.updates == 7
    assert [row["step"] for row in begun.rows] == [0]
    assert (to / "checkpoints" / "0").is_dir()
    assert not begun.finished(1)
    with pytest.raises(SystemExit, match="missing"):
        controls.branch(begun, tmp_path / "again")


def test_a_run_is_finished_when_it_was_to_make_as_many_updates(tmp_path: Path) -> None:
    program.save_resolved(tmp_path, config.experiment("x", algo=config.algo("stepo")))
    assert not _runs.Run.of(tmp_path).finished(5)
    (tmp_path / "result.json").write_text(json.dumps({"updates": 3, "target": 5}))  # it ended early, of itself
    assert _runs.Run.of(tmp_path).finished(5)
    assert not _runs.Run.of(tmp_path).finished(9), "more updates were asked for"


def test_configs_have_names_of_their_own() -> None:
    assert [seeds.label(s) for s in ("configs/stepo.py", "a/grpo.py:naive_step")] == ["stepo", "grpo_naive_step"]
    assert seeds.overrides(["--config.train.updates=3"]) == {"train.updates": "3"}
    with pytest.raises(config.ConfigError, match="--seed"):
        seeds.overrides(["--seed=3"])
