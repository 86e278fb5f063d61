"""Small groups with their screens, for the tests of store, journal and pipeline."""

from collections.abc import Sequence

import numpy as np

from cuajax.data.images import image_hash
from cuajax.types import Action, Call, Completion, Group, Outcome, Step, Task, Trajectory

IMAGE_ID = 1
SIDE = 16  # pixels: four placeholders at patch 4, merge 2


def screen(seed: int, *, step: int = 0) -> np.ndarray:
    """A grey screen with a coloured button that moves from step to step."""
    rng = np.random.default_rng(seed)
    pixels = np.full((SIDE, SIDE, 3), 230, np.uint8)
    y, x = rng.integers(0, SIDE - 4, 2)
    pixels[y : y + 4, x : x + 4] = rng.integers(0, 200, 3)
    pixels[step % SIDE, :4] = rng.integers(0, 200, 3)
    return pixels


def group(
    number: int, *, rewards: Sequence[float] = (1.0, 0.0, 0.0), version: int = 1, steps: int = 2, invalid: int = 0
) -> tuple[Group, dict[str, np.ndarray]]:
    """A group "g<number>" of one attempt a reward, the first `invalid` of them invalid; and its images by hash."""
    rng = np.random.default_rng(number)
    task = Task(f"sim/click/{number}", "sim", "click", "click the red button", {"seed": number})
    images: dict[str, np.ndarray] = {}
    trajectories = []
    for slot, reward in enumerate(rewards):
        decisions = []
        for i in range(steps):
            pixels = screen(1000 * number + 10 * slot * (i > 0) + i, step=i)
            images[h := image_hash(pixels)] = pixels
            prompt = np.concatenate([np.full(4, IMAGE_ID), [2, 3], rng.integers(2, 9, i)]).astype(np.int32)
            k = int(rng.integers(1, 4))
            done = Completion(
                rng.integers(2, 9, k).astype(np.int32),
                -rng.random(k, np.float32),
                np.full(k, version, np.int32),
                "stop",
            )
            calls = (Call(Action("click", x=0.5, y=0.25)),)
            decisions.append(Step(i, prompt, (h,), done, calls, None, h, {"policy": 0.01}))
        status = "invalid" if slot < invalid else "success" if reward else "failure"
        outcome = Outcome(status, reward, "", {"seen": [1, 2]})
        trajectories.append(Trajectory(f"t{number}-{slot}", task.id, f"g{number}", slot, tuple(decisions), outcome))
    return Group(f"g{number}", task, tuple(trajectories)), images


def fill(store, count: int, *, start: int = 0, **options) -> list[Group]:
    """Appends `count` groups, one transaction each."""
    made = []
    for n in range(start, start + count):
        one, images = group(n, **options)
        store.append([one], images, [{"task": one.task.id, "n": n}])
        made.append(one)
    return made


def hashes(one: Group) -> list[str]:
    """Every prompt image of a group, in order."""
    return [h for t in one.trajectories for s in t.steps for h in s.image_hashes]


def same(a: Group, b: Group) -> bool:
    """Equality to the last bit, by what would be stored."""
    from cuajax import wire

    return wire.encode(a) == wire.encode(b)
