"""What the benchmarks of whole runs share: reading a run directory, serving its policy, running a program."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuajax import metrics, program
from cuajax.config import Settings
from cuajax.types import Task

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
if str(LAUNCH) not in sys.path:
    sys.path.insert(0, str(LAUNCH))  # the launch pages are programs, not a package

SESSIONS = "sessions.json"  # in a run directory: what each start of it took
REFUSED = 2  # exit status of a program that did not begin: a wrong setting
START = "checkpoints_start"  # in a run directory: the policy reinforcement began with
LOAD_EVERY = 20.0  # seconds between two looks at the machine's load


# ------------------------------------------------------------------------------------------------ a run directory
@dataclass(frozen=True)
class Run:
    """A run directory as it lies on disk."""

    path: Path
    config: Settings
    result: dict[str, Any] | None  # result.json; None: not finished
    rows: list[dict[str, Any]]
    sessions: list[dict[str, float]]

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Run:
        """Raises RunDirError when it is no run directory."""
        path = Path(path)
        config = program.load_resolved(path)
        return cls(path, config, _json(path / "result.json"), metrics.read_rows(path), _json(path / SESSIONS) or [])

    @property
    def updates(self) -> list[dict[str, Any]]:
        """The rows of updates; evaluations before the first and warm-up rows are left out."""
        return [row for row in self.rows if "rate/updates" in row]

    @property
    def start(self) -> float | None:
        """Success on the final tasks where reinforcement began."""
        return next((row["eval/success"] for row in self.rows if row["step"] == 0 and "eval/success" in row), None)

    @property
    def warmup_seconds(self) -> float | None:
        return next((row["seconds/total"] for row in self.rows if row["step"] == 0 and "seconds/total" in row), None)

    @property
    def rl_seconds(self) -> float:
        """Seconds from the first update's beginning to the last one's end, over all starts of the run."""
        return sum(1.0 / row["rate/updates"] for row in self.updates)

    @property
    def seconds(self) -> float:
        """Wall clock of all starts, start-up and final evaluation included."""
        told = (self.result or {}).get("seconds") or 0.0
        return sum(s["seconds"] for s in self.sessions) or told

    def finished(self, updates: int) -> bool:
        """Whether result.json is there, of a start that was to make at least `updates` updates."""
        return self.result is not None and self.result.get("target", self.result["updates"]) >= updates


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def final_tasks(config: Settings, *, count: int = 0) -> list[Task]:
    """The tasks of the reported evaluation, or `count` of the same range of seeds."""
    import parts

    return parts.held_out(config, parts.suite(config), count or config.eval.final_tasks, start=parts.FINAL)


# ------------------------------------------------------------------------------------------------- its policy
def policy_of(run: Run, *, which: str = "latest", directory: str = "checkpoints", dtype: str = "") -> Any:
    """(PolicyConfig, params, step) of a checkpoint: latest, best, or a step. Raises CheckpointError."""
    import parts

    from cuajax.checkpoint import Checkpoints
    from cuajax.models import policy, presets

    vocabulary = parts.tokenizer(parts.harness(run.config)).vocab_size
    given = run.config.policy
    cfg = presets.get(given.preset, vocab_size=vocabulary, dtype=dtype or given.dtype)
    found = Checkpoints(run.path / directory, metric="success", read_only=True)
    try:
        step = found.latest() if which == "latest" else found.best() if which == "best" else int(which)
        params, meta = found.restore_params(policy.abstract(cfg), step=step)
    finally:
        found.close()
    return cfg, params, int(meta["step"])


@contextlib.contextmanager
def served(run: Run, params: Any, *, cfg: Any, version: int = 1, address: str = "") -> Iterator[Any]:
    """A policy server of these parameters; behind gRPC where `address` is given or the run's config says so."""
    import parts
    import policy_server

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # gRPC's poller grumbles about event loops that ended
    serving = policy_server.start(
        run.config, parts.harness(run.config), params, cfg=cfg, version=version, address=address
    )
    try:
        yield serving
    finally:
        serving.stop()


# ---------------------------------------------------------------------------------------------------- programs
def execute(command: Sequence[str], run_dir: Path) -> int:
    """Runs a program to its end, its output in RUN_DIR.out, and notes in the run directory what it took.

    Returns the exit status. What stops the benchmark stops the program by SIGTERM: a training run saves before it goes.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    began, before, loads = time.time(), _cpu(), [os.getloadavg()[0]]
    caught = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with open(f"{run_dir}.out", "ab") as out:
        child = subprocess.Popen(list(command), stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(LOAD_EVERY)
                loads.append(os.getloadavg()[0])
        finally:
            child.terminate()
            child.wait()
            signal.signal(signal.SIGTERM, caught)
            taken = {"seconds": time.time() - began, "cpu_seconds": _cpu() - before,
                     "load": sum(loads) / len(loads), "status": child.returncode}  # fmt: skip
            if run_dir.is_dir() and child.returncode != REFUSED:
                sessions = [*(_json(run_dir / SESSIONS) or []), taken]
                (run_dir / SESSIONS).write_text(json.dumps(sessions) + "\n", encoding="utf-8")
    return child.returncode


def _cpu() -> float:
    """Processor seconds of the programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tail(run_dir: Path, lines: int = 5) -> str:
    """The end of what a program that `execute` ran has said."""
    text = Path(f"{run_dir}.out").read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(text[-lines:])


def machine() -> str:
    """Cores, processor kind and versions: a number without them is not a number."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "numpy"))
    where = f"{os.cpu_count()} cores {platform.machine()}, {platform.system()}"
    return f"{where}, Python {platform.python_version()}, {versions}"


def rounded(value: Any, digits: int = 4) -> Any:
    """Numbers of nested plain data, for a line that a person may read too."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    return [rounded(item, digits) for item in value] if isinstance(value, list | tuple) else value
