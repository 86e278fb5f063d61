"""The supervised warm-up: single decisions on random screens until grounding is measured, not for a number of updates.

A small policy grounds instructions in pixels only after a transition, at a different update for every seed, and
reinforcement that starts before it stays stuck. So phase 1 (instructions of one clause) lasts until held-out grounding
reaches the gate; phase 2 adds instructions of two clauses. No trajectory of any task is shown.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import optax
import parts
from learner import Learner

from cuajax.agent.harness import Harness
from cuajax.algorithms import surrogate
from cuajax.config import ConfigError, Settings
from cuajax.data.pipeline import supervised
from cuajax.metrics import ProgressLine, Writer
from cuajax.train import optimizer

log = logging.getLogger(__name__)
RAMP = 30  # updates over which the learning rate rises
FLOOR = 0.3  # share of the learning rate that phase 1 decays to, once past the transition


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
    """Learning rate of update `step` (from 1) of a phase; `passed`: the update at which the transition was seen, or 0.

    Phase 1: full until the transition, then down to FLOOR over `decay_over` updates. Phase 2: from `second_rate` of it
    linearly to a tenth.
    """
    full = w.optimizer.learning_rate
    if phase == 1:
        down = 1.0 if not passed else max(FLOOR, 1.0 - (step - passed) / w.decay_over)
        return full * min(1.0, step / RAMP) * down
    return full * (w.second_rate + (0.1 - w.second_rate) * step / max(1, w.second_steps))


def warm_up(
    config: Settings, harness: Harness, params: Any, *, learner: Learner, connect: parts.Connect, publish: Any,
    writer: Writer,
) -> Any:  # fmt: skip
    """The parameters after both phases; progress and grounding go to the metrics as step 0."""
    w, made = config.warmup, rule(config, learner.axes)
    now, train = learner.begin(params, made), learner.train_step(surrogate.sft_loss, made)
    held = parts.grounding_set(config, harness)
    shapes = {1: parts.pack_spec(harness, config, w.pack), 2: parts.pack_spec(harness, config, w.second_pack)}
    done = passed = 0
    grounding = 0.0
    shown = {"grounding": "warmup/grounding", "loss": "warmup/nll"}
    with ProgressLine(w.steps + w.second_steps, label="warm-up", shown=shown) as line:
        for phase, limit in ((1, w.steps), (2, w.second_steps)):
            make = functools.partial(parts.single_decisions, config, harness, phase=phase)
            batches = iter(supervised(make, spec=shapes[phase], seed=config.seed, steps=limit, prefetch=2))
            for step, (batch, _) in enumerate(batches, 1):
                speed = jnp.float32(rate(w, phase=phase, step=step, passed=passed))
                now.opt_state.hyperparams["learning_rate"] = speed
                now, report = train(now, learner.place(batch))
                done += 1
                row: dict[str, Any] = {}
                if step % w.check_every == 0 or step == limit:
                    publish(now.params)
                    grounding = parts.grounding(connect, harness, held)
                    passed = passed or (step if grounding >= w.transition else 0)
                    row = {"warmup/phase": phase, "warmup/step": done, "warmup/grounding": grounding,
                           "warmup/nll": surrogate.summary(report)["nll"]}  # fmt: skip
                    writer.write(0, row)
                line.update(done, row)
                if phase == 1 and row and grounding >= w.gate:
                    break
            batches.close()
            if phase == 1 and grounding < w.gate:
                log.warning(
                    "phase 1 ended at grounding %.3f, below its gate of %.3f, after %d updates", grounding, w.gate, done
                )
    return jax.block_until_ready(now.params)
