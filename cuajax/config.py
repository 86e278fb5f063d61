"""What an experiment is made of: the shared config sections, overrides from outside, and their checks.

A config file is `configs/NAME.py` with `get_config(arg: str = "") -> ConfigDict`; it imports this module alone.
Sections are named as the rooms that take them, and a config object stops at `launch/`, which hands on `**config.room`.
Nothing here imports jax: a wrong key, type or directory is told before a device is touched.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ml_collections import ConfigDict

Settings: TypeAlias = Any  # a ConfigDict; its own annotations make every attribute a union of all types
# (at least, at most), checked where an experiment has the key.
LIMITS: dict[str, tuple[float, float]] = {
    "rollout.group_size": (2, 1024),
    "rollout.attempts": (1, 1 << 16),
    "rollout.max_lag": (0, 64),
    "agent.window": (1, 64),
    "agent.temperature": (0.0, 10.0),
    "agent.top_p": (1e-6, 1.0),
    "data.groups_per_update": (1, 1 << 16),
    "data.rows": (1, 1 << 16),
    "optimizer.learning_rate": (0.0, 1.0),
    "optimizer.end": (0.0, 1.0),
    "rollout.floor": (0.0, 1.0),
    "rollout.beta": (0.0, 1.0),
    "rollout.tasks_per_family": (0, 1 << 30),
    "rollout.infeasible_share": (0.0, 1.0),
    "train.publish_every": (1, 1 << 16),
    "train.updates": (0, 1 << 40),
    "train.data": (1, 1 << 16),
    "train.fsdp": (1, 1 << 16),
    "train.tensor": (1, 1 << 16),
    "checkpoint.keep": (1, 1 << 16),
}


class ConfigError(ValueError):
    """A setting, file or extra a person must correct; launch pages print it and exit with status 2."""


# ------------------------------------------------------------------------------------------------- sections
def section(name: str, defaults: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Settings:
    """A locked section with `changes` applied. Raises ConfigError on an unknown key or a wrong type."""
    made = ConfigDict(dict(defaults)).lock()
    return override(made, changes or {}, prefix=name)


def policy(**changes: Any) -> Settings:
    """models: which network."""
    return section("policy", dict(
        preset="tiny",  # a name in models/presets.py
        dtype="float32",  # of activations and matmuls; parameters are float32
        init="",  # checkpoints of another run, whose newest parameters this one begins with; empty: drawn from the seed
    ), changes)  # fmt: skip


def suite(**changes: Any) -> Settings:
    """tasks and sandbox: where tasks come from."""
    return section("suite", dict(
        name="sim",
        families=("check2", "check3", "type", "drop"),
        infeasible=(),  # those of `families` whose right answer is terminate(failure)
        screen=64,  # pixels, height and width
    ), changes)  # fmt: skip


def agent(**changes: Any) -> Settings:
    """agent: how screens become prompts, and how answers are sampled."""
    return section("agent", dict(
        dialect="compact",  # a file in agent/dialects/
        bins=16,  # coordinate positions a side
        window=1,  # screenshots in the prompt
        history=False,  # earlier answers as text
        temperature=1.0,  # of training attempts
        top_p=1.0,
        top_k=0,  # 0: off
        max_tokens=6,  # of one answer
        prompt_limit=48,  # tokens of prompt and answer together
    ), changes)  # fmt: skip


def warmup(**changes: Any) -> Settings:
    """Supervised single decisions on random screens before reinforcement starts, until grounding is measured.

    Phase 1 (instructions of one clause) ends when grounding reaches `gate`, phase 2 (up to two clauses) `second_decay`
    updates after grounding of its instructions reached `second_gate`; the less of a verb is right, the more screens it
    has until then. A gate not reached is told, and the run goes on.
    """
    return section("warmup", dict(
        steps=0,  # most updates of phase 1; 0: no warm-up
        second_steps=0,  # most updates of phase 2
        transition=0.75,  # grounding from which the learning rate falls
        gate=0.84,  # grounding (held-out single decisions answered rightly) that ends phase 1
        second_gate=0.92,  # grounding from which phase 2's learning rate falls
        verb_gate=0.8,  # grounding of the worst verb that both gates ask for as well
        second_decay=250,  # updates from there to its end
        check_every=50,
        screens=30,  # an update
        second_screens=20,  # an update of phase 2, whose instructions are longer
        per_screen=8,  # instructions a screen
        sparse_steps=400,  # updates over which screens fill up
        read=0.0,  # share of questions about a place of the screen
        submit=0.6,  # share of phase 2's instructions for a form that close with "submit", which is no clause
        filler=0.7,  # share of phase 2's instructions that are lengthened by words that say nothing
        absent=0.14,  # share of instructions that name what is not there
        decay_over=400,  # updates from the full learning rate to 30 %
        second_rate=0.6,  # learning rate of phase 2, as a share
        optimizer=dict(name="muon", learning_rate=6e-3, betas=(0.9, 0.98), weight_decay=1e-4, clip_norm=1.0),
        pack=dict(length=104, loss_tokens=64, images_per_row=2, rows=16),
        second_pack=dict(length=160, loss_tokens=64, images_per_row=2, rows=16),
    ), changes)  # fmt: skip


_LOSS = dict(
    eps_low=0.2,
    eps_high=0.28,
    dual_clip=0.0,  # c of min(.., -A*c) for A<0; 0: off
    kl_beta=0.0,  # weight of k3 against the reference
    entropy_coef=0.0,
    correction="none",  # none | decoupled
    truncate=2.0,  # C of the decoupled correction
)
_ALGORITHMS: dict[str, dict[str, dict[str, Any]]] = {
    "stepo": dict(credit={}, loss=dict(_LOSS)),
    "grpo": dict(credit=dict(aggregate="trajectory"), loss=dict(_LOSS)),  # trajectory | token | naive_step
    "prm_grpo": dict(credit=dict(aggregate="token"), loss=dict(_LOSS, eps_high=0.2, kl_beta=1e-3)),
    "sft": dict(credit={}, loss=dict(entropy_coef=0.0)),
}


def algo(name: str, *, credit: Mapping[str, Any] | None = None, loss: Mapping[str, Any] | None = None) -> Settings:
    """algorithms: `name` is a file of that room; `credit` and `loss` are the arguments of its two functions."""
    known = _ALGORITHMS.get(name, dict(credit=dict(credit or {}), loss=dict(loss or {})))  # an algorithm of one's own
    made = section("algo", dict(name=name, credit=dict(known["credit"]), loss=dict(known["loss"])))
    override(made.credit, credit or {}, prefix="algo.credit")
    override(made.loss, loss or {}, prefix="algo.loss")
    return made


def rollout(**changes: Any) -> Settings:
    """rollout: how many attempts run, and how far behind the learner they may fall."""
    return section("rollout", dict(
        here=True,  # run attempts inside the training process; False: launch/rollout.py does
        group_size=8,  # attempts at one task
        attempts=512,  # in flight at once
        max_lag=2,  # policy versions; older groups age out
        retries=8,  # attempts a group may repeat because the world failed
        sampling="vas",  # uniform | vas: families or tasks by 4P(1-P) | varied: by their share of groups that teach
        tasks_per_family=0,  # P is kept for each of so many tasks a family; 0: every task is new, P is a family's
        beta=0.7,  # how much of P stays when a group ends
        floor=0.05,  # least weight of a family
        infeasible_share=0.12,
        timeout=120.0,  # seconds of one attempt
        replay="",  # experience directory of another run to learn from instead of acting
    ), changes)  # fmt: skip


def rounds(**changes: Any) -> Settings:
    """rollout.candidates: PRO-CUA's rounds, for prm_grpo."""
    return section("rounds", dict(
        rounds=10,
        tasks=256,  # attempts collected a round
        deduplicate=False,  # equal prompts of one task are one state
    ), changes)  # fmt: skip


def serving(**changes: Any) -> Settings:
    """serving: the policy engine."""
    return section("serving", dict(
        address="",  # HOST:PORT of a running policy server, or "run": the one of this run directory; "": one here
        transport="auto",  # grpc | local | auto: gRPC on loopback where the extra is there
        prompts=(16, 64, 128),  # rows of a prefill
        lengths=(32, 40),  # prompt tokens
        slots=(32, 128, 256),  # rows of a decode step; the last is the number of slots
        swap="drain",  # drain | inflight: when new weights are swapped in
    ), changes)  # fmt: skip


def data(**changes: Any) -> Settings:
    """data: from groups to batches."""
    return section("data", dict(
        groups_per_update=12,
        drop_zero_variance=True,  # dynamic sampling: a group with equal rewards is replaced by a fresh one
        length=128,  # tokens of a row
        loss_tokens=72,  # of a row
        images_per_row=4,
        rows=40,  # of one microbatch
        merge_prefixes=True,  # False: plain packing
        prefetch=1,  # batches made ahead
        store_budget=2 << 30,  # bytes on disk before compaction
    ), changes)  # fmt: skip


def optimizer(**changes: Any) -> Settings:
    """train.optimizer: arguments of `make_schedule` and `make_optimizer`."""
    return section("optimizer", dict(
        name="adamw",  # adamw | muon
        learning_rate=6e-4,
        schedule="linear",  # constant | linear | cosine
        end=0.3,  # share of the learning rate at the last update
        warmup_steps=30,
        betas=(0.9, 0.98),
        weight_decay=1e-4,
        clip_norm=1.0,  # global norm of the gradient
    ), changes)  # fmt: skip


def train(**changes: Any) -> Settings:
    """train: the learner's loop and its mesh."""
    return section("train", dict(
        updates=100,  # in all; a finished run continues when this grows
        epochs=1,  # passes over each optimizer batch
        publish_every=1,  # updates between two policy versions
        data=1,  # mesh axes
        fsdp=1,
        tensor=1,
        skip_limit=5,  # non-finite updates in a row before the run stops
    ), changes)  # fmt: skip


def evaluation(**changes: Any) -> Settings:
    """The held-out tasks: how often and how many. Goes into an experiment as `eval`."""
    return section("eval", dict(
        every=50,  # updates; 0: at the end only
        tasks=256,
        final_tasks=256,  # of the run's last, reported evaluation, on other seeds
        temperature=0.0,
        enough=2.0,  # held-out success that ends training early; above 1: never
        collapse=0.5,  # stop when success falls below this share of the best; 0: never
    ), changes)  # fmt: skip


def checkpoint(**changes: Any) -> Settings:
    """checkpoint: when state is saved and what is kept."""
    return section("checkpoint", dict(every=50, keep=2, keep_best=1), changes)


def scoring(**changes: Any) -> Settings:
    """What launch/evaluate.py scores: a whole config, not a section."""
    return section("", dict(
        run="",  # run directory
        step="best",  # best | latest | an update
        episodes=512,  # held-out tasks
        seed=0,  # chooses them
        sampled=False,  # at the temperature of training attempts; else greedy
        samples=1,  # attempts at each task: pass@k and pass^k
    ), changes)  # fmt: skip


def experiment(name: str, *, seed: int = 0, **sections: Settings) -> Settings:
    """A whole locked experiment. `sections` replace or add rooms; an experiment names its `algo` at least."""
    made = ConfigDict(dict(name=name, seed=seed, **sections))
    for room, fragment in (("policy", policy), ("suite", suite), ("agent", agent), ("warmup", warmup),
                           ("rollout", rollout), ("rounds", rounds),
                           ("serving", serving), ("data", data), ("optimizer", optimizer), ("train", train),
                           ("eval", evaluation), ("checkpoint", checkpoint)):  # fmt: skip
        if room not in made:
            made[room] = fragment()
    return made.lock()


DESKTOP = (
    "tabcheck", "droptype", "drop+radio", "drop+check1", "type+check2", "radio+check2", "drop+check2",
    "type+radiocheck", "droptype+check1", "type+check3", "infeasible",
)  # fmt: skip


def desktop(name: str, *, seed: int = 0, **sections: Settings) -> Settings:
    """An experiment on the embedded desktop: its families, a warm-up on single decisions, then up to 180 updates.

    `sections` replace these or add to them.
    """
    shared = dict(
        suite=suite(families=DESKTOP, infeasible=("infeasible",)),
        warmup=warmup(steps=1500, second_steps=2000),
        train=train(updates=180),  # a slow seed ends here, inside ten minutes on two cores
        eval=evaluation(every=30, enough=0.9),
    )
    return experiment(name, seed=seed, **{**shared, **sections})


def shrink(made: Settings) -> Settings:
    """The `:debug` form: the same pages and rooms, over in under a minute."""
    return override(made, {
        "name": f"{made.name}_debug", "warmup.steps": min(made.warmup.steps, 4), "warmup.second_steps": 2,
        "warmup.check_every": 2, "warmup.gate": 0.0, "warmup.second_gate": 0.0, "warmup.verb_gate": 0.0,
        "warmup.second_decay": 0,
        "warmup.screens": 4, "warmup.second_screens": 4, "warmup.pack.rows": 4, "warmup.second_pack.rows": 4,
        "data.rows": 8, "rollout.group_size": 4, "data.groups_per_update": 2, "data.drop_zero_variance": False,
        "rounds.rounds": 1, "rounds.tasks": 8, "train.updates": 5, "train.publish_every": 1,
        "optimizer.warmup_steps": 1, "eval.every": 5, "eval.tasks": 10, "eval.final_tasks": 10, "eval.collapse": 0.0,
        "checkpoint.every": 5, "serving.prompts": (16,), "serving.lengths": (40,), "serving.slots": (32,),
    })  # fmt: skip


def parse_arg(arg: str, **defaults: Any) -> Settings:
    """`"debug,seed=3"` with `debug=False, seed=0` -> their values: a bare word sets a switch, the rest are typed."""
    parts = [part.strip() for part in arg.split(",") if part.strip()]
    pairs = [part.partition("=") for part in parts]
    changes = {name: value if equals else "true" for name, equals, value in pairs}
    return section("", defaults, changes)


# ------------------------------------------------------------------------------------------ loading, overriding
def leaves(config: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every setting."""
    for key in config:
        value = config[key]
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, ConfigDict | dict):
            yield from leaves(value, path)
        else:
            yield path, value


def nearest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'X'?`, or the choices where none is near: the end of every message about a name."""
    names = list(dict.fromkeys(choices))
    last = word.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(word, names, 1, 0.75)
    near = near or [name for name in names if name.rsplit(".", 1)[-1] == last][:1]
    near = near or difflib.get_close_matches(word, names, 1, 0.55)
    return f"; did you mean {near[0]!r}?" if near else f"; choices: {', '.join(sorted(names)) or 'none'}"


def _typed(path: str, current: Any, value: Any) -> Any:
    """`value` (a string from the command line, or a plain value) as the type of `current`."""
    kind = type(current)
    if isinstance(value, str) and not isinstance(current, str):
        value = _parsed(kind, value)
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
    if kind is float and type(value) is int:
        value = float(value)
    if current is not None and type(value) is not kind:
        raise ConfigError(f"{path} takes {kind.__name__} (now {current!r}), not {value!r}")
    return value


def _parsed(kind: type, text: str) -> Any:
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if kind is tuple and not text.startswith(("(", "[")):
        return tuple(_parsed(type(None), part.strip()) for part in text.split(",") if part.strip())
    try:
        if kind in (int, float):
            return kind(text)
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word: right for an untyped setting, refused by the type check elsewhere


def override(config: Settings, changes: Mapping[str, Any], *, prefix: str = "") -> Settings:
    """Sets dotted keys in place. Raises ConfigError that names an unknown key (and the nearest) or a wrong type."""
    dotted = f"{prefix}." if prefix else ""
    for path, value in changes.items():
        *parents, last = path.split(".")
        at: Any = config
        for part in parents:
            at = at[part] if isinstance(at, ConfigDict) and part in at else None
        if not isinstance(at, ConfigDict) or last not in at:
            known = [dotted + leaf for leaf, _ in leaves(config)]
            raise ConfigError(f"unknown config key {dotted + path!r}{nearest(dotted + path, known)}")
        current = at[last]
        if isinstance(current, ConfigDict):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{dotted + path} is a section; set one of its keys: {', '.join(sorted(current))}")
            override(current, value, prefix=dotted + path)
            continue
        value = _typed(dotted + path, current, value)
        with at.ignore_type():
            at[last] = value
    return config


def check(config: Settings) -> Settings:
    """Refuses values outside LIMITS with a ConfigError of value, limit and key; returns the config."""
    for path, value in leaves(config):
        low, high = LIMITS.get(path, (None, None))
        if low is not None and high is not None and not low <= value <= high:
            raise ConfigError(f"{path} = {value!r} is outside {low} .. {high}")
    return config


def require_extra(module: str, extra: str) -> None:
    """Raises ConfigError that says which `pip install` is missing, without importing `module`."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a dotted name whose parent is missing
        found = False
    if not found:
        raise ConfigError(f"{module} is not installed: pip install 'cuajax[{extra}]'")
