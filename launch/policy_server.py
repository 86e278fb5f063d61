"""The policy server a page starts, or the one of another process that it joins."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parts

from cuajax.agent.harness import Harness
from cuajax.config import ConfigError, Settings
from cuajax.serving.client import EngineFault, GrpcClient, LocalClient, Unavailable
from cuajax.types import Completion, Prompt, Sampling

ENDPOINT = "policy_server.json"  # in the run directory: where its policy server listens
PATIENCE = 300.0  # seconds a policy server may be away (restarting) before its callers give up
POLL = 0.2


@dataclass(frozen=True)
class Policy:
    """A policy that serves: how to reach it, how to replace its weights, what it counts."""

    connect: Callable[[], Any]  # a client for the caller's event loop
    publish: Callable[[Any, int], None]
    stats: Callable[[], Mapping[str, float]]
    stop: Callable[[], None]
    address: str = ""
    renew: Callable[[Any, int], None] = lambda params, version: None  # publish again what a restarted server lacks


# ------------------------------------------------------------------------------------------------ in this process
def start(config: Settings, made: Harness, params: Any, *, cfg: Any, version: int, address: str = "") -> Policy:
    """A policy server in this process: behind gRPC, or called directly.

    Raises ConfigError when `address` cannot be served on.
    """
    from cuajax.serving import weights
    from cuajax.serving.scheduler import open_policy

    truncate = config.agent.top_p < 1.0 or config.agent.top_k > 0
    scheduler = open_policy(
        cfg, params, tokenizer=parts.tokenizer(made), spec=made.image, buckets=parts.buckets(config, made),
        version=version, truncate=truncate,
    )  # fmt: skip

    def publish(params: Any, version: int) -> None:
        weights.publish(params, version, scheduler, mode=config.serving.swap)

    if parts.transport(config) == "local" and not address:
        return Policy(lambda: LocalClient(scheduler), publish, scheduler.snapshot, scheduler.stop)
    from cuajax.serving.server import PolicyServer

    token = os.environ.get("CUAJAX_TOKEN") or None
    try:
        server = PolicyServer(scheduler, address=address or "127.0.0.1:0", token=token, tokenizer=parts.tokenizer(made))
        bound = server.start()
    except (ValueError, OSError) as error:
        scheduler.stop()
        raise ConfigError(f"policy server: {error}; a token goes into the environment as CUAJAX_TOKEN") from error

    def stop() -> None:
        scheduler.stop()  # first: calls under way are answered (Unavailable) rather than cut
        server.stop()

    return Policy(lambda: GrpcClient(bound, token=token), publish, scheduler.snapshot, stop, bound)


def later(begin: Callable[[Any, int], Policy], current: Callable[[], tuple[Any, int]]) -> Policy:
    """The server of a run that may never need one (replay): `begin(params, version)` runs at its first use."""
    made: list[Policy] = []

    def policy() -> Policy:
        if not made:
            made.append(begin(*current()))
        return made[0]

    def publish(params: Any, version: int) -> None:
        if made:
            made[0].publish(params, version)
        else:
            made.append(begin(params, version))

    def stop() -> None:
        for one in made:
            one.stop()

    return Policy(lambda: policy().connect(), publish, lambda: made[0].stats() if made else {}, stop)


def of(config: Settings, made: Harness, run_dir: Path, *, cfg: Any, current: Callable[[], tuple[Any, int]]) -> Policy:
    """The policy server a training run asks for; it serves `current()`, which is (params, version)."""
    if config.serving.address:
        joined = join(config.serving.address, run_dir, mode=config.serving.swap)
        joined.publish(*current())
        return joined

    def begin(params: Any, version: int) -> Policy:
        return start(config, made, params, cfg=cfg, version=version)

    return later(begin, current) if config.rollout.replay else begin(*current())


# --------------------------------------------------------------------------------------------- in another process
class Reconnecting:
    """A policy server that may restart, on another port too: a decision waits for it, at most `patience` seconds.

    A decision changes nothing on the server, so asking again is safe. Belongs to the event loop that first uses it.
    """

    def __init__(self, locate: Callable[[], str], *, token: str | None, patience: float = PATIENCE) -> None:
        self._locate, self._token, self._patience = locate, token, patience
        self._client = self._new()
        self._coming: asyncio.Task | None = None  # one looks for the server, the others wait for that

    def _new(self) -> GrpcClient:
        return GrpcClient(self._locate(), token=self._token, retries=1)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """The policy's answer. Raises PolicyError."""
        end = time.monotonic() + self._patience
        while True:
            client = self._client
            try:
                return await client.generate(prompt, sampling)
            except (Unavailable, EngineFault):  # a call cut in the middle reads as an internal error
                if time.monotonic() > end:
                    raise
            await self._back(client, end)

    async def _back(self, broken: GrpcClient, end: float) -> None:
        if broken is not self._client:
            return
        if self._coming is None:
            self._coming = asyncio.create_task(self._find(end))
        await asyncio.shield(self._coming)

    async def _find(self, end: float) -> None:
        """Until the server answers or time is up; then the next calls go to where it listens now."""
        answered = False
        while not answered and time.monotonic() < end:
            await asyncio.sleep(POLL)
            answered = await _answers(self._locate(), self._token) is not None
        before, self._client, self._coming = self._client, self._new(), None
        await before.close()

    async def info(self) -> Mapping[str, Any]:
        """As GrpcClient.info."""
        return await self._client.info()

    async def close(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)
        await self._client.close()


async def _answers(address: str, token: str | None) -> Mapping[str, Any] | None:
    """What the server there says of itself, None when it does not answer. Raises PolicyError when it refuses us."""
    client = GrpcClient(address, token=token, timeout_s=10.0, retries=0)
    try:
        return await client.info()
    except (Unavailable, EngineFault):
        return None
    finally:
        await client.close()


def join(address: str, run_dir: Path, *, mode: str = "drain", patience: float = PATIENCE) -> Policy:
    """A policy server that another process runs: HOST:PORT, or "run" for the one advertised in the run directory.

    Every use waits up to `patience` seconds for it. Raises ConfigError when it never answers, PolicyError when it
    refuses.
    """
    token = os.environ.get("CUAJAX_TOKEN") or None
    last: dict[str, Any] = {}

    def locate() -> str:
        return find(run_dir, address, patience=patience)

    def ask() -> Mapping[str, Any] | None:
        return asyncio.run(_answers(locate(), token))

    def wait() -> Mapping[str, Any]:
        end = time.monotonic() + patience
        while (found := ask()) is None:
            if time.monotonic() > end:
                raise ConfigError(f"no policy server answers at {locate()} after {patience:g} s")
            time.sleep(POLL)
        return found

    def publish(params: Any, version: int) -> None:
        from cuajax.serving import weights

        while wait()["version"] != version:  # one that is ahead refuses with StaleVersion
            try:
                weights.publish(params, version, locate(), mode=mode, token=token)
            except (Unavailable, EngineFault):  # killed in the middle: the next one has older weights
                time.sleep(POLL)

    def stats() -> Mapping[str, float]:
        last.update((ask() or {}).get("stats", {}))
        return dict(last)

    def renew(params: Any, version: int) -> None:
        found = ask()
        if found is not None and found["version"] < version:
            publish(params, version)

    wait()
    return Policy(
        lambda: Reconnecting(locate, token=token, patience=patience), publish, stats, lambda: None, locate(), renew
    )


# ---------------------------------------------------------------------------- what it serves, where it listens
def checkpoint(run_dir: Path, cfg: Any, *, step: str) -> tuple[Any, dict[str, Any]]:
    """(params, meta) of a run's "best" or "latest" checkpoint, or that of an update. Raises ConfigError."""
    import jax

    from cuajax.checkpoint import CheckpointError, Checkpoints
    from cuajax.models import policy

    if step not in ("best", "latest") and not step.isdecimal():
        raise ConfigError(f"step is {step!r}; choices: best, latest, or the number of an update")
    abstract = jax.eval_shape(lambda: policy.init(jax.random.key(0), cfg))
    try:
        kept = Checkpoints(run_dir / "checkpoints", metric="success", read_only=True)
        number = int(step) if step.isdecimal() else kept.best() if step == "best" else kept.latest()
        found = kept.restore_params(abstract, step=kept.latest() if number is None else number)
        kept.close()
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return found


def newest(run_dir: Path, cfg: Any, *, seed: int) -> tuple[Any, int]:
    """(params, version) of a run's newest checkpoint, or those of `seed` and 0 where there is none yet.

    A checkpoint keeps the number its parameters were published under: the learner, which may be further, publishes
    again when it sees that. Raises ConfigError.
    """
    import jax

    from cuajax.checkpoint import MARKER, Checkpoints
    from cuajax.models import policy

    if (run_dir / "checkpoints" / MARKER).is_file():
        kept = Checkpoints(run_dir / "checkpoints", read_only=True)
        begun = kept.latest() is not None
        kept.close()
        if begun:
            params, meta = checkpoint(run_dir, cfg, step="latest")
            return params, int(meta["version"])
    return policy.init(jax.random.key(seed), cfg), 0


def advertise(run_dir: Path, address: str) -> None:
    """Writes where the run's policy server listens."""
    host, _, port = address.rpartition(":")
    if host in ("0.0.0.0", "[::]"):  # every interface of this machine: others know it by its name
        address = f"{socket.gethostname()}:{port}"
    draft = run_dir / f".{ENDPOINT}.{os.getpid()}"
    draft.write_text(json.dumps({"address": address, "pid": os.getpid()}))
    draft.replace(run_dir / ENDPOINT)


def advertised(run_dir: Path) -> str:
    """The address in the run directory, "" when there is none."""
    try:
        return json.loads((run_dir / ENDPOINT).read_text())["address"]
    except FileNotFoundError:
        return ""


def find(run_dir: Path, address: str, *, patience: float = PATIENCE) -> str:
    """`address`, or for "run" the one advertised in the run directory, waited for. Raises ConfigError."""
    end = time.monotonic() + patience
    while address == "run":
        if found := advertised(run_dir):
            return found
        if time.monotonic() > end:
            raise ConfigError(f"{run_dir / ENDPOINT} did not appear within {patience:g} s: is launch/serve.py running?")
        time.sleep(POLL)
    return address
