"""Decisions per second of the tiny policy, in process and over gRPC, 128 callers at once."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import time
from typing import Any

import jax
import numpy as np

from cuajax.inputs.processor import ImageSpec
from cuajax.inputs.tokenizer import CompactTokenizer
from cuajax.models import policy, presets
from cuajax.serving.client import GrpcClient, LocalClient
from cuajax.serving.engine import Buckets
from cuajax.serving.scheduler import open_policy
from cuajax.serving.server import PolicyServer
from cuajax.types import Image, Prompt, Sampling

STAGES = ("prompt_s", "prefill_s", "decode_s", "deliver_s", "idle_s")


def prompts(tokenizer: CompactTokenizer, count: int) -> list[Prompt]:
    """30-token prompts, each with its own 64x64 screen."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(count):
        pixels = rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
        ids = [tokenizer.image_id] * 16 + rng.integers(30, tokenizer.vocab_size, 14).tolist()
        out.append(Prompt(np.array(ids, np.int32), (Image(hashlib.sha256(pixels.tobytes()).hexdigest(), pixels),)))
    return out


async def drive(client: Any, items: list[Prompt], *, callers: int, each: int, share: int) -> None:
    async def caller(number: int) -> None:
        for turn in range(each):
            prompt = items[(number // share * 37 + turn) % len(items)]
            await client.generate(prompt, Sampling(max_tokens=3, seed=number * 1000 + turn))

    await asyncio.gather(*(caller(number) for number in range(callers)))


async def compare(server: PolicyServer, items: list[Prompt], args: argparse.Namespace) -> dict[str, list[dict]]:
    remote = GrpcClient(server.address)
    rounds: dict[str, list[dict]] = {"local": [], "grpc": []}
    for _ in range(args.rounds):
        for name, client in (("local", LocalClient(server.scheduler)), ("grpc", remote)):
            before, wall, cpu = server.scheduler.snapshot(), time.perf_counter(), time.process_time()
            await drive(client, items, callers=args.callers, each=args.each, share=args.share)
            wall, cpu, count = time.perf_counter() - wall, time.process_time() - cpu, args.callers * args.each
            after = server.scheduler.snapshot()
            row = {"per_s": count / wall, "cpu_us": cpu / count * 1e6}
            rounds[name].append(row | {stage: (after[stage] - before[stage]) / count * 1e6 for stage in STAGES})
    await remote.close()
    return rounds


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="serving")
    parser.add_argument("--callers", type=int, default=128)
    parser.add_argument("--each", type=int, default=40, help="decisions a caller makes in one round")
    parser.add_argument("--share", type=int, default=1, help="callers that see the same prompt at the same time")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args(argv)
    tokenizer = CompactTokenizer()
    cfg = presets.get("tiny", vocab_size=tokenizer.vocab_size)
    params = jax.jit(policy.init, static_argnums=1)(jax.random.key(0), cfg)
    buckets = Buckets(prompts=(8, 32, 128), lengths=(32,), images=(1,), answer=8)
    started = time.perf_counter()
    scheduler = open_policy(cfg, params, tokenizer=tokenizer, spec=ImageSpec(), buckets=buckets)
    print(f"warm-up: {scheduler.engine.compilations} programs in {time.perf_counter() - started:.1f} s")
    server = PolicyServer(scheduler)
    server.start()
    rounds = asyncio.run(compare(server, prompts(tokenizer, 256), args))
    server.stop()
    scheduler.stop()
    out: dict[str, Any] = {"compilations": scheduler.engine.compilations}
    columns = ["per_s", "cpu_us", *STAGES]
    print(f"{'':6}" + "".join(f"{name.replace('_s', '_us') if name in STAGES else name:>12}" for name in columns))
    for name, rows in rounds.items():
        values = {column: statistics.median(row[column] for row in rows[1:] or rows) for column in columns}
        print(f"{name:6}" + "".join(f"{values[column]:12.0f}" for column in columns))
        out |= {f"{name}_{column}": round(value, 1) for column, value in values.items()}
    return out
