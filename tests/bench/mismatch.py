"""Sampler against trainer at version lag 0: |logp recorded while sampling - logp of the packed batch|, fp32.

    python -m tests.bench mismatch --run=runs/stepo [--tokens=10000] [--checkpoint=latest|best|STEP] [--bar=1e-5]

Serves the checkpoint over loopback gRPC, runs live attempts at temperature 1 into a temporary store, and packs their
groups through the training pipeline; nothing is updated or published, so both sides have the same parameters.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cuajax import metrics
from cuajax.algorithms import stepo
from cuajax.data.store import Store
from cuajax.rollout.service import RolloutService
from tests.bench import _runs
from tests.bench._runs import Run

SECONDS = 600.0  # without a batch for so long is a fault


def live_batches(run: Run, serving: Any, store: Store, *, version: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Packed batches of live attempts, as training would get them; ends the attempts when closed."""
    import parts

    from cuajax.data.pipeline import Rules, experience

    config, harness = run.config, parts.harness(run.config)
    progress = parts.Progress(store, seq=0, shared=False)
    service = RolloutService(
        parts.suite(config), serving.connect(), store, harness=harness, curriculum=parts.curriculum(config),
        plan=dataclasses.replace(parts.plan(config), temperature=1.0), consumed=progress.consumed,
    )  # fmt: skip
    rules = Rules(  # one version for ever, and groups with equal rewards too: a batch is about tokens here
        groups_per_update=config.data.groups_per_update, max_lag=0, drop_zero_variance=False, first_version=version,
        publish_every=1 << 30,
    )  # fmt: skip
    spec = parts.pack_spec(harness, config, config.data)
    # Logprobs do not depend on credit; STEPO's weighs every token of every algorithm's live attempts.
    dataset = experience(store, stepo.credit, spec=spec, rules=rules, prefetch=1, timeout=1.0)
    batches, waited = iter(dataset), 0.0
    service.start()
    try:
        while waited < SECONDS:
            service.check()
            try:
                yield next(batches)
            except TimeoutError:
                waited += 1.0
                continue
            waited = 0.0
            progress.advance(batches.get_state()["seq"], published=False)
    finally:
        service.stop(drain=False)
        batches.close()
    raise SystemExit(f"no batch of attempts within {SECONDS:g} s")


def gaps(run: Run, params: Any, *, cfg: Any, tokens: int) -> dict[str, np.ndarray]:
    """Logprobs float32[n] of the same n >= `tokens` response tokens, by trainer and by sampler."""
    from cuajax.models import policy
    from cuajax.train.step import make_score_step

    score = make_score_step(functools.partial(policy.token_logprobs, cfg=cfg, temperature=1.0))
    found: dict[str, list[np.ndarray]] = {"trainer": [], "sampler": []}
    count = 0
    with tempfile.TemporaryDirectory() as scratch:
        store = Store.open(Path(scratch) / "experience", create=True)
        version = store.new_version()
        with _runs.served(run, params, cfg=cfg, version=version, address="127.0.0.1:0") as serving:
            batches = live_batches(run, serving, store, version=version)
            for batch, info in batches:
                if set(info["lags"]) != {0}:
                    raise SystemExit(f"a batch has lags {info['lags']}, all must be 0")
                used = np.asarray(batch.weight) > 0
                found["trainer"].append(np.asarray(score(params, batch))[used])
                found["sampler"].append(np.asarray(batch.behaviour_logp)[used])
                count += int(used.sum())
                if count >= tokens:
                    break
            batches.close()
        store.close()
    return {name: np.concatenate(parts) for name, parts in found.items()}


def main(argv: list[str]) -> dict:
    parser = argparse.ArgumentParser("tests.bench mismatch", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--run", type=Path, required=True, help="a run directory")
    parser.add_argument("--checkpoint", default="latest", help="latest, best or a step")
    parser.add_argument("--tokens", type=int, default=10_000, help="at least so many")
    parser.add_argument("--bar", type=float, default=1e-5, help="largest difference allowed")
    given = parser.parse_args(argv)
    run = Run.of(given.run)
    cfg, params, step = _runs.policy_of(run, which=given.checkpoint, dtype="float32")
    found = gaps(run, params, cfg=cfg, tokens=given.tokens)
    gap = np.abs(found["trainer"].astype(np.float64) - found["sampler"])
    p50, p99, p999 = np.percentile(gap, [50, 99, 99.9])
    told = {"tokens": len(gap), "max": float(gap.max()), "mean": float(gap.mean()), "p50": p50, "p99": p99,
            "p99.9": p999, "mean_logp": float(found["sampler"].mean()), "bar": given.bar}  # fmt: skip
    print(f"{run.path}, checkpoint {step}, live attempts over gRPC at T=1; {_runs.machine()}")
    rows = [(name, f"{value:.3g}" if isinstance(value, float) else str(value)) for name, value in told.items()]
    metrics.print_table("|logp(trainer) - logp(sampler)|, fp32, lag 0", ("what", "value"), rows)
    print("within the bar" if told["max"] <= given.bar else "OVER THE BAR")
    return {**told, "p50": float(p50), "p99": float(p99), "p99.9": float(p999)} | {
        "ok": told["max"] <= given.bar,
        "checkpoint": step,
    }
