"""Native CPU kernels beside stock ops: products, steps, prompts, in one interleaved run.

    python bench/cpu.py [--repeats 9] [--models tiny-qwen3.5,tiny-qwen3.5-moe]

Both sides run by turns in one process, so that a machine's moods meet both; of each the best time counts. The limit
is what reading the weights once takes at the bandwidth that is measured first: no kernel can be faster.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import headstart
from headstart.engine.step import prefill_prompts, step
from headstart.kernels.cpu import load
from headstart.kernels.products import product

PROMPT = "The history of computing is long. In the beginning there were "
STOCK = load.Loaded(None, "stock (bench)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--models", default="tiny-qwen3.5,tiny-qwen3.5-moe")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    native = load.loaded()
    speed = bandwidth()
    print(f"{native}; reads {speed / 1e9:.1f} GB/s\n")
    print("| what | stock ms | native ms | ratio | limit ms |\n| --- | --- | --- | --- | --- |")

    def row(name: str, run: Callable[[], Any], size: int, calls: int = 1) -> float:
        """Time a call on both sides; `size` bytes are read."""
        best = {True: float("inf"), False: float("inf")}
        for _ in range(args.repeats):
            for ours in best:
                load._loaded = native if ours else STOCK
                begin = time.perf_counter()
                for _ in range(calls):
                    run()
                best[ours] = min(best[ours], (time.perf_counter() - begin) / calls)
        load._loaded = native
        ms = {ours: seconds * 1e3 for ours, seconds in best.items()}
        print(
            f"| {name} | {ms[False]:.3f} | {ms[True]:.3f} | {ms[False] / ms[True]:.1f} | {size / speed * 1e3:.3f} |"
        )
        return ms[True]

    for outputs, inputs in ((1024, 384), (12288, 384), (4096, 4096)):
        for bits in (16, 4):
            layer = linear(outputs, inputs, bits)
            size = sum(array.nbytes for _, array in tree_flatten(layer.parameters()))
            times = []
            for rows in (1, 4):
                x = mx.random.normal((rows, inputs)).astype(mx.bfloat16 if bits == 16 else mx.float32)
                mx.eval(x, layer.parameters())
                name = f"product {outputs}×{inputs}, {bits} bits, {rows} rows"
                times.append(row(name, lambda x=x, layer=layer: mx.eval(product(x, layer)), size, 10))  # type: ignore[misc]
            print(f"| … 4 rows over 1 | | {times[1] / times[0]:.2f}× | | |")

    for name in args.models.split(","):
        whole_model(name, native, row)


def whole_model(name: str, native: load.Loaded, row: Callable[..., float]) -> None:
    model, tokenizer = headstart.load(name)
    size = sum(array.nbytes for _, array in tree_flatten(model.weights.parameters()))
    prompt = list(tokenizer.encode(PROMPT * 40))[:401]

    def steps(k: int) -> Callable[[], None]:
        batches = {id(side): prefill_prompts(model, [prompt[:60]], 8) for side in (native, STOCK)}

        def one() -> None:
            batch = batches[id(load._loaded)]
            made = step(model, batch, k)
            mx.eval(made.tokens, batch.arrays())

        return one

    plain, drafting = (row(f"{name}: step, k = {k}", steps(k), size) for k in (0, 3))
    print(f"| … k = 3 over k = 0 | | {drafting / plain:.2f}× | | |")
    batch = prefill_prompts(model, [prompt[:60]], 8)
    begin, count = time.perf_counter(), 20
    for _ in range(count):
        step(model, batch, 0)  # described, not computed
    print(f"| … Python for a step, k = 0 | | {(time.perf_counter() - begin) / count * 1e3:.2f} | | |")
    row(f"{name}: prompt of {len(prompt) - 1} tokens", lambda: prefill_prompts(model, [prompt], 0), size)


def linear(outputs: int, inputs: int, bits: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs, bias=False)
    if bits < 16:
        return layer.to_quantized(group_size=64, bits=bits)
    layer.set_dtype(mx.bfloat16)
    return layer


def bandwidth() -> float:
    """Bytes a second that all threads together read: a product of one row with more weights than caches hold."""
    layer, x = linear(16384, 8192, 16), mx.ones((1, 8192), mx.bfloat16)
    mx.eval(layer.parameters())
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        mx.eval(product(x, layer))
        times.append(time.perf_counter() - begin)
    return layer.weight.nbytes / min(times)


if __name__ == "__main__":
    main()
