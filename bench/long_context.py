"""Measure prefill, memory and decoding along a long context, with the KV cache as it is and in 8 bits.

    python bench/long_context.py [--model FOLDER] [--tokens 1024 8192 16384 32768] [--steps 8] [--hidden 256]
                                 [--dtype bfloat16]

By default a random checkpoint with one attention layer in four and heads of 256, as Qwen3.5 has them. One sequence is
prefilled once; at each length, `--steps` plain steps (k = 0) are timed and the median is taken, and prefill is timed
from the length before. Memory is that of the sequence's state, counted by MLX.
"""

import gc
import time
from statistics import median

import mlx.core as mx
from harness import line, made_up, options, random_hybrid, seconds_of, table

from headstart.checkpoint import load_model
from headstart.engine.batch import Batch
from headstart.engine.step import prefill, step
from headstart.models import Model
from headstart.sampling import SamplingParams, SequenceParams
from headstart.state import CHUNK


def measure(model: Model, lengths: list[int], steps: int) -> list[tuple[float, float, float]]:
    """Return tokens per second of prefill, milliseconds per step and MB of the state, at each length."""
    prompt = made_up(max(lengths) + 1, model.vocabulary)
    gc.collect()
    before = mx.get_active_memory()
    # With a head, which needs all hidden states: MLX would not compute the last layer's otherwise.
    batch = Batch.of_one(model, prompt, SequenceParams(SamplingParams(), key=0, choice=0, limit=10**6), max_k=1)
    rows, done = [], 0
    for length in lengths:
        first, start = done, time.perf_counter()
        while done < length:
            end = min(done + CHUNK, length)
            chunk, following = mx.array([prompt[done:end]], mx.int32), mx.array([prompt[end]], mx.int32)
            prefill(model.reading, batch, chunk, following)
            mx.eval(batch.arrays())
            done = end
        speed = (length - first) / (time.perf_counter() - start)
        held = mx.get_active_memory() - before

        def plain() -> None:
            mx.eval(step(model, batch, 0).verdict.tokens, batch.arrays())

        times = [seconds_of(plain) for _ in range(steps + 1)]
        done += steps + 1  # they are part of the context now
        rows.append((speed, 1e3 * median(times[1:]), held / 1e6))
    return rows


def main() -> None:
    given = options(__doc__, model=None, tokens=[1024, 8192, 16384, 32768], steps=8, hidden=256, dtype="bfloat16")
    lengths = sorted(given.tokens)
    sizes = {"num_hidden_layers": 4, "head_dim": 256, "max_position_embeddings": 2 * lengths[-1]}
    model = (
        load_model(given.model)
        if given.model
        else random_hybrid(getattr(mx, given.dtype), hidden_size=given.hidden, **sizes)
    )
    exact, small = (measure(each, lengths, given.steps) for each in (model, model.with_kv_bits(8)))
    table("tokens", "prefill tokens/s", "8 bits", "step ms", "8 bits", "state MB", "8 bits")
    for length, ours, eight in zip(lengths, exact, small, strict=True):
        line(length, *[cell for pair in zip(ours, eight, strict=True) for cell in pair])
    if len(lengths) > 1:
        span = (lengths[-1] - lengths[0]) / 10_000
        per = [(rows[-1][2] - rows[0][2]) / span for rows in (exact, small)]
        print(f"\nMemory per 10,000 tokens: {per[0]:.1f} MB, in 8 bits {per[1]:.1f} MB.")


if __name__ == "__main__":
    main()
