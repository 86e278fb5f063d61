"""PRM-GRPO on the embedded desktop: rounds of one-step candidates, scored by the desktop's exact process reward.

    python launch/train.py --config=configs/prm_grpo.py

A round collects attempts, keeps the steps that PRO-CUA's filters keep, samples candidates at each without a sandbox,
and trains on all of them once; KL is measured against the policy the round began with. Groups of equal rewards are
trained too: they pay KL.
Hardware: two CPU cores, no GPU; 7 to 12 minutes, warm-up included; 0.92 to 0.95 of new tasks succeed (three seeds).
`configs/prm_grpo.py:debug` runs the same pages in under a minute.
"""

from cuajax import config


def get_config(arg: str = "") -> config.Settings:
    options = config.parse_arg(arg, debug=False)
    made = config.desktop(
        "prm_grpo",
        algo=config.algo("prm_grpo", loss=dict(entropy_coef=1e-2)),
        rounds=config.rounds(rounds=28, tasks=128),  # 16 updates a round
        data=config.data(groups_per_update=32, rows=16, drop_zero_variance=False),
        train=config.train(updates=450),  # at most: the run ends with its rounds
        eval=config.evaluation(every=25, enough=0.95),  # updates are quick: the last points cost seconds
    )
    if not options.debug:
        return made
    # Attempts must end before their budget to leave states: the policy has to have learned to answer at all.
    return config.override(config.shrink(made), {"warmup.steps": 40, "warmup.check_every": 40, "rounds.tasks": 24})
