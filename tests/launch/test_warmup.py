"""The supervised warm-up's data and schedule, and how a run's numbers are made from attempts."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest

from cuajax import config, program
from cuajax.types import Outcome, Task, Trajectory

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "launch"))

import parts  # noqa: E402
import warmup  # noqa: E402


@pytest.fixture(scope="module")
def settings():
    return program.load(str(ROOT / "configs" / "stepo.py"), {})


def test_rate_is_full_until_the_transition_and_falls_after_it(settings):
    w = settings.warmup
    full = w.optimizer.learning_rate
    assert warmup.rate(w, phase=1, step=1, passed=0) == pytest.approx(full / warmup.RAMP)
    assert warmup.rate(w, phase=1, step=5000, passed=0) == pytest.approx(full)
    assert warmup.rate(w, phase=1, step=600 + w.decay_over // 2, passed=600) == pytest.approx(0.5 * full)
    assert warmup.rate(w, phase=1, step=9000, passed=600) == pytest.approx(warmup.FLOOR * full)
    assert warmup.rate(w, phase=2, step=900, passed=0) == pytest.approx(w.second_rate * full)
    assert warmup.rate(w, phase=2, step=600 + w.second_decay, passed=600) == pytest.approx(warmup.LAST * full)


def test_phases_end_on_measured_grounding(settings):
    """Phase 1 at its gate; phase 2 `second_decay` updates after its own, also when grounding falls again meanwhile."""
    w = settings.warmup
    first = functools.partial(warmup.gauge, w, phase=1, worst=w.verb_gate)
    assert first(step=300, passed=0, grounding=w.transition - 0.01) == (0, False)
    assert first(step=350, passed=0, grounding=w.transition) == (350, False)
    assert first(step=400, passed=350, grounding=w.gate) == (350, True)
    assert first(step=400, passed=350, grounding=1.0, worst=w.verb_gate - 0.01) == (350, False)
    second = functools.partial(warmup.gauge, w, phase=2)
    assert second(step=900, passed=0, grounding=w.second_gate - 0.01, worst=1.0) == (0, False)
    assert second(step=900, passed=0, grounding=1.0, worst=w.verb_gate - 0.01) == (0, False)
    assert second(step=100, passed=0, grounding=w.second_gate, worst=w.verb_gate) == (100, False)
    last = 100 + w.second_decay
    assert second(step=last - 1, passed=100, grounding=1.0, worst=1.0) == (100, False)
    assert second(step=last, passed=100, grounding=0.5, worst=0.0) == (100, True)


def test_what_is_wrong_is_shown_more():
    shares = warmup.weights({"choose": 0.5, "type": 1.0})
    assert shares["choose"] == pytest.approx(0.65) and shares["type"] == pytest.approx(0.15)
    assert warmup.weights({}) == {}  # nothing measured yet: all alike


def test_supervised_updates_are_a_pure_function_of_seed_and_step(settings):
    harness = parts.harness(settings)
    one, images = parts.single_decisions(settings, harness, 3, 7, phase=1)
    two, _ = parts.single_decisions(settings, harness, 3, 7, phase=1)
    other, _ = parts.single_decisions(settings, harness, 3, 8, phase=1)
    assert len(one) == settings.warmup.screens * settings.warmup.per_screen and len(images) <= settings.warmup.screens
    for a, b in zip(one, two, strict=True):
        assert a.prompt_ids.tobytes() == b.prompt_ids.tobytes() and a.response_ids.tobytes() == b.response_ids.tobytes()
    assert any(a.prompt_ids.tobytes() != b.prompt_ids.tobytes() for a, b in zip(one, other, strict=True))
    assert sum(float(s.weight.sum()) for s in one) == pytest.approx(1.0, abs=1e-4)


def test_instructions_have_at_most_as_many_clauses_as_their_phase(settings):
    """Supervision never names three widgets, nor shows anything but one decision of a random screen."""
    harness = parts.harness(settings)
    tokens = parts.tokenizer(harness)
    verbs = {tokens.id(w) for w in ("press", "check", "radio", "tab", "type", "choose")}
    for phase in (1, 2):
        for step in range(4):
            samples, _ = parts.single_decisions(settings, harness, 0, step, phase=phase)
            clauses = [sum(int(i) in verbs for i in s.prompt_ids) for s in samples]
            assert max(clauses) == phase


def test_scores_count_invalid_attempts_apart():
    tasks = [Task("sim/a/1", "sim", "a", "x"), Task("sim/b/1", "sim", "b", "x")]
    made = [
        Trajectory(str(i), "", "", 0, (), Outcome(status, reward))  # type: ignore[arg-type]
        for i, (status, reward) in enumerate([("success", 1.0), ("invalid", 0.0), ("failure", 0.5), ("success", 1.0)])
    ]
    scored = parts.scores(made, tasks)
    assert scored["invalid"] == 1 and scored["success"] == pytest.approx(2 / 3)
    assert scored["families"] == {"a": 1.0, "b": 0.5} and scored["reward"] == pytest.approx(2.5 / 3)


def test_wilson_interval():
    low, high = parts.wilson(90, 100)
    assert (low, high) == (pytest.approx(0.8256, abs=1e-3), pytest.approx(0.9448, abs=1e-3))
    assert parts.wilson(0, 0) == (0.0, 1.0)


def test_what_cannot_fit_is_refused_with_the_numbers(settings):
    harness = parts.harness(settings)
    task = parts.suite(settings).task("check3", 1)
    for changes, message in (
        ({"agent.prompt_limit": 20}, "the limit is 20"),
        ({"serving.lengths": (8,)}, "serving.lengths ends at 8"),
    ):
        small = program.load(str(ROOT / "configs" / "stepo.py"), changes)
        with pytest.raises(config.ConfigError, match=message):
            parts.check_prompts(small, harness, [task])
    with pytest.raises(config.ConfigError, match="length 30, one decision can take 48"):
        parts.pack_spec(harness, settings, dict(settings.data) | {"length": 30})


def test_held_out_tasks_are_new_and_even(settings):
    suite = parts.suite(settings)
    tasks = parts.held_out(settings, suite, 22, start=0)
    assert [t.family for t in tasks[:11]] == list(settings.suite.families)
    assert min(int(t.id.split("/")[-1]) for t in tasks) >= 1 << 30
    assert np.mean([suite.oracle_length(t) for t in tasks]) >= 3.0


def test_the_curriculum_is_the_configs(settings):
    asked = {"tasks_per_family": 50, "beta": 0.25, "floor": 0.125, "sampling": "uniform"}
    changes = {f"rollout.{key}": value for key, value in asked.items()}
    made = parts.curriculum(program.load(str(ROOT / "configs" / "stepo.py"), changes))
    assert (made.tasks_per_family, made.beta, made.floor, made.mode) == (50, 0.25, 0.125, "uniform")
    assert made.families == settings.suite.families and made.infeasible == settings.suite.infeasible


def test_grounding_is_told_by_verb(settings, monkeypatch):
    """A policy that never chooses rightly and does everything else: one verb at 0, those said beside it in between."""

    async def answers(connect, made, chosen):
        return ["choose" not in decision.instruction for decision in chosen]

    monkeypatch.setattr(parts, "_answer_all", answers)
    harness = parts.harness(settings)
    for clauses in (1, 2):
        chosen = parts.grounding_set(settings, harness, clauses=clauses)
        overall, verbs = parts.grounding(lambda: None, harness, chosen)
        assert not any(d.tag in ("fail", "read") for d in chosen)
        wrong = sum("choose" in d.instruction for d in chosen)
        assert overall == pytest.approx(1 - wrong / len(chosen)) and 0 < wrong < len(chosen)
        assert verbs["choose"] == 0.0 and verbs["check"] == (1.0 if clauses == 1 else pytest.approx(0.9, abs=0.09))
        assert set(verbs) == {"check", "choose", "press", "radio", "submit", "tab", "type"}
