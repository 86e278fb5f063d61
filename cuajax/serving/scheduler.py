"""One thread between requests and the engine: continuous batching, weight swaps, and faults that stay where they are.

A turn of the loop admits everything that waits and fits, dispatches its prefill and one decode step, and only then
reads the results of the turn before: the host works while the device does.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cuajax.inputs.processor import ImageSpec
from cuajax.serving import answers, weights
from cuajax.serving import engine as eng
from cuajax.serving.answers import Flight
from cuajax.serving.engine import Buckets, Engine
from cuajax.serving.messages import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    PolicyError,
    Request,
    ResourceExhausted,
    Result,
    StaleVersion,
    Unavailable,
)
from cuajax.serving.prompts import Batch, Prompts
from cuajax.serving.stats import Stats
from cuajax.types import Completion

ATTEMPTS = 2  # of a request whose batch mates broke the engine
DEADLINE_SCAN_S = 0.02
MODES = ("drain", "inflight")
# What a device call can raise; anything else is a bug of this file and stops the thread loudly.
DEVICE_ERRORS = (RuntimeError, ValueError, TypeError, ArithmeticError, MemoryError)


class _Update(NamedTuple):
    params: Any
    version: int
    mode: str
    done: threading.Event


class Scheduler:
    """Runs an engine for many callers. `start` it, `submit` requests, `stop` it."""

    def __init__(
        self, engine: Engine, params: Any, prompts: Prompts, *,
        version: int = 0, max_queue: int = 4096, window_s: float = 0.0005,
    ):  # fmt: skip
        """`max_queue` requests may wait; `window_s` is how long an idle engine waits for company."""
        self.engine, self.prompts = engine, prompts
        self.max_queue, self.window_s = max_queue, window_s
        self.stats = Stats(slots=engine.buckets.slots[-1])
        self.template = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        self._params = weights.stage(params)
        self.version = version
        self._wake = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._cancels: deque[Request] = deque()
        self._update: _Update | None = None
        self._updating = threading.Lock()
        self._stopping = False
        self._out: list[tuple[Request, Result]] = []
        self._flights: deque[Flight] = deque()
        self._timed = False  # some request has a deadline
        self._next_scan = 0.0
        self._clear()
        self._thread = threading.Thread(target=self._run, name="policy-scheduler", daemon=True)

    def _clear(self) -> None:
        slots = self.engine.buckets.slots[-1]
        self._state = self.engine.init_decode_state()
        self._owner: list[Request | None] = [None] * slots
        self._free = list(range(slots))  # a heap: the lowest slot first keeps decode batches small
        self._high = 0  # slots at or above are free
        self._flights.clear()

    # ------------------------------------------------------------------------------------------------- callers
    @property
    def live(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def start(self) -> Scheduler:
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 10.0) -> None:
        """Fails what is still here with Unavailable and ends the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; each ends by exactly one Completion or PolicyError through its sink."""
        now = time.perf_counter()
        with self._wake:
            room = max(0, self.max_queue + len(self._free) - len(self._waiting)) if self.live else 0
            taken = requests[:room] if room < len(requests) else requests
            for request in taken:
                request.submitted = now
                self._timed = self._timed or request.deadline is not None
            self._waiting.extend(taken)
            self._wake.notify()
        if len(taken) < len(requests):
            error: PolicyError = Unavailable("the scheduler is not running")
            if self.live:
                error = ResourceExhausted(f"{self.max_queue} requests wait already, which is the limit")
            self.stats.refused += len(requests) - len(taken)
            for request in requests[len(taken) :]:
                request.state = "finished"
            answers.deliver([(r, error) for r in requests[len(taken) :]])

    def cancel(self, requests: Sequence[Request]) -> None:
        """Ends requests early, freeing their slots; each gets a Completion `cancelled` with what it has."""
        with self._wake:
            self._cancels.extend(requests)
            self._wake.notify()

    def update(self, params: Any, version: int, *, mode: str = "drain", timeout_s: float = 120.0) -> None:
        """Serves `params` as `version` from now on; returns when they are in place.

        `drain` finishes answers under way first, `inflight` swaps between two decode steps (keys and values of the
        old version stay; every token carries its version). The tree is copied, so the caller may donate its own.
        Raises StaleVersion, BadWeights, InvalidRequest or DeadlineExceeded; the serving version then stays.
        """
        with self._updating:
            self.refuse_update(version, mode)
            weights.check(params, self.template)
            staged = weights.stage(params)
            update = _Update(staged, version, mode, threading.Event())
            with self._wake:
                if not self.live:
                    raise Unavailable("the scheduler is not running")
                self._update = update
                self._wake.notify()
            if not update.done.wait(timeout_s):
                with self._wake:
                    if self._update is update:
                        self._update = None
                        raise DeadlineExceeded(f"answers under way did not drain in {timeout_s} s")
            if self.version != version:
                raise Unavailable("the scheduler stopped before the update")

    def refuse_update(self, version: int, mode: str) -> None:
        """Raises StaleVersion or InvalidRequest when an update could not be accepted whatever its weights are."""
        if mode not in MODES:
            raise InvalidRequest(f"mode {mode!r} is not one of {', '.join(MODES)}")
        if version <= self.version:
            raise StaleVersion(f"version {version} is not above the serving version {self.version}")

    def info(self) -> Mapping[str, Any]:
        """Version, config fingerprint, vocabulary, limits and statistics, as plain values."""
        b = self.engine.buckets
        return {
            "version": self.version,
            "fingerprint": hashlib.sha256(repr(self.engine.cfg).encode()).hexdigest()[:16],
            "vocab_size": self.engine.cfg.vocab_size,
            "valid_vocab": self.engine.valid_vocab,
            "limits": {
                "prompt_tokens": b.lengths[-1], "max_tokens": b.answer, "images": b.images[-1], "patches": b.patches,
                "slots": b.slots[-1], "queue": self.max_queue, "stop_ids": b.stops, "support": self.engine.width,
            },
            "stats": self.snapshot(),
        }  # fmt: skip

    def snapshot(self) -> dict[str, float]:
        """Statistics now: counters, seconds by stage, queue depth, free slots, tokens/s, time to first token."""
        return self.stats.snapshot(
            queue=len(self._waiting), free=len(self._free), version=self.version, compiled=self.engine.compilations
        )

    # -------------------------------------------------------------------------------------------------- the loop
    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            with self._wake:
                self._stopping = True
                left = [*self._waiting, *(r for r in self._owner if r is not None)]
                self._waiting.clear()
            for request in left:
                self._finish(request, Unavailable("the scheduler stopped"))
            self._flush()
            if self._update is not None:
                self._update.done.set()

    def _turn(self) -> bool:
        self._sleep()
        if self._stopping:
            return False
        if self._cancels:
            self._cancel()
        if self._timed and time.monotonic() >= self._next_scan:
            self._expire()
        update = self._update
        if update is not None and (update.mode == "inflight" or not self._high):
            self._swap(update)
            update = None
        before = len(self._flights)
        if self._waiting and self._free and update is None:
            self._admit()
        if self._high:
            self._step()
        # Read what earlier turns dispatched; without new work there is nothing to overlap with.
        for _ in range(before if len(self._flights) > before else len(self._flights)):
            if self._flights:
                self._land(self._flights.popleft())
        self._flush()
        return True

    def _sleep(self) -> None:
        if self._high or self._flights:
            return
        started = time.perf_counter()
        with self._wake:
            while not (self._waiting or self._cancels or self._update or self._stopping):
                self._wake.wait()
            if self._waiting and self.window_s and len(self._waiting) < len(self._free):
                self._wake.wait_for(lambda: self._stopping or len(self._waiting) >= len(self._free), self.window_s)
        self.stats.idle_s += time.perf_counter() - started

    def _swap(self, update: _Update) -> None:
        with self._wake:
            if self._update is not update:  # its caller gave up
                return
            self._params, self.version, self._update = update.params, update.version, None
        self.stats.updates += 1
        update.done.set()

    def _cancel(self) -> None:
        while self._cancels:
            request = self._cancels.popleft()
            if request.state == "finished":
                continue
            if request.state == "waiting":
                with self._wake:
                    if request not in self._waiting:
                        continue
                    self._waiting.remove(request)
            self.stats.cancelled += 1
            self._finish(request, answers.completion(request, "cancelled"))

    def _expire(self) -> None:
        now = time.monotonic()
        self._next_scan = now + DEADLINE_SCAN_S
        with self._wake:
            timed = [r for r in (*self._waiting, *self._owner) if r is not None and r.deadline is not None]
            late = [r for r in timed if r.deadline is not None and r.deadline <= now]
            self._timed = len(timed) > len(late)
            for request in late:
                if request.state == "waiting":
                    self._waiting.remove(request)
        for request in late:
            self.stats.expired += 1
            self._finish(request, DeadlineExceeded(f"no answer in time; {len(request.tokens)} tokens were drawn"))

    # ------------------------------------------------------------------------------------------------- dispatch
    def _admit(self) -> None:
        started = time.perf_counter()
        with self._wake:
            count = min(len(self._waiting), len(self._free))
            taken = [self._waiting.popleft() for _ in range(count)]
        good, refused = self.prompts.screen(taken)
        for request, error in refused:
            self._finish(request, error)
        if not good:
            return
        batches = self.prompts.batches(good)
        self.stats.prompt_s += time.perf_counter() - started
        for batch in batches:
            try:
                self._prefill(batch)
            except DEVICE_ERRORS as error:
                self._recover(error, batch.requests)

    def _prefill(self, batch: Batch) -> None:
        started = time.perf_counter()
        requests, samplings = batch.requests, [r.sampling for r in batch.requests]
        slots = [heapq.heappop(self._free) for _ in requests]
        for request, slot in zip(requests, slots, strict=True):
            request.state, request.slot, request.left = "active", slot, request.sampling.max_tokens - 1
            if request.seed is None:
                seed = request.sampling.seed
                request.seed = random.getrandbits(63) if seed is None else seed
            self._owner[slot] = request
        self._high = max(self._high, slots[-1] + 1)
        prefix = self.engine.prefill(self._params, batch.prompts, batch.positions)
        packed = self.engine.pack_requests(batch.rows, slots, samplings, [r.seed or 0 for r in requests])
        truncate = any(answers.truncates(s) for s in samplings)
        self._state, results = self.engine.insert(prefix, self._state, packed, truncate=truncate)
        self._flights.append(Flight("prefill", results, list(requests), self.version))
        self.stats.admitted(len(requests), len(set(batch.rows)), time.perf_counter() - started)

    def _step(self) -> None:
        started = time.perf_counter()
        work = truncate = False
        owners = self._owner[: self._high]
        for request in owners:
            if request is not None and request.left > 0:
                request.left -= 1
                work = True
                truncate = truncate or answers.truncates(request.sampling)
        if not work:  # every answer reaches its limit with results that are on their way
            return
        try:
            self._state, results = self.engine.generate(
                self._params, self._state, batch=eng.pick(self.engine.buckets.slots, self._high), truncate=truncate
            )
        except DEVICE_ERRORS as error:
            self._recover(error, [r for r in owners if r is not None])
            return
        self._flights.append(Flight("decode", results, owners, self.version))
        self.stats.steps += 1
        self.stats.decode_s += time.perf_counter() - started

    # -------------------------------------------------------------------------------------------------- results
    def _land(self, flight: Flight) -> None:
        started = time.perf_counter()
        try:
            results = np.asarray(flight.results)
        except DEVICE_ERRORS as error:
            self._recover(error, [r for r in flight.owners if r is not None])
            return
        landed = time.perf_counter()
        self.stats.waited(flight.kind, landed - started)
        ended, tokens, first = answers.land(flight, results)
        self.stats.ttft.extend([landed - r.submitted for r in first])
        self._out.extend(tokens)
        for request, result in ended:
            self._finish(request, result)
        self.stats.deliver_s += time.perf_counter() - landed

    def _finish(self, request: Request, result: Completion | PolicyError) -> None:
        if request.state == "active":
            self._owner[request.slot] = None
            heapq.heappush(self._free, request.slot)
            while self._high and self._owner[self._high - 1] is None:
                self._high -= 1
        request.state = "finished"
        self.stats.finished(result, len(request.tokens))
        self._out.append((request, result))

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            started = time.perf_counter()
            answers.deliver(out)
            self.stats.deliver_s += time.perf_counter() - started

    def _recover(self, error: Exception, culprits: Sequence[Request]) -> None:
        """The engine raised: its donated state is gone. Culprits get the error, everybody else starts over."""
        message = f"{type(error).__name__}: {error}"[:500]
        self.stats.faults += 1
        others = [r for r in self._owner if r is not None and r not in culprits]
        for request in culprits:
            if request.state != "finished":
                self._finish(request, EngineFault(message))
        for request in others:
            request.attempts += 1
            if request.attempts >= ATTEMPTS or request.stream:
                self._finish(request, EngineFault(f"the engine broke around this request: {message}"))
        again = [r for r in others if r.state != "finished"]
        for request in again:  # the seed is kept, so the answer is the one it would have been
            request.state, request.kept = "waiting", None
            request.tokens, request.logprobs, request.versions = [], [], []
        self._clear()
        with self._wake:
            self._waiting.extendleft(reversed(again))


def open_policy(
    cfg: Any, params: Any, *,
    tokenizer: Any, spec: ImageSpec, buckets: Buckets | None = None, version: int = 0, truncate: bool = False,
) -> Scheduler:  # fmt: skip
    """A warmed up, running scheduler of one policy; `truncate` also compiles top-k and top-p.

    `tokenizer` gives `vocab_size` (later ids are never sampled) and `image_id`.
    """
    engine = Engine(cfg, buckets, valid_vocab=min(tokenizer.vocab_size, cfg.vocab_size))
    engine.warmup(params, truncate=truncate)
    prompts = Prompts(
        engine.buckets, spec, image_id=tokenizer.image_id, vocab_size=cfg.vocab_size, support=engine.width
    )
    return Scheduler(engine, params, prompts, version=version).start()
