import asyncio

from cuajax.rollout.episode import Limits
from cuajax.rollout.evaluate import evaluate
from cuajax.sandbox.env import SandboxLost
from cuajax.tasks.curriculum import evaluation_seeds
from tests.rollout.scripted import HARNESS, Faulty, Knowing, Scripted, say


def test_every_task_in_order_greedy_and_capped():
    sim = Knowing(delay=0.001)
    tasks = [sim.task(family, seed) for family in ("check1", "infeasible") for seed in evaluation_seeds(4)]
    alive = [0, 0]
    suite = Faulty(sim, lambda n: alive.__setitem__(slice(None), [suite.opened - suite.closed, max(alive)]))
    done = asyncio.run(evaluate(suite, sim, tasks, harness=HARNESS, samples=2, limits=Limits(attempts=3)))
    assert [t.task_id for t in done] == [task.id for task in tasks for _ in range(2)]
    assert all(t.outcome.status == "success" for t in done) and max(alive) == 3
    assert len({t.id for t in done}) == 16 and [t.slot for t in done[:2]] == [0, 1]


def test_it_is_greedy_unless_told():
    sim = Knowing()
    client = Scripted(say("<done>"))
    asyncio.run(evaluate(sim, client, [sim.task("check1", 1)], harness=HARNESS))
    asyncio.run(evaluate(sim, client, [sim.task("check1", 1)], harness=HARNESS, temperature=1.0))
    assert [sampling.temperature for _, sampling in client.calls] == [0.0, 1.0]


def test_faults_are_retried_and_then_reported_as_invalid():
    sim = Knowing()
    tasks = [sim.task("check1", 1)]
    once = Faulty(sim, lambda n: SandboxLost("gone") if n == 0 else None)
    (done,) = asyncio.run(evaluate(once, sim, tasks, harness=HARNESS))
    assert done.outcome.status == "success" and done.id.endswith(".1")
    always = Faulty(sim, lambda n: SandboxLost("gone"))
    (done,) = asyncio.run(evaluate(always, sim, tasks, harness=HARNESS))
    assert done.outcome.status == "invalid" and always.opened == 3
