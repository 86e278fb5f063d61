"""A scheduler on one gRPC port: JetStream's `Orchestrator` for any JetStream client, `cuajax.Policy` for ours.

`cuajax.Policy` carries msgpack bodies through generic handlers: Generate (a list of prompts in, replies streamed as
they end), Cancel, OfferWeights and SetWeights (streamed leaves) and Info.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import hmac
import importlib.util
import ipaddress
import logging
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from cuajax import wire
from cuajax.inputs.processor import ImageSpec
from cuajax.serving import weights
from cuajax.serving.engine import Buckets
from cuajax.serving.mailbox import Mailbox, abort, sink_into
from cuajax.serving.messages import (
    SERVICE,
    Ask,
    BadWeights,
    Cancel,
    InvalidRequest,
    PolicyError,
    Reply,
    Request,
    Result,
    WeightsHeader,
)
from cuajax.serving.scheduler import Scheduler, open_policy
from cuajax.types import Completion, Sampling


def loopback(address: str) -> bool:
    """Whether "host:port" can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost" or address.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Bearer(grpc.aio.ServerInterceptor):
    """Refuses every call that does not carry the token."""

    def __init__(self, token: str):
        self._expected = f"Bearer {token}".encode()

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this server wants a bearer token")

        self._refuse = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        if hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._expected):
            return await continuation(handler_call_details)
        return self._refuse


def _reply(index: int, result: Result) -> Reply:
    if isinstance(result, PolicyError):
        return Reply(index, None, result.code, str(result))
    return Reply(index, result if isinstance(result, Completion) else None)


class _Policy:
    """Handlers of `cuajax.Policy`."""

    def __init__(self, scheduler: Scheduler, executor: concurrent.futures.Executor):
        self._scheduler, self._executor = scheduler, executor
        self._calls: dict[str, list[Request]] = {}
        self._sink = sink_into(asyncio.get_running_loop())

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
                "Cancel": grpc.unary_unary_rpc_method_handler(self.cancel),
                "OfferWeights": grpc.unary_unary_rpc_method_handler(self.offer_weights),
                "SetWeights": grpc.stream_unary_rpc_method_handler(self.set_weights),
                "Info": grpc.unary_unary_rpc_method_handler(self.info),
            },
        )

    async def generate(self, body: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            ask = wire.decode(body, Ask)
        except wire.WireError as error:
            await abort(context, InvalidRequest(str(error)))
            return
        left = context.time_remaining()
        deadline = None if left is None else time.monotonic() + left
        mailbox = Mailbox()
        requests = [
            Request(prompt, sampling, self._sink, (mailbox, index), deadline)
            for index, (prompt, sampling) in enumerate(ask.items)
        ]
        self._calls[ask.id] = requests
        self._scheduler.submit(requests)
        open_ = len(requests)
        try:
            while open_:
                results = await mailbox.take()
                open_ -= len(results)
                yield wire.encode([_reply(index, result) for index, result in results])
        finally:
            self._calls.pop(ask.id, None)
            if open_:  # the caller went away
                self._scheduler.cancel(requests)

    async def cancel(self, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            what = wire.decode(body, Cancel)
        except wire.WireError as error:
            await abort(context, InvalidRequest(str(error)))
            return b""
        requests = self._calls.get(what.id, [])
        self._scheduler.cancel([requests[i] for i in what.indices if 0 <= i < len(requests)])
        return b""

    async def info(self, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        del body, context
        return wire.encode(self._scheduler.info())

    async def set_weights(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        try:
            header, params = await self._receive(messages)
            update = functools.partial(self._scheduler.update, params, header.version, mode=header.mode)
            await asyncio.get_running_loop().run_in_executor(self._executor, update)
        except wire.WireError as error:
            await abort(context, InvalidRequest(str(error)))
        except PolicyError as error:
            await abort(context, error)
        return b""

    async def offer_weights(self, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            self._refuse(body)
        except wire.WireError as error:
            await abort(context, InvalidRequest(str(error)))
        except PolicyError as error:
            await abort(context, error)
        return b""

    def _refuse(self, body: bytes) -> tuple[WeightsHeader, weights.Declared]:
        """The header and the leaves it announces. Raises PolicyError or WireError when they cannot be served."""
        header = wire.decode(body, WeightsHeader)
        self._scheduler.refuse_update(header.version, header.mode)
        given = {name: (dtype, tuple(shape)) for name, dtype, shape in header.leaves}
        weights.check_declared(given, weights.declared(self._scheduler.template))
        return header, given

    async def _receive(self, messages: AsyncIterator[bytes]) -> tuple[WeightsHeader, Any]:
        """Leaves in the served tree's structure: nothing is allocated for a tree that does not fit."""
        stream = aiter(messages)
        header, wanted = self._refuse(await anext(stream, b""))
        sizes = {name: weights.size_bytes(*wanted[name]) for name in wanted}
        data, at = bytearray(sum(sizes.values())), 0
        async for chunk in stream:
            if at + len(chunk) > len(data):
                raise BadWeights(f"more bytes than the {len(data)} announced")
            data[at : at + len(chunk)] = chunk
            at += len(chunk)
        if at != len(data):
            raise BadWeights(f"{at} bytes of the {len(data)} announced")
        view, leaves, at = memoryview(data), {}, 0
        for name, size in sizes.items():
            dtype, shape = wanted[name]
            leaves[name] = wire.decode_array((dtype, shape, view[at : at + size]))
            at += size
        return header, weights.unflatten(leaves, self._scheduler.template)


class _Departed(logging.Filter):
    """Drops what gRPC tells of calls whose caller went away or was sent away: that is no fault of ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        return kind is None or kind.__name__ not in ("CancelledError", "ExecuteBatchError")


class PolicyServer:
    """The gRPC face of a scheduler, with its own thread and event loop."""

    def __init__(
        self, scheduler: Scheduler, *, address: str = "127.0.0.1:0", token: str | None = None,
        tls: tuple[str, str] | None = None, tokenizer: Any = None, sampling: Sampling | None = None,
        max_message_bytes: int = 256 << 20,
    ):  # fmt: skip
        """`tls` is (certificate path, key path), PEM; `sampling` is what Orchestrator clients get (default: greedy).

        Raises ValueError for an address beyond this machine without a token.
        """
        if not token and not loopback(address):
            raise ValueError(f"address {address!r} is reachable from other machines: give a token, or use 127.0.0.1")
        self.scheduler, self._tokenizer, self._token, self._tls = scheduler, tokenizer, token, tls
        self.address = ""  # "host:port" once started
        self._address, self._max_message_bytes = address, max_message_bytes
        self._sampling = sampling or Sampling(temperature=0.0, max_tokens=scheduler.engine.buckets.answer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bound: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="policy-server", daemon=True)

    def start(self) -> str:
        """Serves from now on; returns "host:port". Raises OSError when the address cannot be bound."""
        told = logging.getLogger("grpc._cython.cygrpc")
        if not any(isinstance(f, _Departed) for f in told.filters):
            told.addFilter(_Departed())
        self._thread.start()
        self.address = self._bound.result()
        return self.address

    def stop(self, timeout_s: float = 10.0) -> None:
        """Refuses new calls, cancels those under way and closes the port."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(timeout_s)

    async def _serve(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        limit = self._max_message_bytes
        server = grpc.aio.server(
            interceptors=[_Bearer(self._token)] if self._token else [],
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
            ],
        )
        with concurrent.futures.ThreadPoolExecutor(1, "policy-update") as executor:
            if importlib.util.find_spec("jetstream"):  # an extra
                from cuajax.serving.orchestrator import Orchestrator

                Orchestrator(self.scheduler, self._tokenizer, self._sampling).join(server)
            server.add_generic_rpc_handlers((_Policy(self.scheduler, executor).handler(),))
            try:
                port = self._bind(server)
            except (RuntimeError, OSError) as error:
                self._bound.set_exception(OSError(f"cannot serve on {self._address}: {error}"))
                return
            await server.start()
            self._bound.set_result(f"{self._address.rpartition(':')[0]}:{port}")
            await self._ending.wait()
            await server.stop(grace=0.2)

    def _bind(self, server: Any) -> int:
        if self._tls is None:
            return server.add_insecure_port(self._address)
        certificate, key = (Path(path).read_bytes() for path in self._tls)
        return server.add_secure_port(self._address, grpc.ssl_server_credentials([(key, certificate)]))


def serve(
    cfg: Any, params: Any, *,
    tokenizer: Any, spec: ImageSpec, buckets: Buckets | None = None, version: int = 0, truncate: bool = True,
    **network: Any,
) -> PolicyServer:  # fmt: skip
    """Warms a policy up and serves it; `network` goes to PolicyServer. Stop the result, then its `scheduler`."""
    scheduler = open_policy(
        cfg, params, tokenizer=tokenizer, spec=spec, buckets=buckets, version=version, truncate=truncate
    )
    server = PolicyServer(scheduler, tokenizer=tokenizer, **network)
    server.start()
    return server
