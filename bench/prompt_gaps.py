"""Measure how long running streams wait for their next token while a long prompt is read, and how long it takes.

    python bench/prompt_gaps.py [--model FOLDER] [--tokens 11000] [--streams 4] [--repeats 3]

One engine decodes streams greedily; then the prompt arrives. `chunks` reads one whole chunk between two steps,
`slices` what the engine chooses; `alone` reads the prompt without streams. They alternate, so that a noisy machine
shifts all. Gaps are those of all streams from the prompt's arrival to its first token; medians of the repeats. A
chunk or slice changes no token: the prompt's first ones are compared.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

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


class Run:
    """The prompt beside some streams: seconds to its first token, of their steps before it, and of their gaps."""

    def __init__(self, model: Model, tokens: int, streams: int, slices: type[Slices]):
        engine = Engine(model, prefix=PrefixCache(0))
        engine.reader.slices = slices(model.reading.backend, len(model.layers))
        times: list[list[float]] = [[] for _ in range(streams + 1)]
        said: list[list[int]] = [[] for _ in times]

        def start(number: int, length: int) -> None:
            def listen(event: Event) -> None:
                said[number].extend(event.tokens)
                times[number] += [time.perf_counter()] * bool(event.tokens)

            prompt = [(7 * i * i + 3 * i + streams - number) % (model.vocabulary - 1) for i in range(length)]
            params = SamplingParams(max_tokens=4 if number == streams else model.context_length, k=0)
            engine.submit(Request(prompt, params), listener=listen)

        for number in range(streams):
            start(number, 40)
        while streams and min(map(len, times[:-1])) < WARM_UP:
            engine.run_once()
        arrived = time.perf_counter()
        start(streams, tokens)
        while not times[-1]:
            engine.run_once()
        engine.cancel_all()
        while engine.run_once():
            pass
        self.first = times[-1][0] - arrived
        self.said = said[-1]
        pairs = [pair for each in times[:-1] for pair in pairwise(each)]
        self.step = statistics.median([b - a for a, b in pairs if b < arrived] or [0.0])
        self.gaps = sorted(b - a for a, b in pairs if b > arrived and a < times[-1][0])

    def gap(self, share: float) -> float:
        return self.gaps[min(int(share * len(self.gaps)), len(self.gaps) - 1)] if self.gaps else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-qwen3.5")
    parser.add_argument("--tokens", type=int, default=11000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    model = load_model(arguments.model)
    if model.context_length < 2 * arguments.tokens:  # what it says there does not matter
        model = replace(model, config={**model.config, "max_position_embeddings": 2 * arguments.tokens})
    kinds = {"alone": (0, Slices), "chunks": (arguments.streams, WholeChunks), "slices": (arguments.streams, Slices)}
    runs: dict[str, list[Run]] = {name: [] for name in kinds}
    for _ in range(arguments.repeats):
        for name, (streams, slices) in kinds.items():
            runs[name].append(Run(model, arguments.tokens, streams, slices))
    if len({tuple(run.said[:1]) for each in runs.values() for run in each}) > 1:
        raise SystemExit("the tokens differ: this is a bug")

    print("| read in | step before, ms | gap p50, ms | p90 | p99 | longest | first token of the prompt, s |")
    print("| --- " + "| ---: " * 6 + "|")
    for name, each in runs.items():
        times = [[run.step, *(run.gap(share) for share in (0.5, 0.9, 0.99, 1.0))] for run in each]
        middle = [
            f"{statistics.median(column) * 1e3:.1f}" if any(column) else "" for column in zip(*times, strict=True)
        ]
        print(f"| {name} | {' | '.join(middle)} | {statistics.median(run.first for run in each):.2f} |")


if __name__ == "__main__":
    main()
