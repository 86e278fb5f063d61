"""Run attempts for a learner in another process: hops 1-6, from the curriculum to groups in the run's store.

    python launch/rollout.py --config=configs/stepo.py --workdir=DIR [--actor=NAME]

Asks the policy server of the run directory (launch/serve.py), writes to its experience, and keeps pace with what the
learner has read (launch/train.py --config.serving.address=run --config.rollout.here=False). The three start in any
order; each may be killed and started again. More of these run side by side under other names. SIGTERM or Ctrl-C
finishes the groups in flight first. No jax is loaded.
"""

import sys
import time

import parts
import policy_server
import signals

from cuajax import metrics, program
from cuajax.config import Settings
from cuajax.data.store import Store

TELL_SECONDS = 10.0


def main(config: Settings, workdir: str, actor: str) -> int:
    # ------------------------------------------------------------------------------------------------ check
    suite, harness = parts.suite(config), parts.harness(config)
    run_dir = program.prepare_run_dir(workdir or f"runs/{config.name}", config, join=True)
    lease = parts.hold(run_dir / "leases" / ("-".join(["rollout", actor] if actor else ["rollout"])))
    metrics.setup_logging(run_dir)

    # -------------------------------------------------------------- a server that answers, a learner that reads
    store = Store.open(str(run_dir / "experience"), create=True, budget_bytes=config.data.store_budget)
    serving = policy_server.join(config.serving.address or "run", run_dir)
    print(f"policy server at {serving.address}; waiting for the learner", file=sys.stderr)
    while store.get("learner") is None:  # it is in its warm-up, whose versions are not to be learned from
        time.sleep(policy_server.POLL)

    # ----------------------------------------------------------------------------------------------- attempts
    prefix = f"{actor}-" if actor else ""
    actors = parts.actors(config, suite, harness, connect=serving.connect, store=store, actor=prefix)
    actors.start()
    told, ended = time.monotonic(), False
    with signals.Stop() as stop:
        while not stop.wait(0.5) and not (ended := getattr(actors, "done", False)):
            actors.check()
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                print(_line(actors.snapshot()), file=sys.stderr)
    actors.stop(drain=True)
    if ended:
        store.finish()  # all rounds are over
    print(_line(actors.snapshot()), file=sys.stderr)
    store.close()
    lease.release()
    return 0


def _line(stats: dict) -> str:
    return (
        f"groups {stats['groups']:.0f}  attempts {stats.get('attempts', stats.get('collected', 0)):.0f}"
        f"  passed {stats['passed']:.0f}  ready {stats['ready']:.0f}"
    )


if __name__ == "__main__":
    program.run(main, doc=__doc__ or "", workdir="", actor="")
