"""The last hour in samples of two seconds, for whoever opens the dashboard after the fact.

What is counted is kept as differences, so that a page can add them up over any stretch of time.
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
from .counters import Counters
from .fault import LOG

INTERVAL = 2.0  # seconds
KEPT = 1800  # samples


@dataclass(frozen=True)
class Sample:
    time: float  # when it was taken, in seconds since 1970, and never before the one before
    seconds: float  # since the one before. In these:
    generation_tokens: int
    rounds: int
    proposed_by_position: list[int]
    accepted_by_position: list[int]
    prompt_tokens: int
    cached_tokens: int  # of those, found in the prefix cache
    first_tokens: int  # answers that began
    first_token_seconds: float  # that they took to, added up
    running: int  # rows, now
    entering: int
    queued: int
    active_bytes: int  # memory as mlx counts it
    cache_bytes: int
    prefix_bytes: int  # of the active ones, the prefix cache's


class History:
    def __init__(self, room: EngineThread, tally: Counters):
        self._room, self._tally = room, tally
        self._samples: deque[Sample] = deque(maxlen=KEPT)

    async def keep(self) -> None:
        """Sample until cancelled."""
        before, then, prefix = deepcopy(self._tally), time.perf_counter(), self._room.engine.prefix
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                # In a thread: the engine may hold the prefix cache for a while.
                held = (await asyncio.to_thread(prefix.stats)).bytes if prefix is not None else 0
                tally, now = deepcopy(self._tally), time.perf_counter()
                self._samples.append(self._sample(before, tally, now - then, held))
            except Exception as error:
                log_error(LOG, "a sample of the history failed; the next one covers its time too", error=error)
            else:
                before, then = tally, now

    def report(self, after: float) -> dict[str, Any]:
        """The samples that were taken after that time, by column, and what the choice of depth thinks."""
        recent = [*takewhile(lambda sample: sample.time > after, reversed(self._samples))][::-1]
        return {
            "interval": INTERVAL,
            "samples": {each.name: [getattr(sample, each.name) for sample in recent] for each in fields(Sample)},
            "controller": {
                "depth": self._tally.depth,
                "gains": [round(gain, 3) for gain in self._room.engine.depth.gains],
            },
        }

    def _sample(self, before: Counters, now: Counters, seconds: float, prefix_bytes: int) -> Sample:
        # A clock that is set back would leave pages waiting for what is newer than they have.
        least = self._samples[-1].time + seconds if self._samples else 0.0
        return Sample(
            time=round(max(time.time(), least), 3),
            seconds=round(seconds, 3),
            generation_tokens=now.generation_tokens - before.generation_tokens,
            rounds=(now.rounds - before.rounds).total(),
            proposed_by_position=_by_position(now.proposed - before.proposed),
            accepted_by_position=_by_position(now.accepted - before.accepted),
            prompt_tokens=now.prompt_tokens - before.prompt_tokens,
            cached_tokens=now.cached_tokens - before.cached_tokens,
            first_tokens=now.first_tokens - before.first_tokens,
            first_token_seconds=round(now.first_token_seconds - before.first_token_seconds, 4),
            running=self._room.running,
            entering=self._room.prefilling,
            queued=self._room.queued,
            active_bytes=mx.get_active_memory(),
            cache_bytes=mx.get_cache_memory(),
            prefix_bytes=prefix_bytes,
        )


def _by_position(counts: Counter[int]) -> list[int]:
    return [counts[position] for position in range(1, max(counts, default=0) + 1)]
