"""The gRPC face: our own protocol, JetStream's, and everything a network can send."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from cuajax import wire
from cuajax.serving import weights
from cuajax.serving.client import (
    BadWeights,
    DeadlineExceeded,
    GrpcClient,
    InvalidRequest,
    ResourceExhausted,
    StaleVersion,
    Unauthenticated,
    Unavailable,
)
from cuajax.serving.messages import Ask, WeightsHeader
from cuajax.serving.server import PolicyServer, loopback
from cuajax.types import Completion, Image, Prompt, Sampling

from .conftest import BUCKETS, World, local, same
from .test_scheduler import Gated, until


@pytest.fixture
def serve(start: Any) -> Iterator[Callable[..., PolicyServer]]:
    """Starts servers that end with the test."""
    started: list[PolicyServer] = []

    def begin(scheduler: Any = None, **settings: Any) -> PolicyServer:
        server = PolicyServer(scheduler or start(), **settings)
        server.start()
        started.append(server)
        return server

    yield begin
    for server in started:
        server.stop()


def remote(address: str, items: list[tuple[Prompt, Sampling]], **settings: Any) -> list[Any]:
    """All answers of one tick through a GrpcClient."""

    async def run() -> list[Any]:
        client = GrpcClient(address, **settings)
        try:
            return await asyncio.gather(*(client.generate(*item) for item in items), return_exceptions=True)
        finally:
            await client.close()

    return asyncio.run(run())


def calling(address: str, work: Callable[[GrpcClient], Any], **settings: Any) -> Any:
    """What `work(client)` returns."""

    async def run() -> Any:
        client = GrpcClient(address, **settings)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


def raw(address: str, method: str, body: bytes, *, token: str = "") -> bytes:
    """One raw call of cuajax.Policy."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address) as channel:
        path = f"/cuajax.Policy/{method}"
        if method == "Generate":
            return b"".join(channel.unary_stream(path)(body, metadata=metadata, timeout=20))
        if method == "SetWeights":
            return channel.stream_unary(path)(iter([body]), metadata=metadata, timeout=20)
        return channel.unary_unary(path)(body, metadata=metadata, timeout=20)


def test_remote_is_local(world: World, serve: Any) -> None:
    server = serve()
    kinds = [
        Sampling(max_tokens=5, seed=1),
        Sampling(temperature=0.0, max_tokens=3),
        Sampling(top_k=4, max_tokens=4, seed=3),
    ]
    items = [(world.prompt(i, image=i % 3 > 0), kinds[i % 3]) for i in range(9)]
    here, there = local(server.scheduler, items), remote(server.address, items, max_batch=4)
    assert all(same(a, b) for a, b in zip(here, there, strict=True))
    for a, b in zip(here, there, strict=True):
        assert (a.support is None) == (b.support is None)
        if a.support is not None:
            assert (a.support.ids == b.support.ids).all()
            assert (a.support.count == b.support.count).all()
        assert (a.versions == b.versions).all()
    info = calling(server.address, lambda client: client.info())
    assert info["version"] == 0
    assert info["limits"]["prompt_tokens"] == 24
    assert info["stats"]["completed"] == 18
    assert info["fingerprint"] == server.scheduler.info()["fingerprint"]


def test_bad_items_fail_alone(world: World, serve: Any) -> None:
    ids = world.prompt(0).token_ids
    lie = Prompt(ids, (Image("x", np.zeros((4096, 4096, 3), np.uint8)),))
    address = serve().address
    unsendable = Sampling(max_tokens=2, seed=1 << 70)
    bad, good = remote(address, [(world.prompt(0), unsendable), (world.prompt(0), Sampling(max_tokens=2))])
    assert isinstance(bad, InvalidRequest)
    assert isinstance(good, Completion)
    *bad, good = remote(
        address,
        [
            (Prompt(np.full(2000, 40, np.int32)), Sampling(max_tokens=2)),
            (Prompt(ids.astype(np.float64)), Sampling(max_tokens=2)),
            (lie, Sampling(max_tokens=2)),
            (world.prompt(0), Sampling(max_tokens=2)),
        ],
    )
    assert all(isinstance(error, InvalidRequest) for error in bad)
    assert "2000 tokens, must have 1..24" in str(bad[0])
    assert isinstance(good, Completion)


def test_malformed_bytes_kill_nothing(world: World, serve: Any) -> None:
    server = serve(max_message_bytes=1 << 20)
    prompt = world.prompt(0)
    fine = wire.encode(Ask("a", [(prompt, Sampling(max_tokens=2))]))
    huge_seed = fine.replace(b"\xa4seed\xc0", b"\xa4seed\xcf" + b"\xff" * 8)
    assert huge_seed != fine
    for method in ("Generate", "Cancel", "SetWeights"):
        for body in (b"", b"\xff" * 100, b"\x91" * 5000, b"garbage", fine[:-7], wire.encode({"id": 1, "items": {}})):
            with pytest.raises(grpc.RpcError) as caught:
                raw(server.address, method, body)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (method, body[:20])  # type: ignore[attr-defined]
    with pytest.raises(grpc.RpcError) as caught:
        raw(server.address, "Generate", b"x" * (2 << 20))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    with pytest.raises(grpc.RpcError) as caught:
        raw(server.address, "Nonsense", b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
    assert raw(server.address, "Generate", wire.encode(Ask("b", []))) == b""
    assert b"token_ids" in raw(server.address, "Generate", huge_seed)
    rng, codes = np.random.default_rng(0), set()
    for _ in range(100):  # single bits flipped: an answer or a refusal, never a dead server
        at, bit = int(rng.integers(len(fine))), 1 << int(rng.integers(8))
        try:
            raw(server.address, "Generate", fine[:at] + bytes([fine[at] ^ bit]) + fine[at + 1 :])
        except grpc.RpcError as error:
            codes.add(error.code())  # type: ignore[attr-defined]
    assert codes <= {grpc.StatusCode.INVALID_ARGUMENT}
    assert isinstance(remote(server.address, [(prompt, Sampling(max_tokens=2))])[0], Completion)


def test_closing_a_client_fails_what_is_left(world: World, serve: Any, start: Any) -> None:
    engine = Gated(world.engine)
    server = serve(start(engine))

    async def run() -> Any:
        client = GrpcClient(server.address)
        task = asyncio.create_task(client.generate(world.prompt(0), Sampling(max_tokens=6)))
        await asyncio.sleep(0.1)
        await client.close()
        return await asyncio.gather(task, return_exceptions=True)

    assert isinstance(asyncio.run(run())[0], Unavailable)
    engine.open()
    until(lambda: server.scheduler.snapshot()["slots_free"] == 8)


def test_one_call_a_tick(world: World, serve: Any) -> None:
    server, calls = serve(), []

    async def work(client: GrpcClient) -> None:
        once = client._call

        async def counted(batch: Any, timeout_s: float) -> Any:
            calls.append(len(batch))
            return await once(batch, timeout_s)

        client._call = counted  # type: ignore[method-assign]
        await asyncio.gather(*(client.generate(world.prompt(i), Sampling(max_tokens=1)) for i in range(20)))

    calling(server.address, work, max_batch=16)
    assert calls == [16, 4]


def test_limits_deadlines_and_cancelling(world: World, serve: Any, start: Any) -> None:
    engine = Gated(world.engine)
    scheduler = start(engine, max_queue=4)
    server = serve(scheduler)
    item = (world.prompt(0), Sampling(max_tokens=6))
    threading.Timer(0.8, engine.open).start()  # the engine stands still meanwhile
    assert isinstance(remote(server.address, [item], timeout_s=0.3, retries=0)[0], DeadlineExceeded)

    async def work(client: GrpcClient) -> Any:
        held = [asyncio.create_task(client.generate(*item)) for _ in range(12)]
        await asyncio.sleep(0.15)
        crowded = await asyncio.gather(client.generate(*item), return_exceptions=True)
        held[0].cancel()
        return crowded, await asyncio.gather(*held, return_exceptions=True)

    engine = Gated(world.engine)
    scheduler = start(engine, max_queue=4)
    server = serve(scheduler)
    threading.Timer(0.6, engine.open).start()
    (crowded,), (cancelled, *rest) = calling(server.address, work, retries=0)
    assert isinstance(crowded, ResourceExhausted)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert all(isinstance(answer, Completion) for answer in rest)
    until(lambda: scheduler.snapshot()["slots_free"] == 8)
    assert scheduler.snapshot()["cancelled"] == 1


def test_weights_over_the_wire(world: World, serve: Any) -> None:
    server, item = serve(), (world.prompt(0), Sampling(max_tokens=3, seed=1))
    leaves = weights.flatten(world.other)
    name = list(leaves)[-1]

    def send(leaves: dict[str, np.ndarray], version: int, mode: str = "drain") -> None:
        calling(server.address, lambda client: client.set_weights(leaves, version, mode=mode))

    nan = {**leaves, name: np.full_like(leaves[name], np.nan)}
    for bad, message in (
        (nan, "not finite"),
        ({k: v for k, v in leaves.items() if k != name}, "missing"),
        ({**leaves, name: leaves[name][..., :1]}, "must be float32"),
        ({**leaves, "x": leaves[name]}, "unknown leaf 'x'"),
    ):
        with pytest.raises(BadWeights, match=message):
            send(bad, 1)
    with pytest.raises(StaleVersion, match="serving version 0"):
        send(leaves, 0)
    with pytest.raises(InvalidRequest, match="drain, inflight"):
        send(leaves, 1, "soon")
    header = WeightsHeader(1, "drain", [(n, v.dtype.name, list(v.shape)) for n, v in leaves.items()])
    with pytest.raises(grpc.RpcError, match="0 bytes of the"):
        raw(server.address, "SetWeights", wire.encode(header))
    assert server.scheduler.version == 0
    weights.publish(world.other, 5, server.address, mode="inflight")
    assert server.scheduler.version == 5
    answer = remote(server.address, [item])[0]
    assert answer.versions.tolist() == [5] * 3
    reference = world.scheduler(version=0)
    reference.update(world.other, 5)
    assert same(local(reference, [item])[0], answer)
    reference.stop()


def test_a_token_guards_every_method(world: World, serve: Any, start: Any) -> None:
    for address in ("0.0.0.0:0", "[::]:0", "10.1.2.3:0", "example.org:80"):
        assert not loopback(address)
        with pytest.raises(ValueError, match="give a token"):
            PolicyServer(start(), address=address)
    assert all(loopback(a) for a in ("127.0.0.1:0", "localhost:1", "[::1]:0", "unix:/tmp/x"))
    server = serve(address="0.0.0.0:0", token="s3cret")
    address = server.address.replace("0.0.0.0", "127.0.0.1")
    item = (world.prompt(0), Sampling(max_tokens=2))
    assert isinstance(remote(address, [item], token="s3cret")[0], Completion)
    for token in ("", "s3cre", "s3cret2"):
        assert isinstance(remote(address, [item], token=token)[0], Unauthenticated)
        for method in ("Generate", "Cancel", "SetWeights", "Info"):
            with pytest.raises(grpc.RpcError) as caught:
                raw(address, method, b"", token=token)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(world: World, serve: Any, tmp_path: Path) -> None:
    certificate, key = str(tmp_path / "c.pem"), str(tmp_path / "k.pem")
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    name = ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", *made.split(), *name], check=True, capture_output=True)
    server = serve(address="localhost:0", token="t", tls=(certificate, key))
    item, root = (world.prompt(0), Sampling(max_tokens=2)), Path(certificate).read_bytes()
    assert isinstance(remote(server.address, [item], token="t", root_certificate=root)[0], Completion)
    assert isinstance(remote(server.address, [item], token="t", retries=0)[0], Unavailable)


def test_a_restarted_server_is_found_again(world: World, start: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    item = (world.prompt(0), Sampling(max_tokens=3, seed=1))
    assert isinstance(remote(address, [item], retries=1)[0], Unavailable)
    engine = Gated(world.engine)
    first, second = PolicyServer(start(engine), address=address), PolicyServer(start(), address=address)
    first.start()
    with pytest.raises(OSError, match="cannot serve"):
        PolicyServer(start(), address=address).start()

    async def work(client: GrpcClient) -> Any:
        task = asyncio.create_task(client.generate(*item))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(first.stop)  # with the call in flight
        await asyncio.to_thread(second.start)
        return await task

    answer = calling(address, work, retries=8)
    assert same(answer, local(second.scheduler, [item])[0])
    engine.open()
    second.stop()


@pytest.mark.jetstream
def test_a_jetstream_client_gets_tokens(world: World, serve: Any) -> None:
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    pb: Any = jetstream_pb2
    tokenizer = world.tokenizer
    server = serve(tokenizer=tokenizer)
    text = "click on save"
    ids = tokenizer.encode(text)
    greedy = Sampling(temperature=0.0, max_tokens=4)
    wanted = local(server.scheduler, [(Prompt(np.array(ids, np.int32)), greedy)])[0].token_ids.tolist()
    with grpc.insecure_channel(server.address) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=20).is_live

        def decode(**content: Any) -> list[Any]:
            request = pb.DecodeRequest(session_cache="", priority=1, max_tokens=4, **content)
            return [r.stream_content.samples[0] for r in stub.Decode(request, timeout=20)]

        by_token = decode(token_content=pb.DecodeRequest.TokenContent(token_ids=ids))
        by_text = decode(text_content=pb.DecodeRequest.TextContent(text=text))
        assert [list(sample.token_ids) for sample in by_token] == [[t] for t in wanted]  # one a message
        assert [sample.token_ids[0] for sample in by_text] == wanted
        assert [sample.text for sample in by_text] == [tokenizer.decode([t]) for t in wanted]
        for content in (
            {"token_content": pb.DecodeRequest.TokenContent(token_ids=[40] * 100)},
            {"token_content": pb.DecodeRequest.TokenContent(token_ids=[-1])},
            {"text_content": pb.DecodeRequest.TextContent(text="save " * 100)},
            {"text_content": pb.DecodeRequest.TextContent(text="x" * 100_000)},
            {},
        ):
            with pytest.raises(grpc.RpcError) as caught:
                decode(**content)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        assert len(decode(token_content=pb.DecodeRequest.TokenContent(token_ids=ids))) == 4
        longest = pb.DecodeRequest(max_tokens=10_000, token_content=pb.DecodeRequest.TokenContent(token_ids=ids))
        assert len(list(stub.Decode(longest, timeout=20))) == BUCKETS.answer
        call = stub.Decode(longest, timeout=20)
        next(call)
        call.cancel()
    until(lambda: server.scheduler.snapshot()["slots_free"] == 8)
