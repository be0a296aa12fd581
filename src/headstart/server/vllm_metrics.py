"""The metrics that dashboards and autoscalers made for vLLM read, under its names."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.scheduler import Scheduler
from .pooled_model import PooledModel

NAMES = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_seconds": "inter_token_latency_seconds",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "rounds": "spec_decode_num_drafts",
    "proposed_draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_draft_tokens": "spec_decode_num_accepted_tokens",
}


class VllmMetrics(Collector):
    def __init__(self, families: list[Callable[[], Iterable[Metric]]], models: list[PooledModel]):
        """`families`: what returns Headstart's metrics."""
        self._families, self._models = families, models

    def collect(self) -> Iterator[Metric]:
        gauges: dict[str, tuple[str, Callable[[Scheduler], float]]] = {
            "num_requests_running": ("Requests that are prefilled or decoded.", lambda each: len(each.admitted)),
            "num_requests_waiting": ("Requests that wait for admission.", lambda each: len(each.queue)),
            "kv_cache_usage_perc": ("Share of the memory for sequences in use.", _usage),
        }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            for model in self._models:
                if (engine := model.engine) is not None:
                    family.add_metric([model.id], value(engine.scheduler))
            yield family
        yield from self._prefix_cache()
        for ours in chain.from_iterable(each() for each in self._families):
            if new := NAMES.get(ours.name.removeprefix("headstart_")):
                yield _renamed(ours, new)

    def _prefix_cache(self) -> Iterator[Metric]:
        """vLLM counts tokens: those that were looked for, and those that were found."""
        counted = {"queries": "prompt_tokens", "hits": "cached_tokens"}
        for name, field in counted.items():
            counter = Metric(f"vllm:prefix_cache_{name}", f"Prompt tokens: prefix cache {name}.", "counter")
            for model in self._models:
                value = getattr(model.counters, field)
                counter.add_sample(f"vllm:prefix_cache_{name}_total", {"model_name": model.id}, value)
            yield counter


def _usage(scheduler: Scheduler) -> float:
    return min(1.0, scheduler.admitted_bytes / scheduler.memory) if scheduler.admitted and scheduler.memory else 0.0


def _renamed(family: Metric, new: str) -> Metric:
    """Return a metric under a name of vLLM's, summed over the labels that vLLM does not have."""
    renamed = Metric(f"vllm:{new}", family.documentation, family.type)
    totals: dict[tuple[str, str, str | None], float] = {}
    for sample in family.samples:
        if sample.labels.get("depth") == "0":  # a round without drafts
            continue
        name = sample.name.replace(family.name, f"vllm:{new}")
        key = (name, sample.labels["model"], sample.labels.get("le"))
        totals[key] = totals.get(key, 0.0) + sample.value
    for (name, model, le), value in totals.items():
        renamed.add_sample(name, {"model_name": model} | ({"le": le} if le is not None else {}), value)
    return renamed
