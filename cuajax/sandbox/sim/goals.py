"""What a task wants of the desktop: clauses, whether they are met, how far it is, and the next right action.

A clause is a tuple of instruction words, verb first: ("check", "red"), ("type", "dot"), ("put", "red", "blue").
Everything reads the state, never pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cuajax.sandbox.sim.state import (
    DELETE_ENTRY,
    DELETED,
    PAGE_ROWS,
    Desktop,
    close_box,
    coverers,
    dialog_button,
    option_rects,
    place,
    visible,
    widget_at,
)
from cuajax.sandbox.sim.words import COLOURS, LEVELS, VERB_OF
from cuajax.types import Action

Clause = tuple[str, ...]
Rect = tuple[float, float, float, float]  # x, y, width, height in unscaled pixels
KIND_OF = {verb: kind for kind, verb in VERB_OF.items()} | {"delete": "icon", "put": "icon"}
_COLOUR = {name: k for k, name in enumerate(COLOURS)}
_EXCLUSIVE = frozenset(("radio", "item"))
_SOLITARY = frozenset(("field", "drop", "menu"))  # a desktop has one of each: clauses do not name it


class Move(NamedTuple):
    """A right next action, with the rectangles in which its points may lie."""

    action: Action
    start: Rect | None = None
    end: Rect | None = None


SUCCEED = Move(Action("terminate", status="success"))
FAIL = Move(Action("terminate", status="failure"))


@dataclass(frozen=True, slots=True)
class Goal:
    """Clauses resolved against one start state; `want[i]` is widget i's (on, value) in every accepted end state."""

    clauses: tuple[Clause, ...]
    submit: bool
    feasible: bool
    order: tuple[int, ...]  # widgets the clauses name, in order, then all others
    want: tuple[tuple[int, int | str], ...]
    presses: tuple[int, ...]  # every button press, in order
    tab: int = -1  # the tab that must be in front at the end

    @property
    def instruction(self) -> str:
        return " ".join([word for clause in self.clauses for word in clause] + ["submit"] * self.submit)


def find(desktop: Desktop, clause: Clause) -> int:
    """Index of the widget a clause is about, on any page; -1 if there is none."""
    kind = KIND_OF[clause[0]]
    colour = -1 if kind == "field" else _COLOUR[clause[1]]
    for index, w in enumerate(desktop.widgets):
        if w.kind == kind and (w.colour == colour or kind == "field" or (kind in _SOLITARY and colour in w.options)):
            return index
    return -1


def _wanted(desktop: Desktop, clause: Clause, now: tuple[int, int | str]) -> tuple[int, int | str]:
    """What a clause makes of its target's (on, value)."""
    verb, (on, value) = clause[0], now
    if verb == "type":
        return on, clause[1]
    if verb == "choose":
        return on, _COLOUR[clause[1]]
    if verb == "menu":
        return 1, _COLOUR[clause[1]]
    if verb == "slide":
        return on, LEVELS.index(clause[2])
    if verb == "delete":
        return on, DELETED
    if verb == "put":
        return on, find(desktop, ("bin", clause[2]))
    return 1, value


def resolve(desktop: Desktop, clauses: Sequence[Clause], *, submit: bool = False, feasible: bool = True) -> Goal:
    """Fixes what clauses mean on this desktop: their targets as named, everything else as it is now.

    Raises ValueError if a feasible goal names something that is not there, or sends an icon to two places.
    """
    want = [(w.on, w.value) for w in desktop.widgets]
    targets: list[int] = []
    presses = list(desktop.pressed)
    tab = -1
    for clause in clauses if feasible else ():
        index = find(desktop, clause)
        if index < 0 or (clause[0] == "put" and find(desktop, ("bin", clause[2])) < 0):
            raise ValueError(f"{' '.join(clause)!r} names nothing on this desktop")
        kind = desktop.widgets[index].kind
        if kind == "tab":
            tab = index
            continue
        if kind in _EXCLUSIVE:
            want = [(0, v) if desktop.widgets[i].kind == kind else (on, v) for i, (on, v) in enumerate(want)]
        before, want[index] = want[index], _wanted(desktop, clause, want[index])
        if kind == "icon" and before[1] not in (desktop.widgets[index].value, want[index][1]):
            raise ValueError(f"{' '.join(clause)!r} sends an icon to a second place")
        if clause[0] == "put":
            want[int(want[index][1])] = (1, -1)
        if kind == "button" and index not in presses:
            presses.append(index)
        targets.append(index)
    named = dict.fromkeys(targets)
    order = (*named, *(i for i in range(len(desktop.widgets)) if i not in named))
    return Goal(tuple(clauses), submit, feasible, order, tuple(want), tuple(presses), tab)


def met(desktop: Desktop, goal: Goal) -> bool:
    """All clauses met, no other widget changed, submitted iff asked; False for infeasible goals."""
    if desktop.submitted != goal.submit or not goal.feasible or (goal.tab >= 0 and desktop.active != goal.tab):
        return False
    if desktop.pressed != list(goal.presses):
        return False
    return all((w.on, w.value) == want for w, want in zip(desktop.widgets, goal.want, strict=True))


# ----------------------------------------------------------------------------------------------- how far it is
def pending(desktop: Desktop, goal: Goal) -> list[int]:
    """Widgets still to be acted on, in clause order (collateral changes last)."""
    widgets, want = desktop.widgets, goal.want
    return [
        i
        for i in goal.order
        if (widgets[i].on, widgets[i].value) != want[i]
        and widgets[i].kind != "bin"
        and not (widgets[i].kind in _EXCLUSIVE and widgets[i].on)  # the wanted one of its group stands for it
    ]


def remaining(desktop: Desktop, goal: Goal) -> float:
    """Fewest GUI actions still needed, plus 1 for the decision to terminate; infinite when nothing can help."""
    if not goal.feasible or met(desktop, goal):
        return 1
    if desktop.submitted or not _alive(desktop, goal):
        return math.inf
    needs = pending(desktop, goal)
    steps = sum(_steps(desktop, goal, i) for i in needs)
    steps += _switches(desktop, goal, needs) + desktop.dialog + goal.submit
    if desktop.popup >= 0 and steps and desktop.popup not in _popup_needs(desktop, goal, needs):
        steps += 1  # a click to close it
    return steps + 1


def _alive(desktop: Desktop, goal: Goal) -> bool:
    """Whether every change that cannot be undone is one the goal wants."""
    if desktop.pressed != list(goal.presses[: len(desktop.pressed)]):
        return False
    pairs = list(zip(desktop.widgets, goal.want, strict=True))
    chosen = {w.kind for w, (on, _) in pairs if on and w.kind in _EXCLUSIVE}
    for w, (on, value) in pairs:
        kind = w.kind
        if kind in _EXCLUSIVE:
            if w.on and not on and kind not in chosen:
                return False
        elif kind == "drop":
            if value == -1 and w.value != -1:
                return False
        elif kind == "menu":
            if w.on > on or (w.on == on and w.value != value):
                return False
        elif kind in ("icon", "window", "bin") and (w.on > on or (kind == "icon" and w.value not in (-1, value))):
            return False
    return True


def _steps(desktop: Desktop, goal: Goal, index: int) -> int:
    """GUI actions one pending widget needs once its page is in front."""
    w, (on, value) = desktop.widgets[index], goal.want[index]
    kind = w.kind
    if kind == "field":
        return 1 if desktop.focus == index else 2
    if kind in ("drop", "menu"):
        return 1 if desktop.popup == index else 2
    if kind == "item":
        return 1 + _scrolls(desktop, index)
    if kind == "window":
        return 2 if any(not goal.want[i][0] for i in coverers(desktop, index)) else 1
    if kind == "icon":
        gone = 0 if w.value == value else 1 if value != DELETED or desktop.popup == index else 2
        return gone + (w.on != on)
    return 1


def _scrolls(desktop: Desktop, index: int) -> int:
    return abs(int(desktop.widgets[index].value) // PAGE_ROWS - desktop.offset // PAGE_ROWS)


def _popup_needs(desktop: Desktop, goal: Goal, needs: Iterable[int]) -> list[int]:
    """Pending widgets whose own popup is the way to go on."""
    widgets = desktop.widgets
    return [
        i
        for i in needs
        if widgets[i].kind in ("drop", "menu") or (widgets[i].kind == "icon" and goal.want[i][1] == DELETED)
    ]


def _route(desktop: Desktop, goal: Goal, needs: list[int]) -> list[int]:
    """Tabs to bring to the front, in order: free pages, then those that ordered presses force, `goal.tab` last."""
    widgets, done, forced = desktop.widgets, len(desktop.pressed), []
    at = desktop.active
    for index in goal.presses[done:]:
        page = widgets[index].page
        if page >= 0 and page != at:
            forced.append(page)
            at = page
    free = dict.fromkeys(widgets[i].page for i in needs if widgets[i].page >= 0)
    route = [p for p in free if p != desktop.active and p not in forced and p != goal.tab] + forced
    if goal.tab >= 0 and (route[-1] if route else desktop.active) != goal.tab:
        route.append(goal.tab)
    return route


def _switches(desktop: Desktop, goal: Goal, needs: list[int]) -> int:
    return len(_route(desktop, goal, needs))


# ------------------------------------------------------------------------------------------------- what to do
def next_move(desktop: Desktop, goal: Goal) -> Move:
    """The oracle: from any state, the action that lowers `remaining` or rightly ends the task."""
    if not goal.feasible:
        return FAIL
    if met(desktop, goal):
        return SUCCEED
    if desktop.submitted or not _alive(desktop, goal):
        return FAIL
    if desktop.dialog:
        return click(desktop, dialog_button(desktop))
    needs = pending(desktop, goal)
    if desktop.popup >= 0:
        if desktop.popup in _popup_needs(desktop, goal, needs):
            return _work(desktop, goal, desktop.popup)
        return click(desktop, place(desktop, desktop.popup))
    if desktop.focus in needs and desktop.widgets[desktop.focus].kind == "field":
        return _work(desktop, goal, desktop.focus)
    ready = [i for i in needs if not _blocked(desktop, goal, i)]
    here = [i for i in ready if desktop.widgets[i].page in (-1, desktop.active)]
    route = _route(desktop, goal, needs)
    # keep clause order, but never leave a page with work on it
    if here and not (ready[0] not in here and all(desktop.widgets[i].page < 0 for i in here)):
        return _work(desktop, goal, here[0])
    if route:
        return click(desktop, place(desktop, route[0]))
    return click(desktop, place(desktop, next(i for i, w in enumerate(desktop.widgets) if w.kind == "ok")))


def _blocked(desktop: Desktop, goal: Goal, index: int) -> bool:
    kind = desktop.widgets[index].kind
    if kind == "button":
        return goal.presses[len(desktop.pressed)] != index
    if kind == "window":
        return any(goal.want[i][0] for i in coverers(desktop, index))
    return False


def click(desktop: Desktop, rect: Rect, kind: str = "click") -> Move:
    x, y = (rect[0] + rect[2] / 2) / desktop.width, (rect[1] + rect[3] / 2) / desktop.height
    return Move(Action(kind, x, y), rect)  # type: ignore[arg-type]


def _drag(desktop: Desktop, start: Rect, end: Rect) -> Move:
    a, b = click(desktop, start).action, click(desktop, end).action
    return Move(Action("drag", a.x, a.y, b.x, b.y), start, end)


def _work(desktop: Desktop, goal: Goal, index: int) -> Move:
    """The next action on one pending widget that is within reach."""
    w, (on, value) = desktop.widgets[index], goal.want[index]
    kind, rect = w.kind, place(desktop, index)
    if kind == "field":
        if desktop.focus != index:
            return click(desktop, rect)
        return Move(Action("type", text=str(value)) if value else Action("key", keys=("backspace",)))
    if kind in ("drop", "menu") and desktop.popup == index:
        return click(desktop, list(option_rects(desktop, index))[w.options.index(int(value))])
    if kind == "item" and not visible(desktop, index):
        panel = next(i for i, other in enumerate(desktop.widgets) if other.kind == "list")
        move = click(desktop, place(desktop, panel), "scroll")
        notch = 1.0 if int(w.value) > desktop.offset else -1.0
        return Move(Action("scroll", move.action.x, move.action.y, dy=notch), move.start)
    if kind == "slider":
        third = w.w / 3
        return _drag(desktop, rect, (w.x + third * int(value), w.y, third, w.h))
    if kind == "window":
        return click(desktop, _bare_part(desktop, index) if coverers(desktop, index) else close_box(desktop, index))
    if kind == "icon":
        if w.on != on:
            return click(desktop, rect, "double_click")
        if value != DELETED:
            return _drag(desktop, rect, place(desktop, int(value)))
        if desktop.popup != index:
            return click(desktop, rect, "right_click")
        return click(desktop, list(option_rects(desktop, index))[w.options.index(DELETE_ENTRY)])
    return click(desktop, rect)


def _bare_part(desktop: Desktop, index: int) -> Rect:
    """A cell-sized part of a window that no other window hides and that is not its close box."""
    w = desktop.widgets[index]
    for x, y in ((1, 1), (1, 16), (16, 16)):
        rect = (w.x + x, w.y + y, 12, 10)
        if widget_at(desktop, w.x + x + 6, w.y + y + 5) == index:
            return rect
    return rect
