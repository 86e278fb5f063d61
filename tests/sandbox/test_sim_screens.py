"""Warm-up decisions: labels are reachable in bins, deterministic, and what an attempt would call right."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cuajax.sandbox.sim import screens
from cuajax.sandbox.sim.families import FAMILIES
from cuajax.sandbox.sim.questions import Mix
from cuajax.sandbox.sim.screens import Decision, decisions, grounded
from cuajax.sandbox.sim.words import COLOURS, LETTERS, VERBS, WORDS
from cuajax.types import Action
from tests.sandbox.sim_world import binned


@pytest.mark.parametrize("clauses", [1, 2, 3])
def test_labels_survive_binning(clauses: int) -> None:
    made = decisions(random.Random(clauses), 300, 6, clauses=clauses)
    assert len(made) == 1800
    for decision in made:
        assert grounded(decision, decision.action)
        assert grounded(decision, binned(decision.action)), (decision.instruction, decision.action)


def test_the_mix() -> None:
    count = Counter(d.tag for d in decisions(random.Random(0), 600, 6, clauses=1))
    share = {tag: n / 3600 for tag, n in count.items()}
    assert 0.2 < share["read"] < 0.3 and 0.1 < share["done"] < 0.3 and 0.03 < share["fail"] < 0.09
    assert {"click", "type", "drag", "scroll", "double_click", "right_click"} <= set(share)
    plain = decisions(random.Random(0), 200, 6, clauses=1, mix=Mix(read=0, absent=0))
    assert not {"read", "fail"} & {d.tag for d in plain}
    pool = decisions(random.Random(0), 200, 6, pool=("check2",))
    assert {d.instruction.split()[0] for d in pool} <= {"check", "press", "radio", "submit", "what"}


@pytest.mark.parametrize("clauses", [1, 2])
def test_instructions_have_at_most_so_many_clauses(clauses: int) -> None:
    verbs = set(VERBS)
    lengths = set()
    for decision in decisions(random.Random(7), 200, 6, clauses=clauses):
        words = decision.instruction.split()
        if words[0] == "what":
            assert [w[:2] for w in words[1:]] == ["<x", "<y"]
            assert set(decision.action.text.split()) <= set(WORDS)
            continue
        lengths.add(sum(word in verbs for word in words))
        typed = [words[i + 1] for i, word in enumerate(words) if word == "type"]
        assert set(words) - set(typed) <= set(WORDS) and all(set(word) <= set(LETTERS) for word in typed)
        assert "submit" not in words[:-1], "submit comes last"
    assert max(lengths) <= clauses + 1  # a submitted screen is always asked about with submit


def test_deterministic_and_shared() -> None:
    one, two = (decisions(random.Random("3/4"), 8, 5, clauses=2) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert (a.instruction, a.action, a.tag) == (b.instruction, b.action, b.tag)
        assert a.screenshot.tobytes() == b.screenshot.tobytes()
    assert len({id(d.screenshot) for d in one}) == 8


def test_reading_names_what_is_there() -> None:
    answers = Counter(d.action.text.split()[0] for d in decisions(random.Random(1), 400, 6) if d.tag == "read")
    assert {"check", "press", "radio", "tab", "type", "choose", "submit", "slide", "pick", "close"} <= set(answers)


def test_absent_colours_are_not_on_the_screen() -> None:
    """A failure label names a colour that no widget of its kind shows: checked on buttons by their colour's pixels."""
    from cuajax.sandbox.sim.sprites import PALETTE

    seen = 0
    for decision in decisions(random.Random(2), 600, 6, pool=("order3",), mix=Mix(read=0)):
        if decision.tag == "fail":
            verb, colour = decision.instruction.split()[:2]
            if verb == "press":
                exact = (decision.screenshot == PALETTE[COLOURS.index(colour)]).all(-1)
                rows = exact.any(1).sum()
                assert rows == 0 or exact.sum() < 200
                seen += 1
    assert seen > 20


def test_other_sizes() -> None:
    for decision in decisions(random.Random(0), 40, 3, size=(192, 160, 2), pool=tuple(FAMILIES)):
        assert decision.screenshot.shape == (160, 192, 3)
        assert grounded(decision, decision.action)


def test_grounded_is_strict() -> None:
    (made,) = decisions(random.Random(5), 1, 1, pool=("check1",), mix=Mix(read=0, absent=0, sparse=0))
    pointing = Decision(made.screenshot, "check red", Action("click", 0.5, 0.5), (0.4, 0.4, 0.2, 0.2), None, "click")
    assert grounded(pointing, Action("click", 0.41, 0.59))
    for wrong in (
        Action("click", 0.61, 0.5), Action("click", 0.5, 0.39), Action("double_click", 0.5, 0.5), Action("click"),
        Action("click", float("nan"), 0.5), Action("terminate", status="success"),
    ):  # fmt: skip
        assert not grounded(pointing, wrong)
    rolling = Decision(made.screenshot, "", Action("scroll", 0.5, 0.5, dy=1.0), (0.4, 0.4, 0.2, 0.2), None, "scroll")
    assert grounded(rolling, Action("scroll", 0.5, 0.5, dy=3.0))
    assert not grounded(rolling, Action("scroll", 0.5, 0.5, dy=-1.0))


def test_each_part_of_the_pool_has_an_equal_share_of_the_screens(monkeypatch):
    """Three families that only check and one that only uses radios: half of the screens have radios."""
    drawn: list[str] = []

    def spy(name, *args, **kwargs):
        drawn.append(name)
        return build(name, *args, **kwargs)

    build = screens.build
    monkeypatch.setattr(screens, "build", spy)
    screens.decisions(random.Random(3), 600, 1, pool=("check1", "check2", "check3", "radio"))
    assert len(drawn) == 600 and 0.44 < drawn.count("radio") / 600 < 0.56
    assert all(drawn.count(name) > 60 for name in ("check1", "check2", "check3"))


@pytest.mark.parametrize(("verb", "name"), [("choose", "drop"), ("type", "type"), ("tab", "tabcheck")])
def test_weights_share_out_the_screens(monkeypatch, verb: str, name: str) -> None:
    """A verb without a weight weighs 1; what lies behind a tab counts as its tab."""
    drawn: Counter[str] = Counter()

    def build(family, *rest):
        drawn[family] += 1
        return whole(family, *rest)

    whole = screens.build
    monkeypatch.setattr(screens, "build", build)
    decisions(random.Random(3), 2000, 1, pool=("type", "drop", "tabcheck"), weights={verb: 3.0})
    assert drawn[name] / 2000 == pytest.approx(3 / 5, abs=0.04)
    drawn.clear()
    decisions(random.Random(3), 200, 1, pool=("type", "drop", "tabcheck"), weights={verb: 0.0})
    assert drawn[name] == 0 and drawn.total() == 200
