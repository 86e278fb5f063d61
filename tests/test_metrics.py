"""The writer, the progress line, the clock and the log."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cuajax import metrics


def board_scalars(run: Path) -> list[tuple[int, str, float]]:
    """(step, tag, value) of every event file, oldest file first."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted((run / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # TFRecord: length u64, crc u32, payload, crc u32
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])  # type: ignore[attr-defined]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            data = data[12 + size + 4 :]
    return found


def test_rows_hold_numbers_arrays_and_counted_nulls(tmp_path: Path) -> None:
    with metrics.Writer(tmp_path) as writer:
        writer.write(1, {"a": np.float32(0.5), "b": float("nan"), "lags": np.array([1, 2]), "n": np.int64(3)})
        writer.write(2, {"a": float("inf"), "deep": {"x": [1.0, float("-inf")]}, "word": "x", "flag": True})
        assert writer.nonfinite == 3
    first, second = metrics.read_rows(tmp_path)
    assert {k: first[k] for k in ("step", "a", "b", "lags", "n", "nonfinite")} == {
        "step": 1, "a": 0.5, "b": None, "lags": [1, 2], "n": 3, "nonfinite": 1,
    }  # fmt: skip
    assert second["deep"] == {"x": [1.0, None]}
    assert second["nonfinite"] == 2
    assert abs(first["time"] - time.time()) < 60
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_tensorboard_gets_the_scalars(tmp_path: Path) -> None:
    with metrics.Writer(tmp_path) as writer:
        writer.write(1, {"train/loss": 0.25, "lags": [1, 2], "bad": float("nan")})
    assert board_scalars(tmp_path) == [(1, "train/loss", 0.25), (1, "nonfinite", 1.0)]


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path: Path) -> None:
    with metrics.Writer(tmp_path, tensorboard=False) as writer:
        for step in (1, 2, 4, 3, 5):  # an evaluation of step 3 may come late
            writer.write(step, {"x": step})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step":6,"x"')  # killed while writing
    assert [row["step"] for row in metrics.read_rows(tmp_path)] == [1, 2, 4, 3, 5]
    with metrics.Writer(tmp_path, restored=3, tensorboard=False) as writer:
        assert [row["step"] for row in metrics.read_rows(tmp_path)] == [1, 2, 3]
        writer.write(4, {"x": 4})
    assert [row["step"] for row in metrics.read_rows(tmp_path)] == [1, 2, 3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_rows_survive_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom cuajax import metrics\n"
        f"writer = metrics.Writer({str(tmp_path)!r}, tensorboard=False)\n"
        "for step in range(10**9):\n    writer.write(step, {'x': step})\n    print(step, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        seen = [int(child.stdout.readline()) for _ in range(20)]
        child.send_signal(signal.SIGKILL)
        seen += [int(line) for line in child.stdout if line.endswith("\n")]
    steps = [row["step"] for row in metrics.read_rows(tmp_path)]
    assert steps[: len(seen)] == seen
    assert len(steps) - len(seen) <= 1


def test_a_full_disk_is_a_typed_error_and_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def half(file: int, data: bytes) -> int:
        real(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with metrics.Writer(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"x": 1})
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            with pytest.raises(metrics.MetricsFullError, match="no room for a row"):
                writer.write(2, {"x": 2})
        writer.write(3, {"x": 3})
    assert [row["step"] for row in metrics.read_rows(tmp_path)] == [1, 3]
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 2


# ------------------------------------------------------------------------------------------------------ a person
def test_plain_progress_lines_name_everything_asked_for() -> None:
    stream = io.StringIO()
    with metrics.ProgressLine(3, stream=stream, period=0.0) as line:
        line.update(1, {"rollout/success": 0.5, "rollout/reward": 0.25, "train/entropy": 1.5, "rate/tokens": 51234.0})
        line.update(2, {"rollout/staleness": 1.25, "train/entropy": float("nan")})
        line.update(3, {})
    first, second, last = stream.getvalue().splitlines()
    assert first.startswith("update 1/3  success 0.500  reward 0.250  entropy 1.5  staleness -  tokens/s 51.2k  ETA ")
    assert "staleness 1.25" in second
    assert "entropy -" in second
    assert last.startswith("update 3/3  success 0.500")
    assert last.endswith("ETA 0s")


def test_plain_lines_are_rare_but_the_last_is_there() -> None:
    stream = io.StringIO()
    with metrics.ProgressLine(100, stream=stream, period=60.0) as line:
        for step in range(1, 101):
            line.update(step, {})
    lines = stream.getvalue().splitlines()
    assert [text.split()[1] for text in lines] == ["1/100", "100/100"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.5, "0.500"),
        (1.234, "1.23"),
        (7, "7"),
        (51234.0, "51.2k"),
        (20000, "20.0k"),
        (2.5e6, "2.5M"),
        (None, "-"),
        ("x", "x"),
    ],
)
def test_numbers_as_a_person_reads_them(value: object, shown: str) -> None:
    assert metrics.brief(value) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0s"), (12, "12s"), (247, "4m07s"), (11100, "3h05m"), (-1, "0s")])
def test_durations(seconds: float, shown: str) -> None:
    assert metrics.duration(seconds) == shown


def test_the_closing_table() -> None:
    stream = io.StringIO()
    metrics.print_table(
        "result", ["family", "tasks", "success"], [["press1", 32, 0.9812], ["type", 32, None]], stream=stream
    )
    assert "press1" in stream.getvalue()
    assert "0.981" in stream.getvalue()


# ------------------------------------------------------------------------------------------------------ the clock
def test_stages_and_idle_add_up_to_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = metrics.Clock("learner")
    with clock("pack"):
        now[0] += 2.0
    now[0] += 1.0
    with contextlib.suppress(ValueError), clock("step"):
        now[0] += 5.0
        raise ValueError("a stage that fails has taken its time too")
    assert clock.take() == {"seconds/learner/pack": 2.0, "seconds/learner/step": 5.0, "seconds/learner/idle": 1.0}
    now[0] += 3.0
    assert clock.take() == {"seconds/learner/idle": 3.0}


def test_lanes_share_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = metrics.Clock("actor", lanes=4)
    now[0] = 2.0
    clock.add("sandbox", 3.0)
    clock.add("sandbox", 1.0)
    assert clock.take() == {"seconds/actor/sandbox": 4.0, "seconds/actor/idle": 4.0}


def test_the_breakdown_of_a_run_is_in_the_order_of_stages() -> None:
    rows = [
        {"step": 1, "seconds/learner/step": 3.0, "seconds/learner/pack": 1.0},
        {"step": 2, "seconds/learner/step": 3.0, "seconds/learner/idle": 1.0, "seconds/actor/decode": 2.0},
    ]
    assert metrics.breakdown(rows) == [
        ("actor", "decode", 2.0, 1.0),
        ("learner", "pack", 1.0, 0.125),
        ("learner", "step", 6.0, 0.75),
        ("learner", "idle", 1.0, 0.125),
    ]


# -------------------------------------------------------------------------------------------------------- the log
def test_the_log_keeps_secrets_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_TOKEN", "hunter2hunter2")
    root = logging.getLogger()
    kept, level = list(root.handlers), root.level
    try:
        root.handlers[:] = []
        metrics.setup_logging(tmp_path)
        logging.getLogger("cuajax.x").info("connecting with %s", "hunter2hunter2")
        for handler in root.handlers:
            handler.flush()
        text = (tmp_path / "log.txt").read_text()
        assert "connecting with ***" in text
        assert "hunter2" not in text
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = kept
        root.setLevel(level)
