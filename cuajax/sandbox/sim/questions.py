"""Short instructions about one mid-task screen, each with its one right action."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cuajax.sandbox.sim.goals import FAIL, SUCCEED, Clause, Move, click, next_move, resolve
from cuajax.sandbox.sim.state import DELETED, PAGE_ROWS, Desktop, dialog_button, option_rects, overlap, place, visible
from cuajax.sandbox.sim.words import COLOURS, FILLERS, LEVELS, VERB_OF, typed_word
from cuajax.types import Action

_NAMEABLE = frozenset(("button", "checkbox", "radio"))  # kinds an absent colour is asked of, as in infeasible tasks
_ALONE = frozenset(("radio", "item", "tab"))  # at most one clause of each
LONGEST = 9  # words of an instruction with fillers
_BOOST = {"drop": 0.25, "menu": 0.25, "ok": -0.1}


@dataclass(frozen=True, slots=True)
class Mix:
    """What the decisions are made of.

    read: share of "what <x> <y>" questions (on plain screens, one clause). absent: chance that a clause names a colour
    that is not there. two: chance of each further clause. submit: share of the instructions for a form that close with
    "submit", which names nothing and is no clause. sparse: how far widgets are thinned out (0: whole screens).
    bins: coordinate bins an axis that reading questions name places by. filler: share of instructions with words that
    say nothing between their clauses, up to LONGEST words: short instructions then teach the places of long ones.
    """

    read: float = 0.3
    absent: float = 0.14
    two: float = 0.5
    submit: float = 0.6
    sparse: float = 1.0
    bins: int = 16
    filler: float = 0.0


class Asker:
    """Asks about one screen, with the verbs of its family's `parts`; `most` clauses at most."""

    def __init__(self, rng: random.Random, desktop: Desktop, *, mix: Mix, most: int, parts: Sequence[str]):
        self.rng, self.desktop, self.mix, self.most, self.parts = rng, desktop, mix, most, parts
        widgets = desktop.widgets
        present = [i for i in range(len(widgets)) if visible(desktop, i)]
        over = list(option_rects(desktop, desktop.popup)) if desktop.popup >= 0 else []
        self.shown = [i for i in present if not any(overlap(rect, place(desktop, i)) for rect in over)]
        self.readable = [i for i in self.shown if widgets[i].kind != "list"]
        # an item above the view is asked for at the end of its list only: elsewhere nobody could know to go up
        rows = sum(w.kind == "item" for w in widgets)
        first = 0 if desktop.offset + PAGE_ROWS >= rows else desktop.offset
        hidden = [
            i
            for i, w in enumerate(widgets)
            if i not in present and (w.kind in ("window", "icon") or (w.kind == "item" and int(w.value) >= first))
        ]
        self.askable = [i for i in self.shown if widgets[i].kind not in ("list", "bin")] + hidden
        self.form = any(w.kind == "ok" for w in widgets)
        self.calm = not desktop.submitted and desktop.popup < 0 and not desktop.dialog

    def ask(self) -> tuple[str, Move, str]:
        """An instruction, its right move, and a tag: "read", "fail", "done" or the action's kind."""
        random_, mix = self.rng.random, self.mix
        if self.calm and self.readable and random_() < mix.read:
            words, answer = self._reading(self.rng.choice(self.readable))
            return words, Move(Action("type", text=answer)), "read"
        asked, submit, absent = self._clauses()
        move = _label(self.desktop, asked, submit, absent)
        if move is SUCCEED and self.form and not self.desktop.submitted:
            # A form is done once submitted. "All met, so done" would teach to stop after so many clauses.
            submit = True
            move = _label(self.desktop, asked, submit, absent)
        words = self._spoken([*asked, ("submit",)] if submit else asked)
        kind = move.action.kind
        return words, move, kind if kind != "terminate" else "fail" if move is FAIL else "done"

    def _spoken(self, clauses: Sequence[Sequence[str]]) -> str:
        room = LONGEST - sum(map(len, clauses))
        said = [list(clause) for clause in clauses]
        if room > 0 and self.rng.random() < self.mix.filler:
            for _ in range(self.rng.randint(1, room)):
                said.insert(self.rng.randint(0, len(said)), [self.rng.choice(FILLERS)])
        return " ".join(word for words in said for word in words)

    def _clauses(self) -> tuple[list[Clause], bool, bool]:
        """What is asked: clauses, whether to submit, whether one of them names what is not there."""
        rng, widgets, mix = self.rng, self.desktop.widgets, self.mix
        asked: list[Clause] = []
        named: list[int] = []
        absent, submit = False, self.desktop.submitted
        for k in range(self.most):
            target = self._first() if k == 0 else self._further(named)
            if target < 0:
                break
            kind = widgets[target].kind
            if kind == "ok":
                submit = True
                break
            clause = self._clause(target)
            if self.calm and kind in _NAMEABLE and rng.random() < mix.absent * (0.5 if k else 1):
                other = self._absent(kind)
                if other:
                    absent, clause = True, (clause[0], other)
            named.append(target)
            asked.append(clause)
            if rng.random() >= mix.two:
                break
        submit = submit or (self.form and rng.random() < mix.submit)
        rng.shuffle(asked)
        asked.sort(key=lambda clause: clause[0] != "tab")  # a tab comes before what may lie behind it
        return asked, submit, absent

    def _first(self) -> int:
        """A widget to ask about: an open popup's owner, or any (fields and dropdowns more often)."""
        widgets, random_ = self.desktop.widgets, self.rng.random
        if self.desktop.popup >= 0 and random_() < 0.9:
            return self.desktop.popup
        if self.desktop.submitted and random_() < 0.4:
            return -1
        best, top = -1, -math.inf
        for i in self.askable:
            kind = widgets[i].kind
            score = random_() + ((random_() < 0.5) if kind == "field" else _BOOST.get(kind, 0.0))
            if score > top:
                best, top = i, score
        return best

    def _further(self, named: list[int]) -> int:
        """Another widget to name; after a tab one of its page; -1 if none makes sense."""
        if self.desktop.submitted:
            return -1
        widgets, random_ = self.desktop.widgets, self.rng.random
        kinds = {widgets[i].kind for i in named}
        tab = next((i for i in named if widgets[i].kind == "tab"), -1)
        best, top = -1, -math.inf
        for i in range(len(widgets)) if tab >= 0 else self.shown:
            w = widgets[i]
            kind = w.kind
            if i in named or kind in ("ok", "list", "bin", "tab") or (kind in _ALONE and kind in kinds):
                continue
            if tab >= 0 and w.page != tab:
                continue
            score = random_() + ((random_() < 0.15) if kind in ("field", "drop") else 0.0)
            if score > top:
                best, top = i, score
        return best

    def _clause(self, index: int) -> Clause:
        w, random_ = self.desktop.widgets[index], self.rng.random
        kind = w.kind
        verb, colour = VERB_OF[kind], COLOURS[w.colour]
        if kind == "field":
            # one's own word nearly always: in an attempt another one is there only after a mistake
            return verb, str(w.value) if w.value and random_() < 0.9 else typed_word(self.rng)
        if kind in ("drop", "menu"):
            if self.desktop.popup == index:  # what shows already is not asked for while the popup is open
                return verb, COLOURS[self.rng.choice([c for c in w.options if c != w.value])]
            done = w.on or (w.value != -1 and random_() < 0.6)
            return verb, COLOURS[int(w.value) if done else w.options[int(random_() * 3)]]
        if kind == "slider":
            return verb, colour, LEVELS[int(random_() * 3)]
        if kind == "icon":
            return self._icon_clause(index)
        return verb, colour

    def _icon_clause(self, index: int) -> Clause:
        widgets = self.desktop.widgets
        w = widgets[index]
        bins = [i for i, other in enumerate(widgets) if other.kind == "bin"]
        colour = COLOURS[w.colour]
        if w.value == DELETED or "delete" in self.parts:
            return "delete", colour
        if bins and "put" in self.parts:
            target = int(w.value) if w.value != -1 else self.rng.choice(bins)
            return "put", colour, COLOURS[widgets[target].colour]
        return "open", colour

    def _absent(self, kind: str) -> str:
        used = {w.colour for w in self.desktop.widgets if w.kind == kind}
        free = [c for c in range(len(COLOURS)) if c not in used]
        return COLOURS[self.rng.choice(free)] if free else ""

    def _reading(self, index: int) -> tuple[str, str]:
        """ "what <x> <y>" about a bin whose centre lies on a widget, and the answer."""
        desktop = self.desktop
        x, y, w, h = place(desktop, index)
        column = self._bin(x / desktop.width, w / desktop.width)
        row = self._bin(y / desktop.height, h / desktop.height)
        return f"what <x{column}> <y{row}>", describe(desktop, index)

    def _bin(self, start: float, extent: float) -> int:
        first = math.ceil(start * self.mix.bins - 0.5)
        last = math.ceil((start + extent) * self.mix.bins - 0.5) - 1
        return first + int(self.rng.random() * max(last - first + 1, 1))


def _label(desktop: Desktop, asked: list[Clause], submit: bool, absent: bool) -> Move:
    if desktop.submitted:
        return SUCCEED  # what was met before can no longer be seen
    if desktop.dialog:
        return click(desktop, dialog_button(desktop))
    if not absent:
        return next_move(desktop, resolve(desktop, asked, submit=submit))
    for verb, *names in asked:
        if verb == "tab":
            tab = next(i for i, w in enumerate(desktop.widgets) if w.kind == "tab" and COLOURS[w.colour] == names[0])
            if desktop.active != tab:
                return click(desktop, place(desktop, tab))
    return FAIL


def describe(desktop: Desktop, index: int) -> str:
    """A widget as a reading answer, e.g. "check red on", "choose none", "type off"."""
    w = desktop.widgets[index]
    kind = w.kind
    verb, on = VERB_OF[kind], "on" if w.on else "off"
    if kind == "ok":
        return verb
    if kind == "field":
        return f"{verb} {'on' if w.value else 'off'}"
    if kind in ("drop", "menu"):
        return f"{verb} {COLOURS[int(w.value)] if w.value != -1 else 'none'}"
    if kind == "slider":
        return f"{verb} {COLOURS[w.colour]} {LEVELS[int(w.value)]}"
    if kind == "window":
        return f"{verb} {COLOURS[w.colour]}"
    if kind == "tab":
        on = "on" if desktop.active == index else "off"
    return f"{verb} {COLOURS[w.colour]} {on}"
