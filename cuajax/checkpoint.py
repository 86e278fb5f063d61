"""Checkpoints on Orbax: params, optimizer, data cursor and meta as separate items, written in the background.

A step is committed as a whole or not at all, with a manifest of sizes and CRC-32, because the array format itself
does not notice a flipped bit. A step that is unfinished or damaged is passed over with a
warning; a directory that is not ours, or of another format, is refused by name.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from cuajax.types import FORMAT_VERSION

log = logging.getLogger(__name__)

MARKER = "cuajax.json"  # says that a directory is ours, and in which format
MANIFEST = "cuajax_manifest.json"
ITEMS = ("params", "opt", "data", "meta")
TREES = ("params", "opt")
MODES = ("max", "min")


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read: foreign, of another format, missing, damaged or of another shape."""


class Restored(NamedTuple):
    step: int
    params: Any
    opt: Any
    data: dict[str, Any]
    meta: dict[str, Any]  # format, step, version, config, metrics


class Checkpoints:
    """One directory of checkpoints. Keeps the newest keep_last and the best keep_best by a metric, both honoured.

    metric: name in the metrics given to `save`; a checkpoint without a finite value is never the best.
    read_only: for serving and evaluation beside a running writer; nothing is written or cleaned.
    Raises CheckpointError on a foreign directory or format, ValueError on a bad argument.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        metric: str = "",
        mode: str = "max",
        read_only: bool = False,
    ):
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last is {keep_last}, keep_best {keep_best}; expected >= 1 and >= 0")
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
        self._path = Path(directory).absolute()
        self._metric, self._sign, self._read_only = metric, 1.0 if mode == "max" else -1.0, read_only
        self._saving: int | None = None
        self._damaged: set[int] = set()
        _claim(self._path, read_only=read_only)
        for name in sorted(p.name for p in self._path.iterdir() if not _finished(p) and p.is_dir()):
            log.warning("%s: ignored the unfinished checkpoint %s", self._path, name)
        keep: list[Any] = [LatestN(keep_last)]
        if metric and keep_best:
            keep.append(BestN(get_metric_fn=self._rank, n=keep_best, keep_checkpoints_without_metrics=False))
        self._orbax = ocp.CheckpointManager(
            self._path,
            item_handlers={name: _handler(name) for name in ITEMS},
            options=ocp.CheckpointManagerOptions(
                create=False,
                read_only=read_only,
                save_interval_steps=0 if read_only else 1,
                cleanup_tmp_directories=not read_only,
                preservation_policy=AnyPreservationPolicy(keep),
                best_fn=self._rank,  # without one a reopened directory forgets its metrics
                async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
            ),
        )

    # ------------------------------------------------------------------------------------------------- writing
    def save(
        self,
        step: int,
        *,
        params: Any,
        opt: Any,
        data: Mapping[str, Any],
        version: int,
        config: str,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Copies the state out and returns while it is written; False if this step is already there.

        params, opt: pytrees of arrays; they may be donated as soon as this returns. data: JSON (the data cursor).
        version: the policy version published at this step. config: the configuration's fingerprint.
        Damaged steps found so far are removed: they would count as the newest. Raises CheckpointError behind a
        newer step (see `drop_after`); an error of the write (a full disk) is raised at the next save or by `wait`.
        """
        self._orbax.wait_until_finished()
        for damaged in self._damaged & set(self._orbax.all_steps()):
            self._orbax.delete(damaged)
        self._damaged.clear()
        newest = max(self._orbax.all_steps(), default=step)
        if newest > step:
            raise CheckpointError(f"step {step} is behind the newest checkpoint {newest} of {self._path}")
        if step in self._orbax.all_steps():
            return False
        figures = {k: float(v) for k, v in (metrics or {}).items()}
        meta = {"format": FORMAT_VERSION, "step": step, "version": version, "config": config}
        meta["metrics"] = {k: v for k, v in figures.items() if math.isfinite(v)}
        self._saving = step
        return self._orbax.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                opt=ocp.args.StandardSave(opt),
                data=ocp.args.JsonSave(dict(data)),
                meta=ocp.args.JsonSave(meta),
            ),
            metrics={self._metric: meta["metrics"][self._metric]} if self._metric in meta["metrics"] else None,
            force=True,
        )

    def drop_after(self, step: int) -> None:
        """Deletes every later step, to go on from an earlier one."""
        self._orbax.wait_until_finished()
        for later in [s for s in self._orbax.all_steps() if s > step]:
            self._orbax.delete(later)

    def wait(self) -> None:
        """Blocks until the save in flight is committed; raises its error if it failed."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        """Waits, then releases the threads."""
        self._orbax.wait_until_finished()
        self._orbax.close()

    # ------------------------------------------------------------------------------------------------- reading
    def steps(self) -> list[int]:
        """Committed and undamaged steps, oldest first; looks at the directory again."""
        self._orbax.reload()
        return [s for s in sorted(self._orbax.all_steps()) if self._usable(s)]

    def latest(self) -> int | None:
        """The newest usable step, or None. A damaged one is passed over with a warning."""
        self._orbax.reload()
        return next((s for s in sorted(self._orbax.all_steps(), reverse=True) if self._usable(s)), None)

    def best(self) -> int | None:
        """The usable step with the best metric (the newest of equals), or None."""
        ranked = [(self._sign * m["metrics"][self._metric], m["step"]) for m in map(self.meta, self.steps())
                  if self._metric in m["metrics"]]  # fmt: skip
        return max(ranked)[1] if ranked else None

    def meta(self, step: int) -> dict[str, Any]:
        """The meta item of a step. Raises CheckpointError if it is unreadable or of another format."""
        meta = self._json(step, "meta")
        _check_format(self._path / str(step) / "meta", meta)
        return meta

    def cursors(self) -> list[dict[str, Any]]:
        """The data item of every committed step, oldest step first: what a restart may still have to read from.

        Experience may be dropped only below the smallest of them. A save in flight is not among them.
        """
        self._orbax.reload()
        whole = [s for s in sorted(self._orbax.all_steps()) if not _damage(self._path / str(s), crc=False)]
        return [self._json(step, "data") for step in whole]

    def restore(self, params: Any, opt: Any, *, step: int | None = None) -> Restored:
        """Reads a step (None: the newest usable one) onto the shardings of the abstract trees params and opt.

        Leaves are arrays or ShapeDtypeStructs; one without a sharding goes to the first device. The mesh may differ
        from the one that saved. Raises CheckpointError if there is none, or if a leaf differs in name or shape.
        """
        step = self._choose(step)
        trees = {"params": _placed(params), "opt": _placed(opt)}
        for item, tree in trees.items():
            self._check_tree(step, item, tree)
        found = self._orbax.restore(
            step,
            args=ocp.args.Composite(
                data=ocp.args.JsonRestore(), **{k: ocp.args.StandardRestore(v) for k, v in trees.items()}
            ),
        )
        return Restored(step, found["params"], found["opt"], found["data"], self.meta(step))

    def restore_params(self, params: Any, *, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """(params, meta) of a step (None: the newest usable one), without reading the optimizer; as `restore`."""
        step = self._choose(step)
        tree = _placed(params)
        self._check_tree(step, "params", tree)
        found = self._orbax.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(tree)))
        return found["params"], self.meta(step)

    # ------------------------------------------------------------------------------------------------- inside
    def _json(self, step: int, item: str) -> dict[str, Any]:
        path = self._path / str(step) / item / "metadata"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: unreadable ({error})") from error

    def _rank(self, metrics: Mapping[str, float]) -> float:
        return self._sign * metrics.get(self._metric, -self._sign * math.inf)

    def _seal(self) -> None:
        """Runs in Orbax's thread once the files are written and, where commits are renames, before the commit."""
        if self._saving is None or jax.process_index() != 0:
            return
        root = next(self._path.glob(f"{self._saving}.orbax-checkpoint-tmp*"), self._path / str(self._saving))
        paths = [p for item in ITEMS for p in sorted((root / item).rglob("*")) if p.is_file()]
        files = {p.relative_to(root).as_posix(): [p.stat().st_size, _crc(p)] for p in paths}
        _write(root / MANIFEST, {"format": FORMAT_VERSION, "files": files})

    def _choose(self, step: int | None) -> int:
        if step is None:
            step = self.latest()
            if step is None:
                raise CheckpointError(f"{self._path} holds no usable checkpoint")
        elif step not in self._orbax.all_steps() or not self._usable(step):
            raise CheckpointError(f"{self._path} has no usable step {step}, expected one of {self.steps()}")
        return step

    def _usable(self, step: int) -> bool:
        damage = _damage(self._path / str(step))
        if damage:
            self._damaged.add(step)
            log.warning("%s: ignored the damaged checkpoint %d (%s)", self._path, step, damage)
        return not damage

    def _check_tree(self, step: int, item: str, tree: Any) -> None:
        stored = _shapes(self._orbax.item_metadata(step)[item])
        wanted = _shapes(tree)
        for path in sorted(stored.keys() | wanted.keys()):
            if stored.get(path) != wanted.get(path):
                raise CheckpointError(
                    f"{self._path}/{step}/{item}: {path} is {stored.get(path, 'absent')} in the checkpoint, "
                    f"{wanted.get(path, 'absent')} in this run"
                )


class Preemption:
    """Notices SIGTERM: `with Preemption() as p: ... if p.requested: save and leave`. Main thread only."""

    def __init__(self, *signals: signal.Signals):
        self.requested = False
        self._signals = signals or (signal.SIGTERM,)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Preemption:
        for number in self._signals:
            self._before[number] = signal.signal(number, self._notice)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _notice(self, number: int, frame: Any) -> None:
        self.requested = True


def _handler(name: str) -> Any:
    return ocp.StandardCheckpointHandler() if name in TREES else ocp.JsonCheckpointHandler()


def _placed(tree: Any) -> Any:
    first = SingleDeviceSharding(jax.local_devices()[0])

    def leaf(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or first)

    return jax.tree.map(leaf, tree)


def _shapes(tree: Any) -> dict[str, str]:
    return {
        "/".join(_key(k) for k in path): f"{jax.numpy.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _key(entry: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)


# -------------------------------------------------------------------------------------------------- directories
def _claim(path: Path, *, read_only: bool) -> None:
    """Marks an empty directory as ours, or checks the mark."""
    marker = path / MARKER
    if marker.is_file():
        try:
            found = json.loads(marker.read_text())
        except ValueError as error:
            raise CheckpointError(f"{marker}: not JSON ({error})") from error
        _check_format(marker, found)
        return
    names = sorted(p.name for p in path.iterdir() if p.name != MARKER + ".tmp") if path.is_dir() else []
    if names or path.is_file() or read_only:
        what = f"holds {', '.join(names[:5])}" if names else "is a file" if path.is_file() else "is empty or missing"
        raise CheckpointError(f"{path} is no checkpoint directory of cuajax: it has no {MARKER} and {what}")
    if jax.process_index() == 0:
        path.mkdir(parents=True, exist_ok=True)
        _write(marker, {"format": FORMAT_VERSION})
    if jax.process_count() > 1:
        ocp.utils.sync_global_processes("cuajax.checkpoint.claim")


def _check_format(path: Path, found: Any) -> None:
    number = found.get("format") if isinstance(found, dict) else None
    if number != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format {number!r}, this version reads format {FORMAT_VERSION}")


def _finished(path: Path) -> bool:
    return path.name.isdecimal() and (path / "_CHECKPOINT_METADATA").is_file()


def _damage(root: Path, *, crc: bool = True) -> str:
    """What is wrong with a committed step, or ''; without crc the files' bytes are not read."""
    missing = [item for item in ITEMS if not (root / item).is_dir()]
    if missing:
        return f"no {', '.join(missing)}"
    manifest = root / MANIFEST
    if not manifest.is_file():
        return f"no {MANIFEST}"
    try:
        files = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError) as error:
        return f"{MANIFEST}: {error}"
    for name, (size, expected) in files.items():
        path = root / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, expected {size}"
        if crc and _crc(path) != expected:
            return f"{name} fails its CRC-32"
    return ""


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _write(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
