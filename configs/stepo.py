"""STEPO on the embedded desktop: from grounding to multi-step tasks in minutes.

    python launch/train.py --config=configs/stepo.py

Hardware: two CPU cores, no GPU; 7 to 10 minutes, of which the warm-up takes 5 to 8; 0.88 to 0.95 of new tasks succeed
(README.md has the table of five seeds).
`configs/stepo.py:debug` runs the same pages in under a minute. Families, warm-up and length are those of all
experiments on this desktop: `desktop` in cuajax/config.py.
"""

from cuajax import config


def get_config(arg: str = "") -> config.Settings:
    options = config.parse_arg(arg, debug=False)
    made = config.desktop("stepo", algo=config.algo("stepo", loss=dict(entropy_coef=3e-3)))
    return config.shrink(made) if options.debug else made
