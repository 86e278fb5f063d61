"""What an experiment is made of: the shared config sections, overrides from outside, and their checks.

A config file is `configs/NAME.py` with `get_config(arg: str = "") -> ConfigDict`; it imports this module alone.
Sections are named as the rooms that take them, and a config object stops at `launch/`, which hands on `**config.room`.
Nothing here imports jax: a wrong key, type or directory is told before a device is touched.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
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
    "serving.slots": (1, 1 << 16),
    "optimizer.learning_rate": (0.0, 1.0),
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
    """models: which network, and where its weights come from."""
    return section("policy", dict(
        preset="tiny",  # a name in models/presets.py
        checkpoint="",  # Hugging Face directory to start from; "": random weights
        dtype="float32",  # of the parameters
    ), changes)  # fmt: skip


def suite(**changes: Any) -> Settings:
    """tasks and sandbox: where tasks come from."""
    return section("suite", dict(
        name="sim",
        families=(),  # (): every family of the suite
        screen=64,  # pixels, height and width
        feasible_share=1.0,  # of sampled tasks; the rest cannot be done and want terminate(failure)
    ), changes)  # fmt: skip


def agent(**changes: Any) -> Settings:
    """agent: how screens become prompts, and how answers are sampled."""
    return section("agent", dict(
        dialect="compact",  # a file in agent/dialects/
        window=1,  # screenshots in the prompt; older turns stay as text
        temperature=1.0,  # of training attempts
        top_p=1.0,
        top_k=0,  # 0: off
        max_tokens=16,  # of one answer
        budget=0,  # most decisions of one attempt; 0: the task's own
    ), changes)  # fmt: skip


def warmup(**changes: Any) -> Settings:
    """algorithms.sft: supervised updates on oracle decisions before reinforcement starts."""
    return section("warmup", dict(
        steps=0,  # 0: none
        samples=256,  # decisions an update
        learning_rate=3e-3,
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
        group_size=8,  # attempts at one task
        attempts=64,  # in flight at once
        max_lag=2,  # policy versions; older groups age out
        replace_zero_variance=True,  # dynamic sampling: a group with equal rewards is replaced by a fresh one
        timeout=600.0,  # seconds of one attempt
        retries=2,  # of a slot whose attempt was invalid
    ), changes)  # fmt: skip


def serving(**changes: Any) -> Settings:
    """serving: the policy engine."""
    return section("serving", dict(
        address="",  # HOST:PORT of a running policy server; "": one inside this process
        slots=64,  # sequences decoded together
        prefill_batch=16,
        prefix_cache=True,
        update="drain",  # drain | inflight: when new weights are swapped in
    ), changes)  # fmt: skip


def data(**changes: Any) -> Settings:
    """data: from groups to batches."""
    return section("data", dict(
        groups_per_update=8,
        rows=4,  # of one microbatch
        length=1024,  # tokens of a row
        loss_tokens=256,  # of a row
        images_per_row=8,
        patches_per_image=64,
        merge_prefixes=True,  # False: plain packing, for recurrent layers
        prefetch=2,  # batches made ahead
        store_budget=2 << 30,  # bytes on disk before compaction
    ), changes)  # fmt: skip


def optimizer(**changes: Any) -> Settings:
    """train.optimizer: arguments of `make_optimizer`."""
    return section("optimizer", dict(
        name="adamw",  # adamw | muon
        learning_rate=1e-3,
        schedule="constant",  # constant | cosine
        warmup_steps=0,
        weight_decay=0.0,
        clip_norm=1.0,  # global norm of the gradient
    ), changes)  # fmt: skip


def train(**changes: Any) -> Settings:
    """train: the learner's loop and its mesh."""
    return section("train", dict(
        updates=100,  # in all; a finished run continues when this grows
        epochs=1,  # passes over each optimizer batch
        data=1,  # mesh axes
        fsdp=1,
        tensor=1,
        skip_limit=5,  # non-finite updates in a row before the run stops
        log_every=1,
    ), changes)  # fmt: skip


def evaluation(**changes: Any) -> Settings:
    """The held-out tasks: how often and how many. Goes into an experiment as `eval`."""
    return section("eval", dict(
        every=50,  # updates; 0: at the end only
        tasks=32,  # a family
        temperature=0.0,
        collapse=0.5,  # stop when success falls below this share of the best; 0: never
    ), changes)  # fmt: skip


def checkpoint(**changes: Any) -> Settings:
    """checkpoint: when state is saved and what is kept."""
    return section("checkpoint", dict(every=25, keep=2, keep_best=1), changes)


def experiment(name: str, *, seed: int = 0, **sections: Settings) -> Settings:
    """A whole locked experiment. `sections` replace or add rooms; an experiment names its `algo` at least."""
    made = ConfigDict(dict(name=name, seed=seed, **sections))
    for room, fragment in (("policy", policy), ("suite", suite), ("agent", agent), ("rollout", rollout),
                           ("serving", serving), ("data", data), ("optimizer", optimizer), ("train", train),
                           ("eval", evaluation), ("checkpoint", checkpoint)):  # fmt: skip
        if room not in made:
            made[room] = fragment()
    return made.lock()


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


def _config_file(name: str | os.PathLike[str]) -> Path:
    path = Path(name)
    if not path.is_file():
        found = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"no config file {str(path)!r}{nearest(str(path), found)}")
    return path


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_config_{path.stem}", path.absolute())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _told(path: Path, error: BaseException) -> ConfigError:
    """An error raised while a config file ran, as one line with its place in that file."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.absolute()]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else 0)
    message = str(error.args[0]) if error.args else ""
    if unknown := re.search(r'Key "(\w+)" does not exist', message):  # what a locked ConfigDict says
        present = re.findall(r"(\w+)\W{0,2}: ", message.split("Other fields present", 1)[-1])
        message = f"unknown config key {unknown[1]!r}{nearest(unknown[1], present)}"
    elif not isinstance(error, ConfigError):
        message = f"{type(error).__name__}: {message}"
    return ConfigError(f"{path}:{line}: {message}")


def load(spec: str, overrides: Mapping[str, Any] | None = None) -> Settings:
    """`FILE[:ARG]` and dotted overrides -> a locked, checked experiment. Raises ConfigError, and nothing else."""
    name, _, arg = spec.partition(":")
    path = _config_file(name)
    try:
        config = _module(path).get_config(arg)
    except (AttributeError, TypeError, KeyError, ValueError, NameError, ImportError, SyntaxError) as error:
        raise _told(path, error) from error
    return check(override(config.lock(), overrides or {}))


def load_sweep(path: str | os.PathLike[str]) -> tuple[str, list[dict[str, Any]]]:
    """A file of configs/sweeps/ -> its base config spec `CONFIG`, and the override dicts of `get_sweep()`."""
    module = _module(_config_file(path))
    if not hasattr(module, "CONFIG") or not hasattr(module, "get_sweep"):
        raise ConfigError(f"{path}: a sweep has CONFIG = 'configs/NAME.py' and get_sweep() -> list of override dicts")
    return module.CONFIG, [dict(point) for point in module.get_sweep()]


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
