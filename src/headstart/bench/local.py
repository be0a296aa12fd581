"""Decode on this machine: a batch of sequences at one depth, timed while all of them decode."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine import DepthController, Engine, Event, Request, Stats
from ..errors import RequestError
from ..models import Model
from ..sampling import SamplingParams
from ..state import PrefixCache
from .measurement import Trial
from .plan import Condition, Measure

K = int | Literal["auto"]


def measure_locally(
    model: Model,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    tokens: int,
    sampling: Mapping[str, Any] | None = None,
) -> Measure[Trial]:
    """Return a function that measures depths such as "k=2". `prompts`: token ids by name; `sampling`: fields of
    SamplingParams."""
    params = SamplingParams(**sampling or {})

    def measure(variant: str, condition: Condition, repeat: int) -> Trial:
        k = variant.removeprefix("k=")
        batch = list(islice(cycle(prompts[condition.prompts]), int(condition.value)))
        return decode_batch(model, batch, "auto" if k == "auto" else int(k), tokens, params)

    return measure


def decode_batch(
    model: Model,
    prompts: Sequence[Sequence[int]],
    k: K,
    tokens: int,
    params: SamplingParams | None = None,
    *,
    adapters: Sequence[str | None] = (),
    tokenizer: TokenizerWrapper | None = None,
    prefix: PrefixCache | None = None,
) -> Trial:
    """Decode `tokens` tokens per prompt, past any end token: greedily, or with `params`, and the prompts' adapters.

    The clock starts after the first step, so that prefill is left out, and stops when the first sequence ends, so
    that the batch has the same size throughout. A `tokenizer`, which text needs, also knows end tokens.
    """
    params = replace(params or SamplingParams(), max_tokens=tokens, k=k)
    # "auto" keeps what it learned about this model in earlier runs, as in a server. A fixed depth gets a controller
    # of its own: its runs must not train the controller that "auto" is measured with.
    depth = None if k == "auto" else DepthController()
    prefix = PrefixCache(0) if prefix is None else prefix
    engine = Engine(model, tokenizer, max_sequences=len(prompts), depth=depth, prefix=prefix)
    received: list[list[Event]] = [[] for _ in prompts]
    for prompt, adapter, events in zip(prompts, adapters or [None] * len(prompts), received, strict=True):
        engine.submit(Request(prompt, params, adapter=adapter), listener=events.append)
    engine.prefill_all()
    _raise_errors(received)
    if (fit := len(engine.scheduler.running.sequences)) < len(prompts):
        raise RequestError(f"--batch-size {len(prompts)}: memory is left for {fit} sequences only")
    started, cpu_started, before = None, 0.0, 0
    while not any(events and events[-1].finish_reason for events in received):
        engine.run_once()
        now, cpu_now = time.perf_counter(), time.process_time()
        if started is None and all(events and events[-1].tokens for events in received):
            started, cpu_started, before = now, cpu_now, _count(received)
    generated = _count(received) - before
    engine.cancel_all()
    while engine.run_once():
        pass
    _raise_errors(received)
    if started is None or not generated:
        raise RequestError(f"--tokens {tokens}: generated in one step, too few to time")
    stats = Stats.of([events[-1].stats for events in received if events[-1].stats is not None])
    return Trial(
        tokens=generated,
        seconds=now - started,
        tokens_per_round=stats.tokens_per_round,
        proposed=stats.proposed_by_position,
        accepted=stats.accepted_by_position,
        sequences=[[token for event in events for token in event.tokens] for events in received],
        exact=stats.exact,
        cpu_seconds=cpu_now - cpu_started,
    )


def _count(received: list[list[Event]]) -> int:
    return sum(len(event.tokens) for events in received for event in events)


def _raise_errors(received: list[list[Event]]) -> None:
    for events in received:
        if events and events[-1].error is not None:
            raise events[-1].error
