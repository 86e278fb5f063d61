import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuajax.agent.actions import ParseError
from cuajax.agent.dialects.compact import CompactDialect
from cuajax.inputs.tokenizer import KEYS, CompactTokenizer, words
from cuajax.types import Action, Call

T = CompactTokenizer()
D = CompactDialect(T)
place = st.integers(0, 15).map(lambda b: (b + 0.5) / 16)
typed = st.lists(
    st.one_of(st.sampled_from(words()), st.text("abcxyz019 ", max_size=4)), min_size=1, max_size=3
).map(" ".join).filter(lambda s: s and len(T.spell(s)) < 16)  # fmt: skip
ACTIONS = st.one_of(
    st.builds(Action, kind=st.sampled_from(["click", "double_click", "right_click", "move"]), x=place, y=place),
    st.builds(Action, kind=st.just("drag"), x=place, y=place, x2=place, y2=place),
    st.builds(Action, kind=st.just("scroll"), x=place, y=place, dy=st.sampled_from([1.0, -1.0])),
    st.builds(Action, kind=st.just("type"), text=typed),
    st.builds(Action, kind=st.just("key"), keys=st.sampled_from([tuple(k.split("+")) for k in KEYS])),
    st.just(Action("wait", seconds=1.0)),
    st.builds(Action, kind=st.just("terminate"), status=st.sampled_from(["success", "failure"])),
)


@given(ACTIONS)
@settings(max_examples=400, deadline=None)
def test_every_action_comes_back(action):
    ids = D.format(action)
    assert D.parse(ids) == (Call(action),)
    assert D.parse(np.array(ids, np.int32)) == (Call(action),)
    assert ids[-1] in D.stop_ids and not set(ids[:-1]) & set(D.stop_ids) and len(ids) <= D.max_tokens


@given(st.lists(st.one_of(st.integers(0, T.vocab_size - 1), st.integers(-(2**40), 2**40)), max_size=20))
@settings(max_examples=1000, deadline=None)
def test_any_ids_parse_or_raise_parse_error(ids):
    with contextlib.suppress(ParseError):
        calls = D.parse(ids)
        assert D.parse(D.format(calls[0].action)) == calls  # type: ignore[arg-type]


PARTS = [*D.stop_ids, T.x0, T.x0 + 15, T.y0, T.y0 + 15, T.id("a"), T.id("<space>"), T.id("red")]


@given(st.lists(st.sampled_from(PARTS), max_size=6))
@settings(max_examples=1000, deadline=None)
def test_near_misses_parse_or_raise_parse_error(ids):
    with contextlib.suppress(ParseError):
        assert len(D.parse(ids)) == 1


def test_goldens():
    say = lambda *tokens: [T.id(t) for t in tokens]  # noqa: E731
    assert D.parse(say("<x3>", "<y7>", "<click>")) == (Call(Action("click", x=3.5 / 16, y=7.5 / 16)),)
    assert D.parse(say("<x0>", "<y0>", "<x15>", "<y2>", "<drag>"))[0].action == Action(
        "drag", x=0.5 / 16, y=0.5 / 16, x2=15.5 / 16, y2=2.5 / 16
    )
    assert D.parse(say("<x1>", "<y1>", "<down>"))[0].action == Action("scroll", x=1.5 / 16, y=1.5 / 16, dy=1.0)
    assert D.parse(say("c", "a", "t", "<type>"))[0].action == Action("type", text="cat")
    assert D.parse(say("check", "red", "on", "<type>"))[0].action == Action("type", text="check red on")
    assert D.parse(say("<key:ctrl+a>"))[0].action == Action("key", keys=("ctrl", "a"))
    assert D.parse(say("<fail>"))[0].action == Action("terminate", status="failure")
    assert D.format(Action("click", x=0.24, y=1.0)) == say("<x3>", "<y15>", "<click>")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "empty answer"),
        (["<x3>", "<y7>"], "no verb at the end of 2 tokens, but <y7>"),
        (["<y7>", "<x3>", "<click>"], "<y7> is no column position"),
        (["<x3>", "<click>"], "takes 2 positions, got 1"),
        (["<x3>", "<y7>", "<drag>"], "takes 4 positions, got 2"),
        (["a", "<done>"], "<done> takes nothing before it"),
        (["<type>"], "without text"),
        (["<x3>", "<type>"], "not <x3>"),
        (["<image>"], "but <image>"),
    ],
)
def test_what_is_wrong_is_said(tokens, message):
    with pytest.raises(ParseError, match=message):
        D.parse([T.id(t) for t in tokens])


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action("click", x=1.5, y=0.5), "x is 1.5, must lie in 0..1"),
        (Action("click", x=float("nan"), y=0.5), "x is nan"),
        (Action("click", x=0.5), "y is None"),
        (Action("type", text="Ü"), "no token for"),
        (Action("type", text="a" * 16), "17 tokens"),
        (Action("type"), "no text"),
        (Action("key", keys=("f13",)), "no token for"),
        (Action("scroll", x=0.5, y=0.5, dx=1.0), "only up and down"),
        (Action("terminate"), "status ''"),
        (Action("fly"), "'fly' is not one of"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_said(action, message):
    with pytest.raises(ParseError, match=message):
        D.format(action)


def test_prompts():
    ids = D.prompt_ids("press red", [], 3)
    assert ids.tolist() == [1, 1, 1, T.id("press"), T.id("red"), T.act_id] and ids.dtype == np.int32
    assert D.prompt_ids("press red", (), 3) is ids and not ids.flags.writeable
    past = [np.array(D.format(Action("wait", seconds=1.0)), np.int32), np.array([T.image_id, T.id("a")], np.int32)]
    ids = D.prompt_ids("press red", past, 2)
    want = [1, 1, T.id("press"), T.id("red"), T.id("<wait>"), T.pad_id, T.id("a"), T.act_id]
    assert ids.tolist() == want  # a sampled image placeholder must not count as an image


def test_bins_must_agree():
    with pytest.raises(ValueError, match="8 bins, its tokenizer 16"):
        CompactDialect(T, bins=8)
    with pytest.raises(ValueError, match="a drag takes 5"):
        CompactDialect(T, max_tokens=4)
