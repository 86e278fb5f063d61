"""Every word the embedded desktop's instructions are made of."""

from __future__ import annotations

import random

COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan")
LEVELS = ("low", "mid", "high")  # the three stops of a slider

# One verb a widget kind: an instruction never needs the kind's name beside its colour.
VERB_OF = {
    "button": "press",
    "checkbox": "check",
    "radio": "radio",
    "tab": "tab",
    "field": "type",
    "drop": "choose",
    "ok": "submit",
    "slider": "slide",
    "menu": "menu",
    "item": "pick",
    "icon": "open",
    "bin": "bin",
    "window": "close",
}
VERBS = (*VERB_OF.values(), "delete", "put")
FILLERS = ("now", "please", "then")  # say nothing; instructions of other lengths, at other places
READING = ("what", "on", "off", "none")  # questions about one place, and their answers

LETTERS = "acdehlnortux"  # of typed words; each has a 3x5 glyph unlike the others
WORDS: tuple[str, ...] = (*COLOURS, *VERBS, *LEVELS, *READING, *FILLERS)
_KNOWN = frozenset(WORDS)


def typed_word(rng: random.Random) -> str:
    """A 3-letter word to type that is no instruction word, so that a tokenizer always spells it."""
    while True:
        word = "".join(rng.choices(LETTERS, k=3))
        if word not in _KNOWN:
            return word
