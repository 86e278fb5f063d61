"""How a launch page starts: its command line, its run directory, and the one way it ends on a person's mistake.

Jax-free: everything here happens before a device is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ml_collections import ConfigDict

from cuajax.config import ConfigError, Settings, check, leaves, nearest, override

RUN_FORMAT = 1  # of config.json in a run directory
RUN_FILE = "config.json"
# A run may be continued with other values of these; any other difference is another experiment.
FREE_KEYS = frozenset({
    "train.updates", "eval.every", "eval.enough", "checkpoint.every", "checkpoint.keep", "serving.address",
    "rollout.here",
})  # fmt: skip


class RunDirError(ConfigError):
    """A run directory that cannot be used; nothing in it was changed."""


# ------------------------------------------------------------------------------------------- config files
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


# --------------------------------------------------------------------------------------------- command line
def command_line(
    argv: Sequence[str] | None = None, *, doc: str = "", default: str = "", **flags: Any
) -> tuple[Settings, Settings]:
    """`--config=FILE[:ARG] --config.KEY=VALUE --FLAG=VALUE` -> (experiment, flags). Raises ConfigError.

    `flags` are the page's own, with their defaults and types; a switch needs no value. `default` is the config of a
    page that works without one. `--help` prints `doc` and exits.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        shown = "".join(f"\n  --{name}={value!r}" for name, value in flags.items())
        sys.stdout.write(f"{doc.strip()}\n\n  --config=FILE[:ARG]\n  --config.KEY=VALUE ...{shown}\n")
        sys.exit(0)
    given: dict[str, str] = {}
    changes: dict[str, str] = {}
    spec = default
    while words:
        word = words.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        if not has_value and flags.get(name) is False:
            has_value, value = "=", "true"
        if not word.startswith("--") or not (has_value or words):
            raise ConfigError(f"cannot read {word!r}; settings look like --NAME=VALUE")
        value = value if has_value else words.pop(0)
        if name == "config":
            spec = value
        elif name.startswith("config."):
            changes[name.removeprefix("config.")] = value
        elif name in flags:
            given[name] = value
        else:
            known = ["--config", *(f"--{flag}" for flag in flags)]
            raise ConfigError(f"unknown flag {word.partition('=')[0]!r}{nearest(f'--{name}', known)}")
    if not spec:
        raise ConfigError("--config=FILE is missing, for example --config=configs/stepo.py")
    return load(spec, changes), override(ConfigDict(dict(flags)).lock(), given)


def run(
    main: Callable[..., Any], argv: Sequence[str] | None = None, *, doc: str = "", default: str = "", **flags: Any
) -> NoReturn:
    """Calls `main(config, **flags)` of a launch page; a ConfigError at any depth ends as one message and status 2.

    For a mistake to be told before jax loads, the page imports jax inside `main`.
    """
    try:
        config, given = command_line(argv, doc=doc, default=default, **flags)
        status = main(config, **given)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        status = 2
    sys.exit(status or 0)


# -------------------------------------------------------------------------------------------- run directory
def plain(config: Settings) -> dict[str, Any]:
    """Nested dicts of JSON values (a tuple becomes a list)."""
    made: dict[str, Any] = {}
    for key in config:
        value = config[key]
        made[key] = plain(value) if isinstance(value, ConfigDict | dict) else value
        if isinstance(value, tuple):
            made[key] = list(value)
    return made


def fingerprint(config: Settings) -> str:
    """16 hex digits over every setting but FREE_KEYS: equal for the starts of one run."""
    fixed = {path: value for path, value in leaves(plain(config)) if path not in FREE_KEYS}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def save_resolved(run_dir: str | os.PathLike[str], config: Settings) -> None:
    """Writes config.json whole or not at all. Raises OSError."""
    record = dict(format=RUN_FORMAT, fingerprint=fingerprint(config), config=plain(config))
    draft = Path(run_dir) / f".{RUN_FILE}.{os.getpid()}"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, Path(run_dir) / RUN_FILE)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def load_resolved(run_dir: str | os.PathLike[str]) -> Settings:
    """The locked experiment a run directory was made for. Raises RunDirError when it is not one of ours."""
    path = Path(run_dir) / RUN_FILE
    try:
        record = json.loads(path.read_bytes())
        version, settings = record["format"], record["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirError(f"{path} is not the config of a run: {error}") from error
    if version != RUN_FORMAT:
        raise RunDirError(f"{path} has format {version!r}; this version reads {RUN_FORMAT}")
    return _locked(settings)


def _locked(settings: Mapping[str, Any]) -> Settings:
    values = {
        key: _locked(value) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value
        for key, value in settings.items()
    }
    return ConfigDict(values).lock()


def _absent(path: Path) -> list[Path]:
    """The directories `mkdir(parents=True)` would make, innermost first."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    return missing


def _differences(ours: Settings, theirs: Settings) -> list[str]:
    new, kept = dict(leaves(plain(ours))), dict(leaves(plain(theirs)))
    return [
        f"{path} ({kept.get(path, 'absent')!r} there, {new.get(path, 'absent')!r} here)"
        for path in sorted(new.keys() | kept.keys())
        if path not in FREE_KEYS and new.get(path, ...) != kept.get(path, ...)
    ]


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time in here, where the file system has locks: several may start on one run directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def prepare_run_dir(workdir: str | os.PathLike[str], config: Settings, *, join: bool = False) -> Path:
    """Makes the run directory, or opens it for a continued run. Raises RunDirError, having changed nothing.

    `join`: for a process beside the learner, which leaves the settings of a run that is already there.
    Refused: a path that is no directory or cannot be written, a non-empty directory that is no run of ours,
    and a run of another experiment (the differing keys are named).
    """
    path = Path(workdir).absolute()
    missing: list[Path] = []
    try:
        if path.exists() and not path.is_dir():
            raise RunDirError(f"run directory {path} is not a directory; give another --workdir")
        missing = _absent(path)
        path.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            if not _continues(path, config) or not join:
                save_resolved(path, config)
    except OSError as error:
        with contextlib.suppress(OSError):
            for made in missing:
                made.rmdir()
        raise RunDirError(f"run directory {path} cannot be used: {error.strerror or error}") from error
    return path


def _continues(path: Path, config: Settings) -> bool:
    """Whether a run of this experiment is there already. Raises RunDirError when something else is."""
    if (path / RUN_FILE).exists():
        if differing := _differences(config, load_resolved(path)):
            raise RunDirError(f"run directory {path} holds another experiment; differing: {'; '.join(differing)}")
        return True
    if entries := sum(not entry.name.startswith(f".{RUN_FILE}.") for entry in path.iterdir()):  # a killed start's draft
        raise RunDirError(
            f"run directory {path} is occupied: {entries} entries and no {RUN_FILE}; give an empty or a new --workdir"
        )
    return False
