"""Task families: which clauses a task is made of, and the desktops they are asked on.

A family is a list of parts ("check", "type", "tab/check": behind a tab ...). Joining families joins their parts,
so every composition is a family too.
"""

from __future__ import annotations

import difflib
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cuajax.sandbox.sim.goals import KIND_OF, Clause, Goal, resolve
from cuajax.sandbox.sim.sprites import BACKDROPS
from cuajax.sandbox.sim.state import CELL, DELETE_ENTRY, Desktop, Widget
from cuajax.sandbox.sim.words import COLOURS, LEVELS, typed_word


@dataclass(frozen=True, slots=True)
class Family:
    """`parts` in the order of the instruction; `dialog` puts a modal dialog in the way at the start."""

    parts: tuple[str, ...]
    submit: bool = True
    dialog: bool = False


class Scene(NamedTuple):
    """A task's start and its goal."""

    desktop: Desktop
    goal: Goal


FAMILIES: Mapping[str, Family] = {
    "press1": Family(("press",), submit=False),
    "check1": Family(("check",)),
    "check2": Family(("check", "check")),
    "check3": Family(("check", "check", "check")),
    "radio": Family(("radio",)),
    "radiocheck": Family(("radio", "check")),
    "order2": Family(("press", "press"), submit=False),
    "order3": Family(("press", "press", "press"), submit=False),
    "tab": Family(("tab/press",), submit=False),
    "tabcheck": Family(("tab/check",)),
    "type": Family(("type",)),
    "drop": Family(("choose",)),
    "typecheck": Family(("type", "check")),
    "droptype": Family(("choose", "type")),
    "slider": Family(("slide",)),
    "menu": Family(("menu",), submit=False),
    "list": Family(("pick",)),
    "open": Family(("open", "open"), submit=False),
    "put": Family(("put", "put"), submit=False),
    "delete": Family(("delete",), submit=False),
    "close": Family(("close",), submit=False),
    "dialog": Family(("check",), dialog=True),
    "form": Family(("choose", "type", "radio", "check", "check")),
}
# Nothing but the naming of an absent colour tells an infeasible task from its look-alike.
INFEASIBLE_PATTERNS = ("press1", "check1", "check2", "check3", "radiocheck", "order2")
TWINS = ("infeasible", "lookalike")  # of one seed: the same desktop, with and without the naming
NAMES: tuple[str, ...] = (*FAMILIES, *TWINS)

_ONCE = ("radio", "type", "choose", "menu", "pick", "close")
_SPARE = {"checkbox": (1, 2), "button": (1, 2), "radio": (1, 2), "slider": (1, 1), "icon": (1, 2), "bin": (0, 1)}


def family(name: str) -> Family:
    """The family of a name; "a+b" is the composition of a and b. Raises ValueError with the nearest names."""
    if "+" in name:
        return compose(*name.split("+"))
    if name in TWINS:
        raise ValueError(f"{name!r} draws one of several patterns and cannot be part of a composition")
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, NAMES, 3) or NAMES
        raise ValueError(f"no sim family {name!r}; did you mean {', '.join(near)}? all: {', '.join(NAMES)}")
    return FAMILIES[name]


def check_name(name: str) -> None:
    """Raises ValueError, as `family` does, unless tasks can be drawn under this name."""
    if name not in TWINS:
        family(name)


def compose(*names: str) -> Family:
    """One family that asks for all clauses of the given ones, in order, and submits at the end if any does.

    Raises ValueError where a desktop could not hold it (two text fields, more than six checkboxes ...).
    """
    chosen = [family(name) for name in names]
    parts = tuple(part for f in chosen for part in f.parts)
    joined = "+".join(names)
    counts = Counter(part.removeprefix("tab/") for part in parts)
    for part in _ONCE:
        if counts[part] > 1:
            raise ValueError(f"{joined!r} asks for {part!r} {counts[part]} times; a desktop has one of those")
    kinds = Counter(KIND_OF[part] for part in counts.elements())
    for kind, count in kinds.items():
        if count > len(COLOURS):
            raise ValueError(f"{joined!r} names {count} of kind {kind!r}; there are {len(COLOURS)} colours")
    return Family(parts, any(f.submit for f in chosen), any(f.dialog for f in chosen))


def scene(name: str, rng: random.Random, width: float, height: float) -> Scene:
    """Draws one task of a family on a screen of `width` x `height` unscaled pixels."""
    built = build(name, rng, width, height)
    clauses, submit = built.clauses, built.family.submit
    if name not in TWINS:
        return Scene(built.desktop, resolve(built.desktop, clauses, submit=submit))
    which = rng.randrange(len(clauses))  # drawn for both, so that twins share every other draw
    absent = built.absent(clauses[which][0])
    if name == "lookalike":
        return Scene(built.desktop, resolve(built.desktop, clauses, submit=submit))
    clauses[which] = (clauses[which][0], absent)
    return Scene(built.desktop, resolve(built.desktop, clauses, submit=submit, feasible=False))


def build(name: str, rng: random.Random, width: float, height: float) -> Builder:
    """A family's desktop with the clauses asked of it."""
    if name in TWINS:
        return Builder(FAMILIES[rng.choice(INFEASIBLE_PATTERNS)], rng, width, height)
    return Builder(family(name), rng, width, height)


class Builder:
    """Places what a family needs, then distractors, each in a free cell."""

    def __init__(self, family: Family, rng: random.Random, width: float, height: float):
        self.family, self.rng = family, rng
        self.columns, self.rows = int(width) // CELL, int(height) // CELL
        self.desktop = Desktop(width, height, rng.randrange(len(BACKDROPS)))
        self.desktop.dialog = family.dialog
        self.cells = [(c, r) for r in range(self.rows) for c in range(self.columns)]
        rng.shuffle(self.cells)
        self.colours: dict[str, list[int]] = {}  # of each kind, those not used yet
        self.clauses: list[Clause] = []
        self._place()

    def absent(self, verb: str) -> str:
        """A colour that no widget of this verb's kind has."""
        kind = KIND_OF[verb]
        used = {w.colour for w in self.desktop.widgets if w.kind == kind}
        return COLOURS[self.rng.choice([c for c in range(len(COLOURS)) if c not in used])]

    # ------------------------------------------------------------------------------------------ one widget
    def colour(self, kind: str) -> int:
        if kind not in self.colours:
            self.colours[kind] = self.rng.sample(range(len(COLOURS)), len(COLOURS))
        return self.colours[kind].pop()

    def cell(self, fits: str = "") -> tuple[int, int]:
        """Takes a free cell, if asked for one with room for a popup below or in the top row."""
        for k in range(len(self.cells) - 1, -1, -1):
            _, row = self.cells[k]
            if (fits != "popup" or row + 3 < self.rows) and (fits != "top" or row == 0):
                return self.cells.pop(k)
        raise ValueError(f"{self.columns}x{self.rows} cells are too few for {'+'.join(self.family.parts)!r}")

    def add(self, kind: str, cell: tuple[int, int], *, page: int = -1, colour: int | None = None) -> int:
        randrange = self.rng.randrange
        x, y = cell[0] * CELL + randrange(3), cell[1] * CELL + randrange(7)
        if colour is None:
            colour = self.colour(kind)
        options = (DELETE_ENTRY,) if kind == "icon" else ()
        value = randrange(3) if kind == "slider" else -1
        self.desktop.widgets.append(Widget(kind, colour, x, y, page=page, options=options, value=value))
        return len(self.desktop.widgets) - 1

    # -------------------------------------------------------------------------------------------- the whole
    def _place(self) -> None:
        parts, rng = self.family.parts, self.rng
        paged = Counter(KIND_OF[p[4:]] for p in parts if p.startswith("tab/"))
        plain = Counter(KIND_OF[p] for p in parts if not p.startswith("tab/"))
        plain["bin"] = sum(p == "put" for p in parts)
        found: dict[str, list[int]] = {}
        tabs = [self.add("tab", self.cell("top")) for _ in range(3)] if paged else []
        for kind in ("drop", "menu"):
            if plain.pop(kind, 0):
                self._popup_owner(kind)
        if plain.pop("window", 0):
            found["window"] = self._windows()
        if plain.pop("item", 0):
            found["item"] = self._list()
        if plain.pop("field", 0):
            self.add("field", self.cell(), colour=-1)
        if self.family.submit or rng.random() < 0.3:
            self.add("ok", self.cell(), colour=-1)
        behind = self._pages(tabs, paged, plain)
        for kind, count in plain.items():
            if count:
                found[kind] = [self.add(kind, self.cell()) for _ in range(count)]
        for kind, count in plain.items():
            if count:
                self._spare(kind, rng.randint(*_SPARE[kind]))
        for kind in rng.sample(("checkbox", "button", "radio"), 2):
            if not plain[kind] and not paged[kind]:
                self._spare(kind, rng.randint(1, 2))
        while len(self.desktop.widgets) < 6 and self.cells:
            self._spare(rng.choice(("checkbox", "button", "radio")), 1)
        self._clauses(found, behind)

    def _spare(self, kind: str, count: int) -> None:
        for _ in range(count):
            if self.cells and (self.colours.get(kind) or kind not in self.colours):
                self.add(kind, self.cell())

    def _popup_owner(self, kind: str) -> None:
        index = self.add(kind, self.cell("popup"), colour=-1)
        self.desktop.widgets[index].options = tuple(self.rng.sample(range(len(COLOURS)), 3))

    def _windows(self) -> list[int]:
        """Two windows side by side, two cells by two each, sharing a column."""
        free, rng = set(self.cells), self.rng
        spots = []
        for c, r in self.cells:
            for shift in (-1, 0, 1):
                left = {(c + i, r + j) for i in (0, 1) for j in (0, 1)}
                right = {(c + 1 + i, r + shift + j) for i in (0, 1) for j in (0, 1)}
                if left | right <= free:
                    spots.append(((c, r), (c + 1, r + shift), left | right))
        if not spots:
            raise ValueError(f"{self.columns}x{self.rows} cells leave no room for two windows")
        *corners, taken = rng.choice(spots)
        self.cells = [cell for cell in self.cells if cell not in taken]
        made = []
        for c, r in corners:
            self.desktop.widgets.append(Widget("window", self.colour("window"), c * CELL + 1, r * CELL + 1))
            made.append(len(self.desktop.widgets) - 1)
        self.desktop.stack = made[:] if rng.random() < 0.7 else made[::-1]  # the right one may hide the left one's box
        return made if rng.random() < 0.3 else made[::-1]

    def _list(self) -> list[int]:
        free, rng = set(self.cells), self.rng
        spots = [(c, r) for c, r in self.cells if (c, r + 1) in free]
        if not spots:
            raise ValueError(f"{self.columns}x{self.rows} cells leave no room for a list")
        c, r = rng.choice(spots)
        self.cells = [cell for cell in self.cells if cell not in ((c, r), (c, r + 1))]
        widgets, first = self.desktop.widgets, len(self.desktop.widgets)
        rows = rng.choice((4, 6))
        widgets.append(Widget("list", -1, c * CELL, r * CELL))
        for row in range(rows):
            widgets.append(Widget("item", self.colour("item"), c * CELL + 1, r * CELL + 3, value=row))
        return rng.sample(range(first + 1, first + 1 + rows), rows)

    def _pages(self, tabs: list[int], paged: Counter[str], plain: Counter[str]) -> dict[str, list[int]]:
        """Widgets behind the tabs: every page has some of each paged kind, in cells that the pages share."""
        if not tabs:
            return {}
        behind: dict[str, list[int]] = {}
        each = {kind: min(2, max(-(-n // 3), (len(COLOURS) - plain[kind]) // 3)) for kind, n in paged.items()}
        area = [self.cell() for _ in range(sum(each.values()) + 1)]
        for tab in self.rng.sample(tabs, 3):
            cells = self.rng.sample(area, len(area))
            for kind, count in each.items():
                for _ in range(count):
                    behind.setdefault(kind, []).append(self.add(kind, cells.pop(), page=tab))
        for kind in behind:
            self.rng.shuffle(behind[kind])
        first = self.desktop.widgets[next(iter(behind.values()))[-1]].page  # where the first tab clause leads
        self.desktop.active = self.rng.choice([t for t in tabs if t != first])
        return behind

    def _clauses(self, found: dict[str, list[int]], behind: dict[str, list[int]]) -> None:
        widgets, rng = self.desktop.widgets, self.rng
        for part in self.family.parts:
            verb = part.removeprefix("tab/")
            kind = KIND_OF[verb]
            if verb == "type":
                self.clauses.append((verb, typed_word(rng)))
                continue
            if kind in ("drop", "menu"):
                owner = next(w for w in widgets if w.kind == kind)
                self.clauses.append((verb, COLOURS[rng.choice(owner.options)]))
                continue
            w = widgets[(behind if part != verb else found)[kind].pop()]
            if w.page >= 0:
                self.clauses.append(("tab", COLOURS[widgets[w.page].colour]))
            clause = (verb, COLOURS[w.colour])
            if verb == "slide":
                clause = (*clause, LEVELS[rng.choice([v for v in range(3) if v != w.value])])
            elif verb == "put":
                clause = (*clause, COLOURS[widgets[found["bin"].pop()].colour])
            self.clauses.append(clause)
