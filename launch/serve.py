"""Serve the policy of a run directory, for a learner and actors in other processes.

    python launch/serve.py --config=configs/stepo.py --workdir=DIR [--address=HOST:PORT]

Starts from the newest checkpoint of the run, or from the seed's first parameters, and takes new weights from the
learner (launch/train.py --config.serving.address=run --config.rollout.here=False); a learner or actor may die and come
back. Where it listens stands in DIR/policy_server.json; started again, it listens there again if it can. SIGTERM or
Ctrl-C ends it. Other machines reach it with --address=0.0.0.0:PORT and a token in the environment (CUAJAX_TOKEN).
"""

import sys
from pathlib import Path
from typing import Any

import parts
import policy_server
import signals

from cuajax import metrics, program
from cuajax.config import ConfigError, Settings

LOCAL = "127.0.0.1:0"


def main(config: Settings, workdir: str, address: str) -> int:
    # ------------------------------------------------------------------------ check, before devices are touched
    harness = parts.harness(config)
    run_dir = program.prepare_run_dir(workdir or f"runs/{config.name}", config, join=True)
    lease = parts.hold(run_dir / "leases" / "server")
    metrics.setup_logging(run_dir)

    from cuajax.models import presets

    # ------------------------------------------------------------------------------------- the policy, and its port
    vocabulary = parts.tokenizer(harness).vocab_size
    cfg = presets.get(config.policy.preset, vocab_size=vocabulary, dtype=config.policy.dtype)
    params, version = policy_server.newest(run_dir, cfg, seed=config.seed)
    serving = listen(config, harness, params, run_dir=run_dir, cfg=cfg, version=version, address=address)
    policy_server.advertise(run_dir, serving.address)
    print(f"serving version {version} of {run_dir} at {serving.address}", file=sys.stderr)

    # ------------------------------------------------------------------------------------------- until told to stop
    with signals.Stop() as stop:
        while not stop.wait(30.0):
            now = serving.stats()
            print(f"version {now['version']:.0f}  requests {now['requests']:.0f}", file=sys.stderr)
    serving.stop()
    lease.release()
    return 0


def listen(
    config: Settings, harness: Any, params: Any, *, run_dir: Path, cfg: Any, version: int, address: str
) -> policy_server.Policy:
    """At `address`; without one where the run's server listened before, so that open connections find it again."""
    before = policy_server.advertised(run_dir)
    if not address and before:
        try:
            return policy_server.start(config, harness, params, cfg=cfg, version=version, address=before)
        except ConfigError as error:
            print(f"{error}; taking another port", file=sys.stderr)
    return policy_server.start(config, harness, params, cfg=cfg, version=version, address=address or LOCAL)


if __name__ == "__main__":
    program.run(main, doc=__doc__ or "", workdir="", address="")
