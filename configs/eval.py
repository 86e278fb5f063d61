"""Score a run's checkpoint on held-out tasks that neither its training nor its own evaluations have seen.

    python launch/evaluate.py --run=runs/stepo --episodes=512 --seed=1
    python launch/evaluate.py --config=configs/eval.py --config.run=runs/stepo --config.sampled=true --config.samples=8

Hardware: two CPU cores. The last line is one JSON object.
"""

from cuajax import config


def get_config(arg: str = "") -> config.Settings:
    options = config.parse_arg(arg, debug=False)
    return config.scoring(episodes=10 if options.debug else 512)
