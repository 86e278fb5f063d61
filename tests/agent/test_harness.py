import numpy as np
import pytest

from cuajax.agent.dialects.compact import CompactDialect
from cuajax.agent.harness import Harness, check_limits, prompt, see
from cuajax.data.images import image_hash
from cuajax.inputs.processor import ImageSpec
from cuajax.inputs.tokenizer import CompactTokenizer
from cuajax.types import Completion, Observation, Step, Task

T = CompactTokenizer()
DIALECT = CompactDialect(T)
TASK = Task("sim/check1/1", "sim", "check1", "check red", budget=5)


def shot(seed, h=64, w=64):
    return Observation(np.random.default_rng(seed).integers(0, 256, (h, w, 3), dtype=np.uint8))


def step(*tokens):
    ids = np.array([T.id(t) for t in tokens], np.int32)
    n = len(ids)
    return Step(0, ids, (), Completion(ids, np.zeros(n, np.float32), np.zeros(n, np.int32), "stop"))


def test_what_is_seen_is_hashed_once_and_kept_as_fed():
    harness = Harness(DIALECT, ImageSpec())
    observation = shot(1)
    seen = see(observation, harness)
    assert seen.image.pixels is observation.screenshot and seen.tokens == 16
    assert seen.image.hash == seen.screen_hash == image_hash(observation.screenshot)
    odd = see(shot(1, 60, 100), harness)
    assert odd.image.pixels.shape == (64, 96, 3) and odd.tokens == 24
    assert odd.image.hash == image_hash(odd.image.pixels) != odd.screen_hash == image_hash(shot(1, 60, 100).screenshot)


def test_equal_screens_and_instructions_give_equal_prompts_whatever_came_before():
    harness = Harness(DIALECT, ImageSpec())
    first = prompt(TASK, [], [see(shot(1), harness)], harness)
    later = prompt(TASK, [step("<wait>")] * 3, [see(shot(s), harness) for s in (2, 3, 1)], harness)
    assert first.token_ids.tobytes() == later.token_ids.tobytes()
    assert [i.hash for i in first.images] == [i.hash for i in later.images]


def test_window_and_history():
    harness = Harness(DIALECT, ImageSpec(), window=2, history=True)
    seen = [see(shot(s, 64, w), harness) for s, w in ((1, 64), (2, 32), (3, 64))]
    steps = [step("<x1>", "<y2>", "<click>"), step("a", "b", "<type>")]
    one = prompt(TASK, [], seen[:1], harness)
    assert one.token_ids.tolist() == [T.image_id] * 16 + [T.id("check"), T.id("red"), T.act_id]
    three = prompt(TASK, steps, seen, harness)
    assert [i.hash for i in three.images] == [s.image.hash for s in seen[1:]]
    text = [T.id(t) for t in ("check", "red", "<x1>", "<y2>", "<click>", "a", "b", "<type>", "<act>")]
    assert three.token_ids.tolist() == [T.image_id] * (8 + 16) + text


def test_limits_are_checked_with_numbers():
    harness = Harness(DIALECT, ImageSpec())
    assert check_limits([TASK], harness, screen=(64, 64), prompt_limit=35) == 19
    with pytest.raises(ValueError, match=r"sim/check1/1: 16 image \+ 3 instruction \+ 0 history .* of 16 make 35.* 34"):
        check_limits([TASK], harness, screen=(64, 64), prompt_limit=34)
    wide = Harness(DIALECT, ImageSpec(), window=3, history=True)
    assert check_limits([TASK], wide, screen=(64, 64), prompt_limit=200) == 3 * 16 + 3 + 4 * 16
    with pytest.raises(ValueError, match="window is 0"):
        Harness(DIALECT, ImageSpec(), window=0)
