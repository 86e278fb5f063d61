"""Supervised learning on whole demonstrations: the desktop's oracle acts, a policy that knows nothing imitates it.

    python launch/train.py --config=configs/sft.py

Every update takes fresh demonstrations at training seeds, through the same store, packer and step as reinforcement.
Hardware: two CPU cores, no GPU; 20 minutes for 1500 updates, after which 0.9 of new tasks succeed.
`configs/sft.py:debug` runs the same pages in under a minute.
"""

from cuajax import config


def get_config(arg: str = "") -> config.Settings:
    options = config.parse_arg(arg, debug=False)
    made = config.desktop(
        "sft",
        algo=config.algo("sft"),
        warmup=config.warmup(),  # none
        data=config.data(groups_per_update=64, drop_zero_variance=False),
        optimizer=config.optimizer(name="muon", learning_rate=6e-3),
        train=config.train(updates=1500, publish_every=100),
        eval=config.evaluation(every=100, collapse=0.0),
    )
    return config.shrink(made) if options.debug else made
