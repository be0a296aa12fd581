"""Count what all requests add up to, for Prometheus, /v1/mtp/stats and the dashboard.

docs/reference/http-api.md lists the metrics.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import Engine, Event, Stats
from ..engine.scheduler import Scheduler
from .model_pool import ModelPool
from .pooled_model import PooledModel
from .states import STATUSES, ServerState
from .vllm_metrics import VllmMetrics

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 1)


class Metrics(Collector):
    """What Prometheus reads: counters and engines as they are when it asks, and two histograms."""

    def __init__(self, state: ServerState, pool: ModelPool):
        self._state, self._device, self._models = state, pool.device, pool.models
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.first_token = Histogram(
            "headstart_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            ["model"],
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.inter_token = Histogram(
            "headstart_inter_token_seconds",
            "Between two tokens of an answer. The tokens of a round share the time since the previous round.",
            ["model"],
            buckets=INTER_TOKEN_BUCKETS,
            registry=self._registry,
        )
        families = [self.collect, self.first_token.collect, self.inter_token.collect]
        self._registry.register(VllmMetrics(families, self._models))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        device, now = self._device, self._state.health().status
        states = {status: status == now for status in STATUSES}
        yield _gauge("state", "1 for the state that the server is in.", states, "state")
        yield _gauge("engine_healthy", "1 while the engine's thread is alive.", {(): device.healthy})
        yield _counter("engine_restarts", "Restarts of the engine's thread.", {(): device.restarts})
        memory = {"active": mx.get_active_memory(), "cache": mx.get_cache_memory(), "peak": mx.get_peak_memory()}
        yield _gauge("memory_bytes", "Memory as MLX counts it.", memory, "kind")
        yield from self._of_models()
        yield from self._of_engines()

    def _of_models(self) -> Iterator[Metric]:
        counters = {model.id: model.counters for model in self._models}

        def each(name: str) -> dict[str, Any]:
            return {id: getattr(of_model, name) for id, of_model in counters.items()}

        yield _counter("requests", "Requests by outcome.", each("requests"), "model", "endpoint", "outcome")
        yield _counter("prompt_tokens", "Prompt tokens.", each("prompt_tokens"), "model")
        cached = "Prompt tokens found in the prefix cache."
        yield _counter("cached_prompt_tokens", cached, each("cached_tokens"), "model")
        yield _counter("generation_tokens", "Generated tokens.", each("generation_tokens"), "model")
        yield _counter("rounds", "Rounds of sequences, by depth.", each("rounds"), "model", "depth")
        proposed, accepted = "Drafts proposed, by position.", "Drafts accepted, by position."
        yield _counter("proposed_draft_tokens", proposed, each("proposed"), "model", "position")
        yield _counter("accepted_draft_tokens", accepted, each("accepted"), "model", "position")
        by_source = "Drafts accepted, by source: the head, a block drafter, or copied from the context."
        yield _counter("accepted_drafts_by_source", by_source, each("accepted_by_source"), "model", "source")
        for name in ("proposed", "accepted"):
            drafts = {
                id: {a: getattr(own, name).total() for a, own in list(adapters.items())}
                for id, adapters in each("adapters").items()
            }
            yield _counter(f"adapter_{name}_draft_tokens", f"Drafts {name}, by adapter.", drafts, "model", "adapter")
        paused = "Time that sequences decoded without drafts because speculation was paused."
        yield _counter("paused_seconds", paused, each("paused_seconds"), "model")
        yield _counter("bypasses", "Answers without drafts, by reason.", each("bypasses"), "model", "reason")
        depths = {id: depth for id, depth in each("depth").items() if depth is not None}
        yield _gauge("depth", "Drafts in the last round.", depths, "model")
        loaded = {model.id: model.state == "loaded" for model in self._models}
        yield _gauge("model_loaded", "1 while the model is loaded.", loaded, "model")
        yield _counter(
            "model_loads", "How often the model was loaded.", {m.id: m.loads for m in self._models}, "model"
        )

    def _of_engines(self) -> Iterator[Metric]:
        engines = {model.id: engine for model in self._models if (engine := model.engine) is not None}

        def each(value: Callable[[Engine], Any]) -> dict[str, Any]:
            return {id: value(engine) for id, engine in engines.items()}

        retries = "Steps and prefill chunks that failed and were run again."
        yield _counter("engine_retries", retries, each(lambda engine: engine.recovery.retries), "model")
        recomputed = "Sequences prefilled again from their tokens, by reason."
        yield _counter(
            "recomputed_sequences", recomputed, each(lambda engine: engine.recovery.recomputed), "model", "reason"
        )
        yield _gauge(
            "ranks", "Machines that share the model.", each(lambda engine: engine.model.share.ranks), "model"
        )
        queued = each(lambda engine: len(engine.scheduler.queue))
        yield _gauge("queued_requests", "Requests waiting for admission.", queued, "model")
        sequences = each(lambda engine: _sequences(engine.scheduler))
        yield _gauge("sequences", "Sequences in the batch, by state.", sequences, "model", "state")
        stats = {id: prefix.stats() for id, engine in engines.items() if (prefix := engine.prefix) is not None}
        if stats:
            of_cache = partial(_fields, stats)
            yield _gauge("prefix_cache_bytes", "Bytes in the prefix cache.", of_cache("bytes"), "model")
            yield _gauge("prefix_cache_entries", "Chunks in the prefix cache.", of_cache("entries"), "model")
            hits, misses = "Prompts that found a prefix in the cache.", "Prompts that found none."
            yield _counter("prefix_cache_hits", hits, of_cache("hits"), "model")
            yield _counter("prefix_cache_misses", misses, of_cache("misses"), "model")
            disk = "Prompt tokens read from the disk."
            yield _counter("prefix_cache_disk_tokens", disk, of_cache("disk_tokens"), "model")
            evictions = "Chunks evicted from the prefix cache."
            yield _counter("prefix_cache_evictions", evictions, of_cache("evictions"), "model")


def _fields(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: getattr(value, name) for key, value in values.items()}


def _counter(name: str, text: str, values: Mapping[Any, Any], *labels: str) -> Metric:
    return _fill(CounterMetricFamily(f"headstart_{name}", text, labels=labels), values)


def _gauge(name: str, text: str, values: Mapping[Any, Any], *labels: str) -> Metric:
    return _fill(GaugeMetricFamily(f"headstart_{name}", text, labels=labels), values)


def _fill(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Any, Any], before: tuple[Any, ...] = ()
) -> CounterMetricFamily | GaugeMetricFamily:
    """Add a value for each label or tuple of labels, or for each of a mapping below it."""
    for key, value in list(values.items()):  # a copy: another thread may add a key meanwhile
        labels = (*before, *(key if isinstance(key, tuple) else (key,)))
        if isinstance(value, Mapping):
            _fill(family, value, labels)
        else:
            family.add_metric([str(label) for label in labels], value)
    return family


class Meter:
    """Count one request. Times are those of time.perf_counter."""

    def __init__(self, metrics: Metrics, model: PooledModel, endpoint: str, arrived: float, owner: str = ""):
        self._counters, self._owner = model.counters, owner
        self._first_token, self._inter_token = (
            metrics.first_token.labels(model.id),
            metrics.inter_token.labels(model.id),
        )
        self._endpoint = endpoint
        self._last: defaultdict[int, float] = defaultdict(lambda: arrived)  # time of the last token, by choice
        self._stats: defaultdict[int, Stats] = defaultdict(lambda: Stats(None, None))
        self._ended = False

    def count(self, event: Event, when: float, *, first: bool) -> None:
        """`first`: the event is of the first answer to its prompt."""
        if event.stats is not None:
            self._counters.add(self._stats[event.choice], event.stats, first=first)
            if event.tokens:
                self._counters.tokens[self._owner].update(event.tokens)
                self._time(event, when)
            self._stats[event.choice] = event.stats

    def end(self, outcome: str) -> None:
        """Count how the request ended. Only the first call counts."""
        if not self._ended:
            self._counters.requests[self._endpoint, outcome] += 1
        self._ended = True

    def _time(self, event: Event, when: float) -> None:
        passed = when - self._last[event.choice]
        self._last[event.choice] = when
        if self._stats[event.choice].generation_tokens == 0:
            self._first_token.observe(passed)
            self._counters.first_tokens += 1
            self._counters.first_token_seconds += passed
            return
        for _ in event.tokens:
            self._inter_token.observe(passed / len(event.tokens))


def _sequences(scheduler: Scheduler) -> dict[str, int]:
    return {"running": len(scheduler.running.sequences), "prefilling": len(scheduler.prefilling)}
