"""What weighs the same in GRPO, three seeds each: attempts, response tokens or decisions.

python launch/sweep.py --sweep=configs/sweeps/aggregates.py
"""

CONFIG = "configs/grpo.py"


def get_sweep() -> list[dict]:
    return [
        {"algo.credit.aggregate": aggregate, "seed": seed}
        for aggregate in ("trajectory", "token", "naive_step")
        for seed in range(3)
    ]
