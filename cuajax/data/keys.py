"""The names under which a store keeps things."""

from __future__ import annotations

HEAD = b"head"
GROUP, DELTA, IMAGE, SLOT, RECORD, JOURNAL = b"group/", b"delta/", b"image/", b"slot/", b"record/", b"journal/"


def group(seq: int) -> bytes:
    """A group record."""
    return b"group/%012d" % seq


def delta(seq: int) -> bytes:
    """The curriculum delta committed with a group."""
    return b"delta/%012d" % seq


def image(h: str) -> bytes:
    """An image blob."""
    return IMAGE + h.encode()


def slot(group_id: str) -> bytes:
    """Which slots of a group are stored, and under which sequence number."""
    return SLOT + group_id.encode()


def record(name: str) -> bytes:
    """A small named record."""
    return RECORD + name.encode()


def attempt(group_id: str, number: int) -> bytes:
    """An attempt's journal entry."""
    return f"journal/{group_id}/{number}".encode()
