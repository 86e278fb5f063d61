"""Single decisions for a supervised warm-up: random mid-task screens, short instructions, one right action each.

Labels follow the oracle: the first unmet clause in order (its tab first when the target is behind one), done when all
are met, failure when a named widget is not there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cuajax.sandbox.sim.families import FAMILIES, build, family
from cuajax.sandbox.sim.goals import Rect
from cuajax.sandbox.sim.questions import Asker, Mix
from cuajax.sandbox.sim.render import render
from cuajax.sandbox.sim.state import DELETED, PAGE_ROWS, Desktop
from cuajax.sandbox.sim.words import typed_word
from cuajax.types import Action


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One labelled decision; decisions of one screen share the `screenshot` array.

    start, end: where the action's points may lie, as (x, y, width, height) in fractions of the screen.
    tag: "read", "fail", "done" or the action's kind, for reports.
    """

    screenshot: np.ndarray  # uint8[H,W,3]
    instruction: str
    action: Action
    start: Rect | None
    end: Rect | None
    tag: str


def grounded(decision: Decision, action: Action) -> bool:
    """Whether a predicted action is as good as the label: same kind, points on target, same text, keys or status."""
    want = decision.action
    if (action.kind, action.text, action.keys, action.status) != (want.kind, want.text, want.keys, want.status):
        return False
    if want.kind == "scroll" and action.dy * want.dy <= 0:
        return False
    return _hits(decision.start, action.x, action.y) and _hits(decision.end, action.x2, action.y2)


def _hits(rect: Rect | None, x: float | None, y: float | None) -> bool:
    if rect is None:
        return True
    return x is not None and y is not None and 0 <= x - rect[0] < rect[2] and 0 <= y - rect[1] < rect[3]


def decisions(
    rng: random.Random,
    n_screens: int,
    per_screen: int,
    *,
    clauses: int = 1,
    pool: Sequence[str] = tuple(FAMILIES),
    weights: Mapping[str, float] | None = None,
    mix: Mix | None = None,
    size: tuple[int, int, int] = (64, 64, 1),
) -> list[Decision]:
    """`n_screens * per_screen` decisions, screen by screen.

    clauses: most clauses of an instruction. pool: families whose desktops are drawn. weights: of each verb, 1 where it
    has none; the screens are shared out to the pool's parts by them, whatever else a screen shows. size: width, height,
    scale.
    """
    mix = mix or Mix()
    width, height, scale = size
    having: dict[str, list[str]] = {}
    for name in pool:
        for part in dict.fromkeys(family(name).parts):
            having.setdefault(part, []).append(name)
    each = list(having.values())
    heavy = [(weights or {}).get(part.split("/")[0], 1.0) for part in having]
    result: list[Decision] = []
    for _ in range(n_screens):
        built = build(rng.choice(rng.choices(each, heavy)[0]), rng, width / scale, height / scale)
        desktop, parts = built.desktop, built.family.parts
        disturb(rng, desktop, parts, sparse=mix.sparse)
        shot = render(desktop, width=width, height=height, scale=scale)
        asker = Asker(rng, desktop, mix=mix, most=clauses, parts=parts)
        for _ in range(per_screen):
            words, move, tag = asker.ask()
            start, end = _fractions(desktop, move.start), _fractions(desktop, move.end)
            result.append(Decision(shot, words, move.action, start, end, tag))
    return result


def _fractions(desktop: Desktop, rect: Rect | None) -> Rect | None:
    if rect is None:
        return None
    w, h = desktop.width, desktop.height
    return rect[0] / w, rect[1] / h, rect[2] / w, rect[3] / h


# --------------------------------------------------------------------------------------------------- screens
def disturb(rng: random.Random, desktop: Desktop, parts: Sequence[str], *, sparse: float = 0.0) -> None:
    """Turns a start state into one from the middle of some attempt, in place; `sparse` in [0,1] drops widgets too."""
    if sparse > 0:
        _thin(rng, desktop, 1 - sparse * (1 - 0.4 * rng.random()))
    kinds: dict[str, list[int]] = {}
    for i, w in enumerate(desktop.widgets):
        kinds.setdefault(w.kind, []).append(i)
    _shuffle_widgets(rng, desktop, kinds, parts)
    _shuffle_front(rng, desktop, kinds, parts)


def _thin(rng: random.Random, desktop: Desktop, keep: float) -> None:
    """Drops widgets at random, at least one stays; what was behind a dropped tab in front is then simply there."""
    widgets, random_ = desktop.widgets, rng.random
    sure = rng.choice([i for i, w in enumerate(widgets[:4]) if w.kind != "bin" and w.page < 0])
    kept: dict[int, int] = {}
    for i, w in enumerate(widgets):
        reachable = w.page < 0 or w.page in kept or w.page == desktop.active
        if reachable and (w.kind in ("item", "list", "window") or i == sure or random_() < keep):
            kept[i] = len(kept)
    desktop.widgets = [widgets[i] for i in kept]
    for w in desktop.widgets:
        w.page = kept.get(w.page, -1)
    desktop.active = kept.get(desktop.active, -1)
    desktop.stack = [kept[i] for i in desktop.stack]


def _shuffle_widgets(rng: random.Random, desktop: Desktop, kinds: dict[str, list[int]], parts: Sequence[str]) -> None:
    widgets, random_ = desktop.widgets, rng.random
    for i, w in enumerate(widgets):
        kind = w.kind
        if kind == "checkbox":
            w.on = int(random_() < 0.35)
        elif kind in ("button", "icon", "window"):
            w.on = int(random_() < 0.25)
            if kind == "button" and w.on:
                desktop.pressed.append(i)
            elif kind == "icon" and random_() < 0.15:
                _remove_icon(rng, desktop, i, bins=kinds.get("bin", []), parts=parts)
        elif kind == "slider":
            w.value = int(random_() * 3)
        elif kind == "field":
            w.value = typed_word(rng) if random_() < 0.5 else ""
        elif kind in ("drop", "menu") and random_() < 0.65:
            w.value, w.on = w.options[int(random_() * 3)], int(kind == "menu")
    for kind in ("radio", "item"):
        if kind in kinds and random_() < 0.5:
            widgets[rng.choice(kinds[kind])].on = 1


def _remove_icon(
    rng: random.Random, desktop: Desktop, index: int, *, bins: Sequence[int], parts: Sequence[str]
) -> None:
    if "delete" in parts:
        desktop.widgets[index].value = DELETED
    elif bins and "put" in parts:
        desktop.widgets[index].value = target = rng.choice(bins)
        desktop.widgets[target].on = 1


def _shuffle_front(rng: random.Random, desktop: Desktop, kinds: dict[str, list[int]], parts: Sequence[str]) -> None:
    """Tabs, scrolling, stacking, and at most one of: submitted, dialog, focus, popup."""
    widgets, random_ = desktop.widgets, rng.random
    if "item" in kinds:
        chosen = [int(widgets[i].value) for i in kinds["item"] if widgets[i].on]  # kept in view: else none could tell
        desktop.offset = PAGE_ROWS * ((chosen[0] if chosen else int(random_() * len(kinds["item"]))) // PAGE_ROWS)
    if "tab" in kinds:
        desktop.active = rng.choice(kinds["tab"])
    if random_() < 0.5:
        desktop.stack.reverse()
    if "ok" in kinds and random_() < 0.08:
        desktop.submitted, desktop.dialog = True, False
        return
    desktop.dialog = desktop.dialog and random_() < 0.5
    if desktop.dialog:
        return
    owners = [
        i
        for i, w in enumerate(widgets)
        if w.kind == "drop"
        or (w.kind == "menu" and not w.on)
        or (w.kind == "icon" and w.value == -1 and "delete" in parts)
    ]
    if owners and random_() < 0.5:  # before focus: reading a popup's entries is learned last of all
        desktop.popup = rng.choice(owners)
    elif "field" in kinds and random_() < 0.5:
        desktop.focus = kinds["field"][0]
