"""Look at any hop of a recorded trajectory, or learn from recorded experience.

    python launch/replay.py dump --run=DIR --hop=NAME [--seq=N] [--slot=K] [--out=DIR]
    python launch/train.py --config=CONFIG --config.rollout.replay=DIR/experience --workdir=OTHER

`dump` prints one hop of attempt --slot of group --seq (default: the last group's first attempt) from DIR's store:
task, observation (PNG files go to --out, DIR/dump by default), prompt, completion, calls, outcome, group, credit,
batch, update, version; `all` prints them one after the other. The second line is a learner without actors: the same
store and config give bit-identical updates, however often it is killed. No jax is loaded for the first eight hops.
"""

import argparse
import sys
from pathlib import Path

from hops import HOPS, Recorded

from cuajax import metrics, program
from cuajax.config import ConfigError
from cuajax.data.database import StoreError
from cuajax.data.records import RecordError
from cuajax.data.store import Store


# ------------------------------------------------------------------------------------------------------ the command
def find(run: Path, *, seq: int, slot: int, out: str) -> Recorded:
    """The attempt asked for. Raises ConfigError with the choices."""
    config = program.load_resolved(run)
    try:
        store = Store.open(config.rollout.replay or str(run / "experience"))
        head = store.info()
        seq = head.seq - 1 if seq < 0 else seq
        chosen = store.read(seq)
    except (StoreError, RecordError) as error:
        raise ConfigError(f"group {seq} of {run}: {error}") from error
    slots = [t.slot for t in chosen.trajectories]
    if slot >= 0 and slot not in slots:
        raise ConfigError(f"group {seq} has no slot {slot}; choices: {', '.join(map(str, slots))}")
    attempt = chosen.trajectories[slots.index(slot) if slot >= 0 else 0]
    return Recorded(config, store, seq, chosen, attempt, metrics.read_rows(run), Path(out) if out else run / "dump")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["dump"])
    parser.add_argument("--run", required=True, type=Path)
    parser.add_argument("--hop", required=True, choices=[*HOPS, "all"])
    parser.add_argument("--seq", type=int, default=-1)
    parser.add_argument("--slot", type=int, default=-1)
    parser.add_argument("--out", default="")
    given = parser.parse_args(argv)
    try:
        recorded = find(given.run, seq=given.seq, slot=given.slot, out=given.out)
        for name in HOPS if given.hop == "all" else [given.hop]:
            print(f"-- {name}")
            for line in HOPS[name](recorded):
                print(line)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
