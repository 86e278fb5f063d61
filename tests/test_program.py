"""Command lines and run directories: what cannot be used says so and is left as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cuajax import config, program
from cuajax.config import ConfigError
from cuajax.program import RunDirError


def small(**train: Any) -> config.Settings:
    return config.experiment("small", algo=config.algo("stepo"), train=config.train(**train))


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else b"" for p in sorted(root.rglob("*"))}


# ------------------------------------------------------------------------------------------------- command line
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--confg=x.py"], "unknown flag '--confg'; did you mean '--config'?"),
        (["--config=x.py", "--workdr=/x"], "unknown flag '--workdr'; did you mean '--workdir'?"),
        (["x.py"], "cannot read 'x.py'; settings look like --NAME=VALUE"),
        (["--workdir"], "cannot read '--workdir'"),
        ([], "--config=FILE is missing"),
    ],
)
def test_a_wrong_flag_is_named(argv: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        program.command_line(argv, workdir="")
    assert told in str(caught.value)


def test_flags_have_types_and_both_spellings(tmp_path: Path) -> None:
    path = tmp_path / "c.py"
    path.write_text("from cuajax import config\ndef get_config(arg=''): return config.experiment('x')\n")
    made, flags = program.command_line([f"--config={path}", "--config.seed", "3", "--rounds=2"], rounds=1, workdir="")
    assert (made.seed, flags.rounds, flags.workdir) == (3, 2, "")


def test_a_mistake_found_late_still_ends_as_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.py"
    path.write_text("from cuajax import config\ndef get_config(arg=''): return config.experiment('x')\n")

    def main(config: Any) -> None:
        raise RunDirError("occupied")

    with pytest.raises(SystemExit) as caught:
        program.run(main, [f"--config={path}"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: occupied\n"


# ------------------------------------------------------------------------------------------------ run directory
def test_a_new_directory_holds_the_resolved_config(tmp_path: Path) -> None:
    run = program.prepare_run_dir(tmp_path / "runs" / "one", small())
    assert program.load_resolved(run) == small()
    assert isinstance(program.load_resolved(run).suite.families, tuple)  # JSON has lists
    record = json.loads((run / "config.json").read_text())
    assert record["fingerprint"] == program.fingerprint(small())
    assert [p.name for p in run.iterdir()] == ["config.json"]


def test_a_run_continues_with_more_updates_but_not_as_another_experiment(tmp_path: Path) -> None:
    program.prepare_run_dir(tmp_path, small(updates=5))
    program.prepare_run_dir(tmp_path, small(updates=9))
    assert program.load_resolved(tmp_path).train.updates == 9
    before = snapshot(tmp_path)
    with pytest.raises(RunDirError, match=r"differing: train\.skip_limit \(5 there, 3 here\)"):
        program.prepare_run_dir(tmp_path, small(skip_limit=3))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"notes.txt": "mine"}, "is occupied: 1 entries and no config.json"),
        ({"config.json": "{}"}, "is not the config of a run"),
        ({"config.json": '{"format": 7, "config": {}}'}, "has format 7; this version reads 1"),
    ],
)
def test_a_foreign_directory_is_refused_untouched(tmp_path: Path, content: dict[str, str], told: str) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    before = snapshot(tmp_path)
    with pytest.raises(RunDirError) as caught:
        program.prepare_run_dir(tmp_path, small())
    assert told in str(caught.value)
    assert snapshot(tmp_path) == before


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunDirError):
            program.prepare_run_dir(path, small())
    assert snapshot(tmp_path) == {"file": b"x"}


def test_a_directory_that_cannot_be_written_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not stop root, so the refusal comes from the system call."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunDirError, match="cannot be used: Permission denied"):
        program.prepare_run_dir(tmp_path / "a" / "b", small())
    assert snapshot(tmp_path) == {}


def test_the_fingerprint_sees_every_other_setting() -> None:
    base = small()
    for path, value in config.leaves(base):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        changed = config.override(config.experiment("small", algo=config.algo("stepo")), {path: value + 1})
        same = program.fingerprint(changed) == program.fingerprint(base)
        assert same == (path in program.FREE_KEYS), path
