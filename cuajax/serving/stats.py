"""What the scheduler counts, and its Prometheus face with JetStream's names where JetStream has one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cuajax.serving.messages import PolicyError

COUNTERS = (
    "requests", "prefilled", "completed", "failed", "refused", "cancelled", "expired", "faults", "tokens", "steps",
    "updates", "idle_s", "prompt_s", "prefill_s", "decode_s", "deliver_s",
)  # fmt: skip
RECENT = 1024  # times to first token kept for percentiles


@dataclass(slots=True)
class Stats:
    """Counters written by the scheduler thread; seconds are wall-clock shares of that thread."""

    slots: int
    requests: int = 0  # admitted
    prefilled: int = 0  # prompts prefilled; the rest of `requests` shared one
    completed: int = 0
    failed: int = 0
    refused: int = 0
    cancelled: int = 0
    expired: int = 0
    faults: int = 0
    tokens: int = 0
    steps: int = 0  # decode steps
    updates: int = 0
    idle_s: float = 0.0
    prompt_s: float = 0.0  # checking and batching prompts
    prefill_s: float = 0.0
    decode_s: float = 0.0
    deliver_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def admitted(self, requests: int, rows: int, seconds: float) -> None:
        self.requests += requests
        self.prefilled += rows
        self.prefill_s += seconds

    def waited(self, kind: str, seconds: float) -> None:
        if kind == "prefill":
            self.prefill_s += seconds
        else:
            self.decode_s += seconds

    def finished(self, result: Any, tokens: int) -> None:
        self.tokens += tokens
        if isinstance(result, PolicyError):
            self.failed += 1
        else:
            self.completed += 1

    def snapshot(self, *, queue: int, free: int, version: int, compiled: int) -> dict[str, float]:
        """Plain numbers; rates are over the time since start."""
        now = time.perf_counter()
        recent = sorted(self.ttft)
        out = {name: getattr(self, name) for name in COUNTERS}
        out |= {"deduplicated": self.requests - self.prefilled, "queue": queue, "slots_free": free}
        out |= {"slots": self.slots, "version": version, "compilations": compiled, "seconds": now - self.started}
        out["tokens_per_s"] = self.tokens / max(now - self.started, 1e-9)
        for share in (50, 95):
            out[f"ttft_p{share}_s"] = recent[len(recent) * share // 100] if recent else 0.0
        return out


def registry(snapshot: Callable[[], dict[str, float]], *, name: str = "policy") -> Any:
    """A prometheus_client CollectorRegistry over `Scheduler.snapshot`; `name` is the `id` label."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Collector:
        def collect(self) -> Iterator[Any]:
            now = snapshot()
            backlog = GaugeMetricFamily("jetstream_prefill_backlog_size", "Requests that wait", labels=["id"])
            backlog.add_metric([name], now["queue"])
            free = GaugeMetricFamily(
                "jetstream_slots_available_percentage", "Free share of the slots, 0 to 1", labels=["id", "idx"]
            )
            free.add_metric([name, "0"], now["slots_free"] / now["slots"])
            yield from (backlog, free)
            for key, value in now.items():
                kind = CounterMetricFamily if key in COUNTERS else GaugeMetricFamily
                metric = kind(f"cuajax_{key}", f"cuajax policy: {key}", labels=["id"])
                metric.add_metric([name], value)
                yield metric

    out = CollectorRegistry()
    out.register(Collector())  # type: ignore[arg-type]
    return out
