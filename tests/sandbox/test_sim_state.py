"""What one action does, by hand and for anything at all."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuajax.sandbox.sim.families import NAMES, scene
from cuajax.sandbox.sim.render import render
from cuajax.sandbox.sim.sprites import sprite
from cuajax.sandbox.sim.state import Desktop, Widget, apply, close_box, coverers, option_rects
from cuajax.sandbox.sim.words import LETTERS
from cuajax.types import ACTION_KINDS, Action


def desk(*widgets: Widget) -> Desktop:
    desktop = Desktop(64, 64)
    desktop.widgets = list(widgets)
    desktop.stack = [i for i, w in enumerate(widgets) if w.kind == "window"]
    return desktop


def at(rect: tuple[int, int, int, int]) -> tuple[float, float]:
    return (rect[0] + rect[2] / 2) / 64, (rect[1] + rect[3] / 2) / 64


def click(desktop: Desktop, index: int, kind: str = "click") -> None:
    w = desktop.widgets[index]
    apply(desktop, Action(kind, *at((w.x, w.y, w.w, w.h))))  # type: ignore


def key(desktop: Desktop, *keys: str) -> None:
    apply(desktop, Action("key", keys=keys))


def test_buttons_stay_pressed_and_checkboxes_toggle() -> None:
    d = desk(Widget("button", 0, 1, 1), Widget("checkbox", 0, 17, 1))
    click(d, 0)
    click(d, 0)
    click(d, 1)
    assert (d.widgets[0].on, d.widgets[1].on, d.pressed) == (1, 1, [0])
    click(d, 1)
    assert d.widgets[1].on == 0
    click(d, 1, "double_click")
    assert d.widgets[1].on == 0, "two clicks leave a checkbox as it was"


def test_radios_are_exclusive_and_pages_hide() -> None:
    radios = Widget("radio", 0, 1, 20, page=0), Widget("radio", 1, 17, 20)
    d = desk(Widget("tab", 0, 1, 0), Widget("tab", 1, 17, 0), *radios)
    d.active = 1
    click(d, 2)
    assert d.widgets[2].on == 0, "hidden"
    click(d, 0)
    click(d, 2)
    click(d, 3)
    assert (d.active, d.widgets[2].on, d.widgets[3].on) == (0, 0, 1)


def test_typing_needs_focus_and_replaces() -> None:
    d = desk(Widget("field", -1, 1, 1), Widget("button", 0, 17, 1))
    apply(d, Action("type", text="cat"))
    assert d.widgets[0].value == ""
    click(d, 0)
    apply(d, Action("type", text="cat"))
    apply(d, Action("type", text="dot"))
    assert d.widgets[0].value == "dot"
    key(d, "backspace")
    assert d.widgets[0].value == ""
    click(d, 1)
    apply(d, Action("type", text="oat"))
    assert d.widgets[0].value == "", "clicking elsewhere drops the focus"


def test_keys_move_focus_and_enter_acts() -> None:
    d = desk(Widget("ok", -1, 33, 1), Widget("checkbox", 0, 17, 1), Widget("field", -1, 1, 1))
    key(d, "tab")
    assert d.focus == 2, "reading order"
    key(d, "enter")
    assert not d.submitted
    key(d, "tab")
    key(d, "space")
    assert d.widgets[1].on == 1
    key(d, "shift", "tab")
    assert d.focus == 2
    key(d, "tab")
    key(d, "tab")
    key(d, "enter")
    assert d.submitted
    click(d, 1)
    assert d.widgets[1].on == 1, "frozen"


@pytest.mark.parametrize("kind", ["drop", "menu"])
def test_popups_take_the_next_click(kind: str) -> None:
    d = desk(Widget(kind, -1, 1, 1, options=(3, 4, 5)), Widget("checkbox", 0, 1, 17), Widget("checkbox", 1, 49, 49))
    click(d, 0)
    assert d.popup == 0
    click(d, 2)
    assert d.popup == -1 and d.widgets[2].on == 0, "a click elsewhere only closes it"
    click(d, 0)
    apply(d, Action("click", *at(next(option_rects(d, 0)))))
    assert d.widgets[0].value == 3 and d.widgets[1].on == 0, "the popup lies over what is there"
    assert d.widgets[0].on == (kind == "menu")
    click(d, 0)
    key(d, "escape")
    assert d.popup == -1


def test_icons_open_move_and_go() -> None:
    spots = ((1, 1), (17, 1), (33, 49))
    icons = [Widget("icon", k, x, y, options=(-1,)) for k, (x, y) in enumerate(spots)]
    d = desk(*icons, Widget("bin", 3, 49, 1))
    click(d, 0)
    assert d.widgets[0].on == 0
    click(d, 0, "double_click")
    assert d.widgets[0].on == 1
    apply(d, Action("drag", *at((17, 1, 14, 10)), *at((49, 1, 14, 10))))
    assert d.widgets[1].value == 3 and d.widgets[3].on == 1
    apply(d, Action("drag", *at((1, 1, 14, 10)), 0.5, 0.5))
    assert d.widgets[0].value == -1, "it snaps back"
    click(d, 2, "right_click")
    (entry,) = option_rects(d, 2)
    assert entry[1] < d.widgets[2].y, "above, on the last row"
    apply(d, Action("click", *at(entry)))
    assert d.widgets[2].value == -2
    click(d, 2, "double_click")
    assert d.widgets[2].on == 0, "it is gone"


def test_sliders_follow_the_pointer() -> None:
    d = desk(Widget("slider", 0, 1, 1, value=0))
    for x, stop in ((0.12, 1), (0.9, 2), (0.0, 0), (1.0, 2)):
        apply(d, Action("drag", *at((1, 1, 14, 10)), x, 0.7))
        assert d.widgets[0].value == stop
    click(d, 0)
    assert d.widgets[0].value == 2


def test_lists_scroll_by_pages_and_stop_at_their_ends() -> None:
    d = desk(Widget("list", -1, 0, 0), *(Widget("item", k, 1, 3, value=k) for k in range(4)))
    apply(d, Action("scroll", 0.9, 0.9, dy=1.0))
    assert d.offset == 0, "beside the list"
    for dy, offset in ((1.0, 2), (5.0, 2), (-1.0, 0), (-1.0, 0), (math.nan, 0)):
        apply(d, Action("scroll", 0.1, 0.2, dy=dy))
        assert d.offset == offset
    apply(d, Action("scroll", 0.1, 0.2, dy=1.0))
    apply(d, Action("click", *at((1, 19, 12, 10))))
    assert [w.on for w in d.widgets] == [0, 0, 0, 0, 1]


def test_windows_come_to_the_front_and_close() -> None:
    d = desk(Widget("window", 0, 1, 1), Widget("window", 1, 17, 1))
    assert coverers(d, 0) == [1] and coverers(d, 1) == []
    apply(d, Action("click", *at(close_box(d, 0))))
    assert d.widgets[0].on == 0, "the other window lies there"
    apply(d, Action("click", *at((1, 1, 10, 10))))
    assert d.stack == [1, 0]
    apply(d, Action("click", *at(close_box(d, 0))))
    assert d.widgets[0].on == 1 and coverers(d, 1) == []


def test_a_dialog_takes_everything() -> None:
    d = desk(Widget("checkbox", 0, 1, 1), Widget("slider", 1, 1, 20, value=0))
    d.dialog = True
    click(d, 0)
    click(d, 0, "double_click")
    apply(d, Action("drag", *at((1, 20, 14, 10)), 0.9, 0.3))
    assert d.dialog and d.widgets[0].on == 0 and d.widgets[1].value == 0
    apply(d, Action("click", 0.5, 0.57))
    assert not d.dialog
    click(d, 0)
    assert d.widgets[0].on == 1


numbers = st.one_of(st.none(), st.floats(), st.floats(0, 1))
actions = st.builds(
    Action,
    kind=st.sampled_from(ACTION_KINDS),
    x=numbers, y=numbers, x2=numbers, y2=numbers,
    button=st.sampled_from(("left", "right", "middle", "")),
    text=st.text(max_size=80),
    keys=st.lists(st.sampled_from(("tab", "enter", "Escape", "space", "shift", "é", "")), max_size=3).map(tuple),
    dx=st.floats(), dy=st.floats(), seconds=st.floats(),
    status=st.sampled_from(("", "success", "failure")),
)  # fmt: skip


@given(st.sampled_from(NAMES), st.integers(0, 999), st.lists(actions, max_size=12))
def test_no_action_breaks_the_desktop(name: str, seed: int, plan: list[Action]) -> None:
    desktop = scene(name, random.Random(seed), 64, 64).desktop
    for action in plan:
        apply(desktop, action)
        assert render(desktop, width=64, height=64).shape == (64, 64, 3)
    assert desktop.copy().key() == desktop.key()


@given(st.sampled_from(NAMES), st.integers(0, 999), st.sampled_from([math.nan, math.inf, -math.inf, -0.01, 1.01, None]))
def test_pointing_nowhere_changes_nothing(name: str, seed: int, bad: float | None) -> None:
    desktop = scene(name, random.Random(seed), 64, 64).desktop
    before = desktop.key()
    for kind in ("click", "double_click", "right_click", "drag", "scroll", "move"):
        for x, y in ((bad, 0.5), (0.5, bad)):
            apply(desktop, Action(kind, x, y, 0.5, 0.5, dy=1.0))  # type: ignore
    assert desktop.key() == before


# ------------------------------------------------------------------------------------------------- pictures
def test_states_look_different() -> None:
    """Every state of a kind differs from every other by at least a tenth of the sprite, strongly."""
    states: dict[str, list[int | str]] = {
        "button": [0, 1], "checkbox": [0, 1], "radio": [0, 1], "tab": [0, 1], "slider": [0, 1, 2], "icon": [0, 1],
        "item": [0, 1], "field": ["-", "*"],
    }  # fmt: skip
    for kind, values in states.items():
        for colour in range(6):
            looks = [sprite(kind, colour, value, 0).astype(int) for value in values]
            for i, one in enumerate(looks):
                for two in looks[:i]:
                    assert (np.abs(one - two).max(-1) > 60).mean() > 0.1, (kind, colour)


def test_colours_kinds_and_letters_look_different() -> None:
    for kind in ("button", "checkbox", "radio", "tab", "slider", "item", "icon", "bin", "window", "option", "entry"):
        looks = {sprite(kind, colour, 0, 0).tobytes() for colour in range(6)}
        assert len(looks) == 6
    words = {sprite("field", -1, f"-{letter * 3}", 0).tobytes() for letter in LETTERS}
    assert len(words) == len(LETTERS)


def test_sprites_cannot_be_written_to() -> None:
    with pytest.raises(ValueError):
        sprite("button", 0, 0, 0)[0, 0] = 1
