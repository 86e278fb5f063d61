"""What an action may be, whatever the dialect it was spoken in."""

from __future__ import annotations

import math

from cuajax.types import ACTION_KINDS, Action

POINTED = frozenset({"click", "double_click", "right_click", "drag", "scroll", "move"})


class ParseError(ValueError):
    """A model's answer that is no action; the attempt goes on without one."""


def check(action: Action) -> Action:
    """The action itself, or ParseError naming the field, its value and its limits."""
    if action.kind not in ACTION_KINDS:
        raise ParseError(f"action {action.kind!r} is not one of {', '.join(ACTION_KINDS)}")
    points = {"x": action.x, "y": action.y} if action.kind in POINTED else {}
    if action.kind == "drag":
        points |= {"x2": action.x2, "y2": action.y2}
    for name, value in points.items():
        if value is None or not 0.0 <= value <= 1.0:
            raise ParseError(f"{action.kind}: {name} is {value}, must lie in 0..1")
    for name, value in (("dx", action.dx), ("dy", action.dy), ("seconds", action.seconds)):
        if not math.isfinite(value):
            raise ParseError(f"{action.kind}: {name} is {value}, must be finite")
    if action.kind == "type" and not action.text:
        raise ParseError("type: no text")
    if action.kind == "key" and not action.keys:
        raise ParseError("key: no keys")
    if action.kind == "terminate" and action.status not in ("success", "failure"):
        raise ParseError(f"terminate: status {action.status!r} is not success or failure")
    return action
