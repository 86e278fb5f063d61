"""From an experiment's config to the parts a page puts together. A config object goes no deeper than here."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cuajax.agent.actions import ParseError
from cuajax.agent.dialects.compact import CompactDialect
from cuajax.agent.harness import Harness, check_limits
from cuajax.config import ConfigError, Settings, nearest, require_extra
from cuajax.data.images import image_hash
from cuajax.data.lease import Lease, LeaseHeld, acquire
from cuajax.data.pack import PackSpec
from cuajax.data.store import Store
from cuajax.inputs.grid import image_tokens
from cuajax.inputs.processor import ImageSpec
from cuajax.inputs.tokenizer import CompactTokenizer
from cuajax.rollout.candidates import CandidateRounds, RoundPlan
from cuajax.rollout.candidates import Learner as LearnerCursor
from cuajax.rollout.demonstrations import Demonstrations
from cuajax.rollout.episode import Limits
from cuajax.rollout.evaluate import evaluate
from cuajax.rollout.plan import Plan
from cuajax.rollout.service import RolloutService
from cuajax.sandbox.sim.prm import SimPRM
from cuajax.sandbox.sim.screens import Decision, Mix, decisions, grounded
from cuajax.sandbox.sim.suite import SimSuite
from cuajax.sandbox.sim.words import VERBS
from cuajax.tasks.curriculum import Curriculum, evaluation_seeds
from cuajax.types import Image, Prompt, Sample, Sampling, Suite, Task, Trajectory

Connect = Callable[[], Any]  # a policy client for the event loop it is first used in
SUITES = ("sim",)
DIALECTS = ("compact",)
FINAL = 1 << 20  # the reported evaluation's seeds start here; those during training start at 0


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}{nearest(value, choices)}; choices: {', '.join(choices)}")


# ------------------------------------------------------------------------------------------- inputs and tasks
def suite(config: Settings) -> SimSuite:
    """The task suite. Raises ConfigError on an unknown suite or family."""
    _one_of("suite.name", config.suite.name, SUITES)
    families = tuple(config.suite.families)
    stray = set(config.suite.infeasible) - set(families)
    if stray:
        raise ConfigError(f"suite.infeasible names {sorted(stray)}, which suite.families does not have")
    try:
        return SimSuite(config.suite.screen, config.suite.screen, families=families)
    except ValueError as error:
        raise ConfigError(f"suite: {error}") from error


def harness(config: Settings) -> Harness:
    """Tokenizer, dialect and context policy."""
    _one_of("agent.dialect", config.agent.dialect, DIALECTS)
    agent = config.agent
    try:
        dialect = CompactDialect(CompactTokenizer(bins=agent.bins), bins=agent.bins, max_tokens=agent.max_tokens)
        return Harness(dialect, ImageSpec(), window=agent.window, history=agent.history)
    except ValueError as error:
        raise ConfigError(f"agent: {error}") from error


def tokenizer(made: Harness) -> CompactTokenizer:
    dialect = made.dialect
    assert isinstance(dialect, CompactDialect)
    return dialect.tokenizer


def pack_spec(made: Harness, config: Settings, shape: Mapping[str, Any]) -> PackSpec:
    """`shape` has length, loss_tokens, images_per_row and rows. Raises ConfigError where a decision cannot fit."""
    side = config.suite.screen // made.image.patch
    names = ("length", "loss_tokens", "images_per_row", "rows")
    spec = PackSpec(
        **{name: shape[name] for name in names}, patches_per_image=side * side, image=made.image,
        image_id=tokenizer(made).image_id, pad_id=tokenizer(made).pad_id,
        merge_prefixes=shape.get("merge_prefixes", True),
    )  # fmt: skip
    for name, need in (("length", config.agent.prompt_limit), ("loss_tokens", config.agent.max_tokens),
                       ("images_per_row", config.agent.window)):  # fmt: skip
        if getattr(spec, name) < need:
            raise ConfigError(f"a packed row has {name} {getattr(spec, name)}, one decision can take {need}")
    return spec


def check_prompts(config: Settings, made: Harness, tasks: Sequence[Task]) -> None:
    """Refuses, with the numbers, a config whose prompt, image or answer cannot fit its limits."""
    side = config.suite.screen
    try:
        longest = check_limits(tasks, made, screen=(side, side), prompt_limit=config.agent.prompt_limit)
    except ValueError as error:
        raise ConfigError(f"agent.prompt_limit: {error}") from error
    if longest > max(config.serving.lengths):
        raise ConfigError(
            f"a prompt takes up to {longest} tokens, serving.lengths ends at {max(config.serving.lengths)}"
        )


def held_out(config: Settings, made: Suite, count: int, *, start: int) -> list[Task]:
    """`count` tasks spread evenly over the families, on seeds no training task has."""
    families = config.suite.families
    seeds = evaluation_seeds(count, start=start)
    return [made.task(families[i % len(families)], seed) for i, seed in enumerate(seeds)]


def curriculum(config: Settings) -> Curriculum:
    r = config.rollout
    return Curriculum(
        tuple(config.suite.families), infeasible=tuple(config.suite.infeasible), mode=r.sampling, floor=r.floor,
        infeasible_share=r.infeasible_share, beta=r.beta, tasks_per_family=r.tasks_per_family,
    )  # fmt: skip


def plan(config: Settings, *, actor: str = "") -> Plan:
    r, a = config.rollout, config.agent
    return Plan(
        group_size=r.group_size, groups_per_update=config.data.groups_per_update, max_lag=r.max_lag,
        temperature=a.temperature, top_p=a.top_p, top_k=a.top_k, retries=r.retries, seed=config.seed, actor=actor,
        replace_zero_variance=config.data.drop_zero_variance,
        reuse_envs=True, limits=Limits(attempts=r.attempts, execute=r.timeout),
    )  # fmt: skip


def hold(place: Path) -> Lease:
    """A lease that only one process has at a time. Raises ConfigError naming the holder."""
    try:
        return acquire(str(place))
    except LeaseHeld as error:
        raise ConfigError(str(error)) from error


def actors(
    config: Settings, made: SimSuite, context: Harness, *, connect: Connect, store: Store, progress: Any = None,
    actor: str = "",
) -> Any:  # fmt: skip
    """The service that fills the store: live attempts, the candidates of PRM rounds, or demonstrations.

    `progress` has consumed() and published(); None: what the learner of another process leaves in the store.
    """
    if config.algo.name == "sft":
        return Demonstrations(
            made, store, oracle=made.oracle, harness=context, curriculum=curriculum(config),
            plan=plan(config, actor=actor), consumed=progress.consumed if progress else None,
        )  # fmt: skip
    if config.algo.name != "prm_grpo":
        return RolloutService(
            made, connect(), store, harness=context, curriculum=curriculum(config), plan=plan(config, actor=actor),
            consumed=progress.consumed if progress else None,
        )  # fmt: skip
    progress = progress or _Elsewhere(store)
    rounds = RoundPlan(plan(config, actor=actor), rounds=config.rounds.rounds, tasks=config.rounds.tasks,
                       deduplicate=config.rounds.deduplicate)  # fmt: skip
    return CandidateRounds(
        made, connect(), store, prm=SimPRM(made), harness=context, curriculum=curriculum(config), plan=rounds,
        learner=LearnerCursor(progress.consumed, progress.published),
    )  # fmt: skip


class Progress:
    """How far the learner has read and published, for actors in this process and (through the store) elsewhere."""

    def __init__(self, store: Any, *, seq: int, shared: bool) -> None:
        self._store, self._shared = store, shared
        self._read = self._published = seq
        self._dropped: set[int] = set()  # groups ahead of `_read` that will never be trained
        self._lock = threading.Lock()
        self._tell()  # actors elsewhere wait for a learner that is past its warm-up

    def advance(self, seq: int, *, published: bool) -> None:
        with self._lock:
            self._read = seq
            self._dropped = {s for s in self._dropped if s >= seq}
        if published:
            self._published = seq
        self._tell()

    def drop(self, seq: int) -> None:
        with self._lock:
            self._dropped.add(seq)
        self._tell()

    def _tell(self) -> None:
        if self._shared:
            self._store.put("learner", {"consumed": self.consumed(), "published": self._published})

    def consumed(self) -> int:
        with self._lock:
            return self._read + len(self._dropped)

    def published(self) -> int:
        return self._published


class _Elsewhere:
    """A learner in another process, through the record it keeps in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def consumed(self) -> int:
        return int((self._store.get("learner") or {"consumed": 0})["consumed"])

    def published(self) -> int:
        return int((self._store.get("learner") or {"published": 0})["published"])


# ------------------------------------------------------------------------------------------------- algorithms
def algorithm(config: Settings) -> Any:
    """The module of `config.algo.name`. Raises ConfigError on an unknown one."""
    import cuajax.algorithms as room

    names = [
        p.stem for p in Path(room.__path__[0]).glob("*.py") if p.stem not in ("__init__", "advantages", "surrogate")
    ]
    _one_of("algo.name", config.algo.name, sorted(names))
    return importlib.import_module(f"cuajax.algorithms.{config.algo.name}")


def credit(config: Settings) -> Callable[..., Any]:
    return functools.partial(algorithm(config).credit, **config.algo.credit)


# ---------------------------------------------------------------------------------------------------- serving
def transport(config: Settings) -> str:
    """grpc or local; auto takes gRPC where the JetStream extra is there."""
    _one_of("serving.transport", config.serving.transport, ("auto", "grpc", "local"))
    if config.serving.transport == "grpc":
        require_extra("jetstream", "jetstream")
    if config.serving.transport != "auto":
        return config.serving.transport
    return "grpc" if importlib.util.find_spec("jetstream") else "local"


def buckets(config: Settings, made: Harness) -> Any:
    from cuajax.serving.engine import Buckets

    s, side = config.serving, config.suite.screen // made.image.patch
    return Buckets(
        prompts=tuple(s.prompts), lengths=tuple(s.lengths), slots=tuple(s.slots), images=(config.agent.window,),
        patches=side * side, answer=config.agent.max_tokens,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- supervised warm-up
def mix(config: Settings, step: int, clauses: int) -> Mix:
    """Phase 1 begins on nearly empty screens: with few widgets the right one is found soon. Phase 2 shows full ones."""
    sparse = min(1.0, max(0.0, 1.2 - step / config.warmup.sparse_steps)) if clauses == 1 else 0.2
    w = config.warmup
    return Mix(
        read=w.read, absent=w.absent, two=0.7, sparse=sparse, bins=config.agent.bins,
        submit=w.submit if clauses > 1 else 0.0, filler=w.filler if clauses > 1 else 0.0,
    )  # fmt: skip


def single_decisions(
    config: Settings, made: Harness, seed: int, step: int, *, phase: int, weights: Mapping[str, float] | None = None
) -> tuple[list[Sample], dict]:
    """Supervised samples of update `step`: random screens, instructions of at most `phase` clauses. Pure.

    weights: of each verb's screens, 1 where it has none.
    """
    w = config.warmup
    screens = w.screens if phase == 1 else w.second_screens
    chosen = decisions(
        random.Random(f"{seed}/{phase}/{step}"), screens, w.per_screen, clauses=phase,
        pool=tuple(f for f in config.suite.families if f not in config.suite.infeasible),
        weights=weights, mix=mix(config, step, phase), size=(config.suite.screen, config.suite.screen, 1),
    )  # fmt: skip
    return labelled(chosen, made)


def labelled(chosen: Sequence[Decision], made: Harness) -> tuple[list[Sample], dict[str, np.ndarray]]:
    """Decisions as samples of cross-entropy: token-mean, advantage 1."""
    images: dict[int, tuple[str, np.ndarray, int]] = {}
    for d in chosen:
        if id(d.screenshot) not in images:
            h, w = d.screenshot.shape[:2]
            images[id(d.screenshot)] = (image_hash(d.screenshot), d.screenshot, image_tokens(h, w, made.image))
    answers = [np.array(made.dialect.format(d.action), np.int32) for d in chosen]
    total = sum(len(a) for a in answers)
    samples = []
    for i, (d, answer) in enumerate(zip(chosen, answers, strict=True)):
        digest, _, tokens = images[id(d.screenshot)]
        one = np.ones(len(answer), np.float32)
        prompt = made.dialect.prompt_ids(d.instruction, (), tokens)
        samples.append(Sample(prompt, (digest,), answer, 0 * one, one, one / total, name=f"decision {i}"))
    return samples, {digest: pixels for digest, pixels, _ in images.values()}


def grounding_set(config: Settings, made: Harness, *, clauses: int = 1, count: int = 64) -> list[Decision]:
    """Held-out single decisions that grounding is measured on: full screens, no reading questions, nothing absent.

    That a widget is not there is learned last of all, in reinforcement, and would hide how well the others are found.
    """
    shown = replace(mix(config, 0, clauses), read=0.0, sparse=0.0, absent=0.0)
    pool = tuple(f for f in config.suite.families if f not in config.suite.infeasible)
    size = (config.suite.screen, config.suite.screen, 1)
    return decisions(random.Random(f"grounding/{clauses}"), count, 6, clauses=clauses, pool=pool, mix=shown, size=size)


async def _answer_all(connect: Connect, made: Harness, chosen: Sequence[Decision]) -> list[bool]:
    client = connect()
    sampling = Sampling(0.0, max_tokens=made.dialect.max_tokens, stop_ids=made.dialect.stop_ids)

    async def one(d: Decision) -> bool:
        h, w = d.screenshot.shape[:2]
        ids = made.dialect.prompt_ids(d.instruction, (), image_tokens(h, w, made.image))
        answer = await client.generate(Prompt(ids, (Image(image_hash(d.screenshot), d.screenshot),)), sampling)
        try:
            action = made.dialect.parse(answer.token_ids)[0].action
        except ParseError:
            return False
        return action is not None and grounded(d, action)

    try:
        return list(await asyncio.gather(*(one(d) for d in chosen)))
    finally:
        await client.close()


def grounding(connect: Connect, made: Harness, chosen: Sequence[Decision]) -> tuple[float, dict[str, float]]:
    """(share of held-out single decisions answered rightly, greedily; the same by verb of the instruction)."""
    right = asyncio.run(_answer_all(connect, made, chosen))
    by_verb: dict[str, list[bool]] = defaultdict(list)
    for decision, good in zip(chosen, right, strict=True):
        for verb in set(VERBS).intersection(decision.instruction.split()):
            by_verb[verb].append(good)
    return float(np.mean(right)), {verb: float(np.mean(found)) for verb, found in by_verb.items()}


# ------------------------------------------------------------------------------------------------- evaluation
def scores(trajectories: Sequence[Trajectory], tasks: Sequence[Task]) -> dict[str, Any]:
    """Success, mean decisions and success by family over valid attempts; invalid ones are counted apart."""
    samples = len(trajectories) // max(1, len(tasks))
    by_family: dict[str, list[float]] = defaultdict(list)
    valid = []
    for i, t in enumerate(trajectories):
        if t.outcome.status != "invalid":
            valid.append(t)
            by_family[tasks[i // samples].family].append(float(t.outcome.status == "success"))
    success = float(np.mean([t.outcome.status == "success" for t in valid])) if valid else float("nan")
    return {
        "success": success,
        "reward": float(np.mean([t.outcome.reward for t in valid])) if valid else float("nan"),
        "mean_steps": float(np.mean([len(t.steps) for t in valid])) if valid else float("nan"),
        "invalid": len(trajectories) - len(valid),
        "families": {f: float(np.mean(v)) for f, v in sorted(by_family.items())},
    }


def evaluation_row(scored: Mapping[str, Any]) -> dict[str, Any]:
    """What a metrics row says of a held-out evaluation."""
    row = {f"eval/{k}": scored[k] for k in ("success", "reward", "mean_steps", "invalid")}
    return row | {f"eval/family/{family}": value for family, value in scored["families"].items()}


def wilson(successes: float, count: float, *, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a proportion (95 % at z = 1.96); (0, 1) without trials."""
    if not count:
        return 0.0, 1.0
    p, scale = successes / count, 1.0 / (1.0 + z * z / count)
    half = z * (p * (1 - p) / count + z * z / (4 * count * count)) ** 0.5
    return max(0.0, scale * (p + z * z / (2 * count) - half)), min(1.0, scale * (p + z * z / (2 * count) + half))


def run_tasks(
    connect: Connect, made: Suite, tasks: Sequence[Task], *, harness: Harness, **options: Any
) -> list[Trajectory]:
    """`cuajax.rollout.evaluate.evaluate` to its end, on a client of its own."""
    if not tasks:
        return []

    async def run() -> list[Trajectory]:
        client = connect()
        try:
            return await evaluate(made, client, tasks, harness=harness, **options)
        finally:
            await client.close()

    return asyncio.run(run())
