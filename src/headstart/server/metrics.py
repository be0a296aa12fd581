"""Count what all requests add up to, for Prometheus and /v1/mtp/stats. docs/reference/http-api.md lists them."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import EngineThread, Event, Stats
from .log import access_entry

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 1)


@dataclass
class Counters:
    """Totals since the server started. Only the event loop changes them."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # by endpoint and outcome
    responses: Counter[int] = field(default_factory=Counter)  # by HTTP status
    bypasses: Counter[str] = field(default_factory=Counter)  # answers without drafts, by reason
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens, found in the prefix cache
    first_tokens: int = 0  # answers that have begun
    first_token_seconds: float = 0.0  # sum of their times to first token
    generation_tokens: int = 0
    rounds: Counter[int] = field(default_factory=Counter)  # by depth
    proposed: Counter[int] = field(default_factory=Counter)  # drafts by position, from 1
    accepted: Counter[int] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)  # head, copy
    paused_seconds: float = 0.0
    depth: int | None = None  # of the last round

    def add(self, before: Stats, now: Stats, *, first: bool = True, scored: bool = False) -> None:
        """Add what an answer's stats gained between `before` and `now`.

        Args:
            first: this is the first answer to its prompt. Only that one counts the prompt.
            scored: the prompt was scored and nothing was generated, so it counts without a round.
        """
        if first and before.rounds == 0 and (now.rounds or scored):
            self.prompt_tokens += now.prompt_tokens
            self.cached_tokens += now.prefix_cache_hit
            if now.rounds and now.bypass_reason:
                self.bypasses[now.bypass_reason] += 1
        self.generation_tokens += now.generation_tokens - before.generation_tokens
        self.paused_seconds += now.paused_seconds - before.paused_seconds
        rounds = Counter(now.depths) - Counter(before.depths)
        self.rounds += rounds
        self.depth = max(rounds, default=self.depth)
        self.proposed += _by_position(now.proposed_by_position) - _by_position(before.proposed_by_position)
        self.accepted += _by_position(now.accepted_by_position) - _by_position(before.accepted_by_position)
        self.accepted_by_source += Counter(now.accepted_by_source) - Counter(before.accepted_by_source)

    def report(self) -> dict[str, Any]:
        """Return a model's entry in /v1/mtp/stats."""
        rounds = self.rounds.total()
        proposed = self.proposed.total()
        accepted = self.accepted.total()
        return {
            "rounds": rounds,
            "generation_tokens": self.generation_tokens,
            "tokens_per_round": self.generation_tokens / rounds if rounds else 0.0,
            "depth": self.depth,
            "rounds_by_depth": {str(k): self.rounds[k] for k in sorted(self.rounds)},
            "proposed_draft_tokens": proposed,
            "accepted_draft_tokens": accepted,
            "accepted_by_source": {source: self.accepted_by_source[source] for source in ("head", "copy")},
            "acceptance_rate": accepted / proposed if proposed else 0.0,
            "acceptance_by_position": [self.accepted[j] / self.proposed[j] for j in sorted(self.proposed)],
            "paused_seconds": self.paused_seconds,
            "bypasses": dict(self.bypasses),
        }


def _by_position(counts: list[int]) -> Counter[int]:
    return Counter(dict(enumerate(counts, 1)))


class Metrics(Collector):
    """What Prometheus reads: the counters and the engine as they are when it asks, and two histograms."""

    def __init__(self, engine_thread: EngineThread):
        self.counters = Counters()
        self._engine_thread = engine_thread
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.first_token = Histogram(
            "headstart_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.inter_token = Histogram(
            "headstart_inter_token_seconds",
            "Between two tokens of an answer. The tokens of a round share the time since the previous round.",
            buckets=INTER_TOKEN_BUCKETS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        counters, thread, engine = self.counters, self._engine_thread, self._engine_thread.engine
        yield _counter("requests", "Requests by outcome.", counters.requests, "endpoint", "outcome")
        yield _counter("http_responses", "Responses by status.", counters.responses, "status")
        yield _counter("prompt_tokens", "Prompt tokens.", counters.prompt_tokens)
        yield _counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache.", counters.cached_tokens)
        yield _counter("generation_tokens", "Generated tokens.", counters.generation_tokens)
        yield _counter("rounds", "Rounds of sequences, by depth.", counters.rounds, "depth")
        yield _counter("proposed_draft_tokens", "Drafts proposed, by position.", counters.proposed, "position")
        yield _counter("accepted_draft_tokens", "Drafts accepted, by position.", counters.accepted, "position")
        by_source = "Drafts accepted, by source: the head, or copied from the context."
        yield _counter("accepted_drafts_by_source", by_source, counters.accepted_by_source, "source")
        paused = "Time that sequences decoded without drafts because speculation was paused."
        yield _counter("paused_seconds", paused, counters.paused_seconds)
        yield _counter("bypasses", "Answers without drafts, by reason.", counters.bypasses, "reason")
        if counters.depth is not None:
            yield _gauge("depth", "Drafts in the last round.", counters.depth)
        yield _gauge("engine_healthy", "1 while the engine's thread is alive.", thread.healthy)
        yield _counter("engine_restarts", "Restarts of the engine's thread.", thread.restarts)
        yield _counter("engine_retries", "Steps and prefill chunks that failed and were run again.", engine.retries)
        recomputed = "Sequences prefilled again from their tokens, by reason."
        yield _counter("recomputed_sequences", recomputed, engine.recomputed, "reason")
        yield _gauge("ranks", "Machines that share the model.", engine.model.share.ranks)
        communication = "Time of all steps spent in communication between machines."
        yield _counter("communication_seconds", communication, engine.communication_seconds)
        yield _gauge("queued_requests", "Requests waiting for admission.", thread.queued)
        sequences = {"running": thread.running, "prefilling": thread.prefilling}
        yield _gauge("sequences", "Sequences in the batch, by state.", sequences, "state")
        memory = {"active": mx.get_active_memory(), "cache": mx.get_cache_memory(), "peak": mx.get_peak_memory()}
        yield _gauge("memory_bytes", "Memory as MLX counts it.", memory, "kind")
        if engine.prefix is not None:
            stats = engine.prefix.stats()
            yield _gauge("prefix_cache_bytes", "Bytes in the prefix cache.", stats.bytes)
            yield _gauge("prefix_cache_entries", "Chunks in the prefix cache.", stats.entries)
            yield _counter("prefix_cache_hits", "Prompts that found a prefix in the cache.", stats.hits)
            yield _counter("prefix_cache_misses", "Prompts that found none.", stats.misses)
            yield _counter("prefix_cache_evictions", "Chunks evicted from the prefix cache.", stats.evictions)


def _counter(name: str, text: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
    return _fill(CounterMetricFamily(f"headstart_{name}", text, labels=labels), values)


def _gauge(name: str, text: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
    return _fill(GaugeMetricFamily(f"headstart_{name}", text, labels=labels), values)


def _fill(
    family: CounterMetricFamily | GaugeMetricFamily, values: float | Mapping[Any, float]
) -> CounterMetricFamily | GaugeMetricFamily:
    """Add one value, or one for each label or tuple of labels."""
    if not isinstance(values, Mapping):
        values = {(): values}
    for key, value in list(values.items()):  # a copy: another thread may add a key meanwhile
        labels = key if isinstance(key, tuple) else (key,)
        family.add_metric([str(label) for label in labels], value)
    return family


class Meter:
    """Count one request. Times are those of time.perf_counter."""

    def __init__(self, metrics: Metrics, endpoint: str, arrived: float):
        self._metrics = metrics
        self._endpoint = endpoint
        self._last: defaultdict[int, float] = defaultdict(lambda: arrived)  # time of the last token, by choice
        self._stats: defaultdict[int, Stats] = defaultdict(lambda: Stats(None, None))
        self._finish_reasons: list[str] = []
        self._ended = False
        self._access_entry = access_entry.get()

    def count(self, event: Event, when: float, answers: int = 1) -> None:
        """Count an event of a request for `answers` answers. The request ends with the last of them."""
        if event.stats is not None:
            # `add` looks at `scored` only where no round ran; there "length" means that the prompt was scored and
            # nothing generated (score="only").
            scored, before = event.finish_reason == "length", self._stats[event.choice]
            self._metrics.counters.add(before, event.stats, first=event.choice == 0, scored=scored)
            if self._access_entry is not None:
                self._access_entry.prompt_tokens = event.stats.prompt_tokens
                self._access_entry.generation_tokens += event.stats.generation_tokens - before.generation_tokens
            if event.tokens:
                self._time(event, when)
            self._stats[event.choice] = event.stats
        if event.finish_reason in ("error", "cancelled"):
            self.end(event.finish_reason)
        elif event.finish_reason is not None:
            self._finish_reasons.append(event.finish_reason)
            if len(self._finish_reasons) == answers:
                self.end("length" if "length" in self._finish_reasons else "stop")

    def end(self, outcome: str) -> None:
        """Count how the request ended. Only the first call counts."""
        if not self._ended:
            self._metrics.counters.requests[self._endpoint, outcome] += 1
        self._ended = True

    def _time(self, event: Event, when: float) -> None:
        passed = when - self._last[event.choice]
        self._last[event.choice] = when
        if self._stats[event.choice].generation_tokens == 0:
            self._metrics.first_token.observe(passed)
            self._metrics.counters.first_tokens += 1
            self._metrics.counters.first_token_seconds += passed
            return
        for _ in event.tokens:
            self._metrics.inter_token.observe(passed / len(event.tokens))
