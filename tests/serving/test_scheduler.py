"""The scheduler under load, faults and weight updates; the engine behind it is real."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client import generate_latest

from cuajax.serving import engine as eng
from cuajax.serving import weights
from cuajax.serving.client import (
    BadWeights,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    LocalClient,
    ResourceExhausted,
    StaleVersion,
    Unavailable,
)
from cuajax.serving.messages import Request
from cuajax.serving.stats import registry
from cuajax.types import Completion, Image, Prompt, Sampling

from .conftest import World, local, same


class Gated:
    """The engine with a gate in front of every decode step."""

    def __init__(self, engine: Any):
        self._engine, self.gate, self.steps = engine, threading.Semaphore(0), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        assert self.gate.acquire(timeout=20)
        self.steps += 1
        return self._engine.generate(*args, **kwargs)

    def open(self, steps: int = 1000) -> None:
        self.gate.release(steps)


class Faulty:
    """The engine with faults: a prefill of token `bad` raises, and generate does `what` once."""

    def __init__(self, engine: Any, *, bad: int = -1, what: str = ""):
        self._engine, self._bad, self._what = engine, bad, what

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, params: Any, prompts: Any, positions: Any) -> Any:
        if (prompts.tokens == self._bad).any():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: this prompt is too much")
        return self._engine.prefill(params, prompts, positions)

    def insert(self, *args: Any, **kwargs: Any) -> Any:
        state, results = self._engine.insert(*args, **kwargs)
        if self._what == "nan":  # what the sampler reports for logits that are not finite
            self._what = ""
            results = np.array(results)
            results[0, eng.FLAGS] = eng.EMITTED | eng.BROKEN
        return state, results

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if self._what == "raise":
            self._what = ""
            raise jax.errors.JaxRuntimeError("INTERNAL: the device hiccuped")
        return self._engine.generate(*args, **kwargs)


class Inbox:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.results: dict[Any, Any] = {}
        self.changed = threading.Condition()

    def __call__(self, results: list[tuple[Any, Any]]) -> None:
        with self.changed:
            self.results.update(results)
            self.changed.notify_all()

    def wait(self, count: int) -> dict[Any, Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.results) >= count, 20), self.results
            return self.results


def requests(world: World, inbox: Inbox, count: int, **settings: Any) -> list[Request]:
    sampling = Sampling(max_tokens=6)
    return [Request(world.prompt(i), sampling, inbox, i, **settings) for i in range(count)]


def until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_bad_requests_fail_alone(world: World, start: Any) -> None:
    good, v = world.prompt(1), world.cfg.vocab_size
    picture, ids = good.images[0], good.token_ids

    def pixels(*shape: int, dtype: Any = np.uint8) -> Prompt:
        return Prompt(ids, (Image("x", np.zeros(shape, dtype)),))

    bad: list[tuple[Prompt, Sampling, str]] = [
        (Prompt(np.zeros(0, np.int32)), Sampling(max_tokens=1), "0 tokens"),
        (Prompt(np.full(25, 40, np.int32)), Sampling(max_tokens=1), r"25 tokens, must have 1\.\.24"),
        (Prompt(np.array([v], np.int32)), Sampling(max_tokens=1), f"token id {v}"),
        (Prompt(np.array([-4], np.int32)), Sampling(max_tokens=1), "token id -4"),
        (Prompt(np.array([1.5])), Sampling(max_tokens=1), "float64"),
        (Prompt(np.zeros((2, 2), np.int32)), Sampling(max_tokens=1), "int32"),
        (Prompt(ids), Sampling(max_tokens=1), "placeholders"),
        (Prompt(ids, (picture, picture)), Sampling(max_tokens=1), "2 images"),
        (pixels(33, 32, 3), Sampling(max_tokens=1), "33x32"),
        (pixels(32, 32), Sampling(max_tokens=1), "must be"),
        (pixels(64, 64, 3), Sampling(max_tokens=1), "16 patches"),
        (pixels(32, 32, 3, dtype=np.float32), Sampling(max_tokens=1), "uint8"),
        (good, Sampling(max_tokens=7), r"1\.\.6"),
        (good, Sampling(max_tokens=0), "max_tokens 0"),
        (good, Sampling(max_tokens=1, temperature=float("nan")), "temperature"),
        (good, Sampling(max_tokens=1, top_p=0.0), "top_p"),
        (good, Sampling(max_tokens=1, top_k=17), r"0\.\.16"),
        (good, Sampling(max_tokens=1, stop_ids=(1, 2, 3, 4, 5)), "5 stop ids"),
        (good, Sampling(max_tokens=1, stop_ids=(-1,)), "stop ids"),
        (good, Sampling(max_tokens=1, stop_ids=[1]), "tuple"),  # type: ignore[arg-type]
        (good, Sampling(max_tokens=1, seed=1.5), "seed"),  # type: ignore[arg-type]
        (good, Sampling(max_tokens="1"), "not a request"),  # type: ignore[arg-type]
        (Prompt([40, 41]), Sampling(max_tokens=1), "not a request"),  # type: ignore[arg-type]
    ]
    scheduler = start()
    items = [(p, s) for p, s, _ in bad] + [(good, Sampling(max_tokens=2, seed=1))]
    *refused, answer = local(scheduler, items)
    for error, (_, _, message) in zip(refused, bad, strict=True):
        with pytest.raises(InvalidRequest, match=message):
            raise error
    assert isinstance(answer, Completion)
    assert scheduler.snapshot()["slots_free"] == 8


def test_queue_limit_and_slots(world: World, start: Any) -> None:
    engine, inbox = Gated(world.engine), Inbox()
    scheduler = start(engine, max_queue=10)
    scheduler.submit(requests(world, inbox, 8))
    until(lambda: scheduler.snapshot()["slots_free"] == 0)
    scheduler.submit([dataclasses.replace(r, handle=100 + r.handle) for r in requests(world, inbox, 12)])
    refused = inbox.wait(2)
    assert sorted(refused) == [110, 111]
    assert all(isinstance(e, ResourceExhausted) and "10 requests wait" in str(e) for e in refused.values())
    text = generate_latest(registry(scheduler.snapshot)).decode()
    assert 'jetstream_prefill_backlog_size{id="policy"} 10.0' in text
    assert 'jetstream_slots_available_percentage{id="policy",idx="0"} 0.0' in text
    assert 'cuajax_refused_total{id="policy"} 2.0' in text
    engine.open()
    assert sum(isinstance(r, Completion) for r in inbox.wait(20).values()) == 18


def test_cancelling_frees_the_slot_at_once(world: World, start: Any) -> None:
    engine, inbox = Gated(world.engine), Inbox()
    scheduler = start(engine)
    running = requests(world, inbox, 8)
    waiting = [dataclasses.replace(r, handle="late") for r in requests(world, inbox, 1)]
    scheduler.submit(running)
    scheduler.submit(waiting)
    engine.open(2)
    until(lambda: engine.steps == 2)
    scheduler.cancel([running[3], running[5]])
    engine.open(1)
    results = inbox.wait(2)
    assert {k: r.finish_reason for k, r in results.items() if k != "late"} == {3: "cancelled", 5: "cancelled"}
    assert 1 <= len(results[3].token_ids) < 6
    until(lambda: waiting[0].state == "active")  # took one of the slots while the other answers go on
    engine.open()
    assert all(inbox.wait(9)[k].finish_reason == "length" for k in (0, 1, 2, 4, 6, 7, "late"))

    async def cancelled_caller() -> None:
        task = asyncio.create_task(LocalClient(scheduler).generate(world.prompt(0), Sampling(max_tokens=6)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled_caller())
    until(lambda: scheduler.snapshot()["slots_free"] == 8)


def test_deadlines(world: World, start: Any) -> None:
    engine, inbox = Gated(world.engine), Inbox()
    scheduler = start(engine)
    soon = time.monotonic() + 0.05
    scheduler.submit(requests(world, inbox, 8, deadline=soon))  # on slots
    scheduler.submit([dataclasses.replace(r, handle=8 + r.handle) for r in requests(world, inbox, 2, deadline=soon)])
    time.sleep(0.06)
    engine.open(3)
    results = inbox.wait(10)
    assert all(isinstance(error, DeadlineExceeded) for error in results.values())
    engine.open()
    assert isinstance(local(scheduler, [(world.prompt(0), Sampling(max_tokens=3))])[0], Completion)
    assert scheduler.snapshot()["expired"] == 10


def test_an_error_reaches_its_own_request(world: World, start: Any) -> None:
    items = [(world.prompt(i), Sampling(max_tokens=4, seed=i)) for i in range(3)]
    wanted = local(start(), items)
    poison = world.prompt(7, words=15)  # its own length bucket, so its own batch
    scheduler = start(Faulty(world.engine, bad=int(poison.token_ids[-1])))
    *fine, failed = local(scheduler, [*items, (poison, Sampling(max_tokens=4))])
    assert isinstance(failed, EngineFault)
    assert "too much" in str(failed)
    assert all(same(a, b) for a, b in zip(fine, wanted, strict=True))  # started over with the same seeds

    first, *fine = local(start(Faulty(world.engine, what="nan")), items)
    assert isinstance(first, EngineFault)
    assert "not finite" in str(first)
    assert all(same(a, b) for a, b in zip(fine, wanted[1:], strict=True))

    scheduler = start(Faulty(world.engine, what="raise"))
    assert all("hiccuped" in str(error) for error in local(scheduler, items))
    assert all(same(a, b) for a, b in zip(local(scheduler, items), wanted, strict=True))  # and then it goes on
    assert scheduler.snapshot()["faults"] == 1


def test_weights_are_checked_and_versions_rise(world: World, start: Any) -> None:
    scheduler, item = start(version=3), (world.prompt(0), Sampling(max_tokens=6, seed=1))
    before = local(scheduler, [item])[0]
    assert before.versions.tolist() == [3] * 6
    leaves = weights.flatten(world.other)
    name = next(iter(leaves))
    bad = np.array(leaves[name])
    bad.reshape(-1)[0] = np.nan

    first, *rest = jax.tree.leaves(world.other)
    structure = jax.tree.structure(world.other)
    for leaf, message in (
        (bad, f"not finite: {name}"),
        (first[..., :1], f"leaf {name} is"),
        (np.asarray(first, np.float16), f"leaf {name} is float16"),
    ):
        with pytest.raises(BadWeights, match=message):
            scheduler.update(structure.unflatten([leaf, *rest]), 4)
    with pytest.raises(BadWeights, match="leaves are missing"):
        scheduler.update({"vision": world.other["vision"]}, 4)
    with pytest.raises(BadWeights, match="unknown leaf 'embedding', the nearest is 'embed'"):
        weights.unflatten({**leaves, "embedding": bad}, world.params)
    for stale in (3, 2, -1):
        with pytest.raises(StaleVersion, match="not above the serving version 3"):
            scheduler.update(world.other, stale)
    with pytest.raises(InvalidRequest, match="drain, inflight"):
        scheduler.update(world.other, 4, mode="now")
    assert same(local(scheduler, [item])[0], before)

    donated = jax.tree.map(jnp.copy, world.other)
    weights.publish(donated, 4, scheduler)
    jax.tree.map(lambda a: a.delete(), donated)  # as the learner's next step does
    after = local(scheduler, [item])[0]
    assert after.versions.tolist() == [4] * 6
    assert not same(after, before)
    other = world.scheduler(version=9)
    weights.publish(weights.unflatten(leaves, world.params), 10, other)
    assert same(local(other, [item])[0], after)
    other.stop()


@pytest.mark.parametrize("mode", ["drain", "inflight"])
def test_update_modes(world: World, start: Any, mode: str) -> None:
    engine, inbox = Gated(world.engine), Inbox()
    scheduler = start(engine)
    scheduler.submit(requests(world, inbox, 2))
    engine.open(2)
    until(lambda: engine.steps == 2)
    update = threading.Thread(target=scheduler.update, args=(world.other, 1), kwargs={"mode": mode})
    update.start()
    until(lambda: scheduler._update is not None)
    late = [dataclasses.replace(r, handle="late") for r in requests(world, inbox, 1)]
    scheduler.submit(late)
    engine.open()
    update.join(20)
    versions = {k: r.versions.tolist() for k, r in inbox.wait(3).items()}
    assert versions["late"] == [1] * 6
    if mode == "drain":
        assert versions[0] == versions[1] == [0] * 6
    else:
        assert versions[0] == versions[1]
        assert versions[0] == sorted(versions[0])
        assert set(versions[0]) == {0, 1}


def test_stopping_fails_what_is_left(world: World, start: Any) -> None:
    engine, inbox = Gated(world.engine), Inbox()
    scheduler = start(engine)
    scheduler.submit(requests(world, inbox, 12))
    until(lambda: scheduler.snapshot()["slots_free"] == 0)
    stopping = threading.Thread(target=scheduler.stop)
    stopping.start()
    until(lambda: not scheduler.live)
    engine.open()
    stopping.join(20)
    assert all(isinstance(error, Unavailable) for error in inbox.wait(12).values())
    assert isinstance(local(scheduler, [(world.prompt(0), Sampling(max_tokens=1))])[0], Unavailable)
    with pytest.raises(Unavailable):
        scheduler.update(world.other, 1)
