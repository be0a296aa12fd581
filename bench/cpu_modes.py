"""CPU seconds of every mode of quantised weights: native kernels, and MLX's operations, by turns in one run.

    python bench/cpu_modes.py [--repeats 9] [--model tiny-qwen3.5]

Products alone, then a step without drafts and a window of four of a model whose matrices are quantised anew in the
mode. CPU seconds, of all threads: the machine may be busy. The least of each counts. "over affine": over the affine
mode of the nearest bits in groups of 64.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import headstart
from headstart.engine.step import prefill_prompts, step
from headstart.kernels.cpu import load
from headstart.kernels.cpu.backend import StockCpu, cpu_backend
from headstart.models import Model

MODES = [("affine", bits, 64) for bits in (1, 2, 3, 4, 5, 6, 8)]
MODES += [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]
SHAPES = ((4096, 4096), (1024, 384))
PROMPT = "The history of computing is long. In the beginning there were "
Run = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--model", default="tiny-qwen3.5")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    native = load.loaded().module
    assert native is not None, "no native kernels here"
    runs: dict[tuple[str, str, bool], Run] = {}
    for mode in MODES:
        runs |= product_runs(mode) | model_runs(args.model, mode)
    best = measure(runs, args.repeats)
    print(cpu_backend())
    for what in dict.fromkeys(what for _, what, _ in runs):
        show(what, best)


def name_of(mode: tuple[str, int, int]) -> str:
    return f"{mode[0]} {mode[1]} bits, groups of {mode[2]}"


def product_runs(mode: tuple[str, int, int]) -> dict[tuple[str, str, bool], Run]:
    kind, bits, group = mode
    runs: dict[tuple[str, str, bool], Run] = {}
    for outputs, inputs in SHAPES:
        layer = nn.QuantizedLinear.from_linear(nn.Linear(inputs, outputs, bias=False), group, bits, kind)
        mx.eval(layer.parameters())
        for rows in (1, 4):
            x = mx.random.normal((rows, inputs))
            for ours, backend in ((True, cpu_backend()), (False, StockCpu())):
                runs[name_of(mode), f"{outputs}×{inputs}, {rows} row{'s' * (rows > 1)}", ours] = product(
                    backend, x, layer
                )
    return runs


def product(backend: StockCpu, x: mx.array, layer: nn.Module) -> Run:
    return lambda: mx.eval(backend.product(x, layer))


def model_runs(name: str, mode: tuple[str, int, int]) -> dict[tuple[str, str, bool], Run]:
    kind, bits, group = mode
    model, tokenizer = headstart.load(name)
    model.lm.set_dtype(mx.float32)
    nn.quantize(
        model.lm,
        group,
        bits,
        mode=kind,
        class_predicate=lambda path, each: hasattr(each, "to_quantized") and each.weight.shape[-1] % group == 0,
    )
    model = replace(model, dtype=mx.float32)
    mx.eval(model.lm.parameters())
    prompt = list(tokenizer.encode(PROMPT * 4))[:60]
    runs: dict[tuple[str, str, bool], Run] = {}
    for ours in (True, False):
        each = model if ours else replace(model, backend=StockCpu())
        runs[name_of(mode), f"{name}, step at k = 0", ours] = one_step(each, prompt)
        runs[name_of(mode), f"{name}, window of 4", ours] = one_window(each, prompt)
    return runs


def one_step(model: Model, prompt: Sequence[int]) -> Run:
    batch = prefill_prompts(model, [prompt], 0)
    return lambda: mx.eval(step(model, batch, 0).verdict.tokens, batch.arrays())


def one_window(model: Model, prompt: Sequence[int]) -> Run:
    state = prefill_prompts(model, [prompt], 0).trunk_state

    def run() -> None:
        mx.eval(model.logits(model.trunk(mx.array([prompt[:4]]), state, certain=1)), state.arrays())

    return run


def measure(runs: dict[tuple[str, str, bool], Run], repeats: int) -> dict[tuple[str, str, bool], float]:
    """Return the least CPU milliseconds of each, taken by turns."""
    best: dict[tuple[str, str, bool], float] = {}
    for each in range(repeats + 1):
        for key, run in runs.items():
            if not key[2] and each > 2:
                continue  # MLX's take long, and so vary little
            begin = time.process_time()
            run()
            spent = (time.process_time() - begin) * 1e3
            if each:  # not the first
                best[key] = min(best.get(key, float("inf")), spent)
    return best


def show(what: str, best: dict[tuple[str, str, bool], float]) -> None:
    print(f"\n| {what} | native ms | MLX ms | ratio | over affine |\n| --- | ---: | ---: | ---: | ---: |")
    for mode in MODES:
        ours, stock = (best[name_of(mode), what, native] for native in (True, False))
        near = best[name_of(("affine", mode[1], 64)), what, True]
        print(f"| {name_of(mode)} | {ours:.3f} | {stock:.2f} | {stock / ours:.1f}× | {ours / near:.2f} |")


if __name__ == "__main__":
    main()
