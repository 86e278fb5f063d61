"""The compact vocabulary: words, letters, action verbs, keys and screen bins, one token each.

It lets a policy of a few million parameters read an instruction and answer with an action in three tokens. Ids are
stable: the structural tokens come first, then the bins, then the words of words.txt, which only grows at its end.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Iterable

SPECIAL = ("<pad>", "<image>", "<act>")
VERBS = (
    "<click>", "<double>", "<right>", "<drag>", "<up>", "<down>", "<type>", "<move>", "<wait>", "<done>", "<fail>",
)  # fmt: skip
KEYS = (
    "enter", "tab", "escape", "backspace", "delete", "space", "home", "end", "pageup", "pagedown", "up", "down",
    "left", "right", "shift+tab", "ctrl+a", "ctrl+c", "ctrl+s", "ctrl+v", "ctrl+x", "ctrl+z",
)  # fmt: skip
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_CHARACTERS = frozenset(CHARACTERS)
SPACE = "<space>"  # a blank inside typed text; between words it is implied

_WORD = re.compile("<[xy][0-9]+>|[a-z0-9]+")


def words() -> tuple[str, ...]:
    """The word list, in id order."""
    text = importlib.resources.files("cuajax.inputs").joinpath("words.txt").read_text(encoding="ascii")
    return tuple(text.split())


class CompactTokenizer:
    """Word-level tokenizer with `bins` horizontal and `bins` vertical screen positions.

    Attributes: `vocab_size`, `pad_id`, `image_id`, `act_id` (ends every prompt), `bins`, `x0` and `y0` (ids of the
    first bins).
    """

    def __init__(self, bins: int = 16) -> None:
        if not 1 <= bins <= 1000:
            raise ValueError(f"bins is {bins}, must be 1..1000")
        fixed = [*SPECIAL, *VERBS, *(f"<key:{k}>" for k in KEYS), SPACE, *CHARACTERS]
        places = [f"<x{i}>" for i in range(bins)] + [f"<y{i}>" for i in range(bins)]
        self._tokens = (*fixed, *places, *(w for w in words() if len(w) > 1))
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        if len(self._ids) != len(self._tokens):
            raise ValueError(f"words.txt repeats a word: {len(self._tokens)} tokens, {len(self._ids)} distinct")
        self._words = frozenset(w for w in words() if len(w) > 1)
        self.bins = bins
        self.vocab_size = len(self._tokens)
        self.pad_id, self.image_id, self.act_id = (self._ids[token] for token in SPECIAL)
        self.x0, self.y0 = self._ids["<x0>"], self._ids["<y0>"]
        self._encode = functools.lru_cache(maxsize=65536)(self._encode_text)

    def id(self, token: str) -> int:
        """Id of one token, such as "red", "a", "<click>", "<key:tab>" or "<x3>". Raises KeyError naming it."""
        return self._ids[token]

    def token(self, index: int) -> str:
        """Token of one id. Raises IndexError outside 0..vocab_size-1."""
        if not 0 <= index < self.vocab_size:
            raise IndexError(f"token id {index} is not in 0..{self.vocab_size - 1}")
        return self._tokens[index]

    def _encode_text(self, text: str) -> tuple[int, ...]:
        out: list[int] = []
        for word in _WORD.findall(text.lower()):
            known = self._ids.get(word)
            if known is not None:
                out.append(known)
            else:
                out.extend(self._ids[c] for c in word if c in _CHARACTERS)
        return tuple(out)

    def encode(self, text: str) -> list[int]:
        """Text -> ids: a known word or "<x3>" is one token, any other its characters; case, punctuation are dropped."""
        return list(self._encode(text))

    def spell(self, text: str) -> list[int]:
        """Text to be typed -> ids that `decode` to exactly it. Raises ValueError naming characters without a token."""
        out: list[int] = []
        before: str | None = None
        for word in text.split(" "):
            if before is not None and not (before and word and (before in self._words or word in self._words)):
                out.append(self._ids[SPACE])  # beside a known word a blank is implied
            if word in self._words:
                out.append(self._ids[word])
            else:
                unknown = sorted(set(word) - _CHARACTERS)
                if unknown:
                    raise ValueError(f"no token for {unknown} of {text!r}; there are {CHARACTERS} and blanks")
                out.extend(self._ids[c] for c in word)
            before = word
        return out

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text: blanks between tokens, none between characters. Raises IndexError on an unknown id."""
        out: list[str] = []
        for index in ids:
            token = self.token(int(index))
            token = " " if token == SPACE else token
            if out and " " not in (out[-1], token) and len(out[-1]) + len(token) > 2:
                out.append(" ")
            out.append(token)
        return "".join(out)
