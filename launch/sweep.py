"""Run the points of a sweep one after another, and print one table.

    python launch/sweep.py --sweep=configs/sweeps/aggregates.py [--workdir=DIR] [--config.KEY=VALUE ...]

A sweep file names a config and a list of settings; each point is a run of launch/train.py in a directory of its own
under DIR (runs/sweeps/NAME by default). The same command goes on where it was stopped: points that have finished are
passed over, one that was interrupted continues from its checkpoint. `--config.KEY=VALUE` goes to every point.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cuajax import metrics
from cuajax.config import ConfigError, nearest
from cuajax.program import load, load_sweep

ROOT = Path(__file__).resolve().parents[1]
PREEMPTED = 75


def spec_of(config: str) -> str:
    """`FILE[:ARG]` as it is, or from the repository when the working directory has no such file."""
    name = config.partition(":")[0]
    return config if Path(name).is_file() else str(ROOT / config)


def said(value: Any) -> str:
    """A setting as a command line says it."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def name_of(place: int, point: Mapping[str, Any]) -> str:
    """A directory name: `03-aggregate=token,seed=1`."""
    text = ",".join(f"{key.rpartition('.')[2]}={said(value)}" for key, value in point.items())
    return f"{place:02d}-{re.sub(r'[^A-Za-z0-9=,._-]', '_', text)}"[:120]


def finished(run_dir: Path, updates: int) -> dict[str, Any] | None:
    """The result of a point that has done all its updates, None for any other."""
    try:
        found = json.loads((run_dir / "result.json").read_text())
    except FileNotFoundError:
        return None
    return found if found.get("target", updates) >= updates else None


def run_point(spec: str, point: Mapping[str, Any], run_dir: Path) -> int:
    """One run of launch/train.py; its exit status."""
    settings = [f"--config.{key}={said(value)}" for key, value in point.items()]
    page = str(Path(__file__).with_name("train.py"))
    return subprocess.run(
        [sys.executable, page, f"--config={spec}", f"--workdir={run_dir}", *settings], check=False
    ).returncode


def main(argv: Sequence[str]) -> int:
    sweep, workdir, shared = options(argv)
    config, points = load_sweep(sweep)
    spec, directory = spec_of(config), Path(workdir or f"runs/sweeps/{Path(sweep).stem}")
    made = [(name_of(i, point), {**point, **shared}) for i, point in enumerate(points)]
    targets = {name: load(spec, point).train.updates for name, point in made}  # a wrong key ends it here, not at night
    rows: list[list[Any]] = []
    for place, (name, point) in enumerate(made, 1):
        status = 0
        if finished(directory / name, targets[name]) is None:
            print(f"sweep: point {place} of {len(made)}, {name}", file=sys.stderr)
            status = run_point(spec, point, directory / name)
        if status == PREEMPTED:
            return PREEMPTED
        found = finished(directory / name, targets[name]) or {}
        ci = "{:.3f}-{:.3f}".format(*found["ci95"]) if found else f"status {status}"
        start, final, updates, seconds = (found.get(key) for key in ("start", "final", "updates", "seconds"))
        rows.append([name, start, final, ci, updates, seconds])
    columns = ("point", "before", "after", "95 % interval", "updates", "seconds")
    metrics.print_table(f"{Path(sweep).stem}: {spec}, success on held-out tasks", columns, rows)
    return 0 if all(row[2] is not None for row in rows) else 1


def options(argv: Sequence[str]) -> tuple[str, str, dict[str, str]]:
    """(sweep file, directory, settings of every point). Raises ConfigError."""
    given: dict[str, str] = {}
    for word in argv:
        name, equals, value = word.partition("=")
        known = ("--sweep", "--workdir")
        if not equals or (name not in known and not name.startswith("--config.")):
            raise ConfigError(f"cannot use {word!r}{nearest(name, known)}; settings look like --config.KEY=VALUE")
        given[name] = value
    if "--sweep" not in given:
        raise ConfigError("--sweep=FILE is missing, for example --sweep=configs/sweeps/seeds.py")
    shared = {name.removeprefix("--config."): v for name, v in given.items() if name.startswith("--config.")}
    return given["--sweep"], given.get("--workdir", ""), shared


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        sys.exit(0)
    try:
        status = main(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    sys.exit(status)
