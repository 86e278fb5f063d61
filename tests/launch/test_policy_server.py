"""A client that outlives its policy server, and a server that is started only when it is needed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuajax.config import ConfigError
from cuajax.serving.client import InvalidRequest, Unavailable
from cuajax.types import Completion, Prompt, Sampling
from tests.launch.pages import ROOT

sys.path.insert(0, str(ROOT / "launch"))
import policy_server

PROMPT = Prompt(np.zeros(3, np.int32))
ANSWER = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")


class World:
    """Policy servers by address: those that are up answer."""

    def __init__(self) -> None:
        self.up: set[str] = {"a"}
        self.at = "a"
        self.closed: list[str] = []

    def client(self, address: str, **_: Any) -> Any:
        return _Client(self, address)


class _Client:
    def __init__(self, world: World, address: str) -> None:
        self.world, self.address = world, address

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        if sampling.max_tokens == 0:
            raise InvalidRequest("no")
        if self.address not in self.world.up:
            raise Unavailable(f"{self.address} is away")
        return ANSWER

    async def info(self) -> dict:
        if self.address not in self.world.up:
            raise Unavailable(f"{self.address} is away")
        return {"version": 1}

    async def close(self) -> None:
        self.world.closed.append(self.address)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(policy_server, "GrpcClient", made.client)
    monkeypatch.setattr(policy_server, "POLL", 0.001)
    return made


def test_decisions_wait_for_a_server_that_comes_back_elsewhere(world: World) -> None:
    async def main() -> list[Completion]:
        client = policy_server.Reconnecting(lambda: world.at, token=None, patience=10.0)
        world.up.clear()
        asked = [asyncio.create_task(client.generate(PROMPT, Sampling())) for _ in range(50)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in asked)
        world.at, world.up = "b", {"b"}
        answers = await asyncio.gather(*asked)
        await client.close()
        return answers

    assert asyncio.run(main()) == [ANSWER] * 50
    assert world.closed.count("b") >= 1


def test_patience_ends_and_a_refusal_is_no_absence(world: World) -> None:
    async def main() -> None:
        client = policy_server.Reconnecting(lambda: world.at, token=None, patience=0.05)
        with pytest.raises(InvalidRequest):
            await client.generate(PROMPT, Sampling(max_tokens=0))
        world.up.clear()
        with pytest.raises(Unavailable, match="a is away"):
            await client.generate(PROMPT, Sampling())
        await client.close()

    asyncio.run(main())


def test_a_server_begins_at_its_first_use() -> None:
    begun: list[tuple[Any, int]] = []

    def begin(params: Any, version: int) -> policy_server.Policy:
        begun.append((params, version))
        return policy_server.Policy(lambda: "client", lambda *a: begun.append(a), lambda: {"x": 1.0}, lambda: None)

    made = policy_server.later(begin, lambda: ("now", 3))
    assert made.stats() == {} and not begun
    made.stop()
    made.publish("trained", 7)
    assert begun == [("trained", 7)]
    assert made.connect() == "client" and made.stats() == {"x": 1.0}
    other = policy_server.later(begin, lambda: ("now", 3))
    other.connect()
    assert begun[-1] == ("now", 3)


def test_where_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_server, "POLL", 0.001)
    assert policy_server.find(tmp_path, "host:1") == "host:1"
    with pytest.raises(ConfigError, match=r"is launch/serve\.py running"):
        policy_server.find(tmp_path, "run", patience=0.01)
    policy_server.advertise(tmp_path, "127.0.0.1:5")
    assert policy_server.find(tmp_path, "run") == "127.0.0.1:5"
    policy_server.advertise(tmp_path, "0.0.0.0:6")
    assert policy_server.find(tmp_path, "run").rpartition(":")[2] == "6"
    assert not policy_server.find(tmp_path, "run").startswith("0.0.0.0")


def test_clients_of_short_loops_end_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """A call that ends after its event loop has closed would be told as an error by gRPC's queue."""
    from types import SimpleNamespace

    from cuajax.serving.client import GrpcClient
    from cuajax.serving.server import PolicyServer

    class Instant:
        engine = SimpleNamespace(buckets=SimpleNamespace(answer=1, lengths=(8,)))
        live = True

        def submit(self, requests: list) -> None:
            requests[0].sink([(request.handle, ANSWER) for request in requests])

        def cancel(self, requests: list) -> None:
            pass

    server = PolicyServer(Instant())  # type: ignore[arg-type]
    address = server.start()

    async def ask() -> None:
        client = GrpcClient(address)
        await asyncio.gather(*(client.generate(PROMPT, Sampling()) for _ in range(30)))
        await client.close()

    for _ in range(30):
        asyncio.run(ask())
    server.stop()
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
