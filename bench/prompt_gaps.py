"""Measure how long running streams wait for their next token while a long prompt is read, and how long it takes.

    python bench/prompt_gaps.py [--model FOLDER] [--tokens 11000] [--streams 4] [--repeats 3]

One engine decodes streams greedily; then the prompt arrives. `chunks` reads one whole chunk between two steps,
`slices` what the engine chooses; `alone` reads the prompt without streams. They alternate, so that a noisy machine
shifts all. Gaps are those of all streams from the prompt's arrival to its first token; medians of the repeats. A
chunk or slice changes no token: the prompt's first ones are compared.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median

from harness import line, made_up, medians, options, table, turns

from headstart.checkpoint import load_model
from headstart.engine import Engine, Event, Request
from headstart.engine.prompt_pass import PromptPass
from headstart.engine.sequence import SequenceState
from headstart.engine.slices import Slices
from headstart.models import Model
from headstart.sampling import SamplingParams
from headstart.state import CHUNK, PrefixCache

WARM_UP = 12  # tokens of each stream before the prompt arrives


class WholeChunks(Slices):
    """One chunk of the first prompt between two steps."""

    def next(self, waiting: Sequence[SequenceState]) -> SequenceState:
        return waiting[0]

    def width(self, begin: int, end: int) -> int:
        return CHUNK

    def pieces(self, reading: PromptPass) -> int:
        first, self._first = self._first, False
        return reading.left if first else 0


@dataclass(frozen=True)
class Beside:
    """A prompt beside streams. Times in seconds."""

    alone: float  # a step of the streams before it arrives
    gaps: list[float]  # of the streams until its first token, in order
    first: float  # from its arrival to its first token
    said: list[int]

    def gap(self, share: float) -> float:
        return self.gaps[min(int(share * len(self.gaps)), len(self.gaps) - 1)] if self.gaps else 0.0


def read_beside(model: Model, tokens: int, streams: int, slices: type[Slices] = Slices) -> Beside:
    engine = Engine(model, prefix=PrefixCache(0))
    engine.reader.slices = slices(model.reading.backend, len(model.layers))
    times: list[list[float]] = [[] for _ in range(streams + 1)]
    said: list[int] = []

    def start(number: int, length: int, most: int) -> None:
        def listen(event: Event) -> None:
            times[number] += [time.perf_counter()] * bool(event.tokens)
            said.extend(event.tokens if number == streams else ())

        prompt = made_up(length, model.vocabulary, streams - number)
        engine.submit(Request(prompt, SamplingParams(max_tokens=most, k=0)), listener=listen)

    for number in range(streams):
        start(number, 40, model.context_length)
    while streams and min(map(len, times[:-1])) < WARM_UP:
        engine.run_once()
    arrived = time.perf_counter()
    start(streams, tokens, 4)
    while not times[-1]:
        engine.run_once()
    engine.cancel_all()
    while engine.run_once():
        pass
    pairs = [pair for each in times[:-1] for pair in pairwise(each)]
    gaps = sorted(b - a for a, b in pairs if b > arrived and a < times[-1][0])
    return Beside(median([b - a for a, b in pairs if b < arrived] or [0.0]), gaps, times[-1][0] - arrived, said)


def main() -> None:
    given = options(__doc__, model="tiny-qwen3.5", tokens=11000, streams=4, repeats=3)
    model = load_model(given.model)
    if model.context_length < 2 * given.tokens:  # what it says there does not matter
        model = replace(model, config={**model.config, "max_position_embeddings": 2 * given.tokens})
    kinds = {"alone": (0, Slices), "chunks": (given.streams, WholeChunks), "slices": (given.streams, Slices)}
    runs = {name: partial(read_beside, model, given.tokens, *kind) for name, kind in kinds.items()}
    found = turns(runs, given.repeats)
    if len({tuple(run.said[:1]) for each in found.values() for run in each}) > 1:
        raise SystemExit("the tokens differ: this is a bug")
    table("read in", "step before, ms", "gap p50, ms", "p90", "p99", "longest", "first token of the prompt, s")
    for name, each in found.items():
        *times, first = medians([[run.alone, *map(run.gap, (0.5, 0.9, 0.99, 1.0)), run.first] for run in each])
        line(name, *[1e3 * seconds if seconds else "" for seconds in times], first)


if __name__ == "__main__":
    main()
