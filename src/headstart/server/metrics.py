"""What Prometheus reads. docs/serving.md lists every name."""

from collections import defaultdict
from collections.abc import Iterator

import mlx.core as mx
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine import EngineThread, Event, Stats
from .counters import Counters
from .log import exchange

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 1)


class Metrics:
    def __init__(self, room: EngineThread):
        self.tally = Counters()
        self._registry = CollectorRegistry()
        self._registry.register(Reading(room, self.tally))
        self.first_token = Histogram(
            "headstart_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=FIRST_TOKEN,
            registry=self._registry,
        )
        self.next_token = Histogram(
            "headstart_inter_token_seconds",
            "Between two tokens of an answer. The tokens of a round share the time since the round before.",
            buckets=NEXT_TOKEN,
            registry=self._registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Meter:
    """Counts one request. Times are time.perf_counter's."""

    def __init__(self, metrics: Metrics, endpoint: str, arrived: float):
        self._metrics, self._endpoint = metrics, endpoint
        self._last: defaultdict[int, float] = defaultdict(lambda: arrived)  # by choice
        self._stats: defaultdict[int, Stats] = defaultdict(lambda: Stats(None, None))
        self._ends: list[str] = []  # of its answers
        self._ended = False
        self._exchange = exchange.get()  # for the access log

    def count(self, event: Event, when: float, answers: int = 1) -> None:
        """Of a request for so many answers, which is cut off if one of them is."""
        if event.stats is not None:
            # Without a round only a prompt that was to be scored and no more comes to its end.
            scored, before = event.finish_reason == "length", self._stats[event.choice]
            self._metrics.tally.add(before, event.stats, first=event.choice == 0, scored=scored)
            if self._exchange is not None:
                self._exchange.prompt_tokens = event.stats.prompt_tokens
                self._exchange.generation_tokens += event.stats.generation_tokens - before.generation_tokens
            if event.tokens:
                self._time(event, when)
            self._stats[event.choice] = event.stats
        if event.finish_reason in ("error", "cancelled"):
            self.end(event.finish_reason)
        elif event.finish_reason is not None:
            self._ends.append(event.finish_reason)
            if len(self._ends) == answers:
                self.end("length" if "length" in self._ends else "stop")

    def end(self, outcome: str) -> None:
        """The first end counts."""
        if not self._ended:
            self._metrics.tally.requests[self._endpoint, outcome] += 1
        self._ended = True

    def _time(self, event: Event, when: float) -> None:
        passed, self._last[event.choice] = when - self._last[event.choice], when
        if self._stats[event.choice].generation_tokens == 0:
            self._metrics.first_token.observe(passed)
            self._metrics.tally.first_tokens += 1
            self._metrics.tally.first_token_seconds += passed
            return
        for _ in event.tokens:
            self._metrics.next_token.observe(passed / len(event.tokens))


class CountStatus:
    """Counts what is sent back by its status, whoever sends it."""

    def __init__(self, app: ASGIApp, tally: Counters):
        self.app, self.tally = app, tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.tally.responses[message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counted)


class Reading(Collector):
    """The tally and the room as they are when Prometheus asks: nothing is counted twice."""

    def __init__(self, room: EngineThread, tally: Counters):
        self._room, self._tally = room, tally

    def collect(self) -> Iterator[Metric]:
        yield from self._traffic()
        yield from self._speculation()
        yield from self._engine()

    def _traffic(self) -> Iterator[Metric]:
        tally = self._tally
        requests = CounterMetricFamily(
            "headstart_requests", "Requests by how they ended.", labels=("endpoint", "outcome")
        )
        for (endpoint, outcome), count in list(tally.requests.items()):  # the event loop may add one meanwhile
            requests.add_metric((endpoint, outcome), count)
        yield requests
        responses = CounterMetricFamily("headstart_http_responses", "Responses by status.", labels=("status",))
        for status, count in sorted(tally.responses.items()):
            responses.add_metric((str(status),), count)
        yield responses
        yield CounterMetricFamily("headstart_prompt_tokens", "Tokens of prompts.", tally.prompt_tokens)
        yield CounterMetricFamily(
            "headstart_cached_prompt_tokens", "Of those, found in the prefix cache.", tally.cached_tokens
        )
        yield CounterMetricFamily("headstart_generation_tokens", "Tokens of answers.", tally.generation_tokens)

    def _speculation(self) -> Iterator[Metric]:
        tally = self._tally
        rounds = CounterMetricFamily("headstart_rounds", "Rounds of rows, by depth.", labels=("depth",))
        for k, count in sorted(tally.rounds.items()):
            rounds.add_metric((str(k),), count)
        yield rounds
        for name, counts in (("proposed", tally.proposed), ("accepted", tally.accepted)):
            drafts = CounterMetricFamily(
                f"headstart_{name}_draft_tokens", f"Drafts {name}, by position.", labels=("position",)
            )
            for position, count in sorted(counts.items()):
                drafts.add_metric((str(position),), count)
            yield drafts
        yield CounterMetricFamily(
            "headstart_paused_seconds", "Rows' time in rounds of no drafts that allowed some.", tally.paused_seconds
        )
        bypasses = CounterMetricFamily("headstart_bypasses", "Answers without drafts.", labels=("reason",))
        for reason, count in list(tally.bypasses.items()):
            bypasses.add_metric((reason,), count)
        yield bypasses
        if tally.depth is not None:
            yield GaugeMetricFamily("headstart_depth", "Drafts in the last round.", tally.depth)

    def _engine(self) -> Iterator[Metric]:
        room = self._room
        yield GaugeMetricFamily("headstart_engine_healthy", "1 while the engine's thread is alive.", room.healthy)
        yield CounterMetricFamily("headstart_engine_restarts", "Times that thread was started again.", room.restarts)
        yield CounterMetricFamily(
            "headstart_engine_retries",
            "Steps and prefill chunks that failed and were run again.",
            room.engine.retries,
        )
        recomputed = CounterMetricFamily(
            "headstart_recomputed_sequences", "Sequences prefilled again from their tokens.", labels=("reason",)
        )
        for reason, count in list(room.engine.recomputed.items()):
            recomputed.add_metric((reason,), count)
        yield recomputed
        ranks, seconds = room.engine.model.share.ranks, room.engine.communication_seconds
        yield GaugeMetricFamily("headstart_ranks", "Machines that share the model.", ranks)
        yield CounterMetricFamily("headstart_communication_seconds", "Between them, in all steps.", seconds)
        yield GaugeMetricFamily("headstart_queued_requests", "Requests that wait for a place.", room.queued)
        rows = GaugeMetricFamily("headstart_rows", "BatchState of the batch.", labels=("state",))
        rows.add_metric(("running",), room.running)
        rows.add_metric(("entering",), room.prefilling)
        yield rows
        memory = GaugeMetricFamily("headstart_memory_bytes", "Memory as mlx counts it.", labels=("kind",))
        memory.add_metric(("active",), mx.get_active_memory())
        memory.add_metric(("cache",), mx.get_cache_memory())
        memory.add_metric(("peak",), mx.get_peak_memory())
        yield memory
        if room.engine.prefix is None:
            return
        stats = room.engine.prefix.stats()
        yield GaugeMetricFamily("headstart_prefix_cache_bytes", "Bytes in the prefix cache.", stats.bytes)
        yield GaugeMetricFamily("headstart_prefix_cache_entries", "Chunks in the prefix cache.", stats.entries)
        for name, count in (("hits", stats.hits), ("misses", stats.misses), ("evictions", stats.evictions)):
            yield CounterMetricFamily(f"headstart_prefix_cache_{name}", f"The prefix cache's {name}.", count)
