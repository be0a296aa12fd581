"""What benchmarks share: options, turns, ratios, tables, random models, timed answers, other processes."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import mlx.core as mx

from headstart.checkpoint import load_model
from headstart.engine import Engine, Request, Stats
from headstart.models import Model
from headstart.sampling import SamplingParams

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]  # before this folder, where a file may have the same name
sys.path.append(str(ROOT))
FOUND: dict[str, Any] = {}

Name = TypeVar("Name", bound=Hashable)
T = TypeVar("T")


def options(doc: str | None, *positional: str, **defaults: Any) -> argparse.Namespace:
    """Return what the command line says. A default has its option's type; of a list, its items have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in positional:
        parser.add_argument(name, nargs="?")
    for name, default in defaults.items():
        flag, several = f"--{name.replace('_', '-')}", isinstance(default, list)
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
            continue
        kind = int if default == [] else next((type(each) for each in (default if several else [default])), str)
        kind = str if kind is type(None) else kind
        parser.add_argument(flag, type=kind, default=default, nargs="*" if several else None)
    return parser.parse_args()


def turns(runs: Mapping[Name, Callable[[], T]], repeats: int) -> dict[Name, list[T]]:
    """Run everything by turns, so that a busy machine slows all alike. A turn before the first warms up."""
    found: dict[Name, list[T]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            made = run()
            found[name] += [made] * bool(turn)
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios within a turn, where the machine was the same."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [median(column) for column in zip(*rows, strict=True)]


def seconds_of(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def table(*heads: str) -> None:
    print("\n| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads), flush=True)


def line(*cells: Any) -> None:
    print("| " + " | ".join(map(_cell, cells)) + " |", flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def note(name: str, value: Any) -> None:
    """Write what was found to a JSON file as well, if $OUT names a folder."""
    FOUND[name] = value
    if folder := os.environ.get("OUT"):
        Path(folder, f"{Path(sys.argv[0]).stem}.json").write_text(json.dumps(FOUND, indent=1))


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    times: list[float]  # seconds since the prompts were submitted, of each event with tokens
    counts: list[int]  # its tokens
    stats: Stats

    @property
    def rate(self) -> float:
        """Return the tokens per second after the first event."""
        return sum(self.counts[1:]) / (self.times[-1] - self.times[0])

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


def answers(engine: Engine, prompts: Sequence[Sequence[int]], **params: Any) -> list[Answer]:
    """Answer prompts side by side."""
    heard: list[list[tuple[float, Any]]] = [[] for _ in prompts]
    begun = time.perf_counter()
    for prompt, mine in zip(prompts, heard, strict=True):
        request = Request(prompt, SamplingParams(**params))
        engine.submit(request, listener=lambda event, mine=mine: mine.append((time.perf_counter() - begun, event)))
    while engine.run_once():
        pass
    made = []
    for mine in heard:
        if (last := mine[-1][1]).error:
            raise last.error
        timed = [(at, event.tokens) for at, event in mine if event.tokens]
        tokens = [token for _, several in timed for token in several]
        made.append(Answer(tokens, [at for at, _ in timed], [len(each) for _, each in timed], last.stats))
    return made


def made_up(length: int, vocabulary: int, row: int = 0) -> list[int]:
    """Return a prompt of tokens that do not repeat soon."""
    return [(7 * i * i + 3 * i + row) % (vocabulary - 1) for i in range(length)]


def random_hybrid(dtype: mx.Dtype = mx.float32, **sizes: int) -> Model:
    """Return a random model with one attention layer in four, as Qwen3.5 has them."""
    from checkpoints import write

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), "dense", intermediate_size=4 * sizes["hidden_size"], **sizes)
        return load_model(folder, dtype=dtype)


class Worker:
    """A process that answers each line of JSON with one. Its first line says what it is."""

    def __init__(self, python: str, script: str, *arguments: str):
        command = [python, script, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.what = self._next()

    def ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._next()

    def end(self) -> None:
        self._process.communicate()

    def _next(self) -> Any:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if text.startswith("{"):  # libraries print too
                return json.loads(text)
        raise SystemExit(f"{self._process.args!r} ended")
