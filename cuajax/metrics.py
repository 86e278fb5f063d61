"""What a run reports: a writer (JSONL always, TensorBoard beside it), a progress line, tables, a clock, the log.

Metric names are paths (`rollout/success`, `seconds/learner/pack`). Rows survive a kill: each is one appended line.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

ROWS_FILE = "metrics.jsonl"
LOG_FILE = "log.txt"
STAGES = ("sandbox", "prompt", "wait for policy", "prefill", "decode", "store", "pack", "step", "publish", "idle")
# Label of the progress line -> metric it shows.
SHOWN = {
    "success": "rollout/success",
    "reward": "rollout/reward",
    "entropy": "train/entropy",
    "staleness": "rollout/staleness",
    "tokens/s": "rate/tokens",
}
_QUIET = ("absl", "jax", "jax._src", "orbax", "grain", "h5py", "matplotlib", "PIL", "asyncio")
log = logging.getLogger(__name__)


class MetricsFullError(OSError):
    """The disk (or quota) under the metrics is full; the row was taken back whole."""


# --------------------------------------------------------------------------------------------------- the writer
def _value(value: Any) -> tuple[Any, int]:
    """A JSON value and how many non-finite numbers in it became null."""
    if value is None or isinstance(value, str | bool | int):
        return value, 0
    if isinstance(value, float):
        return (value, 0) if math.isfinite(value) else (None, 1)
    if isinstance(value, Mapping):
        made = {str(key): _value(item) for key, item in value.items()}
        return {key: item for key, (item, _) in made.items()}, sum(bad for _, bad in made.values())
    if isinstance(value, list | tuple):
        items = [_value(item) for item in value]
        return [item for item, _ in items], sum(bad for _, bad in items)
    return _value(np.asarray(value).tolist())  # NumPy and device arrays


def read_rows(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every whole row of a run, oldest first; an unfinished last line (a kill) is passed over."""
    try:
        lines = (Path(run_dir) / ROWS_FILE).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [row for row in map(_row, lines) if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class Writer:
    """Appends rows to `metrics.jsonl` and to TensorBoard files under `tensorboard/`.

    `restored` is the step a checkpoint was restored at (-1: a fresh start): rows past it belong to work that will be
    done again and are dropped. Raises MetricsFullError when the disk is full, other OSErrors as they are.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, restored: int = -1, tensorboard: bool = True) -> None:
        self.path = Path(run_dir) / ROWS_FILE
        self.nonfinite = 0  # numbers written as null since this writer opened
        _truncate(self.path, restored)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        self._board = _Board(Path(run_dir) / "tensorboard", restored) if tensorboard else None

    def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Appends one row {step, time, ...values} and returns it. Non-finite numbers become null and are counted."""
        row: dict[str, Any] = {"step": int(step), "time": time.time()}
        bad = 0
        for name, value in values.items():
            row[name], count = _value(value)
            bad += count
        if bad:
            row["nonfinite"] = bad
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self.nonfinite += bad
            _append(self._file, line, self.path)
            if self._board is not None:
                self._board.write(row)
        return row

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
                if self._board is not None:
                    self._board.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _append(file: int, line: bytes, path: Path) -> None:
    size = os.fstat(file).st_size
    try:
        if os.write(file, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        os.ftruncate(file, size)  # half a row would hide the next one
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MetricsFullError(error.errno, f"no room for a row of {len(line)} bytes", str(path)) from error
        raise


def _truncate(path: Path, restored: int) -> None:
    """Keeps the whole rows up to step `restored`, in a new file put in place at once."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and (row := _row(line)) and row["step"] <= restored]
    if len(kept) == len(lines):
        return
    log.info(
        "metrics: %d of %d rows lie past step %d and are written again", len(lines) - len(kept), len(lines), restored
    )
    draft = path.with_suffix(".draft")
    try:
        draft.write_bytes(b"".join(kept))
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MetricsFullError(error.errno, "no room to shorten the metrics", str(path)) from error
        raise


class _Board:
    """TensorBoard event files; one event a row, written in the caller's thread."""

    def __init__(self, directory: Path, restored: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        directory.mkdir(parents=True, exist_ok=True)
        events: Any = event_pb2  # protobuf makes its classes when imported: no type checker sees them
        summaries: Any = summary_pb2
        self._event, self._summary = events.Event, summaries.Summary
        self._file = EventsWriter(str(directory / "events"), "")
        start = events.SessionLog(status=events.SessionLog.START)  # hides what an earlier start wrote past here
        self._file.write_event(events.Event(wall_time=time.time(), step=restored + 1, session_log=start))
        self._flushed = 0.0

    def write(self, row: Mapping[str, Any]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if isinstance(value, int | float) and name not in ("step", "time")
        ]
        event = self._event(wall_time=row["time"], step=row["step"], summary=self._summary(value=values))
        self._file.write_event(event)
        if row["time"] - self._flushed > 10.0:
            self._file.flush()
            self._flushed = row["time"]

    def close(self) -> None:
        self._file.flush()
        self._file.close()


# ------------------------------------------------------------------------------------------------------- a person
def duration(seconds: float) -> str:
    """`3h05m`, `4m07s` or `12s`."""
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def brief(value: Any) -> str:
    """A number as a person reads it: `0.53`, `12.4k`, `-`."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10_000:
        return str(value)
    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.1f}{letter}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 1 else f"{value:.3f}"


class ProgressLine:
    """update, success, reward, entropy, staleness, tokens/s, ETA: one live line on a terminal, else plain lines.

    Plain lines come at most every `period` seconds, and for the first and last update.
    """

    def __init__(
        self,
        total: int,
        *,
        done: int = 0,
        label: str = "update",
        shown: Mapping[str, str] = SHOWN,
        stream: IO[str] | None = None,
        period: float = 5.0,
    ) -> None:
        self._console = Console(file=stream or sys.stderr, soft_wrap=True, highlight=False)
        self._total, self._label, self._shown, self._period = total, label, dict(shown), period
        self._values: dict[str, Any] = {}
        self._done, self._last, self._pace = done, time.monotonic(), 0.0  # pace: seconds an update, smoothed
        self._printed = -math.inf
        self._live: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            columns = BarColumn(bar_width=20), TextColumn("{task.fields[line]}")
            live = Progress(*columns, console=self._console, refresh_per_second=4)
            self._task = live.add_task(label, total=total, completed=done, line="starting")
            live.start()
            self._live = live

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """`step` updates are done; metrics that `values` lacks keep what they last showed."""
        now = time.monotonic()
        if step > self._done:
            pace = (now - self._last) / (step - self._done)
            self._pace = pace if self._pace == 0.0 else 0.9 * self._pace + 0.1 * pace
        self._done, self._last = step, now
        self._values.update({name: values[name] for name in self._shown.values() if name in values})
        line = self._line()
        if self._live is not None:
            self._live.update(self._task, completed=step, line=line)
        elif now - self._printed >= self._period or step >= self._total:
            self._printed = now
            self._console.print(line)

    def _line(self) -> str:
        parts = [f"{self._label} {self._done}/{self._total}"]
        parts += [f"{label} {brief(_value(self._values.get(name))[0])}" for label, name in self._shown.items()]
        left = self._pace * (self._total - self._done)
        return "  ".join([*parts, f"ETA {duration(left) if self._pace else '-'}"])

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, stream: IO[str] | None = None
) -> None:
    """One table for a person; numbers to the right."""
    made = [list(row) for row in rows]
    table = Table(title=title, title_justify="left", title_style="bold")
    for place, name in enumerate(columns):
        numeric = all(not isinstance(row[place], str) for row in made)
        table.add_column(name, justify="right" if numeric and made else "left", no_wrap=place == 0)
    for row in made:
        table.add_row(*(brief(_value(cell)[0]) for cell in row))
    Console(file=stream or sys.stdout, highlight=False).print(table)


# ------------------------------------------------------------------------------------------------------ the clock
class _Timer:
    __slots__ = ("_begun", "_clock", "_stage")

    def __init__(self, clock: Clock, stage: str) -> None:
        self._clock, self._stage, self._begun = clock, stage, 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._clock.add(self._stage, time.perf_counter() - self._begun)


class Clock:
    """Where one role's wall time goes: `with clock("pack"): ...`. Stages of one lane must not nest.

    `lanes` is how many things of the role run at once (attempts in flight); what no stage claims is idle.
    """

    def __init__(self, role: str, *, lanes: int = 1) -> None:
        self.role, self.lanes = role, lanes
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._taken = time.perf_counter()

    def __call__(self, stage: str) -> _Timer:
        return _Timer(self, stage)

    def add(self, stage: str, seconds: float) -> None:
        with self._lock:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """`seconds/ROLE/STAGE` since the last take, idle included: goes into a metrics row as it is."""
        now = time.perf_counter()
        with self._lock:
            seconds, self._seconds = self._seconds, {}
            wall, self._taken = (now - self._taken) * self.lanes, now
        told = seconds.pop("idle", 0.0)
        idle = max(told, wall - sum(seconds.values()))
        return {f"seconds/{self.role}/{stage}": spent for stage, spent in {**seconds, "idle": idle}.items()}


def breakdown(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, float, float]]:
    """(role, stage, seconds, share of the role) over the rows of a run, stages in the order of STAGES."""
    total: dict[tuple[str, str], float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("seconds/") and isinstance(value, int | float):
                role, _, stage = name.removeprefix("seconds/").partition("/")
                total[role, stage] = total.get((role, stage), 0.0) + value
    roles = {role: sum(s for (r, _), s in total.items() if r == role) or 1.0 for role, _ in total}
    rank = {stage: place for place, stage in enumerate(STAGES)}
    order = sorted(total, key=lambda key: (key[0], rank.get(key[1], len(rank)), key[1]))
    return [(role, stage, total[role, stage], total[role, stage] / roles[role]) for role, stage in order]


# -------------------------------------------------------------------------------------------------------- the log
class _Scrub(logging.Filter):
    """Takes the values of secret-looking environment variables out of what is logged."""

    def __init__(self) -> None:
        super().__init__()
        words = ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "CREDENTIAL")
        self._secrets = [v for k, v in os.environ.items() if len(v) >= 8 and any(word in k.upper() for word in words)]

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        for secret in self._secrets:
            text = text.replace(secret, "***")
        record.msg, record.args = text, None
        return True


def setup_logging(run_dir: str | os.PathLike[str] | None = None, *, level: int = logging.INFO) -> None:
    """Logs to stderr (warnings) and, whole, to `log.txt` of the run; libraries only from WARNING on."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    console = logging.StreamHandler()
    console.setLevel(max(level, logging.WARNING))
    handlers: list[logging.Handler] = [console]
    if run_dir is not None:
        handlers.append(logging.FileHandler(Path(run_dir) / LOG_FILE, encoding="utf-8"))
    for handler in handlers:
        handler.addFilter(_Scrub())
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
        root.addHandler(handler)
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what was asked for
