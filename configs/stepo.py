"""STEPO on the embedded desktop: from grounding to multi-step tasks in minutes.

    python launch/train.py --config=configs/stepo.py

Hardware: two CPU cores, no GPU. See README.md for the minutes and the success to expect.
`configs/stepo.py:debug` runs the same pages in under a minute.
"""

from cuajax import config

FAMILIES = (
    "check1", "check2", "check3", "type", "drop", "tabcheck", "typecheck", "droptype", "radiocheck", "order3", "infeasible",
)  # fmt: skip


def get_config(arg: str = "") -> config.Settings:
    options = config.parse_arg(arg, debug=False)
    made = config.experiment(
        "stepo",
        suite=config.suite(families=FAMILIES, infeasible=("infeasible",)),
        algo=config.algo("stepo", loss=dict(entropy_coef=3e-3)),
        warmup=config.warmup(steps=900, second_steps=450),
        train=config.train(updates=300),
        eval=config.evaluation(every=50),
    )
    return config.shrink(made) if options.debug else made
