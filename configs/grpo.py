"""GRPO over whole attempts: the baseline STEPO is measured against. What weighs the same is the argument.

    python launch/train.py --config=configs/grpo.py               # each attempt (NorthCUA's mean)
    python launch/train.py --config=configs/grpo.py:token         # each response token
    python launch/train.py --config=configs/grpo.py:naive_step    # each decision, so that long attempts dominate

Hardware: two CPU cores, no GPU; 7 to 10 minutes, warm-up included; with `naive_step` 0.88 to 0.92 of new tasks succeed
(three seeds). Everything but the weights is as in configs/stepo.py.
`configs/grpo.py:debug` runs the same pages in under a minute.
"""

from cuajax import config


def get_config(arg: str = "") -> config.Settings:
    options = config.parse_arg(arg, debug=False, token=False, naive_step=False)
    if options.token and options.naive_step:
        raise config.ConfigError("grpo.py takes one of token and naive_step")
    aggregate = "token" if options.token else "naive_step" if options.naive_step else "trajectory"
    made = config.desktop(
        f"grpo_{aggregate}",
        algo=config.algo("grpo", credit=dict(aggregate=aggregate), loss=dict(entropy_coef=3e-3)),
    )
    return config.shrink(made) if options.debug else made
