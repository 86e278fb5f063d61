"""The pictures of every widget in every state, drawn once and kept."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cuajax.sandbox.sim.state import CELL, DELETE_ENTRY, HEIGHT, WIDTH

PALETTE = np.array(
    [[228, 44, 44], [46, 190, 70], [52, 96, 238], [240, 208, 40], [178, 62, 208], [44, 208, 218]], np.uint8
)
BACKDROPS = np.array(
    [[72, 78, 92], [84, 82, 80], [66, 84, 86], [92, 84, 98], [100, 102, 108], [60, 64, 74], [88, 94, 84], [78, 70, 74]],
    np.uint8,
)
INK, PAPER, STEEL, FOCUS = (16, 18, 24), (252, 252, 252), (112, 118, 128), (255, 140, 0)
NAVY, PANEL, DARK_PANEL, SHADE = (24, 40, 92), (222, 226, 232), (34, 36, 44), (196, 202, 212)
ALARM, DONE = (200, 24, 24), (24, 120, 52)

# 3x5 glyphs, row by row, as octal digits (one a row)
_GLYPHS = {
    "a": "25755", "b": "65656", "c": "74447", "d": "65556", "e": "74647", "f": "74644", "g": "74557", "h": "55755",
    "i": "72227", "j": "11153", "k": "55655", "l": "44447", "m": "57755", "n": "65555", "o": "75557", "p": "75744",
    "q": "75571", "r": "65655", "s": "74717", "t": "72222", "u": "55557", "v": "55552", "w": "55775", "x": "55255",
    "y": "55222", "z": "71247", "0": "75757", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717",
    "6": "74757", "7": "71122", "8": "75757", "9": "75717", "-": "00700", " ": "00000",
}  # fmt: skip


def _glyph(letter: str) -> np.ndarray:
    rows = _GLYPHS.get(letter, "77777")
    return np.array([[int(r) >> 2 & 1, int(r) >> 1 & 1, int(r) & 1] for r in rows], bool)


def _write(image: np.ndarray, text: str, x: int, ink: tuple[int, int, int]) -> None:
    for k, letter in enumerate(text):
        image[2:7, x + 4 * k : x + 4 * k + 3][_glyph(letter)] = ink


def _shade(colour: np.ndarray, factor: float) -> np.ndarray:
    return np.clip(colour * factor, 0, 255).astype(np.uint8)


@lru_cache(maxsize=8192)
def sprite(kind: str, colour: int, state: int | str, backdrop: int) -> np.ndarray:
    """One widget's picture, uint8[h,w,3], opaque (its corners show the backdrop); read-only."""
    image = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    image[:] = BACKDROPS[backdrop]
    ink = PALETTE[colour] if colour >= 0 else np.array(INK, np.uint8)
    image = _DRAW[kind](image, ink, state)
    image.setflags(write=False)
    return image


def _button(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image[:] = ink
    if state:  # pushed in: a dark rim and a white bar
        image[[0, -1]] = INK
        image[:, [0, -1]] = INK
        image[4:6, 2:12] = PAPER
    else:
        image[0] = image[:, 0] = _shade(ink, 1.25)
        image[-1] = image[:, -1] = _shade(ink, 0.5)
    return image


def _checkbox(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image[:, 2:12] = ink
    image[2:8, 4:10] = PAPER if state else INK
    if state:
        for y, x in ((5, 5), (6, 6), (5, 7), (4, 8), (3, 9)):
            image[y, x] = INK
    return image


def _disc(image: np.ndarray, radius: float) -> np.ndarray:
    y, x = np.mgrid[: image.shape[0], : image.shape[1]]
    return (y - 4.5) ** 2 + (x - 6.5) ** 2 <= radius**2


def _radio(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    # a rim of its own tells it from a checkbox better than roundness does
    image[_disc(image, 5.2)] = PAPER if state else INK
    image[_disc(image, 4.2)] = ink
    if state:
        image[_disc(image, 1.6)] = PAPER
    return image


def _tab(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image[:, 1:-1], image[1:] = ink, ink
    image[4 if state else 7 :] = PAPER if state else (40, 40, 44)
    return image


def _field(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    focused, text = str(state)[0] == "*", str(state)[1:]
    rim = FOCUS if focused else STEEL
    image[:] = PAPER
    image[[0, 1, -2, -1]] = rim
    image[:, [0, -1]] = rim
    _write(image, text[:3].lower(), 1, INK)
    return image


def _drop(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image[:] = SHADE
    image[2:8, 1:7] = ink
    for k in range(3):
        image[3 + k, 8 + k : 13 - k] = INK
    return image


def _menu(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image[:] = DARK_PANEL
    image[[2, 3, 6, 7], 7:13] = PAPER
    if state:  # how many commands ran: only the last one's colour shows
        image[2:8, 1:6] = ink
    return image


def _ok(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image[:] = NAVY
    image[[0, -1], 1:-1] = PAPER
    image[1:-1, [0, -1]] = PAPER
    _write(image, "ok", 3, PAPER)
    return image


def _slider(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image[:] = DARK_PANEL
    image[4:6, 1:13] = ink
    at = 1 + 4 * int(state)
    image[1:9, at : at + 4] = PAPER
    image[2:8, at + 1 : at + 3] = ink
    return image


def _item(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image = image[:, :12]
    image[:] = INK if state else PAPER
    image[2:8, 1:6] = ink
    image[3:7:2, 7:11] = PAPER if state else STEEL
    return image


def _icon(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    if state:  # opened: a white sheet in a coloured frame
        image[:, 1:13] = ink
        image[3:9, 2:12] = PAPER
        image[[4, 6], 3:10] = INK
    else:  # a folder
        image[1:10, 1:13] = _shade(ink, 0.6)
        image[0:2, 1:6] = ink
        image[3:9, 1:13] = ink
    return image


def _bin(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image[0:2, 1:13] = PAPER
    image[2:10, 3:11] = ink
    image[3:9, 4:10:2] = PAPER if state else INK
    return image


def _option(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image[:] = INK  # as dark as what other colours stand on: on white they are learned long after all else
    image[2:8, 1:13] = ink
    return image


def _entry(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image[:] = INK
    image[2:8, 1:7] = ink
    image[[3, 6], 8:13] = PAPER
    return image


def _delete(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image[:] = ALARM
    for k in range(6):
        image[2 + k, 4 + k] = image[2 + k, 9 - k] = PAPER
    return image


def _window(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    image = np.empty((30, 30, 3), np.uint8)
    image[:] = INK
    image[1:-1, 1:-1] = PAPER
    image[1:12, 1:-1] = ink
    image[1:11, 17:29] = PAPER
    for k in range(6):
        image[3 + k, 20 + k : 22 + k] = image[3 + k, 25 - k : 27 - k] = ALARM
    image[15:28:4, 4:22] = STEEL
    return image


def _list(image: np.ndarray, ink: np.ndarray, state: int | str) -> np.ndarray:
    """The frame behind the items: `state` is "pages:page"."""
    pages, page = map(int, str(state).split(":"))
    image = np.empty((2 * CELL, CELL, 3), np.uint8)
    image[:] = PANEL
    image[:, 13:] = INK
    size = 32 // max(pages, 1)
    image[size * page : size * (page + 1), 14:] = FOCUS
    return image


_DRAW = {
    "button": _button, "checkbox": _checkbox, "radio": _radio, "tab": _tab, "field": _field, "drop": _drop,
    "menu": _menu, "ok": _ok, "slider": _slider, "item": _item, "icon": _icon, "bin": _bin, "window": _window,
    "list": _list, "option": _option, "entry": _entry, "delete": _delete,
}  # fmt: skip


@lru_cache(maxsize=8)
def dialog() -> np.ndarray:
    """The modal dialog with its one button, uint8[30,30,3]."""
    image = np.empty((30, 30, 3), np.uint8)
    image[:] = FOCUS
    image[2:-2, 2:-2] = PAPER
    image[4:10, 14:16] = image[11:13, 14:16] = ALARM
    button = image[16 : 16 + HEIGHT, 8 : 8 + WIDTH]
    button[:] = ALARM
    for k in range(6):
        button[2 + k, 4 + k] = button[2 + k, 9 - k] = PAPER
    return image


@lru_cache(maxsize=8)
def submitted(height: int, width: int, backdrop: int) -> np.ndarray:
    """The whole screen after `ok`: a green banner with a tick, uint8[height,width,3]."""
    image = np.empty((height, width, 3), np.uint8)
    image[:] = BACKDROPS[backdrop] // 2
    middle = height // 2
    image[max(middle - 12, 0) : middle + 12] = DONE
    left = max(width // 2 - 8, 0)
    for k in range(5):
        image[middle + k - 1 : middle + k + 2, left + k : left + k + 2] = PAPER
    for k in range(9):
        image[middle + 3 - k : middle + 6 - k, left + 5 + k : left + 7 + k] = PAPER
    return image


def option(owner_kind: str, value: int, backdrop: int) -> np.ndarray:
    """One entry of a popup, uint8[10,14,3]."""
    if value == DELETE_ENTRY:
        return sprite("delete", 0, 0, backdrop)
    return sprite("entry" if owner_kind == "menu" else "option", value, 0, backdrop)
