"""STEPO on the embedded desktop: from grounding to multi-step tasks in minutes.

    python launch/train.py --config=configs/stepo.py

Hardware: two CPU cores, no GPU. See README.md for the minutes and the success to expect.
`configs/stepo.py:debug` runs the same pages in under a minute. Families, warm-up and length are those of all
experiments on this desktop: `desktop` in cuajax/config.py.
"""

from cuajax import config


def get_config(arg: str = "") -> config.Settings:
    options = config.parse_arg(arg, debug=False)
    made = config.desktop("stepo", algo=config.algo("stepo", loss=dict(entropy_coef=3e-3)))
    return config.shrink(made) if options.debug else made
