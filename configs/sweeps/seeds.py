"""STEPO over three seeds: how much of a result is luck.

python launch/sweep.py --sweep=configs/sweeps/seeds.py
"""

CONFIG = "configs/stepo.py"


def get_sweep() -> list[dict]:
    return [{"seed": seed} for seed in range(3)]
