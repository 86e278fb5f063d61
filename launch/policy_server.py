"""The policy server a page starts, or the one of another process that it joins."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parts

from cuajax.agent.harness import Harness
from cuajax.config import ConfigError, Settings
from cuajax.serving.client import GrpcClient, LocalClient
from cuajax.serving.messages import PolicyError

ENDPOINT = "policy_server.json"  # in the run directory: where its policy server listens


@dataclass(frozen=True)
class Policy:
    """A policy that serves: how to reach it, how to replace its weights, what it counts."""

    connect: Callable[[], Any]  # a client for the caller's event loop
    publish: Callable[[Any, int], None]
    stats: Callable[[], Mapping[str, float]]
    stop: Callable[[], None]
    address: str = ""


def start(config: Settings, made: Harness, params: Any, *, cfg: Any, version: int, address: str = "") -> Policy:
    """A policy server in this process: behind loopback gRPC, or called directly."""
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
        server = PolicyServer(
            scheduler, address=address or "127.0.0.1:0", token=token, tokenizer=parts.tokenizer(made)
        )
        bound = server.start()
    except (ValueError, OSError) as error:
        scheduler.stop()
        raise ConfigError(f"policy server: {error}; a token goes into the environment as CUAJAX_TOKEN") from error

    def stop() -> None:
        server.stop()
        scheduler.stop()

    return Policy(lambda: GrpcClient(bound, token=token), publish, scheduler.snapshot, stop, bound)


def join(address: str, *, mode: str = "drain", patience: float = 120.0) -> Policy:
    """A policy server that another process runs; waits up to `patience` seconds for it to answer."""
    from cuajax.serving import weights

    token = os.environ.get("CUAJAX_TOKEN") or None

    async def ask() -> Mapping[str, Any]:
        client = GrpcClient(address, token=token, timeout_s=10.0, retries=0)
        try:
            return await client.info()
        finally:
            await client.close()

    end = time.monotonic() + patience
    while True:
        try:
            asyncio.run(ask())
            break
        except PolicyError as error:
            if time.monotonic() > end:
                raise ConfigError(f"no policy server answers at {address} after {patience:g} s: {error}") from error
            time.sleep(0.5)

    def publish(params: Any, version: int) -> None:
        weights.publish(params, version, address, mode=mode, token=token)

    return Policy(
        lambda: GrpcClient(address, token=token), publish, lambda: asyncio.run(ask())["stats"], lambda: None, address
    )


def advertise(run_dir: Path, address: str) -> None:
    """Writes where the run's policy server listens."""
    draft = run_dir / f".{ENDPOINT}.{os.getpid()}"
    draft.write_text(json.dumps({"address": address, "pid": os.getpid()}))
    draft.replace(run_dir / ENDPOINT)


def find(run_dir: Path, address: str, *, patience: float = 300.0) -> str:
    """`address`, or for "run" the one advertised in the run directory, waited for. Raises ConfigError."""
    if address != "run":
        return address
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            return json.loads((run_dir / ENDPOINT).read_text())["address"]
        except FileNotFoundError:
            time.sleep(0.2)
    raise ConfigError(f"{run_dir / ENDPOINT} did not appear within {patience:g} s: is launch/serve.py running?")
