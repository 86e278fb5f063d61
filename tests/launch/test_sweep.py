"""Sweeps: one directory a point, finished points are passed over, an interrupted one is not, one table at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cuajax.config import ConfigError
from tests.launch.pages import ROOT

sys.path.insert(0, str(ROOT / "launch"))
import sweep

POINTS = """
CONFIG = "configs/grpo.py:debug"
def get_sweep():
    return [{"algo.credit.aggregate": a, "serving.slots": (16, 32)} for a in ("trajectory", "token")]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "points.py"
    path.write_text(POINTS)
    return path


def test_a_sweep_goes_on_where_it_was_stopped(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[tuple[str, dict[str, Any]]] = []
    statuses = [0, sweep.PREEMPTED, 0]

    def run_point(spec: str, point: Mapping[str, Any], run_dir: Path) -> int:
        assert spec == str(ROOT / "configs/grpo.py:debug") or spec == "configs/grpo.py:debug"
        begun.append((run_dir.name, dict(point)))
        status = statuses.pop(0)
        if status == 0:
            run_dir.mkdir(parents=True)
            found = dict(start=0.25, final=0.75, ci95=[0.5, 0.9], updates=5, target=5, seconds=1.0)
            (run_dir / "result.json").write_text(json.dumps(found))
        return status

    monkeypatch.setattr(sweep, "run_point", run_point)
    monkeypatch.setenv("COLUMNS", "160")
    argv = [f"--sweep={file}", f"--workdir={tmp_path / 'out'}", "--config.seed=3"]
    assert sweep.main(argv) == sweep.PREEMPTED
    assert sweep.main(argv) == 0
    names = [name for name, _ in begun]
    assert names[0].startswith("00-aggregate=trajectory,slots=16,32") and names[1] == names[2]
    assert begun[1][1]["algo.credit.aggregate"] == "token" and begun[0][1]["seed"] == "3"
    assert "0.500-0.900" in capsys.readouterr().out
    assert sweep.main(argv) == 0 and len(begun) == 3  # nothing is left to do


def test_a_failed_point_is_shown_and_the_others_run(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "run_point", lambda spec, point, run_dir: 1)
    monkeypatch.setenv("COLUMNS", "160")
    assert sweep.main([f"--sweep={file}", f"--workdir={tmp_path / 'out'}"]) == 1
    assert capsys.readouterr().out.count("status 1") == 2


def test_a_wrong_key_ends_it_before_the_first_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "run_point", lambda *_: pytest.fail("a run was started"))
    with pytest.raises(ConfigError, match="did you mean"):
        sweep.main([f"--sweep={file}", f"--workdir={tmp_path / 'out'}", "--config.optimizer.learning_rat=1"])
    with pytest.raises(ConfigError, match="did you mean '--sweep'"):
        sweep.main(["--swep=x"])
