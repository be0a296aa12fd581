"""Measure prefill, memory and decoding along a long context, with the KV cache as it is and in 8 bits.

    python bench/long_context.py [--model FOLDER] [--tokens 1024 8192 16384 32768] [--steps 8] [--hidden 256]
                                 [--dtype bfloat16]

By default a random checkpoint with one attention layer in four and heads of 256, as Qwen3.5 has them. One sequence is
prefilled once; at each length, `--steps` plain steps (k = 0) are timed and the median is taken, and prefill is timed
from the length before. Memory is that of the sequence's state, counted by MLX.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx

from headstart.checkpoint import load_model
from headstart.engine.batch import Batch
from headstart.engine.step import prefill, step
from headstart.models import Model
from headstart.sampling import SamplingParams, SequenceParams
from headstart.state import CHUNK

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from checkpoints import write


def random_model(hidden: int, context: int, dtype: str) -> Model:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 4, "head_dim": 256}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), "dense", max_position_embeddings=context, **sizes)
        return load_model(folder, dtype=getattr(mx, dtype))


def measure(model: Model, lengths: list[int], steps: int) -> list[tuple[float, float, float]]:
    """Return tokens per second of prefill, milliseconds per step and bytes of the state, at each length."""
    prompt = [(7 * i * i + 3 * i) % (model.vocabulary - 1) for i in range(max(lengths) + 1)]
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
        seconds = []
        for _ in range(steps + 1):  # the first warms up
            start = time.perf_counter()
            mx.eval(step(model, batch, 0).tokens, batch.arrays())
            seconds.append(time.perf_counter() - start)
        done += steps + 1  # they are part of the context now
        rows.append((speed, statistics.median(seconds[1:]) * 1e3, held))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 16384, 32768])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    lengths = sorted(arguments.tokens)
    if arguments.model:
        model = load_model(arguments.model)
    else:
        model = random_model(arguments.hidden, 2 * lengths[-1], arguments.dtype)
    exact, small = (measure(each, lengths, arguments.steps) for each in (model, model.with_kv_bits(8)))
    print("| tokens | prefill tokens/s | 8 bits | step ms | 8 bits | state MB | 8 bits |")
    print("| ---: " * 7 + "|")
    for length, (a, b, c), (d, e, f) in zip(lengths, exact, small, strict=True):
        print(f"| {length} | {a:.0f} | {d:.0f} | {b:.1f} | {e:.1f} | {c / 1e6:.1f} | {f / 1e6:.1f} |")
    spans = lengths[-1] - lengths[0]
    per = [(rows[-1][2] - rows[0][2]) / spans * 1e4 / 1e6 for rows in (exact, small)] if spans else []
    if per:
        print(f"\nMemory per 10,000 tokens: {per[0]:.1f} MB, in 8 bits {per[1]:.1f} MB.")


if __name__ == "__main__":
    main()
