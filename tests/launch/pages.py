"""Launch pages as processes: start one, watch what its run has done, end it in any way."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEBUG = "--config=configs/stepo.py:debug"
SECONDS = 600.0  # of anything waited for: a shared machine may be slow
PATIENT = pytest.mark.timeout(1800)


@functools.cache
def compiled() -> Path:
    """A compilation cache for all processes of this test run, and of no other."""
    path = Path(tempfile.mkdtemp(prefix="cuajax-compiled-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def environment() -> dict[str, str]:
    cache = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(compiled()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    return {**os.environ, **cache}


class Page:
    """A launch page in a process of its own; both its streams go to one file."""

    def __init__(self, name: str, *args: str, log: Path) -> None:
        command = [sys.executable, str(ROOT / "launch" / f"{name}.py"), *args]
        self._begin(command, log)

    def _begin(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=file, stderr=file)
        _RUNNING.append(self.process)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, reached: Callable[[], Any], what: str) -> None:
        """Waits until `reached()`; fails with what the page said when it ends before."""
        end = time.monotonic() + SECONDS
        while not reached():
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode} before {what}:\n{self.said[-4000:]}"
            )
            assert time.monotonic() < end, f"no {what} within {SECONDS:g} s:\n{self.said[-4000:]}"
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self, number: int = 0) -> int:
        """Its exit status, after a signal if one is given."""
        if number:
            self.process.send_signal(number)
        return self.process.wait(SECONDS)


class Script(Page):
    """The same for a few lines of Python that see launch/."""

    def __init__(self, code: str, *args: str, log: Path) -> None:
        before = f"import sys; sys.path.insert(0, {str(ROOT / 'launch')!r})\n"
        self._begin([sys.executable, "-c", before + code, *args], log)


_RUNNING: list[subprocess.Popen] = []


@atexit.register
def end_all() -> None:
    """No process outlives the tests."""
    for process in _RUNNING:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def train(run: Path, *args: str, config: str = DEBUG) -> Page:
    """A learner on `run`; its output goes beside the run directory."""
    return Page("train", config, f"--workdir={run}", *args, log=run.with_suffix(".train"))


def finish(page: Page, status: int = 0) -> str:
    """What a page said, once it has ended as it should."""
    assert page.end() == status, page.said[-4000:]
    return page.said


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of the run's updates."""
    try:
        lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [row for row in map(json.loads, lines) if row["step"] > 0]


def updates(run: Path) -> int:
    return max((row["step"] for row in rows(run)), default=0)


def checkpoints(run: Path) -> list[int]:
    """Updates with a committed checkpoint."""
    found = (run / "checkpoints").glob("*/_CHECKPOINT_METADATA")
    return sorted(int(path.parent.name) for path in found if path.parent.name.isdecimal())


def state(run: Path, update: int, items: tuple[str, ...] = ("params", "opt")) -> list[Any]:
    """Every array of a checkpoint, by default parameters and optimizer, in a fixed order."""
    import jax
    import orbax.checkpoint as ocp

    trees = [ocp.StandardCheckpointer().restore(run / "checkpoints" / str(update) / item) for item in items]
    return jax.tree.leaves(trees)
