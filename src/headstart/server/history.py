"""The last hour in samples of two seconds, for the dashboard.

Counts are kept as differences, so that a page can add them up over any stretch of time.
"""

import asyncio
import time
from collections import Counter, deque
from copy import deepcopy
from dataclasses import dataclass, fields
from itertools import takewhile
from typing import Any

import mlx.core as mx

from ..engine import EngineThread
from ..engine.log import log_error
from .log import LOG
from .metrics import Counters

INTERVAL = 2.0  # seconds
KEPT = 1800  # samples


@dataclass(frozen=True)
class Sample:
    time: float  # when it was taken, in seconds since 1970; never before the previous one
    seconds: float  # since the previous sample. Counted in these:
    generation_tokens: int
    rounds: int
    proposed_by_position: list[int]
    accepted_by_position: list[int]
    prompt_tokens: int
    cached_tokens: int  # of the prompt tokens, found in the prefix cache
    first_tokens: int  # answers that began
    first_token_seconds: float  # sum of their times to first token
    running: int  # sequences, now
    prefilling: int
    queued: int
    active_bytes: int  # memory as MLX counts it
    cache_bytes: int
    prefix_bytes: int  # of the active bytes, those of the prefix cache


class History:
    def __init__(self, engine_thread: EngineThread, counters: Counters):
        self._engine_thread = engine_thread
        self._counters = counters
        self._samples: deque[Sample] = deque(maxlen=KEPT)

    async def run(self) -> None:
        """Take samples until cancelled."""
        before, then = deepcopy(self._counters), time.perf_counter()
        prefix = self._engine_thread.engine.prefix
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                # In a thread: the engine may hold the prefix cache for a while.
                prefix_bytes = (await asyncio.to_thread(prefix.stats)).bytes if prefix is not None else 0
                counters, now = deepcopy(self._counters), time.perf_counter()
                self._samples.append(self._sample(before, counters, now - then, prefix_bytes))
            except Exception as error:
                log_error(LOG, "a sample of the history failed; the next one covers its time too", error=error)
            else:
                before, then = counters, now

    def report(self, after: float) -> dict[str, Any]:
        """Return the samples newer than `after` as columns, and the depth controller's estimates."""
        recent = [*takewhile(lambda sample: sample.time > after, reversed(self._samples))][::-1]
        gains = [round(gain, 3) for gain in self._engine_thread.engine.depth.gains]
        return {
            "interval": INTERVAL,
            "samples": {each.name: [getattr(sample, each.name) for sample in recent] for each in fields(Sample)},
            "controller": {"depth": self._counters.depth, "gains": gains},
        }

    def _sample(self, before: Counters, now: Counters, seconds: float, prefix_bytes: int) -> Sample:
        # After a clock that was set back, pages would wait for samples newer than the ones they have.
        earliest = self._samples[-1].time + seconds if self._samples else 0.0
        return Sample(
            time=round(max(time.time(), earliest), 3),
            seconds=round(seconds, 3),
            generation_tokens=now.generation_tokens - before.generation_tokens,
            rounds=(now.rounds - before.rounds).total(),
            proposed_by_position=_as_list(now.proposed - before.proposed),
            accepted_by_position=_as_list(now.accepted - before.accepted),
            prompt_tokens=now.prompt_tokens - before.prompt_tokens,
            cached_tokens=now.cached_tokens - before.cached_tokens,
            first_tokens=now.first_tokens - before.first_tokens,
            first_token_seconds=round(now.first_token_seconds - before.first_token_seconds, 4),
            running=self._engine_thread.running,
            prefilling=self._engine_thread.prefilling,
            queued=self._engine_thread.queued,
            active_bytes=mx.get_active_memory(),
            cache_bytes=mx.get_cache_memory(),
            prefix_bytes=prefix_bytes,
        )


def _as_list(counts: Counter[int]) -> list[int]:
    return [counts[position] for position in range(1, max(counts, default=0) + 1)]
