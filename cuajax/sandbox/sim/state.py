"""The embedded desktop: plain data, and what one GUI action does to it.

Positions inside are unscaled pixels; the screen is a grid of 16x16 cells and every widget lies inside one cell
(a list, a window and the dialog span several). Index -1 means none.
"""

from __future__ import annotations

from collections.abc import Iterator

from cuajax.types import Action

CELL = 16
WIDTH, HEIGHT = 14, 10  # of an ordinary widget
PAGE_ROWS = 2  # list items in view; one scroll moves as many
DELETED = -2  # `Widget.value` of an icon that was deleted (its bin's index if it was dropped there)
DELETE_ENTRY = -1  # the one option of an icon's context menu
FOCUSABLE = frozenset(("button", "checkbox", "radio", "tab", "field", "drop", "menu", "ok"))
POPUP_KINDS = frozenset(("drop", "menu"))


class Widget:
    """One thing on the desktop; `on` and `value` are all of it that an action can change.

    on: pressed, checked, selected, opened or closed (0/1); of a menu, how many commands ran.
    value: a field's text, a dropdown's or menu's colour (-1 none), a slider's stop 0..2,
    an icon's place (-1 desktop, a bin's index, DELETED), an item's row in its list (fixed).
    """

    __slots__ = ("colour", "h", "kind", "on", "options", "page", "value", "w", "x", "y")

    def __init__(
        self, kind: str, colour: int, x: int, y: int, *, page: int = -1, options: tuple[int, ...] = (), value: int = -1
    ):
        self.kind, self.colour, self.x, self.y = kind, colour, x, y
        self.w, self.h = (30, 30) if kind == "window" else (16, 32) if kind == "list" else (WIDTH, HEIGHT)
        self.page, self.options, self.on = page, options, 0
        self.value: int | str = "" if kind == "field" else value

    def copy(self) -> Widget:
        twin = Widget.__new__(Widget)
        for name in Widget.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin


class Desktop:
    """A whole screen's state; two desktops with the same `key()` look and behave alike."""

    __slots__ = (
        "active",
        "backdrop",
        "dialog",
        "focus",
        "height",
        "offset",
        "popup",
        "pressed",
        "stack",
        "submitted",
        "widgets",
        "width",
    )  # fmt: skip

    def __init__(self, width: float, height: float, backdrop: int = 0):
        self.width, self.height, self.backdrop = width, height, backdrop
        self.widgets: list[Widget] = []
        self.active = -1  # the tab in front; widgets with another `page` are hidden
        self.focus = -1  # the widget keys and typing go to
        self.popup = -1  # the widget whose popup is open
        self.offset = 0  # first list row in view
        self.stack: list[int] = []  # windows, bottom to top
        self.pressed: list[int] = []  # buttons in the order they were pressed
        self.dialog = False  # a modal dialog is up
        self.submitted = False

    def copy(self) -> Desktop:
        twin = Desktop.__new__(Desktop)
        twin.width, twin.height, twin.backdrop = self.width, self.height, self.backdrop
        twin.widgets = [w.copy() for w in self.widgets]
        twin.active, twin.focus, twin.popup, twin.offset = self.active, self.focus, self.popup, self.offset
        twin.stack, twin.pressed = self.stack[:], self.pressed[:]
        twin.dialog, twin.submitted = self.dialog, self.submitted
        return twin

    def key(self) -> tuple:
        """Everything that tells this state from another, hashable and printable."""
        things = tuple((w.kind, w.colour, w.x, w.y, w.page, w.options, w.on, w.value) for w in self.widgets)
        flags = (self.active, self.focus, self.popup, self.offset, self.dialog, self.submitted)
        return (self.width, self.height, self.backdrop, things, flags, tuple(self.stack), tuple(self.pressed))


# ------------------------------------------------------------------------------------------------- geometry
def visible(desktop: Desktop, index: int) -> bool:
    """Whether a widget is part of the present page, in view, and still on the desktop (overlays aside)."""
    w = desktop.widgets[index]
    if w.page >= 0 and w.page != desktop.active:
        return False
    if w.kind == "item":
        return desktop.offset <= w.value < desktop.offset + PAGE_ROWS  # type: ignore[operator]
    if w.kind == "icon":
        return w.value == -1
    return not (w.kind == "window" and w.on)


def place(desktop: Desktop, index: int) -> tuple[int, int, int, int]:
    """x, y, width, height of a widget as it is drawn now."""
    w = desktop.widgets[index]
    if w.kind == "item":
        return w.x, w.y + CELL * (int(w.value) - desktop.offset), 12, HEIGHT
    return w.x, w.y, w.w, w.h


def close_box(desktop: Desktop, index: int) -> tuple[int, int, int, int]:
    w = desktop.widgets[index]
    return w.x + 17, w.y + 1, 12, HEIGHT


def dialog_rect(desktop: Desktop) -> tuple[int, int, int, int]:
    """The modal dialog: two cells by two in the middle of the screen."""
    column, row = max(int(desktop.width) // CELL - 2, 0) // 2, max(int(desktop.height) // CELL - 2, 0) // 2
    return column * CELL + 1, row * CELL + 1, 30, 30


def dialog_button(desktop: Desktop) -> tuple[int, int, int, int]:
    x, y, _, _ = dialog_rect(desktop)
    return x + 8, y + 16, WIDTH, HEIGHT


def option_rects(desktop: Desktop, owner: int) -> Iterator[tuple[int, int, int, int]]:
    """The entries of a widget's popup: one a cell, below it (above it on the last row)."""
    w = desktop.widgets[owner]
    below = w.y + w.h + CELL <= desktop.height
    for k in range(len(w.options)):
        yield w.x, w.y + CELL * (k + 1) * (1 if below else -1), WIDTH, HEIGHT


def inside(rect: tuple[int, int, int, int], x: float, y: float) -> bool:
    return rect[0] <= x < rect[0] + rect[2] and rect[1] <= y < rect[1] + rect[3]


def overlap(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> bool:
    return a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]


def coverers(desktop: Desktop, index: int) -> list[int]:
    """Open windows that hide this window's close box."""
    if not desktop.stack or desktop.stack[-1] == index:
        return []
    above = desktop.stack[desktop.stack.index(index) + 1 :]
    box = close_box(desktop, index)
    return [i for i in above if not desktop.widgets[i].on and overlap(place(desktop, i), box)]


def widget_at(desktop: Desktop, x: float, y: float) -> int:
    """The topmost widget under a point: windows from the top, then all else; -1 for the backdrop."""
    for index in reversed(desktop.stack):
        if not desktop.widgets[index].on and inside(place(desktop, index), x, y):
            return index
    found = -1
    for index, w in enumerate(desktop.widgets):
        if w.kind == "item":
            if visible(desktop, index) and inside(place(desktop, index), x, y):
                return index
        elif w.x <= x < w.x + w.w and w.y <= y < w.y + w.h and w.kind != "window" and visible(desktop, index):
            if w.kind != "list":
                return index
            found = index
    return found


# -------------------------------------------------------------------------------------------------- actions
def apply(desktop: Desktop, action: Action) -> None:
    """Performs one action in place; anything that has no effect here (off-screen, NaN, unknown key) does nothing.

    Clicking: a button stays pressed, a checkbox toggles, radios, items and tabs are exclusive, a field takes focus,
    a dropdown or menu opens its popup (the next click picks an option or closes it), a window comes to the front or
    closes, `ok` submits and freezes the desktop. While the dialog is up only its button reacts.
    A double click opens an icon and is one click elsewhere, except that it leaves what toggles as it was.
    """
    if desktop.submitted:
        return
    kind = action.kind
    if kind == "type":
        _type(desktop, action.text)
    elif kind == "key":
        _key(desktop, action.keys)
    elif kind in _POINTER:
        point = _pixels(desktop, action.x, action.y)
        if point is not None:
            _POINTER[kind](desktop, point, action)


def _pixels(desktop: Desktop, x: float | None, y: float | None) -> tuple[float, float] | None:
    if x is None or y is None or not (0.0 <= x <= 1.0 and 0.0 <= y <= 1.0):  # NaN fails both comparisons
        return None
    return min(x * desktop.width, desktop.width - 1), min(y * desktop.height, desktop.height - 1)


def _click(desktop: Desktop, point: tuple[float, float], action: Action) -> None:
    if action.button != "left":
        if action.button == "right":
            _right_click(desktop, point, action)
        return
    desktop.focus = -1
    if _overlay(desktop, point):
        return
    index = widget_at(desktop, *point)
    if index >= 0:
        activate(desktop, index, point)


def _overlay(desktop: Desktop, point: tuple[float, float]) -> bool:
    """Lets the dialog or an open popup take a click."""
    if desktop.dialog:
        desktop.dialog = not inside(dialog_button(desktop), *point)
        return True
    if desktop.popup < 0:
        return False
    owner, desktop.popup = desktop.popup, -1
    w = desktop.widgets[owner]
    for option, rect in zip(w.options, option_rects(desktop, owner), strict=True):
        if inside(rect, *point):
            w.value = DELETED if option == DELETE_ENTRY else option
            w.on += w.kind == "menu"
    return True


def activate(desktop: Desktop, index: int, point: tuple[float, float] | None = None) -> None:
    """What clicking a widget does (or Enter on it, without a point)."""
    w = desktop.widgets[index]
    kind = w.kind
    if kind == "button":
        if not w.on:
            w.on = 1
            desktop.pressed.append(index)
    elif kind == "checkbox":
        w.on ^= 1
    elif kind == "radio" or kind == "item":
        for other in desktop.widgets:
            if other.kind == kind:
                other.on = 0
        w.on = 1
    elif kind == "tab":
        desktop.active = index
    elif kind == "field":
        desktop.focus = index
    elif kind in POPUP_KINDS:
        desktop.popup, desktop.focus = index, -1
    elif kind == "ok":
        desktop.submitted = True
    elif kind == "window" and point is not None:
        if inside(close_box(desktop, index), *point):
            w.on = 1
        desktop.stack.remove(index)
        desktop.stack.append(index)


def _double_click(desktop: Desktop, point: tuple[float, float], action: Action) -> None:
    if not desktop.dialog and desktop.popup < 0:
        index = widget_at(desktop, *point)
        kind = desktop.widgets[index].kind if index >= 0 else ""
        if kind == "icon":
            desktop.widgets[index].on = 1
        if kind in ("icon", "checkbox", "drop", "menu"):
            desktop.focus = -1
            return
    _click(desktop, point, action)


def _right_click(desktop: Desktop, point: tuple[float, float], action: Action) -> None:
    if desktop.dialog:
        return
    desktop.focus = -1
    if desktop.popup >= 0:
        desktop.popup = -1
        return
    index = widget_at(desktop, *point)
    if index >= 0 and desktop.widgets[index].kind == "icon":
        desktop.popup = index


def _drag(desktop: Desktop, point: tuple[float, float], action: Action) -> None:
    end = _pixels(desktop, action.x2, action.y2)
    if end is None or desktop.dialog or desktop.popup >= 0:
        return
    index = widget_at(desktop, *point)
    if index < 0:
        return
    w = desktop.widgets[index]
    if w.kind == "slider":  # the handle follows the pointer, also beyond the track
        w.value = min(max(int((end[0] - w.x) * 3 / w.w), 0), 2)
    elif w.kind == "icon":
        target = widget_at(desktop, *end)
        if target >= 0 and desktop.widgets[target].kind == "bin":
            w.value, desktop.widgets[target].on = target, 1


def _scroll(desktop: Desktop, point: tuple[float, float], action: Action) -> None:
    if desktop.dialog or desktop.popup >= 0 or not (action.dy > 0 or action.dy < 0):
        return
    index = widget_at(desktop, *point)
    if index >= 0 and desktop.widgets[index].kind in ("list", "item"):
        rows = sum(w.kind == "item" for w in desktop.widgets)
        offset = desktop.offset + (PAGE_ROWS if action.dy > 0 else -PAGE_ROWS)
        desktop.offset = min(max(offset, 0), max(rows - PAGE_ROWS, 0))


_POINTER = {
    "click": _click, "double_click": _double_click, "right_click": _right_click, "drag": _drag, "scroll": _scroll,
}  # fmt: skip


def _type(desktop: Desktop, text: str) -> None:
    if desktop.focus >= 0 and desktop.widgets[desktop.focus].kind == "field" and not desktop.dialog:
        desktop.widgets[desktop.focus].value = text[:64]


def _key(desktop: Desktop, keys: tuple[str, ...]) -> None:
    chord = tuple(k.lower() for k in keys)
    if chord in (("esc",), ("escape",)):
        desktop.dialog = False
        desktop.popup = desktop.focus = -1
    elif desktop.dialog:
        desktop.dialog = chord not in (("enter",), ("return",))
    elif desktop.popup >= 0:
        return
    elif chord in (("tab",), ("shift", "tab")):
        _move_focus(desktop, 1 if len(chord) == 1 else -1)
    elif desktop.focus >= 0:
        kind = desktop.widgets[desktop.focus].kind
        if chord in (("enter",), ("return",), ("space",)) and kind != "field":
            activate(desktop, desktop.focus)
        elif chord == ("backspace",):
            _type(desktop, "")


def _move_focus(desktop: Desktop, step: int) -> None:
    widgets = desktop.widgets
    ring = [i for i, w in enumerate(widgets) if w.kind in FOCUSABLE and visible(desktop, i)]
    ring.sort(key=lambda i: (widgets[i].y // CELL, widgets[i].x))
    if ring:
        at = ring.index(desktop.focus) if desktop.focus in ring else (-1 if step > 0 else 0)
        desktop.focus = ring[(at + step) % len(ring)]
