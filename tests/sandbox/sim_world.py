"""What the tests of the embedded desktop share: random actions, walks, and a blind search for the fewest steps."""

from __future__ import annotations

import random
from collections.abc import Iterator

from cuajax.sandbox.sim.goals import Goal, met, next_move
from cuajax.sandbox.sim.state import (
    Desktop,
    apply,
    close_box,
    dialog_button,
    option_rects,
    place,
    visible,
)
from cuajax.sandbox.sim.words import typed_word
from cuajax.types import Action

KINDS = ("click",) * 6 + ("double_click", "right_click", "drag", "scroll", "type", "key")
COMPOSED = (
    "check2+type", "tabcheck+check1", "tab+tabcheck+tabcheck", "order2+tab", "tab+order2+tab", "form+dialog",
    "menu+delete", "close+check1", "list+drop", "put+delete", "close+dialog+radio", "slider+type+tab",
)  # fmt: skip


def random_action(rng: random.Random, bins: int = 16) -> Action:
    """A GUI action as a policy with `bins` coordinate bins might sample it."""
    x, y, x2, y2 = ((rng.randrange(bins) + 0.5) / bins for _ in range(4))
    keys = (rng.choice(("tab", "enter", "space", "escape", "backspace")),)
    return Action(
        rng.choice(KINDS),
        x,
        y,
        x2,
        y2,
        text=typed_word(rng),
        keys=keys,
        dy=rng.choice((-1.0, 1.0)),  # type: ignore
    )


def binned(action: Action, bins: int = 16) -> Action:
    """The action with its coordinates moved to the centres of their bins."""

    def centre(value: float | None) -> float | None:
        return None if value is None else (int(value * bins) + 0.5) / bins

    return Action(
        action.kind, centre(action.x), centre(action.y), centre(action.x2), centre(action.y2),
        text=action.text, keys=action.keys, dy=action.dy, status=action.status,
    )  # fmt: skip


def follow(desktop: Desktop, goal: Goal, limit: int = 40) -> list[Action]:
    """Runs the oracle in place until it terminates; returns its actions, the last one included."""
    actions = []
    for _ in range(limit):
        actions.append(next_move(desktop, goal).action)
        if actions[-1].kind == "terminate":
            return actions
        apply(desktop, actions[-1])
    raise AssertionError(f"the oracle does not end: {goal.instruction!r} {actions[-4:]}")


def every_action(desktop: Desktop, goal: Goal) -> Iterator[Action]:
    """All actions that can matter in a state, one for each target."""
    rects = [place(desktop, i) for i in range(len(desktop.widgets)) if visible(desktop, i)]
    rects += [close_box(desktop, i) for i in desktop.stack] + [dialog_button(desktop)]
    rects += [(w.x, w.y + 18, 8, 8) for w in desktop.widgets if w.kind == "window"]
    if desktop.popup >= 0:
        rects += list(option_rects(desktop, desktop.popup))
    points = [((x + w / 2) / desktop.width, (y + h / 2) / desktop.height) for x, y, w, h in rects]
    for x, y in points:
        yield Action("click", x, y)
        yield Action("double_click", x, y)
        yield Action("right_click", x, y)
    for i, w in enumerate(desktop.widgets):
        x, y = (w.x + w.w / 2) / desktop.width, (w.y + w.h / 2) / desktop.height
        if w.kind == "slider":
            for third in (1, 3, 5):
                yield Action("drag", x, y, (w.x + w.w * third / 6) / desktop.width, y)
        if w.kind == "icon" and visible(desktop, i):
            for b in desktop.widgets:
                if b.kind == "bin":
                    yield Action("drag", x, y, (b.x + 7) / desktop.width, (b.y + 5) / desktop.height)
        if w.kind == "list":
            yield Action("scroll", x, y, dy=1.0)
            yield Action("scroll", x, y, dy=-1.0)
        if w.kind == "field":
            yield Action("type", text=str(goal.want[i][1]))
    for key in ("tab", "enter", "space", "escape"):
        yield Action("key", keys=(key,))


def reachable_within(desktop: Desktop, goal: Goal, depth: int) -> int | None:
    """Fewest actions that meet the goal, found by trying everything; None if more than `depth`."""
    level, seen = [desktop], {desktop.key()}
    for steps in range(depth + 1):
        if any(met(state, goal) for state in level):
            return steps
        following = []
        for state in level if steps < depth else ():
            for action in every_action(state, goal):
                twin = state.copy()
                apply(twin, action)
                key = twin.key()
                if key not in seen:
                    seen.add(key)
                    following.append(twin)
        level = following
    return None
