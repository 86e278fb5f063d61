"""The benchmark runner: names are files, the last line is JSON."""

from __future__ import annotations

import importlib
import json
from types import ModuleType

import pytest

from tests.bench import __main__ as bench


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
