"""Every family: the oracle scores 1, doing nothing and near misses score 0, chance stays low."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from cuajax.sandbox.sim.families import FAMILIES, NAMES, TWINS, build, compose, family, scene
from cuajax.sandbox.sim.goals import Goal, met, remaining, resolve
from cuajax.sandbox.sim.screens import disturb
from cuajax.sandbox.sim.state import Desktop, apply
from cuajax.sandbox.sim.suite import SimEnv, SimSuite
from cuajax.sandbox.sim.words import COLOURS, LETTERS, LEVELS, WORDS
from cuajax.types import Action
from tests.sandbox.sim_world import COMPOSED, binned, follow, random_action, reachable_within

SUITE = SimSuite()
SEEDS = 200
SUCCESS, FAILURE = Action("terminate", status="success"), Action("terminate", status="failure")
STEPS = {  # GUI actions the oracle takes, fewest and most
    "press1": (1, 1), "check1": (2, 2), "check2": (3, 3), "check3": (4, 4), "radio": (2, 2), "radiocheck": (3, 3),
    "order2": (2, 2), "order3": (3, 3), "tab": (2, 2), "tabcheck": (3, 3), "type": (3, 3), "drop": (3, 3),
    "typecheck": (4, 4), "droptype": (5, 5), "slider": (2, 2), "menu": (2, 2), "list": (2, 4), "open": (2, 2),
    "put": (2, 2), "delete": (2, 2), "close": (1, 2), "dialog": (3, 3), "form": (8, 8), "infeasible": (0, 0),
    "lookalike": (1, 4),
}  # fmt: skip


def started(name: str, seed: int) -> tuple[Desktop, Goal]:
    start = SUITE.scene(SUITE.task(name, seed))
    return start.desktop.copy(), start.goal


def score(name: str, seed: int, actions: list[Action]) -> float:
    task, env = SUITE.task(name, seed), SimEnv(SUITE)
    env.desktop, env.goal = started(name, seed)
    for action in actions:
        apply(env.desktop, action)
    return SUITE.evaluate_now(task, env, actions[-1] if actions else None).reward


@pytest.mark.parametrize("name", NAMES + COMPOSED)
def test_the_oracle_scores_one_and_nothing_scores_zero(name: str) -> None:
    lengths = set()
    for seed in range(SEEDS if name in NAMES else 50):
        task = SUITE.task(name, seed)
        actions = follow(*started(name, seed))
        lengths.add(len(actions) - 1)
        assert len(actions) <= task.budget
        assert len(actions) - 1 == SUITE.oracle_length(task)
        assert score(name, seed, [binned(a) for a in actions]) == 1, task.instruction
        assert score(name, seed, []) == score(name, seed, [SUCCESS]) == 0
        if task.feasible:
            assert score(name, seed, actions[:-1]) == 1, "success needs no terminate"
            assert score(name, seed, [FAILURE]) == score(name, seed, [*actions[:-1], FAILURE]) == 0
    if name in NAMES:
        assert (min(lengths), max(lengths)) == STEPS[name]


@pytest.mark.parametrize("name", NAMES)
def test_chance_is_low(name: str) -> None:
    rng = random.Random(name)
    total = 0.0
    for seed in range(SEEDS):
        total += score(name, seed, [random_action(rng) for _ in range(SUITE.task(name, seed).budget)])
    assert total / SEEDS < 0.2


def near_misses(desktop: Desktop, goal: Goal) -> list[Goal]:
    """Goals that differ from the given one by one slip: another colour, word or level, one clause less or more."""
    clauses = list(goal.clauses)
    wrong: list[tuple[list, bool]] = []
    for k, clause in enumerate(clauses):
        spots: list[tuple[int, tuple[str, ...]]] = [(1, ("cat", clause[1][:2], "") if clause[0] == "type" else COLOURS)]
        if len(clause) == 3:
            spots.append((2, LEVELS if clause[0] == "slide" else COLOURS))
        for spot, choices in spots:
            others = [(*clause[:spot], choice, *clause[spot + 1 :]) for choice in choices if choice != clause[spot]]
            wrong += [([*clauses[:k], other, *clauses[k + 1 :]], goal.submit) for other in others]
        if clause[0] != "tab":  # a page is only reached through its tab, so leaving the tab out changes nothing
            wrong.append(([*clauses[:k], *clauses[k + 1 :]], goal.submit))
    for kind in ("check", "press", "radio"):
        wrong += [([*clauses, (kind, colour)], goal.submit) for colour in COLOURS if (kind, colour) not in clauses]
    if any(w.kind == "ok" for w in desktop.widgets):
        wrong.append((clauses, not goal.submit))
    if clauses[0][0] == "press" and len(clauses) > 1:
        wrong.append((clauses[::-1], goal.submit))
    found = []
    for slips, submit in wrong:
        try:
            found.append(resolve(desktop, slips, submit=submit))
        except ValueError:  # names what is not there, or contradicts itself: no way to do that
            continue
    return found


def _asks(goal: Goal) -> tuple:
    return goal.want, goal.presses, goal.tab, goal.submit


@pytest.mark.parametrize("name", [n for n in NAMES if n != "infeasible"] + list(COMPOSED))
def test_near_misses_score_zero(name: str) -> None:
    probes = 0
    for seed in range(30):
        desktop, goal = started(name, seed)
        for slip in near_misses(desktop, goal):
            if _asks(slip) == _asks(goal):
                continue  # the slip names what was already so
            twin = desktop.copy()
            follow(twin, slip)
            assert not met(twin, goal), f"{goal.instruction!r} accepts {slip.instruction!r}"
            probes += 1
    assert probes > 60


def test_infeasible_tasks_have_feasible_twins() -> None:
    patterns = set()
    for seed in range(SEEDS):
        task, twin = (SUITE.task(name, seed) for name in TWINS)
        ours, theirs = SUITE.scene(task), SUITE.scene(twin)
        assert ours.desktop.key() == theirs.desktop.key(), "nothing but the naming differs"
        changed = [(a, b) for a, b in zip(ours.goal.clauses, theirs.goal.clauses, strict=True) if a != b]
        assert len(changed) == 1 and changed[0][0][0] == changed[0][1][0]
        assert not task.feasible and twin.feasible
        assert score("infeasible", seed, [FAILURE]) == 1 and score("lookalike", seed, [FAILURE]) == 0
        assert score("infeasible", seed, follow(*started("lookalike", seed))) == 0
        assert score("infeasible", seed, [FAILURE, SUCCESS]) == 0, "the last action counts"
        patterns.add(tuple(clause[0] for clause in ours.goal.clauses))
    assert len(patterns) == 6


@pytest.mark.parametrize("name", NAMES + COMPOSED)
def test_each_oracle_step_is_worth_one_from_any_state(name: str) -> None:
    rng = random.Random(name)
    dead = 0
    for seed in range(60):
        desktop, goal = started(name, seed)
        for _ in range(rng.randrange(6)):
            apply(desktop, random_action(rng))
        left = remaining(desktop, goal)
        if not goal.feasible:
            assert left == 1
            continue
        if left == math.inf:
            dead += 1
            assert follow(desktop, goal)[-1] == FAILURE and not met(desktop, goal)
            continue
        for action in follow(desktop.copy(), goal):
            assert remaining(desktop, goal) == left, (goal.instruction, action)
            apply(desktop, action)
            left -= 1
        assert left == 0 and met(desktop, goal)
    assert dead < 60


_SEARCHED_DEEPER = ("check1", "radio", "drop", "type", "close", "tab", "close+check1")


@pytest.mark.parametrize("name", [*(n for n in FAMILIES if n != "form"), *COMPOSED])
def test_remaining_is_what_a_blind_search_finds(name: str) -> None:
    """No shorter way exists, and where `remaining` is infinite none is found."""
    rng = random.Random(name)
    for seed in range(10):
        start = scene(name, random.Random(seed), 64, 64)
        desktop = start.desktop
        disturb(rng, desktop, family(name).parts)
        if desktop.submitted:
            desktop.submitted = False
        goal = resolve(desktop, start.goal.clauses, submit=start.goal.submit)
        for _ in range(rng.randrange(3)):
            apply(desktop, random_action(rng))
        left = remaining(desktop, goal)
        limit = min(left - 1, 4 if name in _SEARCHED_DEEPER else 3)
        found = reachable_within(desktop, goal, int(limit))
        assert found is None or found == left - 1, (goal.instruction, found, left)
        if left - 1 <= limit:
            assert found == left - 1


def test_composition_asks_for_everything_in_order() -> None:
    start = scene("check2+type+tab", random.Random(3), 64, 64)
    verbs = [clause[0] for clause in start.goal.clauses]
    assert verbs == ["check", "check", "type", "tab", "press"] and start.goal.submit
    assert start.goal.instruction.split()[-1] == "submit"
    assert compose("check1", "type") == family("check1+type")
    assert not compose("open", "delete").submit and compose("press1", "dialog").dialog
    for names, said in (
        (("type", "typecheck"), "'type' 2 times"),
        (("check3", "check3", "check1"), "7 of kind 'checkbox'"),
        (("check1", "infeasible"), "cannot be part"),
        (("check1", "chek2"), "check2"),
    ):
        with pytest.raises(ValueError, match=said):
            compose(*names)


def test_too_much_for_a_screen_says_so() -> None:
    with pytest.raises(ValueError, match="4x4 cells"):
        SUITE.task("close+list+put+check3+order3+tabcheck+form", 0)


def test_same_seed_same_task_and_seeds_differ() -> None:
    for name in NAMES:
        one, two = (SimSuite() for _ in range(2))
        hashes = set()
        for seed in range(40):
            a, b = one.task(name, seed), two.task(name, seed)
            assert a == b and one.start_hash(a) == two.start_hash(b)
            shot, again = (s.screenshot(s.scene(a).desktop) for s in (one, two))
            assert shot.tobytes() == again.tobytes()
            hashes.add(one.start_hash(a))
        assert len(hashes) == 40


def test_instructions_use_the_shipped_words() -> None:
    for name in NAMES + COMPOSED:
        for seed in range(30):
            words = SUITE.task(name, seed).instruction.split()
            typed = [words[i + 1] for i, word in enumerate(words) if word == "type"]
            assert set(words) - set(typed) <= set(WORDS)
            assert all(set(word) <= set(LETTERS) and len(word) == 3 and word not in WORDS for word in typed)


def test_targets_are_large_enough_for_sixteen_bins() -> None:
    centres = [4 * b + 2 for b in range(16)]
    for name in FAMILIES:
        for seed in range(30):
            for w in build(name, random.Random(seed), 64, 64).desktop.widgets:
                if w.kind in ("list", "window"):
                    continue
                wide = 12 if w.kind == "item" else w.w
                assert sum(w.x <= c < w.x + wide for c in centres) >= 3
                assert sum(w.y <= c < w.y + w.h for c in centres) >= 2
                assert w.x // 16 == (w.x + w.w - 1) // 16 and w.y // 16 == (w.y + w.h - 1) // 16, "inside one cell"


def test_every_family_has_a_known_length() -> None:
    assert set(STEPS) == set(NAMES) and len(FAMILIES) >= 14
    assert dataclasses.is_dataclass(FAMILIES["form"])
