"""Where decisions come from, as seen by a rollout: the same client surface in process and over gRPC. No jax here.

Both clients gather every `generate` of one event-loop tick into one batch: at thousands of decisions a second a
message, a thread wake-up or a lock per decision would cost a core.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cuajax import wire
from cuajax.serving.messages import (
    SERVICE,
    Ask,
    BadWeights,
    Cancel,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    PolicyError,
    Reply,
    Request,
    ResourceExhausted,
    Result,
    Sink,
    StaleVersion,
    Unauthenticated,
    Unavailable,
    WeightsHeader,
    fault,
)
from cuajax.types import Completion, Prompt, Sampling

__all__ = [
    "BadWeights", "DeadlineExceeded", "EngineFault", "GrpcClient", "InvalidRequest", "LocalClient", "PolicyError",
    "ResourceExhausted", "StaleVersion", "Unauthenticated", "Unavailable",
]  # fmt: skip

UNSENDABLE = (TypeError, ValueError, NotImplementedError, OverflowError)  # what encoding a bad request raises
CHUNK_BYTES = 1 << 20  # of a weight upload
CLOSE_SECONDS = 0.2  # an answered call may take to end


class RequestScheduler(Protocol):
    """What LocalClient needs of a scheduler."""

    def submit(self, requests: Sequence[Request]) -> None: ...
    def cancel(self, requests: Sequence[Request]) -> None: ...
    def info(self) -> Mapping[str, Any]: ...


def _resolve(results: list[tuple[Any, Result]]) -> None:
    for future, value in results:
        if not future.done():
            if isinstance(value, PolicyError):
                future.set_exception(value)
            else:
                future.set_result(value)


# ---------------------------------------------------------------------------------------------------- in process
class LocalClient:
    """A scheduler in this process."""

    def __init__(self, scheduler: RequestScheduler, *, timeout_s: float | None = None):
        self._scheduler = scheduler
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: list[Request] = []
        self._sink: Sink = _resolve

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._pending = loop, []

        def sink(results: list[tuple[Any, Result]]) -> None:
            try:
                loop.call_soon_threadsafe(_resolve, results)
            except RuntimeError:  # the loop closed: nobody waits any more
                return

        self._sink = sink

    def _flush(self) -> None:
        batch, self._pending = self._pending, []
        self._scheduler.submit([r for r in batch if not r.handle.done()])  # done: cancelled within the tick

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """The policy's answer. Raises PolicyError."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._bind(loop)
        future = loop.create_future()
        request = Request(prompt, sampling, self._sink, future)
        if self._timeout_s is not None:
            request.deadline = time.monotonic() + self._timeout_s
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append(request)
        try:
            return await future
        except asyncio.CancelledError:
            self._scheduler.cancel([request])
            raise

    async def info(self) -> Mapping[str, Any]:
        """Version, config fingerprint, vocabulary, limits and statistics."""
        return self._scheduler.info()

    async def close(self) -> None:
        """Nothing is held; both clients end alike."""


# ------------------------------------------------------------------------------------------------------- remote
@dataclass(slots=True, eq=False)
class _Entry:
    prompt: Prompt
    sampling: Sampling
    future: asyncio.Future
    ask: str = ""  # the call it travels in
    index: int = 0


class GrpcClient:
    """A policy server elsewhere. Belongs to the event loop that first uses it."""

    def __init__(
        self, address: str, *, token: str | None = None, root_certificate: bytes | None = None,
        timeout_s: float = 120.0, retries: int = 5, max_batch: int = 256, max_message_bytes: int = 256 << 20,
    ):  # fmt: skip
        """`timeout_s` bounds one decision with all its retries; `root_certificate` (PEM) turns TLS on."""
        self.address, self.timeout_s, self.retries, self.max_batch = address, timeout_s, retries, max_batch
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._certificate, self._max_message_bytes = root_certificate, max_message_bytes
        self._channel: Any = None
        self._pending: list[_Entry] = []
        self._tasks: set[asyncio.Task] = set()
        self._cancels: dict[str, list[int]] = {}
        self._ids = map("{}-{}".format, itertools.repeat(os.urandom(8).hex()), itertools.count())

    def _method(self, kind: str, name: str) -> Any:
        import grpc

        if self._channel is None:
            limit = self._max_message_bytes
            options = [("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", limit)]
            if self._certificate is None:
                self._channel = grpc.aio.insecure_channel(self.address, options)
            else:
                secure = grpc.ssl_channel_credentials(self._certificate)
                self._channel = grpc.aio.secure_channel(self.address, secure, options)
        return getattr(self._channel, kind)(f"/{SERVICE}/{name}")

    async def close(self) -> None:
        """Ends calls under way and closes the connection.

        An answered call still has to hear its end: gRPC tells one that comes to a closed event loop as an error.
        """
        if self._tasks:
            await asyncio.wait([*self._tasks], timeout=CLOSE_SECONDS)
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        ends = [task for task in asyncio.all_tasks() if "_handle_status" in repr(task.get_coro())]
        if ends:
            await asyncio.wait(ends, timeout=CLOSE_SECONDS)

    # ------------------------------------------------------------------------------------------------- decisions
    async def generate(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """The policy's answer. Raises PolicyError."""
        loop = asyncio.get_running_loop()
        entry = _Entry(prompt, sampling, loop.create_future())
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append(entry)
        try:
            return await entry.future
        except asyncio.CancelledError:
            if entry.ask:
                if not self._cancels:
                    loop.call_soon(self._spawn_cancel)
                self._cancels.setdefault(entry.ask, []).append(entry.index)
            raise

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        batch, size = [], 0
        for entry in pending:
            if entry.future.done():  # cancelled within the tick
                continue
            more = entry.prompt.token_ids.nbytes + sum(image.pixels.nbytes for image in entry.prompt.images)
            if batch and (len(batch) == self.max_batch or size + more > self._max_message_bytes // 2):
                self._spawn(self._decide(batch))
                batch, size = [], 0
            batch.append(entry)
            size += more
        if batch:
            self._spawn(self._decide(batch))

    def _spawn_cancel(self) -> None:
        cancels, self._cancels = self._cancels, {}
        self._spawn(self._cancel(cancels))

    async def _cancel(self, cancels: Mapping[str, list[int]]) -> None:
        import grpc

        for ask, indices in cancels.items():
            try:
                await self._method("unary_unary", "Cancel")(
                    wire.encode(Cancel(ask, indices)), metadata=self._metadata, timeout=10.0
                )
            except grpc.aio.AioRpcError:  # the slot is then freed when its answer ends
                return

    async def _decide(self, entries: list[_Entry]) -> None:
        """Runs a batch to its end; safe to retry, since a decision changes nothing on the server."""
        deadline, batch = time.monotonic() + self.timeout_s, entries
        try:
            for attempt in range(self.retries + 1):
                if attempt:
                    await asyncio.sleep(_backoff(attempt))
                batch = [entry for entry in batch if not entry.future.done()]
                failed = await self._call(batch, deadline - time.monotonic()) if batch else []
                batch = []
                last = attempt == self.retries or time.monotonic() >= deadline
                for entry, error in failed:
                    if error.retryable and not last:
                        batch.append(entry)
                    elif not entry.future.done():
                        entry.future.set_exception(error)
                if not batch:
                    return
        finally:
            for entry in entries:
                if not entry.future.done():
                    entry.future.set_exception(Unavailable("the client closed"))

    async def _call(self, batch: list[_Entry], timeout_s: float) -> list[tuple[_Entry, PolicyError]]:
        """One Generate call; answered entries are resolved, the others returned with what went wrong."""
        import grpc

        ask = next(self._ids)
        for index, entry in enumerate(batch):
            entry.ask, entry.index = ask, index
        open_, failed = set(range(len(batch))), []
        try:
            body = wire.encode(Ask(ask, [(entry.prompt, entry.sampling) for entry in batch]))
        except UNSENDABLE:
            return [(entry, _unsendable(entry)) for entry in batch]
        try:
            call = self._method("unary_stream", "Generate")(
                body, metadata=self._metadata, timeout=max(timeout_s, 0.001)
            )
            async for message in call:
                for reply in wire.decode(message, list[Reply]):
                    if reply.index not in open_:
                        continue
                    open_.discard(reply.index)
                    entry = batch[reply.index]
                    if reply.completion is None:
                        failed.append((entry, fault(reply.code, reply.message)))
                    elif not entry.future.done():
                        entry.future.set_result(reply.completion)
            error: PolicyError = EngineFault("the server ended the call without an answer")
        except grpc.aio.AioRpcError as broken:
            error = fault(broken.code().name, f"{self.address}: {broken.details()}")
        except wire.WireError as broken:
            error = EngineFault(f"{self.address} answered nonsense: {broken}")
        return failed + [(batch[i], error) for i in sorted(open_)]

    # ---------------------------------------------------------------------------------------------- other calls
    async def _unary(self, name: str, body: bytes) -> bytes:
        import grpc

        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(_backoff(attempt))
            try:
                return await self._method("unary_unary", name)(body, metadata=self._metadata, timeout=self.timeout_s)
            except grpc.aio.AioRpcError as broken:
                error = fault(broken.code().name, f"{self.address}: {broken.details()}")
                if not error.retryable or attempt == self.retries:
                    raise error from broken
        raise AssertionError("unreachable")

    async def info(self) -> Mapping[str, Any]:
        """Version, config fingerprint, vocabulary, limits and statistics. Raises PolicyError."""
        return wire.decode(await self._unary("Info", b""), dict[str, Any])

    async def set_weights(self, leaves: Mapping[str, np.ndarray], version: int, *, mode: str = "drain") -> None:
        """Makes the server serve `leaves` (by path name, cuajax.serving.weights) as `version`. Raises PolicyError."""
        import grpc

        order = [(name, leaf.dtype.name, list(leaf.shape)) for name, leaf in leaves.items()]
        header = wire.encode(WeightsHeader(version, mode, order))
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(_backoff(attempt))
                # The connection may have died after the swap: then a second upload would be refused as stale.
                if (await self.info())["version"] == version:
                    return
            await self._unary("OfferWeights", header)  # refused before anything is sent: a status cuts a stream badly
            try:
                await self._method("stream_unary", "SetWeights")(
                    _chunks(header, leaves), metadata=self._metadata, timeout=self.timeout_s
                )
                return
            except grpc.aio.AioRpcError as broken:
                error = fault(broken.code().name, f"{self.address}: {broken.details()}")
                # A connection lost in the middle of a stream reads as an internal error.
                if not isinstance(error, (Unavailable, EngineFault)) or attempt == self.retries:
                    raise error from broken


def _chunks(header: bytes, leaves: Mapping[str, np.ndarray]) -> Iterator[bytes]:
    yield header
    for leaf in leaves.values():
        data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data
        for start in range(0, len(data), CHUNK_BYTES):
            yield bytes(data[start : start + CHUNK_BYTES])


def _unsendable(entry: _Entry) -> PolicyError:
    """Why an entry of a batch that cannot be encoded was not sent: itself, or a batch mate (then: again)."""
    try:
        wire.encode((entry.prompt, entry.sampling))
    except UNSENDABLE as error:
        return InvalidRequest(f"not a request: {error}")
    return Unavailable("a request of the same batch cannot be sent")


def _backoff(attempt: int) -> float:
    """Seconds before retry `attempt` (1, 2, ...): doubling from 50 ms to 2 s, with jitter."""
    return min(0.05 * 2 ** (attempt - 1), 2.0) * random.uniform(0.5, 1.0)
