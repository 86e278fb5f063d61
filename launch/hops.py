"""The hops of a recorded trajectory, each as lines a person reads. No jax but in `batch`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import parts
from PIL import Image as Picture

from cuajax import metrics
from cuajax.config import Settings
from cuajax.data.pack import pack
from cuajax.data.store import Store
from cuajax.types import Group, Trajectory
from cuajax.viewer.screens import say


@dataclass(frozen=True)
class Recorded:
    """One attempt of one stored group, and where it lies."""

    config: Settings
    store: Store
    seq: int
    group: Group
    attempt: Trajectory
    rows: list[dict[str, Any]]  # the run's metrics
    out: Path

    def words(self, ids: Any) -> str:
        """Token ids as text; a run of image placeholders is told once."""
        tokenizer, told = parts.tokenizer(parts.harness(self.config)), []
        for i in ids.tolist():
            name = tokenizer.token(i)
            if told and told[-1][0] == name and i == tokenizer.image_id:
                told[-1][1] += 1
            else:
                told.append([name, 1])
        return " ".join(name if count == 1 else f"{name}x{count}" for name, count in told)

    def row(self) -> dict[str, Any]:
        """The metrics row of the update that trained this group; {} when none did."""
        return next((row for row in self.rows if self.seq in row.get("data/seqs", ())), {})


def numbers(values: np.ndarray, digits: int) -> str:
    return ", ".join(f"{v:.{digits}f}" for v in values.tolist())


# ------------------------------------------------------------------------------------------------------ the hops
def task(r: Recorded) -> Iterator[str]:
    t = r.group.task
    yield f"{t.id}  family {t.family}  budget {t.budget}  {'feasible' if t.feasible else 'infeasible'}"
    yield f"instruction: {t.instruction}"
    yield f"setup: {dict(t.setup)}"


def observation(r: Recorded) -> Iterator[str]:
    hashes = [s.screen_hash or s.image_hashes[-1] for s in r.attempt.steps]
    images, lost = r.store.try_images(hashes)
    r.out.mkdir(parents=True, exist_ok=True)
    for step, digest in zip(r.attempt.steps, hashes, strict=True):
        if digest in lost:
            yield f"step {step.index}: {digest[:12]} cannot be read: {lost[digest]}"
            continue
        path = r.out / f"{r.seq:06d}-{r.attempt.slot}-{step.index}.png"
        Picture.fromarray(np.ascontiguousarray(images[digest])).save(path)
        height, width = images[digest].shape[:2]
        yield f"step {step.index}: {width}x{height}  sha256 {digest[:12]}  {path}"


def prompt(r: Recorded) -> Iterator[str]:
    for step in r.attempt.steps:
        images = ", ".join(h[:12] for h in step.image_hashes)
        yield f"step {step.index}: {len(step.prompt_ids)} tokens, images {images}"
        yield f"    {r.words(step.prompt_ids)}"


def completion(r: Recorded) -> Iterator[str]:
    for step in r.attempt.steps:
        c = step.completion
        yield f"step {step.index}: {r.words(c.token_ids)}  ({c.finish_reason})"
        yield f"    ids {c.token_ids.tolist()}  logprobs [{numbers(c.logprobs, 3)}]  versions {c.versions.tolist()}"


def calls(r: Recorded) -> Iterator[str]:
    for step in r.attempt.steps:
        said = [say(c.action) if c.action else f"{c.tool} {dict(c.arguments)} -> {c.result}" for c in step.calls]
        yield f"step {step.index}: {', '.join(said) or f'no action: {step.parse_error}'}"


def outcome(r: Recorded) -> Iterator[str]:
    o = r.attempt.outcome
    yield f"{r.attempt.id}: {o.status}  reward {o.reward:g}  {o.reason}"
    yield f"seconds: { {k: round(v, 4) for k, v in r.attempt.timings.items()} }"


def group(r: Recorded) -> Iterator[str]:
    g = r.group
    yield f"{g.id} (seq {r.seq}): {len(g.trajectories)} attempts, {len(g.valid)} valid" + (
        f", candidates of step {g.state[1]} of {g.state[0]}" if g.state else ""
    )
    for t in g.trajectories:
        yield f"    slot {t.slot}: {t.outcome.status:8} reward {t.outcome.reward:g}  {len(t.steps)} decisions"
    yield f"delta: {r.store.deltas(r.seq)}"


def credit(r: Recorded) -> Iterator[str]:
    made = parts.credit(r.config)(r.group)
    place = [t.slot for t in r.group.trajectories].index(r.attempt.slot)
    yield f"{r.config.algo.name}: the group adds mass {made.mass:g}"
    for i, (a, u) in enumerate(zip(made.advantages[place], made.weights[place], strict=True)):
        yield f"step {i}: advantage [{numbers(a, 4)}]  u [{numbers(u, 5)}]"


def batch(r: Recorded) -> Iterator[str]:
    from cuajax.data.pipeline import samples_of

    harness, give = parts.harness(r.config), parts.credit(r.config)
    seqs = r.row().get("data/seqs", [r.seq])
    credited = [(g, give(g)) for g in map(r.store.read, seqs)]
    total = sum(c.mass for _, c in credited) or 1.0
    samples = [s for g, c in credited for s in samples_of(g, c, total)]
    images = r.store.load_images(h for s in samples for h in s.image_hashes)
    made, stats = pack(samples, images, spec=parts.pack_spec(harness, r.config, r.config.data))
    yield f"groups {seqs}: total mass {total:g}, weights sum to {float(made.weight.sum()):.6f}"
    yield f"tokens {made.tokens.shape} (microbatches, rows, tokens)  targets {made.targets.shape}  " + "  ".join(
        f"{k} {v:.3g}" for k, v in stats._asdict().items() if isinstance(v, int | float)
    )
    for s in samples:
        if s.name.startswith(f"{r.group.id}/{r.attempt.slot}/"):
            yield f"    {s.name}: {len(s.prompt_ids)} + {len(s.response_ids)} tokens  w [{numbers(s.weight, 6)}]"


def update(r: Recorded) -> Iterator[str]:
    row = r.row()
    if not row:
        yield "no update of this run trained the group"
        return
    yield f"update {row['step']} trained groups {row['data/seqs']}"
    yield "  ".join(f"{k} {metrics.brief(v)}" for k, v in row.items() if k.startswith("train/"))


def version(r: Recorded) -> Iterator[str]:
    sampled = sorted({int(v) for s in r.attempt.steps for v in s.completion.versions})
    yield f"sampled by versions {sampled}; after its update version {r.row().get('train/version', 'none')} was served"


HOPS: dict[str, Callable[[Recorded], Iterator[str]]] = {
    f.__name__: f
    for f in (task, observation, prompt, completion, calls, outcome, group, credit, batch, update, version)
}
