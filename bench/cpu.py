"""Native CPU kernels beside stock MLX: products, steps, windows, drafts, prompts and whole texts in one run.

    python bench/cpu.py [--repeats 9] [--models tiny-qwen3.5,tiny-qwen3.5-moe] [--tokens 200]
    python bench/cpu.py --beside llama.cpp --model FOLDER --gguf FILE --python VENV/bin/python [--threads 1]

All measurements take turns in one process, so that a busy machine slows both sides alike; the best time of each
counts. The limit is the time that reading the weights once takes at the bandwidth that is measured first. Stock MLX
uses one core. `--beside llama.cpp` compares with `xllamacpp`, a wheel in an environment of its own (cpu_beside.py).
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from cpu_beside import compare
from harness import answers, line, options, seconds_of, table, turns
from mlx.utils import tree_flatten

import headstart
from headstart.bench.prompts import KINDS, builtin_prompts
from headstart.engine import Engine
from headstart.engine.batch import Batch
from headstart.engine.step import prefill_prompts, step
from headstart.kernels.cpu import load
from headstart.kernels.cpu.backend import cpu_backend
from headstart.models import Model

PROMPT = "The history of computing is long. In the beginning there were "
STOCK = load.Loaded(None, "stock (bench)")
SHAPES = ((1024, 384), (12288, 384), (4096, 4096))  # of products
PATIENCE = 20.0  # seconds that stock MLX may take for all repeats of one measurement


@dataclass
class Case:
    """Something to time with native kernels and, unless `native_only`, with stock MLX."""

    name: str
    run: Callable[[], Any]
    size: int  # bytes of weights that are read
    calls: int = 1
    native_only: bool = False
    best: dict[bool, float] = field(default_factory=dict)  # milliseconds of a call, by whether it is native
    spent: float = 0.0  # seconds, with stock MLX

    def time(self, native: load.Loaded) -> None:
        for ours in (True,) if self.native_only or self.spent > PATIENCE else (True, False):
            load._loaded = native if ours else STOCK
            begin = time.perf_counter()
            for _ in range(self.calls):
                self.run()
            seconds = time.perf_counter() - begin
            self.best[ours] = min(self.best.get(ours, float("inf")), seconds / self.calls * 1e3)
            self.spent += 0.0 if ours else seconds
        load._loaded = native

    @property
    def ms(self) -> float:
        return self.best[True]


def main() -> None:
    args = options(
        __doc__, repeats=9, models=["tiny-qwen3.5", "tiny-qwen3.5-moe"], tokens=200, beside="", model="", gguf="",
        python=sys.executable, threads=1, contexts=[40, 1000], k="0",
    )  # fmt: skip
    args.k = args.k if args.k == "auto" else int(args.k)
    (compare if args.beside else beside_stock)(args)


def beside_stock(args: argparse.Namespace) -> None:
    mx.set_default_device(mx.cpu)
    native, names = load.loaded(), [name for each in args.models for name in each.split(",")]
    speed = bandwidth()
    loaded = {name: headstart.load(name) for name in names}
    load._loaded = STOCK  # which loads experts in float32, the only type that MLX multiplies them in
    stock = {name: headstart.load(name)[0] for name in names}
    load._loaded = native
    cases = [*product_cases(), *(case for name in names for case in model_cases(name, *loaded[name], stock[name]))]
    for _ in range(args.repeats):
        for case in cases:
            case.time(native)

    print(f"{native}; weights are read at {speed / 1e9:.1f} GB/s")
    table("what", "stock ms", "native ms", "ratio", "limit ms")
    for case in cases:
        slow = case.best.get(False)
        line(case.name, slow, case.ms, slow and f"{slow / case.ms:.1f}×", case.size / speed * 1e3)
    times = {case.name: case.ms for case in cases}
    table("ratio of native times", "")
    for shape in SHAPES:
        for bits in (16, 4):
            name = f"product {shape[0]}×{shape[1]}, {bits} bits"
            line(f"{name}: 4 rows over 1", times[f"{name}, 4 rows"] / times[f"{name}, 1 row"])
    for name in names:
        for what, ours, over in (
            ("window of 4 over 1", "window of 4", "window of 1"),
            ("one draft over a step", "one draft", "step, k = 0"),
            ("step with k = 3 over k = 0", "step, k = 3", "step, k = 0"),
        ):
            line(f"{name}: {what}", times[f"{name}: {ours}"] / times[f"{name}: {over}"])
    if args.tokens:
        texts(names[0], *loaded[names[0]], args.tokens)


def product_cases() -> Iterator[Case]:
    for outputs, inputs in SHAPES:
        for bits in (16, 4):
            layer = linear(outputs, inputs, bits)
            size = sum(array.nbytes for _, array in tree_flatten(layer.parameters()))
            for rows in (1, 4):
                x = mx.random.normal((rows, inputs)).astype(mx.bfloat16 if bits == 16 else mx.float32)
                mx.eval(x, layer.parameters())

                def run(x: mx.array = x, layer: nn.Module = layer) -> None:
                    mx.eval(cpu_backend().product(x, layer))

                yield Case(
                    f"product {outputs}×{inputs}, {bits} bits, {rows} row{'s' * (rows > 1)}", run, size, calls=10
                )


def model_cases(name: str, model: Model, tokenizer: Any, stock: Model) -> Iterator[Case]:
    size = sum(array.nbytes for _, array in tree_flatten(model.weights.parameters()))
    prompt = list(tokenizer.encode(PROMPT * 40))[:401]

    def batches(k: int) -> dict[bool, tuple[Model, Batch]]:
        return {each is model: (each, prefill_prompts(each, [prompt[:60]], k)) for each in (model, stock)}

    def steps(k: int) -> Callable[[], None]:
        by_side = batches(8)

        def one() -> None:
            model, batch = by_side[load._loaded is not STOCK]
            mx.eval(step(model, batch, k).verdict.tokens, batch.arrays())

        return one

    def windows(width: int) -> Callable[[], None]:
        by_side = batches(0)

        def one() -> None:
            model, batch = by_side[load._loaded is not STOCK]
            rows = batch.trunk_state
            mx.eval(model.logits(model.trunk(mx.array([prompt[:width]]), rows, certain=1)), rows.arrays())

        return one

    drafting = batches(8)

    def draft() -> None:
        model, batch = drafting[load._loaded is not STOCK]
        hidden = mx.zeros((1, 1, model.config["hidden_size"]), model.dtype)
        mx.eval(mx.argmax(model.draft_logits(model.head(hidden, mx.array([[5]]), batch.head_state)), axis=-1))

    def describe(k: int) -> Callable[[], None]:
        batch = prefill_prompts(model, [prompt[:60]], 8)

        def run() -> None:
            step(model, batch, k)  # described, not computed

        return run

    def prompts() -> None:
        prefill_prompts(model if load._loaded is not STOCK else stock, [prompt], 0)

    for k in (0, 3):
        yield Case(f"{name}: step, k = {k}", steps(k), size, calls=4)
    for width in (1, 4):
        yield Case(f"{name}: window of {width}", windows(width), size, calls=4)
    head = sum(
        array.nbytes
        for _, array in tree_flatten([model.weights.mtp.parameters(), model.weights.embed_tokens.parameters()])
    )
    yield Case(f"{name}: one draft", draft, head, calls=4)
    for k in (0, 3):
        yield Case(f"{name}: Python for a step, k = {k}", describe(k), 0, native_only=True)
    yield Case(f"{name}: prompt of {len(prompt) - 1} tokens", prompts, size)


def texts(name: str, model: Model, tokenizer: Any, tokens: int) -> None:
    """Generate by turns without drafts and with as many as pay, by kind of text."""
    engine, ratios = Engine(model), []
    table("tokens/s", "k = 0", "auto", "ratio")
    for kind in KINDS:
        prompt = builtin_prompts([kind])[0].tokens(tokenizer)
        runs = {k: lambda k=k: answers(engine, [prompt], max_tokens=tokens, k=k)[0].rate for k in (0, "auto")}  # noqa: B023
        best = {k: max(rates) for k, rates in turns(runs, 3).items()}  # prompts are in the other table
        ratios.append(best["auto"] / best[0])
        line(f"{name}: {kind}", best[0], best["auto"], f"{ratios[-1]:.2f}×")
    line("mean", "", "", f"{mean(ratios):.2f}×")


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
    return layer.weight.nbytes / min(seconds_of(lambda: mx.eval(cpu_backend().product(x, layer))) for _ in range(12))


if __name__ == "__main__":
    main()
