"""The learner's verbs: what launch/train.py says in one line each."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cuajax.algorithms import surrogate
from cuajax.checkpoint import CheckpointError, Checkpoints
from cuajax.config import ConfigError, Settings
from cuajax.data.pipeline import Rules
from cuajax.metrics import Clock
from cuajax.models import policy
from cuajax.models.policy import PolicyConfig
from cuajax.train import optimizer, sharding, state, step
from cuajax.types import PackedBatch

log = logging.getLogger(__name__)
START = "checkpoints_start"  # in the run directory: the policy that reinforcement began with
NOTICE = 30.0  # seconds without a group from elsewhere that are worth a warning
PREEMPTED, COLLAPSED = 75, 3  # exit statuses; 75 (EX_TEMPFAIL) asks a scheduler to start the run again


class Diverged(RuntimeError):
    """Update after update was not finite; none of them changed the policy."""


# ------------------------------------------------------------------------------------- policy, optimizer, mesh
class Objective(NamedTuple):
    """A loss over packed tokens, and which logprobs must be scored before an update."""

    loss: Any
    needs_ref: bool = False
    needs_prox: bool = False


def objective(config: Settings) -> Objective:
    """The loss of `config.algo`. Raises ConfigError on a wrong hyper-parameter."""
    given = dict(config.algo.loss)
    if config.algo.name == "sft":
        return Objective(functools.partial(surrogate.sft_loss, **given))
    try:
        hyper = surrogate.PolicyHyper(**given)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"algo.loss: {error}") from error
    return Objective(functools.partial(surrogate.policy_loss, **given), hyper.needs_ref, hyper.needs_prox)


def make_optimizer(settings: Mapping[str, Any], axes: Any, *, updates: int) -> Any:
    """Schedule and optax chain from an `optimizer` section. Raises ConfigError."""
    warm = settings["warmup_steps"]
    try:
        rate = optimizer.make_schedule(
            settings["learning_rate"], schedule=settings["schedule"], warmup_steps=warm,
            total_steps=max(updates, warm + 1), end=settings["end"],
        )  # fmt: skip
        return optimizer.make_optimizer(
            rate, name=settings["name"], axes=axes, clip_norm=settings["clip_norm"],
            weight_decay=settings["weight_decay"], betas=tuple(settings["betas"]),
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from error


@dataclass(frozen=True)
class Learner:
    """A policy on a mesh: builds states and steps that are placed alike."""

    cfg: PolicyConfig
    mesh: Any  # None: one device
    logprobs: Any

    @classmethod
    def of(cls, config: Settings, cfg: PolicyConfig) -> Learner:
        t = config.train
        try:
            mesh = None if t.data * t.fsdp * t.tensor == 1 else sharding.make_mesh(t.data, t.fsdp, t.tensor)
        except ValueError as error:
            raise ConfigError(f"train: {error}") from error
        temperature = config.agent.temperature or 1.0
        return cls(cfg, mesh, functools.partial(policy.token_logprobs, cfg=cfg, temperature=temperature))

    @property
    def axes(self) -> Any:
        return policy.logical_axes(self.cfg)

    def begin(self, params: Any, rule: Any) -> Any:
        """A TrainState at step 0, on the mesh."""
        made = state.create(params, rule)
        return made if self.mesh is None else self._put(made)

    def _put(self, made: Any) -> Any:
        import jax

        return jax.device_put(made, sharding.state_shardings(self.mesh, made, self.axes))

    def _shardings(self, rule: Any) -> Any:
        import jax

        if self.mesh is None:
            return None
        made = jax.eval_shape(lambda: state.create(policy.init(jax.random.key(0), self.cfg), rule))
        return sharding.state_shardings(self.mesh, made, self.axes)

    def train_step(self, loss: Any, rule: Any) -> Any:
        shardings = self._shardings(rule)
        return step.make_train_step(self.logprobs, loss, rule, mesh=self.mesh, state_shardings=shardings)

    def score_step(self, rule: Any) -> Any:
        if self.mesh is None:
            return step.make_score_step(self.logprobs)
        return step.make_score_step(self.logprobs, mesh=self.mesh, params_shardings=self._shardings(rule).params)

    def place(self, batch: PackedBatch) -> PackedBatch:
        return batch if self.mesh is None else sharding.place(batch, self.mesh)


# ------------------------------------------------------------------------------------------------------ actors
def next_batch(
    batches: Iterator, actors: Any, preemption: Any, *, store: Any, waiting: Callable[[], None]
) -> tuple[Any, Any]:
    """The next packed batch, or (None, {}) when told to stop or at the end of experience.

    `waiting` is called about once a second while there is none.
    """
    began, notice = time.monotonic(), NOTICE
    while not preemption.requested:
        if actors is not None:
            actors.check()
            if getattr(actors, "done", False) and not store.info().done:
                store.finish()  # the last round is over: the batches end with what is there
        try:
            return next(batches)
        except TimeoutError:
            waiting()
            if actors is None and time.monotonic() - began > notice:  # our own actors have a watchdog
                log.warning("no group to learn from for %.0f s: is launch/rollout.py running on this run?", notice)
                notice *= 2
        except StopIteration:
            break
    return None, {}


def check_skipped(report: Mapping[str, Any], limit: int, *, checkpoints: Checkpoints) -> None:
    """Raises Diverged after `limit` non-finite updates in a row, once what is being saved is on disk."""
    if int(report["skipped"]) >= limit:
        checkpoints.wait()
        last = f"loss {float(report['loss'])}, gradient norm {float(report['grad_norm'])}"
        raise Diverged(
            f"{int(report['skipped'])} updates in a row were not finite, the limit is {limit}; the last: {last}"
        )


# ----------------------------------------------------------------------------------------------------- account
_SERVER = {"prompt_s": "prompt", "prefill_s": "prefill", "decode_s": "decode", "deliver_s": "deliver"}
_ACTOR = {"env_s": "sandbox", "prepare_s": "sandbox", "evaluate_s": "sandbox", "prompt_s": "prompt",
          "policy_s": "wait for policy", "store_s": "store", "judge_s": "judge"}  # fmt: skip


GAUGES = frozenset({"in_flight", "ready", "live"})  # levels, not counts


class Account:
    """Where time goes and what came of it: one metrics row an update."""

    def __init__(self, serving: Any, actors: Any) -> None:
        self.clock, self._server, self._actor = Clock("learner"), Clock("server"), Clock("rollout")
        self._serving, self._actors = serving, actors
        self._before: dict[str, float] = {}
        self._since = time.perf_counter()
        self._delta("server", serving.stats())  # what warm-up and evaluations took is not the first update's

    def _delta(self, name: str, values: Mapping[str, Any]) -> dict[str, float]:
        out = {}
        for key, value in values.items():
            if isinstance(value, int | float):
                if key in GAUGES:
                    out[key] = value
                    continue
                before = self._before.get(name + key, 0.0)
                out[key] = value - before if value >= before else value  # lower: its process has restarted
                self._before[name + key] = value
        return out

    def row(self, report: Mapping[str, Any], info: Mapping[str, Any], version: int) -> dict[str, Any]:
        """Everything one update knows about itself."""
        figures = surrogate.summary(report)
        rewards = info["rewards"]
        lags = {int(k): v for k, v in info["lags"].items()}
        groups = max(1, sum(lags.values()))
        row: dict[str, Any] = {f"train/{k}": v for k, v in figures.items()}
        row |= {f"reward/{family}": value for family, value in rewards.items()}
        row |= {f"data/{k}": v for k, v in info["counts"].items()}
        row |= {f"data/lag_{k}": v for k, v in lags.items()}
        row |= {"rollout/staleness": sum(k * v for k, v in lags.items()) / groups, "train/version": version}
        row |= {"rollout/reward": sum(rewards.values()) / max(1, len(rewards)), "data/pack_s": info["pack_seconds"]}
        pack = info["pack"]
        pack = pack if isinstance(pack, Mapping) else pack._asdict()
        row |= {f"pack/{k}": v for k, v in pack.items() if isinstance(v, int | float)}
        row["data/seqs"] = list(info["seqs"])
        row["train/share_trained"] = figures["tokens"] / max(1, info["tokens_generated"])
        now = time.perf_counter()
        served = self._delta("server", self._serving.stats())
        row |= {"rate/tokens": served.get("tokens", 0.0) / (now - self._since), "rate/updates": 1 / (now - self._since)}
        row |= {"serving/requests": served.get("requests", 0), "serving/deduplicated": served.get("deduplicated", 0)}
        for key, stage in _SERVER.items():
            self._server.add(stage, served.get(key, 0.0))
        if self._actors is not None:
            acted = self._delta("actor", self._actors.snapshot())
            for key, stage in _ACTOR.items():
                self._actor.add(stage, acted.get(key, 0.0))
            row |= {f"rollout/{k}": v for k, v in acted.items() if not k.endswith("_s") and k != "reward"}
            if ended := acted.get("valid", acted.get("collected", 0.0)):  # attempts, since the row before
                row["rollout/success"] = acted.get("passed", 0.0) / ended
        self._since = now
        return row | self.clock.take() | self._server.take() | self._actor.take()


# ------------------------------------------------------------------------------------------------------- saving
def items(now: Any, reference: Any) -> tuple[Any, Any]:
    """(params, everything else) of a checkpoint; the KL reference goes along where there is one."""
    params, rest = state.split(now)
    return params, rest if reference is None else {**rest, "reference": reference}


def restored(found: Any) -> tuple[Any, Any]:
    """(TrainState, KL reference or None) of a restored checkpoint."""
    rest = dict(found.opt)
    reference = rest.pop("reference", None)
    return state.join(found.params, rest), reference


def rules(config: Settings, *, first_version: int) -> Rules:
    """Which groups make an update. Recorded experience and demonstrations have no age."""
    ageless = config.rollout.replay or config.algo.name == "sft"
    return Rules(
        groups_per_update=config.data.groups_per_update, max_lag=1 << 30 if ageless else config.rollout.max_lag,
        drop_zero_variance=config.data.drop_zero_variance, first_version=first_version,
        publish_every=config.train.publish_every, min_valid=1 if config.algo.name == "sft" else 2,
    )  # fmt: skip


def save(checkpoints: Any, store: Any, now: Any, cursor: Mapping[str, Any], *, reference: Any = None) -> None:
    """One checkpoint of everything, and the store told what it must keep."""
    params, rest = items(now, reference)
    success = cursor.get("success")
    checkpoints.save(
        int(cursor["update"]), params=params, opt=rest, data=dict(cursor), version=int(cursor["version"]),
        config=cursor["config"], metrics={} if success is None else {"success": success},
    )  # fmt: skip
    if needed := [int(c["pipeline"]["seq"]) if "pipeline" in c else 0 for c in checkpoints.cursors()]:
        store.retain(min(needed))  # what any checkpoint on disk may still have to read; the one in flight is later


def keep_start(run_dir: Path, store: Any, now: Any, cursor: Mapping[str, Any], *, reference: Any = None) -> None:
    """Keeps the policy that reinforcement begins with, whatever comes later: a control can begin there as well."""
    kept = Checkpoints(run_dir / START, keep_last=1, keep_best=0)
    save(kept, store, now, cursor, reference=reference)
    kept.close()


def params_of(directory: str, *, like: Any) -> Any:
    """The parameters of the newest checkpoint in a directory of another run. Raises ConfigError."""
    kept = None
    try:
        kept = Checkpoints(directory, read_only=True)
        return kept.restore_params(like)[0]
    except CheckpointError as error:
        raise ConfigError(f"policy.init: {error}") from error
    finally:
        if kept is not None:
            kept.close()


def round_reference(reference: Any, now: Any, begins: bool) -> Any:
    """The parameters KL is measured against: those at the start of the round."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(jnp.copy, now.params) if reference is None or begins else reference


def newest_round(store: Any, seqs: Sequence[int]) -> int:
    """The newest round that a batch's groups belong to."""
    return max((int((store.deltas(seq) or {}).get("round", 0)) for seq in seqs), default=0)
