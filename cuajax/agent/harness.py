"""From what an attempt has seen and done to the prompt of its next decision. Pure: no clock, no disk, no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from cuajax.data.images import image_hash
from cuajax.inputs.grid import image_tokens
from cuajax.inputs.processor import ImageSpec, resize
from cuajax.types import Action, Call, Image, Observation, Prompt, Step, Task


class Dialect(Protocol):
    """How one model family speaks: prompt layout, parser, coordinate map, stop ids."""

    stop_ids: tuple[int, ...]
    max_tokens: int

    def prompt_ids(self, instruction: str, history: Sequence[np.ndarray], image_tokens: int) -> np.ndarray: ...
    def parse(self, token_ids: np.ndarray | Sequence[int]) -> tuple[Call, ...]: ...
    def format(self, action: Action) -> list[int]: ...


class Seen(NamedTuple):
    """An observation made ready for prompts, once."""

    image: Image
    tokens: int  # placeholders it takes
    screen_hash: str  # of the full screenshot


@dataclass(frozen=True, slots=True)
class Harness:
    """The context policy: which screenshots and which earlier answers a decision is shown.

    `window` is how many of the last observations are shown as images; with `history` all earlier answers follow the
    instruction as text, exactly as they were sampled.
    """

    dialect: Dialect
    image: ImageSpec
    window: int = 1
    history: bool = False

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}, must be at least 1")


def see(observation: Observation, harness: Harness) -> Seen:
    """Resize and hash a screenshot. Raises ValueError for a shape the processor refuses."""
    pixels = resize(observation.screenshot, harness.image)
    digest = image_hash(pixels)
    screen = digest if pixels is observation.screenshot else image_hash(observation.screenshot)
    return Seen(Image(digest, pixels), image_tokens(pixels.shape[0], pixels.shape[1], harness.image), screen)


def prompt(task: Task, steps: Sequence[Step], seen: Sequence[Seen], harness: Harness) -> Prompt:
    """The next decision's prompt from all earlier steps and all observations so far (the last one is now).

    Without history and with window 1, the same screen and instruction give byte-identical prompts, so that a batch
    can merge them.
    """
    shown = seen[-harness.window :]
    answers = [step.completion.token_ids for step in steps] if harness.history else ()
    count = shown[0].tokens if len(shown) == 1 else sum(one.tokens for one in shown)
    ids = harness.dialect.prompt_ids(task.instruction, answers, count)
    return Prompt(ids, tuple(one.image for one in shown))


def check_limits(tasks: Iterable[Task], harness: Harness, *, screen: tuple[int, int], prompt_limit: int) -> int:
    """The longest prompt any of `tasks` can reach on a screen of (height, width) pixels; call it at start.

    Raises ValueError with the numbers when prompt and answer exceed `prompt_limit` tokens together.
    """
    h, w = resize(np.zeros((*screen, 3), np.uint8), harness.image).shape[:2]
    per_image = image_tokens(h, w, harness.image)
    longest = 0
    for task in tasks:
        images = per_image * min(harness.window, task.budget)
        text = len(harness.dialect.prompt_ids(task.instruction, (), 0))
        past = (task.budget - 1) * harness.dialect.max_tokens if harness.history else 0
        total = images + text + past + harness.dialect.max_tokens
        if total > prompt_limit:
            raise ValueError(
                f"task {task.id}: {images} image + {text} instruction + {past} history tokens and an answer of"
                f" {harness.dialect.max_tokens} make {total}, the limit is {prompt_limit}; choose a smaller window,"
                " budget or max_tokens, or fewer pixels"
            )
        longest = max(longest, total - harness.dialect.max_tokens)
    return longest
