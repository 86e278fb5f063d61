"""A desktop as pixels: sprites copied onto a backdrop."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cuajax.sandbox.sim import sprites
from cuajax.sandbox.sim.sprites import BACKDROPS, DARK_PANEL, FOCUS, sprite
from cuajax.sandbox.sim.state import CELL, PAGE_ROWS, Desktop, Widget, dialog_rect, option_rects, visible


@lru_cache(maxsize=64)
def _blank(height: int, width: int, backdrop: int) -> np.ndarray:
    image = np.empty((height, width, 3), np.uint8)
    image[:] = BACKDROPS[backdrop]
    return image


def render(desktop: Desktop, *, width: int, height: int, scale: int = 1) -> np.ndarray:
    """The screenshot: a fresh uint8[height,width,3]; `scale` screen pixels show one of the desktop's."""
    small_width, small_height = -(-width // scale), -(-height // scale)
    if desktop.submitted:
        image = sprites.submitted(small_height, small_width, desktop.backdrop).copy()
    else:
        image = _blank(small_height, small_width, desktop.backdrop).copy()
        _paint(image, desktop)
    if scale > 1:
        image = image.repeat(scale, 0).repeat(scale, 1)[:height, :width]
    return np.ascontiguousarray(image)


def _paint(image: np.ndarray, desktop: Desktop) -> None:
    backdrop, active, widgets = desktop.backdrop, desktop.active, desktop.widgets
    for index, w in enumerate(widgets):
        if w.page >= 0 and w.page != active:
            continue
        kind, x, y = w.kind, w.x, w.y
        if kind in _ODD:
            if kind == "window" or not visible(desktop, index):
                continue
            if kind == "item":
                y += CELL * (int(w.value) - desktop.offset)
            look = _odd_look(desktop, index, w)
        else:
            look = sprite(kind, w.colour, w.on, backdrop)
        image[y : y + look.shape[0], x : x + look.shape[1]] = look
    for index in desktop.stack:
        w = widgets[index]
        if not w.on:
            look = sprite("window", w.colour, 0, backdrop)
            image[w.y : w.y + 30, w.x : w.x + 30] = look
    if desktop.focus >= 0 and widgets[desktop.focus].kind != "field":
        _outline(image, widgets[desktop.focus])
    if desktop.popup >= 0:
        _paint_popup(image, desktop)
    if desktop.dialog:
        image >>= 1  # a modal dialog dims what it blocks
        x, y, w_, h_ = dialog_rect(desktop)
        image[y : y + h_, x : x + w_] = sprites.dialog()


_ODD = frozenset(("tab", "field", "drop", "menu", "slider", "item", "icon", "list", "window"))


def _odd_look(desktop: Desktop, index: int, w: Widget) -> np.ndarray:
    kind, colour, state = w.kind, w.colour, w.on
    if kind == "tab":
        state = int(desktop.active == index)
    elif kind == "field":
        state = ("*" if desktop.focus == index else "-") + str(w.value)[:3]
    elif kind == "drop" or kind == "menu":
        colour = int(w.value)
        state = int(w.on > 0)
    elif kind == "slider":
        state = int(w.value)
    elif kind == "list":
        rows = sum(other.kind == "item" for other in desktop.widgets)
        state = f"{-(-rows // PAGE_ROWS)}:{desktop.offset // PAGE_ROWS}"
    return sprite(kind, colour, state, desktop.backdrop)


def _outline(image: np.ndarray, w: Widget) -> None:
    right, bottom = w.x + w.w, w.y + w.h
    image[w.y, w.x : right] = image[bottom - 1, w.x : right] = FOCUS
    image[w.y : bottom, w.x] = image[w.y : bottom, right - 1] = FOCUS


def _paint_popup(image: np.ndarray, desktop: Desktop) -> None:
    w = desktop.widgets[desktop.popup]
    rects = list(option_rects(desktop, desktop.popup))
    left, top = w.x // CELL * CELL, min(rects[0][1], rects[-1][1]) // CELL * CELL
    image[top : top + CELL * len(rects), left : left + CELL] = DARK_PANEL
    for value, (x, y, width, height) in zip(w.options, rects, strict=True):
        image[y : y + height, x : x + width] = sprites.option(w.kind, value, desktop.backdrop)
