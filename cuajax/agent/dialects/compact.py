"""How a small policy speaks: postfix actions of a few tokens, whose last token is the verb.

    <x3> <y7> <click>                 also <double> <right> <move>, and <up> <down> (one scroll notch)
    <x3> <y7> <x9> <y2> <drag>        from, to
    c a t <type>                      known words and characters, as CompactTokenizer.spell has them
    <key:enter>                       one chord
    <wait> <done> <fail>

Every verb stops generation, so no end token is needed. Bin b of n is the point (b + 0.5) / n of the screen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from cuajax.agent.actions import ParseError, check
from cuajax.inputs.tokenizer import CHARACTERS, KEYS, SPACE, VERBS, CompactTokenizer, words
from cuajax.types import Action, ActionKind, Call

POINT: dict[str, ActionKind] = {
    "<click>": "click", "<double>": "double_click", "<right>": "right_click", "<move>": "move",
}  # fmt: skip
BARE = {
    "<wait>": Action("wait", seconds=1.0),
    "<done>": Action("terminate", status="success"),
    "<fail>": Action("terminate", status="failure"),
}
SCROLL = {"<up>": -1.0, "<down>": 1.0}


class CompactDialect:
    """Prompt layout, parser and coordinate map over a CompactTokenizer with `bins` positions a side.

    `max_tokens` is the longest answer that is asked for. Raises ValueError when the tokenizer has other bins.
    """

    def __init__(self, tokenizer: CompactTokenizer, *, bins: int = 16, max_tokens: int = 16) -> None:
        if tokenizer.bins != bins:
            raise ValueError(f"dialect has {bins} bins, its tokenizer {tokenizer.bins}")
        if max_tokens < 5:
            raise ValueError(f"max_tokens is {max_tokens}, a drag takes 5")
        self.tokenizer, self.bins, self.max_tokens = tokenizer, bins, max_tokens
        keys = {f"<key:{k}>": Action("key", keys=tuple(k.split("+"))) for k in KEYS}
        self._bare = {tokenizer.id(token): (Call(action),) for token, action in (BARE | keys).items()}
        self._point: dict[int, ActionKind] = {tokenizer.id(token): kind for token, kind in POINT.items()}
        self._scroll = {tokenizer.id(token): dy for token, dy in SCROLL.items()}
        self._type, self._drag = tokenizer.id("<type>"), tokenizer.id("<drag>")
        self._typeable = frozenset(tokenizer.id(token) for token in (*CHARACTERS, SPACE, *words()))
        self._chord = {action.keys: tokenizer.id(token) for token, action in keys.items()}
        self.stop_ids = tuple(tokenizer.id(token) for token in (*VERBS, *keys))
        self._verbs = frozenset(self.stop_ids)
        self._head = functools.lru_cache(maxsize=8192)(self._encode_head)
        self._known = functools.lru_cache(maxsize=8192)(self._parse)

    # ------------------------------------------------------------------------------------------- prompts
    def _encode_head(self, instruction: str, image_tokens: int) -> np.ndarray:
        t = self.tokenizer
        ids = np.array([*[t.image_id] * image_tokens, *t.encode(instruction), t.act_id], np.int32)
        ids.flags.writeable = False
        return ids

    def prompt_ids(self, instruction: str, history: Sequence[np.ndarray], image_tokens: int) -> np.ndarray:
        """int32[P]: placeholders of all images, instruction, the earlier answers as sampled, <act>.

        The image comes first because many instructions share a screen. Equal arguments give equal bytes; without
        history they give the same read-only array.
        """
        head = self._head(instruction, image_tokens)
        if not history:
            return head
        past = np.concatenate(history, dtype=np.int32)
        past[past == self.tokenizer.image_id] = self.tokenizer.pad_id  # a sampled placeholder is not an image
        return np.concatenate([head[:-1], past, head[-1:]])

    # ------------------------------------------------------------------------------------------- actions
    def parse(self, token_ids: np.ndarray | Sequence[int]) -> tuple[Call, ...]:
        """Sampled ids -> the one call they say. Raises ParseError, and nothing else, on any ids at all."""
        return self._known(tuple(token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids))

    def _parse(self, ids: tuple[int, ...]) -> tuple[Call, ...]:
        if not ids:
            raise ParseError("empty answer")
        *words, verb = ids
        if verb in self._bare:
            if words:
                raise ParseError(f"{self._name(verb)} takes nothing before it, got {len(words)} tokens")
            return self._bare[verb]
        if verb == self._type:
            return (Call(Action("type", text=self._text(words))),)
        if verb == self._drag:
            x, y, x2, y2 = self._places(words, verb, 4)
            return (Call(Action("drag", x=x, y=y, x2=x2, y2=y2)),)
        if verb in self._point:
            x, y = self._places(words, verb, 2)
            return (Call(Action(self._point[verb], x=x, y=y)),)
        if verb in self._scroll:
            x, y = self._places(words, verb, 2)
            return (Call(Action("scroll", x=x, y=y, dy=self._scroll[verb])),)
        raise ParseError(f"no verb at the end of {len(ids)} tokens, but {self._name(verb)}")

    def _name(self, index: int) -> str:
        return self.tokenizer.token(index) if 0 <= index < self.tokenizer.vocab_size else f"unknown id {index}"

    def _text(self, ids: list[int]) -> str:
        for i in ids:
            if i not in self._typeable:
                raise ParseError(f"<type> takes words, letters, digits and {SPACE}, not {self._name(i)}")
        if not ids:
            raise ParseError("<type> without text")
        return self.tokenizer.decode(ids)

    def _places(self, ids: list[int], verb: int, count: int) -> list[float]:
        if len(ids) != count:
            raise ParseError(f"{self._name(verb)} takes {count} positions, got {len(ids)} tokens")
        out = []
        for k, i in enumerate(ids):
            b = i - (self.tokenizer.y0 if k % 2 else self.tokenizer.x0)
            if not 0 <= b < self.bins:
                raise ParseError(f"{self._name(verb)}: {self._name(i)} is no {'row' if k % 2 else 'column'} position")
            out.append((b + 0.5) / self.bins)
        return out

    def _place_ids(self, *points: float | None) -> list[int]:
        bins = [min(int((p or 0.0) * self.bins), self.bins - 1) for p in points]
        return [b + (self.tokenizer.y0 if k % 2 else self.tokenizer.x0) for k, b in enumerate(bins)]

    def format(self, action: Action) -> list[int]:
        """The ids that say an action, positions rounded to their bin. Raises ParseError for what cannot be said."""
        check(action)
        verb = self._verb(action)
        if action.kind == "drag":
            return [*self._place_ids(action.x, action.y, action.x2, action.y2), verb]
        if action.kind == "type":
            try:
                ids = [*self.tokenizer.spell(action.text), verb]
            except ValueError as error:
                raise ParseError(f"type: {error}") from error
            if len(ids) > self.max_tokens:
                raise ParseError(f"type: {len(ids)} tokens for {action.text!r}, the limit is {self.max_tokens}")
            return ids
        if action.kind in ("key", "wait", "terminate"):
            return [verb]
        return [*self._place_ids(action.x, action.y), verb]

    def _verb(self, action: Action) -> int:
        if action.kind == "key":
            if action.keys not in self._chord:
                raise ParseError(f"key: no token for {action.keys}; there are {', '.join(KEYS)}")
            return self._chord[action.keys]
        if action.kind == "scroll":
            if action.dx or not action.dy:
                raise ParseError(f"scroll: dx {action.dx}, dy {action.dy}; only up and down can be said")
            return self.tokenizer.id("<up>" if action.dy < 0 else "<down>")
        names = {"type": "<type>", "drag": "<drag>", "wait": "<wait>"} | {kind: token for token, kind in POINT.items()}
        if action.kind == "terminate":
            return self.tokenizer.id("<done>" if action.status == "success" else "<fail>")
        return self.tokenizer.id(names[action.kind])
