"""JetStream's own gRPC service in front of our scheduler; needs the `jetstream` extra for its protocol alone."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc  # imports neither seqio nor TensorFlow

from cuajax.serving.mailbox import Mailbox, abort, sink_into
from cuajax.serving.messages import InvalidRequest, PolicyError, Request
from cuajax.serving.scheduler import Scheduler
from cuajax.types import Prompt, Sampling

pb: Any = jetstream_pb2  # its messages are made at import
CHARACTERS = 64  # of text a prompt token may stand for; longer texts are refused before they are tokenised


class Orchestrator(jetstream_pb2_grpc.OrchestratorServicer):
    """JetStream's service: text or token ids in, one streamed Sample a token out (a stop token included)."""

    def __init__(self, scheduler: Scheduler, tokenizer: Any, sampling: Sampling):
        """Use inside the server's event loop; `tokenizer` may be None (then only token_content is served)."""
        self._scheduler, self._tokenizer, self._sampling = scheduler, tokenizer, sampling
        self._limits = scheduler.engine.buckets
        self._sink = sink_into(asyncio.get_running_loop())

    def _request(self, message: Any, mailbox: Mailbox, deadline: float | None) -> Request:
        if message.WhichOneof("content") == "token_content":
            ids = list(message.token_content.token_ids)
        elif self._tokenizer is None:
            raise InvalidRequest("this server has no tokenizer: send token_content")
        else:
            text, limit = message.text_content.text, CHARACTERS * self._limits.lengths[-1]
            if len(text) > limit:
                raise InvalidRequest(f"text of {len(text)} characters, at most {limit} are tokenised")
            ids = self._tokenizer.encode(text)
        s = self._sampling
        if message.max_tokens:  # as in JetStream, an answer also ends where the cache does
            s = dataclasses.replace(s, max_tokens=min(message.max_tokens, self._limits.answer))
        return Request(Prompt(np.array(ids, np.int32)), s, self._sink, (mailbox, 0), deadline, stream=True)

    def join(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that has not started."""
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(self, server)

    async def Decode(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        left = context.time_remaining()
        mailbox, content = Mailbox(), pb.DecodeResponse.StreamContent
        try:
            work = self._request(request, mailbox, None if left is None else time.monotonic() + left)
        except InvalidRequest as error:
            await abort(context, error)
            return
        self._scheduler.submit([work])
        done = False
        try:
            while not done:
                for _, result in await mailbox.take():
                    if isinstance(result, PolicyError):
                        done = True
                        await abort(context, result)
                    elif isinstance(result, int):
                        text = self._tokenizer.decode([result]) if self._tokenizer else ""
                        sample = content.Sample(text=text, token_ids=[result])
                        yield pb.DecodeResponse(stream_content=content(samples=[sample]))
                    else:
                        done = True
        finally:
            if not done:
                self._scheduler.cancel([work])

    async def HealthCheck(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        del request, context
        return pb.HealthCheckResponse(is_live=self._scheduler.live)
