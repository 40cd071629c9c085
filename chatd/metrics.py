"""The numbers of this process in Prometheus' format, in a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api import EngineSnapshot, Timings, Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What requests took, counted at their end. Times in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "chatd_requests", "Requests that have ended.", ("finish_reason",), registry=self.registry
        )
        self._prompt = Counter("chatd_prompt_tokens", "Prompt tokens looked up in the cache.", registry=self.registry)
        self._cached = Counter("chatd_cached_tokens", "Prompt tokens found in the cache.", registry=self.registry)
        self._generated = Counter("chatd_generated_tokens", "Tokens generated.", registry=self.registry)
        self._drafted = Counter("chatd_drafted_tokens", "Tokens guessed by speculation.", registry=self.registry)
        self._accepted = Counter("chatd_accepted_tokens", "Guessed tokens that were kept.", registry=self.registry)
        self._ttft = self._histogram("time_to_first_token", "Receipt to first sampled token.", _SECONDS)
        self._tpot = self._histogram(
            "time_per_output_token", "Mean time of a token after the first.", _SECONDS_PER_TOKEN
        )
        self._queue = self._histogram("queue", "Receipt to admission.", _SECONDS)
        self._prefill = self._histogram("prefill", "Admission to first sampled token.", _SECONDS)
        self._decode = self._histogram("decode", "First sampled token to last.", _SECONDS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"chatd_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def finished(self, reason: str, usage: Usage, timings: Timings) -> None:
        self._requests.labels(reason).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._generated.inc(usage.completion_tokens)
        self._drafted.inc(timings.drafted_tokens)
        self._accepted.inc(timings.accepted_tokens)
        self._queue.observe(timings.queue_ms / 1000)
        if timings.ttft_ms is not None:
            self._ttft.observe(timings.ttft_ms / 1000)
            self._prefill.observe(timings.prefill_ms / 1000)
            self._decode.observe(timings.decode_ms / 1000)
        if usage.completion_tokens > 1:
            self._tpot.observe(timings.decode_ms / 1000 / (usage.completion_tokens - 1))

    def failed(self) -> None:
        self._requests.labels("failed").inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Gauges from the engine's snapshot, asked for once a second at most; `look` gives None without an engine."""

    def __init__(self, look: Callable[[], EngineSnapshot | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._clock = clock
        self._seen: tuple[float, EngineSnapshot | None] | None = None

    def collect(self) -> Iterable[Metric]:
        now = self._clock()
        if self._seen is None or now - self._seen[0] >= 1.0:
            self._seen = (now, self._look())
        snapshot = self._seen[1]
        if snapshot is None:
            return
        yield GaugeMetricFamily("chatd_requests_running", "Requests being computed.", value=snapshot.running)
        yield GaugeMetricFamily("chatd_requests_waiting", "Requests in the queue.", value=snapshot.waiting)
        pages = GaugeMetricFamily("chatd_pages", "Pages of the pool by state.", labels=("state",))
        for state in ("free", "evictable", "locked", "private"):
            pages.add_metric((state,), getattr(snapshot.pages, state))
        yield pages
        yield CounterMetricFamily("chatd_engine_steps", "Steps of the engine.", value=snapshot.steps)
        yield CounterMetricFamily(
            "chatd_preemptions", "Requests put back for want of pages.", value=snapshot.preemptions
        )
        for name, value in snapshot.counters.items():
            yield CounterMetricFamily(f"chatd_cache_{name}", f"Counter {name} of the prefix cache.", value=value)
