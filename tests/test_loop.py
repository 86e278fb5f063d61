"""Whole runs, as a person starts them: what they leave, how they go on, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from cuajax.data.store import Store
from cuajax.types import Outcome
from tests.launch.pages import DEBUG, PATIENT, Page, Script, checkpoints, finish, rows, state, train, updates

pytestmark = PATIENT

SMALL = ("--config.eval.tasks=10", "--config.eval.final_tasks=10")
OFTEN = ("--config.checkpoint.every=2", "--config.eval.every=0")  # may differ from start to start
BARE = ("--config.eval.tasks=0", "--config.eval.final_tasks=0", "--config.warmup.steps=0")  # nothing but the loop


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A debug run that has ended."""
    path = tmp_path_factory.mktemp("loop") / "run"
    said = finish(train(path, *SMALL))
    for ugly in ("Traceback", "Event loop is closed", "ExecuteBatchError"):
        assert ugly not in said, said
    return path


def same(one: list, other: list) -> bool:
    assert len(one) == len(other) > 0
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(one, other, strict=True))


# ------------------------------------------------------------------------------------------------- what it leaves
def test_a_run_leaves_what_it_promises(run: Path) -> None:
    for name in ("config.json", "metrics.jsonl", "success.png", "report.html", "result.json"):
        assert (run / name).stat().st_size > 0, name
    assert list((run / "tensorboard").glob("events*")) and (run / "experience").is_dir()
    assert (run / "log.txt").exists()
    assert checkpoints(run)[-1] == 5
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5]
    result = json.loads((run / "result.json").read_text())
    assert result["updates"] == result["target"] == 5 and result["episodes"] == 10
    assert 0.0 <= result["ci95"][0] <= result["final"] <= result["ci95"][1] <= 1.0
    assert "<script src" not in (run / "report.html").read_text()


def test_any_hop_of_a_recorded_attempt_can_be_looked_at(run: Path, tmp_path: Path) -> None:
    seq = rows(run)[0]["data/seqs"][0]
    page = Page("replay", "dump", f"--run={run}", "--hop=all", f"--seq={seq}", f"--out={tmp_path / 'png'}",
                log=tmp_path / "log")  # fmt: skip
    said = finish(page)
    hops = ("task", "observation", "prompt", "completion", "calls", "outcome", "group", "credit", "batch", "update",
            "version")  # fmt: skip
    assert [line.removeprefix("-- ") for line in said.splitlines() if line.startswith("-- ")] == list(hops)
    shows = ("instruction: ", "<image>x16 ", "<act>", "logprobs [-", "weights sum to 1.0", "update 1 trained groups")
    for shown in shows:
        assert shown in said, shown
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "png").iterdir())
    assert len(list((tmp_path / "png").iterdir())) == said.split("-- prompt")[0].count("sha256")
    page = Page("replay", "dump", f"--run={run}", "--hop=task", "--seq=999999", log=tmp_path / "other")
    assert page.end() == 2 and "error: group 999999 of " in page.said


# ---------------------------------------------------------------------------------------------------- how it goes on
def test_the_same_command_goes_on_through_kill_and_sigterm(run: Path) -> None:
    """One story: more updates, a second learner, kill -9, SIGTERM, and an end."""
    many = (*SMALL, *OFTEN, "--config.train.updates=100000")
    page = train(run, *many)
    page.until(lambda: updates(run) >= 8 and checkpoints(run)[-1] >= 7, "update 8")

    second = train(run, *many)
    assert second.end() == 2
    assert f"is held by process {page.process.pid} on " in second.said
    page.kill()

    kept = checkpoints(run)[-1]
    page = train(run, *many)
    page.until(lambda: updates(run) >= kept + 4 and page.process.poll() is None, "updates after a kill")
    assert page.end(signal.SIGTERM) == 75, page.said[-4000:]
    stopped = updates(run)
    assert checkpoints(run)[-1] == stopped  # it saved first

    said = finish(train(run, *SMALL, *OFTEN, f"--config.train.updates={stopped + 2}"))
    assert said.count("reinforcement begins") == 1 and "Traceback" not in said
    assert [row["step"] for row in rows(run)] == list(range(1, stopped + 3))
    assert json.loads((run / "result.json").read_text())["updates"] == stopped + 2
    versions = [row["train/version"] for row in rows(run)]
    assert versions == sorted(set(versions))
    seqs = [seq for row in rows(run) for seq in row["data/seqs"]]
    assert seqs == sorted(set(seqs))  # no group was trained twice


def test_a_warm_up_goes_on_where_it_was_stopped_or_killed(tmp_path: Path) -> None:
    """Stopped between two measurements, then killed: reinforcement begins with the same policy, bit for bit."""
    long = ("--config.warmup.steps=12", "--config.warmup.second_steps=12", "--config.warmup.gate=1.0",
            "--config.warmup.second_gate=1.0")  # fmt: skip
    many = (*BARE[:2], "--config.train.updates=0", *long)
    whole, run = tmp_path / "whole", tmp_path / "run"
    finish(train(whole, *many))

    def grounded(path: Path) -> list[dict]:
        lines = (path / "metrics.jsonl").read_text().splitlines() if (path / "metrics.jsonl").exists() else []
        return [row for row in map(json.loads, lines) if "warmup/step" in row]

    page = train(run, *many)
    page.until(lambda: len(grounded(run)) >= 2, "two measurements")
    assert page.end(signal.SIGTERM) == 75, page.said[-4000:]
    stopped = json.loads(next((run / "checkpoints_warmup").glob("*/data/metadata")).read_text())
    assert 4 <= stopped["done"] < 24 and not checkpoints(run)
    page = train(run, *many)
    page.until(lambda: len(grounded(run)) >= len(stopped["rows"]) + 5, "five more")  # a save lies among any four
    page.kill()
    finish(train(run, *many))
    assert [row["warmup/step"] for row in grounded(run)] == list(range(2, 25, 2))
    ignored = {"time"}
    assert [{k: v for k, v in row.items() if k not in ignored} for row in grounded(run)] == [
        {k: v for k, v in row.items() if k not in ignored} for row in grounded(whole)
    ]
    assert same(state(run, 0), state(whole, 0))
    assert not (run / "checkpoints_warmup").exists()


def test_training_ends_once_success_is_enough(tmp_path: Path) -> None:
    """Any success is enough at 0: the run ends at its first evaluation, and stays ended when started again."""
    run = tmp_path / "run"
    many = (*SMALL, "--config.train.updates=1000", "--config.eval.every=2", "--config.eval.enough=0.0")
    for _ in range(2):
        assert "Traceback" not in finish(train(run, *many))
        assert updates(run) == 0 and json.loads((run / "result.json").read_text())["updates"] == 0


def test_a_run_begins_with_the_policy_of_another(run: Path, tmp_path: Path) -> None:
    other, begins = tmp_path / "other", f"--config.policy.init={run / 'checkpoints'}"
    newest = checkpoints(run)[-1]
    finish(train(other, begins, *BARE, "--config.train.updates=0"))
    assert same(state(other, 0, ("params",)), state(run, newest, ("params",)))
    page = train(tmp_path / "third", f"--config.policy.init={tmp_path}", *BARE)
    assert page.end() == 2 and f"error: policy.init: {tmp_path} is no checkpoint directory of cuajax" in page.said


# ------------------------------------------------------------------------------------------------- what it refuses
def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.txt").write_text("mine")
    page = train(run)
    assert page.end() == 2
    assert f"error: run directory {run} is occupied: 1 entries and no config.json" in page.said
    assert [p.name for p in run.iterdir()] == ["thesis.txt"]


def test_a_typo_is_named_before_jax_is_imported(tmp_path: Path) -> None:
    code = (
        "import runpy\n"
        "page = sys.path[0] + '/train.py'\n"
        "sys.argv = [page, *sys.argv[1:]]\n"
        "try: runpy.run_path(page, run_name='__main__')\n"
        "except SystemExit as end: print(f'status {end.code}, jax {\"jax\" in sys.modules}')\n"
    )
    page = Script(
        code, DEBUG, f"--workdir={tmp_path / 'run'}", "--config.optimizer.learning_rat=1", log=tmp_path / "log"
    )
    said = finish(page)
    assert "unknown config key 'optimizer.learning_rat'; did you mean 'optimizer.learning_rate'?" in said
    assert "status 2, jax False" in said
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------- replay, bit for bit
@pytest.fixture(scope="module")
def recorded(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's first 16 groups, every second attempt made a success, so that there is something to learn."""
    path = tmp_path_factory.mktemp("recorded") / "experience"
    source, store = Store.open(run / "experience"), Store.open(path, create=True)
    for seq in range(16):
        group = source.read(seq)
        told = [
            dataclasses.replace(t, outcome=Outcome("success", 1.0) if t.slot % 2 else Outcome("failure", 0.0))
            for t in group.trajectories
        ]
        images = source.load_images(h for t in told for s in t.steps for h in s.image_hashes)
        store.append([dataclasses.replace(group, trajectories=tuple(told))], images, [source.deltas(seq)])
    source.close()
    store.close()
    return path


def replay(run: Path, recorded: Path) -> Page:
    return train(
        run, *BARE, f"--config.rollout.replay={recorded}", "--config.train.updates=8", "--config.checkpoint.every=2"
    )  # fmt: skip


def test_replay_is_bit_identical_however_often_it_is_killed(recorded: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(replay(whole, recorded))
    assert checkpoints(whole)[-1] == 8 and not same(state(whole, 6), state(whole, 8))

    rng = random.Random(7)
    for least in (0, 2, 5):  # updates done when it is killed: none, some, nearly all
        page = replay(broken, recorded)
        page.until(lambda: (broken / "checkpoints").is_dir() and updates(broken) >= least, f"update {least}")  # noqa: B023
        time.sleep(rng.uniform(0.0, 0.2))
        page.kill()
    finish(replay(broken, recorded))

    assert same(state(whole, 8), state(broken, 8))
    ids = [(row["step"], row["data/seqs"], row["train/loss"]) for row in rows(whole)]
    assert ids == [(row["step"], row["data/seqs"], row["train/loss"]) for row in rows(broken)]
    assert [seq for _, seqs, _ in ids for seq in seqs] == list(range(16))


# ------------------------------------------------------------------------------------------------------ bad updates
def test_a_bad_update_changes_nothing_and_many_end_the_run(recorded: Path, tmp_path: Path) -> None:
    code = (
        "import learner, train\n"
        "from cuajax import program\n"
        "right = learner.objective\n"
        "def broken(config):\n"
        "    made = right(config)\n"
        "    def loss(logp, entropy, batch):\n"
        "        total, figures = made.loss(logp, entropy, batch)\n"
        "        return total * float('nan'), figures\n"
        "    return made._replace(loss=loss)\n"
        "learner.objective = broken\n"
        "program.run(train.main, workdir='')\n"
    )
    run = tmp_path / "run"
    page = Script(
        code, DEBUG, f"--workdir={run}", f"--config.rollout.replay={recorded}", "--config.train.skip_limit=3",
        "--config.checkpoint.every=1", "--config.checkpoint.keep=9", "--config.eval.tasks=0",
        "--config.eval.final_tasks=0", "--config.warmup.steps=0", log=tmp_path / "log",
    )  # fmt: skip
    assert page.end() not in (0, 2)
    assert "3 updates in a row were not finite, the limit is 3" in page.said
    assert checkpoints(run)[:3] == [0, 1, 2]

    def owned(update: int) -> list:
        import orbax.checkpoint as ocp

        item = run / "checkpoints" / str(update)
        opt = ocp.StandardCheckpointer().restore(item / "opt")
        return [ocp.StandardCheckpointer().restore(item / "params"), opt["opt_state"]]

    import jax

    before = jax.tree.leaves(owned(0))
    assert same(before, jax.tree.leaves(owned(1))) and same(before, jax.tree.leaves(owned(2)))


# -------------------------------------------------------------------------------------------------- three processes
def test_three_processes_on_one_directory_survive_each_others_deaths(tmp_path: Path) -> None:
    run = tmp_path / "run"
    apart = (*BARE, *OFTEN, "--config.serving.address=run", "--config.rollout.here=False")

    def learner(count: int) -> Page:
        return train(run, *apart, f"--config.train.updates={count}")

    def actor() -> Page:
        return Page("rollout", DEBUG, f"--workdir={run}", *BARE, log=tmp_path / "rollout")

    def server() -> Page:
        return Page("serve", DEBUG, f"--workdir={run}", *BARE, log=tmp_path / "serve")

    def more(page: Page, what: str) -> None:
        done = updates(run)
        page.until(lambda: updates(run) >= done + 2, f"two updates more {what}")

    acting, learning, serving = actor(), learner(100000), server()  # the server last: the others wait for it
    more(learning, "of the three")
    loaded = Path(f"/proc/{acting.process.pid}/maps")
    assert not loaded.exists() or "jaxlib" not in loaded.read_text()

    acting.kill()
    acting = actor()
    more(learning, "with a new actor")
    serving.kill()
    serving = server()
    more(learning, "with a new server")
    learning.kill()
    done = updates(run) + 5
    finish(learner(done))

    assert updates(run) == done and [row["step"] for row in rows(run)] == list(range(1, done + 1))
    for page in (acting, serving):
        assert page.end(signal.SIGTERM) == 0, page.said[-4000:]
        assert "Traceback" not in page.said, page.said[-4000:]
    errors = [line for line in (run / "log.txt").read_text().splitlines() if " E " in line]
    assert not errors, errors
