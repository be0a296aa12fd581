"""Measure the time to the first token of a prompt that is computed, and of the same prompt from the prefix cache.

    python bench/prefix.py [--model FOLDER] [--tokens 4096 4160] [--repeats 3] [--hidden 64] [--layers 4]

By default a random checkpoint with a long context. Cold and warm runs alternate, so that a noisy machine shifts both;
medians are taken, and the ratio within each repeat. `store` is what a first prefill costs more with the cache than
without one. Every answer is checked: the tokens must be those of an engine without a cache.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx

from headstart.checkpoint import load_model
from headstart.engine import Engine, Request
from headstart.models import Model
from headstart.sampling import SamplingParams
from headstart.state import CHUNK, PrefixCache

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from checkpoints import write


def random_model(hidden: int, layers: int, context: int) -> Model:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "max_position_embeddings": context,
    }
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), "dense", **sizes)
        return load_model(folder, dtype=mx.float32)


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, list[int], int]:
    """Return (seconds, tokens, prompt tokens from the cache) of a short answer."""
    start, seconds, tokens, hit = time.perf_counter(), 0.0, [], 0
    for event in engine.submit(Request(prompt, SamplingParams(max_tokens=4, k=2))):
        if event.tokens and not tokens:
            seconds = time.perf_counter() - start
        tokens += event.tokens
        hit = event.stats.prefix_cache_hit if event.stats is not None else hit
    return seconds, tokens, hit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8 * CHUNK, 8 * CHUNK + 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--eight-bits", action="store_true")
    arguments = parser.parse_args()
    context = 2 * max(arguments.tokens)
    model = (
        load_model(arguments.model) if arguments.model else random_model(arguments.hidden, arguments.layers, context)
    )

    print("| tokens | remembered | without ms | first ms | repeated ms | store | faster | MB kept |")
    print("| --- " * 8 + "|")
    for length in arguments.tokens:
        prompt = [(7 * i * i + 3 * i) % (model.vocabulary - 1) for i in range(length)]
        prefix = PrefixCache(1 << 30, eight_bits=arguments.eight_bits)
        engine, plain = Engine(model, prefix=prefix), Engine(model, prefix=PrefixCache(0))
        runs: list[tuple[float, float, float]] = []
        hit = 0
        for repeat in range(arguments.repeats + 1):  # the first warms up
            prefix.clear()
            without, expected, _ = first_token(plain, prompt)
            first, read, _ = first_token(engine, prompt)
            again, remembered, hit = first_token(engine, prompt)
            if read != expected or (remembered != expected and not arguments.eight_bits):
                raise SystemExit("the tokens differ: this is a bug")
            if repeat:
                runs.append((without, first, again))
        without, first, again = (statistics.median(run[n] for run in runs) * 1e3 for n in range(3))
        store = statistics.median(run[1] / run[0] for run in runs)
        faster = statistics.median(run[1] / run[2] for run in runs)
        print(
            f"| {length} | {hit} | {without:.0f} | {first:.0f} | {again:.0f} | {store:.2f} "
            f"| {faster:.1f} × | {prefix.stats().bytes / 1e6:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
