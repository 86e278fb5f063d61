"""Demonstrations: what the oracle did is what was recorded, it succeeds, and a restart goes on where the store ends."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np

from cuajax.agent.dialects.compact import CompactDialect
from cuajax.agent.harness import Harness
from cuajax.algorithms import sft
from cuajax.data.store import Store
from cuajax.inputs.processor import ImageSpec
from cuajax.inputs.tokenizer import CompactTokenizer
from cuajax.rollout.demonstrations import Demonstrations, demonstrate
from cuajax.rollout.episode import Name
from cuajax.rollout.plan import Plan
from cuajax.sandbox.sim.families import NAMES
from cuajax.sandbox.sim.suite import SimSuite
from cuajax.tasks.curriculum import TRAIN_SEEDS, Curriculum

HARNESS = Harness(CompactDialect(CompactTokenizer(bins=16), max_tokens=16), ImageSpec())
FAMILIES = ("check2", "type", "infeasible")


def test_every_family_is_demonstrated_rightly_in_a_policys_words() -> None:
    suite = SimSuite(64, 64)
    for family in NAMES:
        task = suite.task(family, 5)
        made, images = asyncio.run(
            demonstrate(task, suite, oracle=suite.oracle, harness=HARNESS, name=Name("a", "g", 0))
        )
        assert made.outcome.status == "success", (family, made.outcome)
        assert len(made.steps) == suite.oracle_length(task) + 1, family  # terminate included
        for step in made.steps:
            c = step.completion
            assert HARNESS.dialect.parse(c.token_ids) == step.calls
            assert not c.logprobs.any() and not c.versions.any() and len(c.logprobs) == len(c.token_ids)
            assert set(step.image_hashes) <= set(images)


def _service(store: Store, consumed: list[int], seed: int = 3) -> Demonstrations:
    suite = SimSuite(64, 64, families=FAMILIES)
    plan = Plan(groups_per_update=4, max_lag=1, seed=seed)
    curriculum = Curriculum(FAMILIES, infeasible=("infeasible",))
    return Demonstrations(
        suite, store, oracle=suite.oracle, harness=HARNESS, curriculum=curriculum, plan=plan,
        consumed=lambda: consumed[0],
    )  # fmt: skip


def _until(store: Store, service: Demonstrations, head: int) -> None:
    end = time.monotonic() + 30
    while store.head() < head and time.monotonic() < end:
        service.check()
        time.sleep(0.01)


def test_it_waits_for_the_learner_and_a_restart_writes_what_would_have_come(tmp_path: Path) -> None:
    whole = Store.open(tmp_path / "whole", create=True)
    service = _service(whole, [8])
    service.start()
    _until(whole, service, 16)
    time.sleep(0.1)
    service.stop()
    assert whole.head() == 16  # 8 read, and (max_lag + 1) x 4 ahead of the learner

    broken, consumed = Store.open(tmp_path / "broken", create=True), [0]
    for head in (8, 16):
        service = _service(broken, consumed)
        service.start()
        _until(broken, service, head)
        service.stop()
        consumed[0] = 8
    for seq in range(16):
        one, other = whole.read(seq), broken.read(seq)
        assert (one.id, one.task.id) == (other.id, other.task.id)
        low, high = TRAIN_SEEDS
        assert low <= one.task.setup["seed"] < high
        for a, b in zip(one.trajectories[0].steps, other.trajectories[0].steps, strict=True):
            assert np.array_equal(a.completion.token_ids, b.completion.token_ids) and a.image_hashes == b.image_hashes
    assert sft.credit(whole.read(0)).mass == len(whole.read(0).trajectories[0].steps)
    whole.close()
    broken.close()
