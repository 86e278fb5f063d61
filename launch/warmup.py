"""The supervised warm-up: single decisions on random screens until grounding is measured, not for a number of updates.

A small policy grounds instructions in pixels only after a transition, at a different update for every seed, and
reinforcement that starts before it stays stuck. So phase 1 (instructions of one clause) lasts until held-out grounding
reaches its gate, and phase 2 (up to two clauses) until theirs reaches another, and no verb lags behind. What is
measured also says what is shown next: verbs that are not grounded yet have more of the screens. No trajectory of any
task is shown.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import parts
from learner import Learner, items, restored

from cuajax import program
from cuajax.agent.harness import Harness
from cuajax.algorithms import surrogate
from cuajax.checkpoint import Checkpoints, Preemption
from cuajax.config import ConfigError, Settings
from cuajax.data.pipeline import supervised
from cuajax.metrics import ProgressLine, Writer
from cuajax.train import optimizer
from cuajax.types import Sample

log = logging.getLogger(__name__)
KEPT = "checkpoints_warmup"  # in the run directory, while the warm-up lasts
SAVE_CHECKS = 4  # measurements of grounding between two saves
RAMP = 30  # updates over which the learning rate rises
FLOOR = 0.3  # share of the learning rate that phase 1 decays to, once past the transition
LEAST = 0.15  # weight of a verb that is always right
LAST = 0.1  # share that phase 2 ends at


def rule(config: Settings, axes: Any) -> optax.GradientTransformation:
    """The warm-up's optimizer; its learning rate is set from outside, as it follows measured grounding."""
    o = config.warmup.optimizer

    def make(learning_rate: Any) -> optax.GradientTransformation:
        return optimizer.make_optimizer(
            lambda count: learning_rate, name=o.name, axes=axes, clip_norm=o.clip_norm, weight_decay=o.weight_decay,
            betas=tuple(o.betas),
        )  # fmt: skip

    try:
        make(o.learning_rate)
    except ValueError as error:
        raise ConfigError(f"warmup.optimizer: {error}") from error
    return optax.inject_hyperparams(make)(learning_rate=o.learning_rate)


def rate(w: Settings, *, phase: int, step: int, passed: int) -> float:
    """Learning rate of update `step` (from 1) of a phase; `passed`: the update at which its mark was seen, or 0.

    Phase 1: full until the transition, then down to FLOOR over `decay_over` updates. Phase 2: `second_rate` of it until
    its gate, then down to LAST over `second_decay` updates.
    """
    full = w.optimizer.learning_rate
    if phase == 1:
        down = 1.0 if not passed else max(FLOOR, 1.0 - (step - passed) / w.decay_over)
        return full * min(1.0, step / RAMP) * down
    over = (step - passed) / max(1, w.second_decay) if passed else 0.0
    return full * (w.second_rate + (LAST - w.second_rate) * min(1.0, over))


def gauge(w: Settings, *, phase: int, step: int, passed: int, grounding: float, worst: float) -> tuple[int, bool]:
    """(the update at which the phase's mark was seen or 0, whether the phase ends) after grounding was measured.

    Phase 1 ends at its gate, its mark is the transition; phase 2's mark is its gate, and it ends once its rate is down.
    worst: grounding of the verb that is worst, which both gates ask for. One may lag behind all others; if phase 1
    leaves it there, phase 2 seldom learns it, and no attempt at its tasks succeeds.
    """
    met = grounding >= (w.gate if phase == 1 else w.second_gate) and worst >= w.verb_gate
    if phase == 1:
        return passed or (step if grounding >= w.transition else 0), met
    passed = passed or (step if met else 0)
    return passed, passed > 0 and step >= passed + w.second_decay


def weights(verbs: Mapping[str, float]) -> dict[str, float]:
    """What each verb's screens weigh until grounding is measured again: the more, the less of it is right."""
    return {verb: LEAST + 1 - right for verb, right in verbs.items()}


def _decisions(
    config: Settings, harness: Harness, seed: int, step: int, *, phase: int, first: int, weights: Mapping[str, float]
) -> tuple[list[Sample], dict]:
    return parts.single_decisions(config, harness, seed, first + step, phase=phase, weights=weights)


@dataclass
class Point:
    """Where a warm-up stands: the data of its checkpoints, beside parameters and optimizer."""

    phase: int = 1
    step: int = 0  # updates of this phase
    done: int = 0  # updates of both phases
    passed: int = 0  # the update at which this phase's mark was seen, or 0
    verbs: Mapping[str, float] = field(default_factory=dict)  # grounding by verb, as last measured
    rows: list[dict[str, Any]] = field(default_factory=list)  # all that was measured

    def next_phase(self) -> None:
        self.phase, self.step, self.passed, self.verbs = self.phase + 1, 0, 0, {}


def warm_up(
    config: Settings, harness: Harness, params: Any, *, learner: Learner, connect: parts.Connect, publish: Any,
    writer: Writer, run_dir: Path,
) -> Any:  # fmt: skip
    """The parameters after both phases, or None if SIGTERM came; progress and grounding go to the metrics as step 0.

    A warm-up that was stopped goes on from its own checkpoint, with the screens and updates that were to come.
    """
    w, made = config.warmup, rule(config, learner.axes)
    now, train = learner.begin(params, made), learner.train_step(surrogate.sft_loss, made)
    held = {phase: parts.grounding_set(config, harness, clauses=phase) for phase in (1, 2)}
    shapes = {1: parts.pack_spec(harness, config, w.pack), 2: parts.pack_spec(harness, config, w.second_pack)}
    limits, at = {phase: most for phase, most in ((1, w.steps), (2, w.second_steps)) if most}, Point()
    kept = Checkpoints(run_dir / KEPT, keep_last=1, keep_best=0)
    if kept.latest() is not None:
        found = kept.restore(*items(now, None))
        (now, _), at = restored(found), Point(**found.data)
        for row in at.rows:
            writer.write(0, row)
    shown = {"grounding": "warmup/grounding", "loss": "warmup/nll"}
    progress = ProgressLine(sum(limits.values()), label="warm-up", shown=shown, done=at.done)
    with Preemption() as preemption, progress as line:
        while at.phase in limits and not preemption.requested:
            phase, limit, first = at.phase, limits[at.phase], at.step
            make = functools.partial(_decisions, config, harness, phase=phase, first=first, weights=weights(at.verbs))
            many = min(w.check_every - first % w.check_every, limit - first)
            batches = iter(supervised(make, spec=shapes[phase], seed=config.seed, steps=many, prefetch=2))
            with contextlib.closing(batches):
                for batch, _ in batches:
                    if preemption.requested:
                        break
                    at.step, at.done = at.step + 1, at.done + 1
                    speed = jnp.float32(rate(w, phase=phase, step=at.step, passed=at.passed))
                    now.opt_state.hyperparams["learning_rate"] = speed
                    now, report = train(now, learner.place(batch))
                    line.update(at.done, {})
            if at.step < first + many:
                break
            publish(now.params)
            grounding, at.verbs = parts.grounding(connect, harness, held[phase])
            at.passed, ended = gauge(
                w, phase=phase, step=at.step, passed=at.passed, grounding=grounding, worst=min(at.verbs.values())
            )
            row = {"warmup/phase": phase, "warmup/step": at.done, "warmup/grounding": grounding,
                   "warmup/nll": surrogate.summary(report)["nll"]}  # fmt: skip
            row |= {f"warmup/verb/{verb}": share for verb, share in at.verbs.items()}
            at.rows.append(row)
            line.update(at.done, writer.write(0, row))
            if ended or at.step >= limit:
                if not ended:
                    _missed(w, at, grounding)
                at.next_phase()
            if at.done % (SAVE_CHECKS * w.check_every) == 0:
                _save(kept, now, at, config)
        _save(kept, now, at, config)
    kept.close()
    return None if preemption.requested else now.params


def _save(kept: Checkpoints, now: Any, at: Point, config: Settings) -> None:
    params, rest = items(now, None)
    kept.save(at.done, params=params, opt=rest, data=asdict(at), version=0, config=program.fingerprint(config))


def _missed(w: Settings, at: Point, grounding: float) -> None:
    log.warning(
        "phase %d ended at its limit of %d updates: grounding %.3f, gate %.3f; verbs %s, gate %.2f",
        at.phase, at.step, grounding, w.gate if at.phase == 1 else w.second_gate,
        {k: round(v, 2) for k, v in at.verbs.items()}, w.verb_gate,
    )  # fmt: skip


def forget(run_dir: Path) -> None:
    """Removes the warm-up's checkpoint, once the run has one of its own."""
    shutil.rmtree(run_dir / KEPT, ignore_errors=True)
