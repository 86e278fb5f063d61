"""Our engine under JetStream's own Driver and servicer, in a process of its own: the import leaves marks."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, logging, threading
failed = []
threading.excepthook = lambda args: failed.append(args.exc_value)
before = (logging.getLogger().level, logging.getLogger().handlers[:])

import jax, numpy as np
from cuajax.inputs.processor import ImageSpec
from cuajax.inputs.tokenizer import CompactTokenizer
from cuajax.models import policy, presets
from cuajax.serving import jetstream_compat
from cuajax.serving.client import LocalClient
from cuajax.serving.engine import Buckets
from cuajax.serving.scheduler import open_policy
from cuajax.types import Prompt, Sampling
from jetstream.core.proto import jetstream_pb2 as pb
from jetstream.engine import engine_api

tokenizer = CompactTokenizer()
cfg = presets.get("tiny", vocab_size=tokenizer.vocab_size)
params = jax.jit(policy.init, static_argnums=1)(jax.random.key(0), cfg)
buckets = Buckets(prompts=(1,), lengths=(16,), slots=(4,), images=(0,), patches=4, answer=6, stops=4)
scheduler = open_policy(cfg, params, tokenizer=tokenizer, spec=ImageSpec(), buckets=buckets)

texts = ["click on save", "press the red button", "open the file menu", "type hello", "done", "scroll down"]
prompts = [tokenizer.encode(text) for text in texts]
client = LocalClient(scheduler)

async def ours(sampling):
    items = [client.generate(Prompt(np.array(ids, np.int32)), sampling) for ids in prompts]
    return [c.token_ids.tolist() for c in await asyncio.gather(*items)]

greedy = Sampling(temperature=0.0, max_tokens=6)
wanted = asyncio.run(ours(greedy))
stop = wanted[0][2]
stopping = Sampling(temperature=0.0, max_tokens=6, stop_ids=(stop,))
wanted_stopping = asyncio.run(ours(stopping))
assert len(wanted_stopping[0]) <= 3

orchestrator = jetstream_compat.orchestrator()
assert (logging.getLogger().level, logging.getLogger().handlers[:]) == before, "the root logger was taken over"

def theirs(sampling):
    engine = jetstream_compat.JetStreamEngine(scheduler.engine, tokenizer, sampling=sampling)
    assert isinstance(engine, engine_api.Engine)
    driver = orchestrator.Driver([engine], [engine], [params], [params], interleaved_mode=True)
    server = orchestrator.LLMOrchestrator(driver)

    async def one(**content):
        request = pb.DecodeRequest(max_tokens=100, **content)
        out = []
        async for response in server.Decode(request):
            out += response.stream_content.samples[0].token_ids
        return out

    async def every():
        by_token = [one(token_content=pb.DecodeRequest.TokenContent(token_ids=ids)) for ids in prompts]
        by_text = [one(text_content=pb.DecodeRequest.TextContent(text=text)) for text in texts]
        answers = await asyncio.gather(*by_token, *by_text)
        await asyncio.to_thread(driver.stop)  # its threads close their channels through this loop
        return answers

    return asyncio.run(every())

assert theirs(greedy) == wanted * 2
assert theirs(stopping) == wanted_stopping * 2
assert not failed, failed
scheduler.stop()
print("same tokens")
"""


@pytest.mark.jetstream
def test_the_driver_runs_our_engine() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "same tokens" in done.stdout
