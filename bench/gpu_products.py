"""Our CUDA products on this card: `python bench/gpu_products.py [products experts]`, all parts where none is named.

    products  right? the same row for any number of rows? and the time by rows, beside mlx's
    experts   the same for a mixture of experts

Weights are drawn on the card. A product is timed over many matrices in turn, more than the card's cache holds, and
inside `mx.compile`; medians. With $OUT set, everything is also written to $OUT/gpu_products.json.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from random_model import random_codes

from headstart.kernels.cuda.experts import launch_experts
from headstart.kernels.cuda.products import MatrixWeights, launch_products

Product = Callable[[mx.array, MatrixWeights], mx.array]
FOUND: dict[str, Any] = {}
ROWS = (1, 2, 3, 4, 8, 16)  # mlx compiles its own kernels for more, and takes long to
MORE = (32, 64, 144)
SHAPES = [(5120, 17408, 4), (17408, 5120, 4), (5120, 248320, 4), (5120, 17408, 8), (5120, 17408, 16)]
# What a head costs that only drafts: a copy of the output matrix in fewer bits, or of fewer tokens.
SHAPES += [(5120, 248320, 8), (5120, 248320, 16), (5120, 32768, 4)]


def note(name: str, value: Any) -> None:
    FOUND[name] = value
    if folder := os.environ.get("OUT"):
        script = Path(sys.argv[0]).stem
        Path(folder, f"{script}.json").write_text(json.dumps(FOUND, indent=1))


def table(*heads: str) -> None:
    print("\n| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads), flush=True)


def line(*cells: Any) -> None:
    print("| " + " | ".join(f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells) + " |", flush=True)


def microseconds(product: Product, x: mx.array, weights: Sequence[MatrixWeights]) -> float:
    """Of one product, in a chain of them: each waits for a number of the one before, as layers do. What waiting
    alone costs is measured too, and taken off."""

    def chain(x: mx.array, numbers: mx.array, arrays: list[list[mx.array]], multiplies: bool) -> mx.array:
        for held in arrays:
            if multiplies:
                numbers = product(x, remade(weights[0], held)).flatten()[:1]
            x = x + 0 * numbers
        return x

    graph = mx.compile(chain)
    arrays, numbers = [each.arrays() for each in weights], mx.zeros((1,), x.dtype)

    def seconds(multiplies: bool) -> float:
        mx.eval(graph(x, numbers, arrays, multiplies))
        times = []
        for _ in range(7):
            begun = time.perf_counter()
            for _ in range(3):
                mx.async_eval(graph(x, numbers, arrays, multiplies))
            mx.synchronize()
            times.append((time.perf_counter() - begun) / 3 / len(arrays))
        return statistics.median(times)

    return 1e6 * (seconds(True) - seconds(False))


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy much larger than the cache."""
    big = random_codes((2**29,))
    mx.eval(big)
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        for _ in range(4):
            mx.async_eval(big + 1)
        mx.synchronize()
        times.append((time.perf_counter() - begun) / 4)
    return 2 * big.nbytes / min(times)


def random_weights(outputs: int, inputs: int, bits: int, group: int, experts: int = 0) -> MatrixWeights:
    shape = (experts,) * bool(experts) + (outputs, inputs)
    scale = inputs**-0.5
    if bits == 16:
        weights = MatrixWeights((mx.random.normal(shape) * scale).astype(mx.bfloat16))
    else:
        spread = 2 * scale / 2 ** (bits - 1)
        scales = (mx.random.uniform(0.5, 1.5, (*shape[:-1], inputs // group)) * spread).astype(mx.bfloat16)
        biases = (-scales * (2**bits - 1) / 2).astype(mx.bfloat16)
        codes = random_codes((*shape[:-1], inputs * bits // 32))
        weights = MatrixWeights(codes, scales, biases, bits, group)
    mx.eval(weights.arrays())
    return weights


def stock(x: mx.array, weights: MatrixWeights) -> mx.array:
    if weights.bits == 16:
        return x @ weights.weight.T
    return mx.quantized_matmul(x, *weights.arrays(), transpose=True, group_size=weights.group, bits=weights.bits)


def ours(x: mx.array, weights: MatrixWeights) -> mx.array:
    return launch_products(x, [weights])[0]


def exactly(x: mx.array, weights: MatrixWeights) -> mx.array:
    """In float32, from the same codes."""
    w = weights.weight
    if weights.scales is not None and weights.biases is not None:
        scales, biases = weights.scales.astype(mx.float32), weights.biases.astype(mx.float32)
        w = mx.dequantize(w, scales, biases, group_size=weights.group, bits=weights.bits)
    return mx.matmul(x.astype(mx.float32), w.astype(mx.float32).swapaxes(-1, -2), stream=mx.gpu)


def error(found: mx.array, reference: mx.array) -> float:
    return float((mx.linalg.norm(found.astype(mx.float32) - reference) / mx.linalg.norm(reference)).item())


def products() -> None:
    bandwidth = copy_bandwidth()
    note("copy_tb_s", bandwidth / 1e12)
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    table("right and independent of rows", "error", "mlx's error", "rows that differ")
    cases = [(16, 1, 5120, 1024)] + [(b, g, 5120, 1024) for b in (4, 8) for g in (32, 64, 128)]
    cases += [(4, 64, 17408, 5120), (4, 64, 64, 48), (8, 32, 96, 33)]
    for bits, group, inputs, outputs in cases:
        weights = random_weights(outputs, inputs, bits, group)
        x = mx.random.normal((144, inputs)).astype(mx.bfloat16)
        whole = ours(x, weights)
        differ = []
        for rows in (*range(1, 18), 32, 33, 64):
            if not mx.array_equal(ours(x[:rows], weights), whole[:rows]).item():
                differ.append(rows)
        reference = exactly(x, weights)
        name = f"{inputs}→{outputs} {bits} bits, groups of {group}"
        found = (
            f"{error(whole, reference):.1e}",
            f"{error(stock(x[:4], weights), reference[:4]):.1e}",
            differ or "none",
        )
        line(name, *found)
        note(f"right {name}", found)

    table("µs by rows", *map(str, ROWS + MORE), "TB/s at 1", "of copy")
    for inputs, outputs, bits in SHAPES:
        count = max(2, min(64, 400_000_000 // (outputs * inputs * bits // 8)))
        several = [random_weights(outputs, inputs, bits, 64) for _ in range(count)]
        read = sum(array.nbytes for array in several[0].arrays())
        for name, product in (("mlx", stock), ("ours", ours)):
            cells = []
            for rows in ROWS + MORE * (product is ours) if outputs < 2**16 else ROWS[:4]:
                cells.append(microseconds(product, mx.random.normal((rows, inputs)).astype(mx.bfloat16), several))
            rate = read / cells[0] * 1e6
            blank = ("",) * (len(ROWS + MORE) - len(cells))
            shares = (f"{rate / 1e12:.2f}", f"{rate / bandwidth:.0%}")
            line(f"{inputs}→{outputs} {bits} bits, {name}", *cells, *blank, *shares)
            note(f"product {inputs} {outputs} {bits} {name}", cells)


def remade(like: MatrixWeights, arrays: Sequence[mx.array]) -> MatrixWeights:
    return MatrixWeights(*arrays, **{} if like.scales is None else {"bits": like.bits, "group": like.group})


def experts() -> None:
    table("experts, µs by rows", *map(str, ROWS), "error", "rows that differ")
    choices = mx.argsort(mx.random.uniform(shape=(144, 256)), axis=-1)[:, :8].astype(mx.uint32)
    mx.eval(choices)

    def theirs(x: mx.array, weights: MatrixWeights) -> mx.array:
        wide = mx.expand_dims(x, (-2, -3))
        return mx.gather_qmm(wide, *weights.arrays(), rhs_indices=choices[: len(x)], transpose=True)

    def ours(x: mx.array, weights: MatrixWeights) -> mx.array:
        return launch_experts(x, choices[: len(x)], [weights])[0]

    for inputs, outputs in ((2048, 512), (512, 2048)):
        several = [random_weights(outputs, inputs, 4, 64, experts=256) for _ in range(4)]
        x = mx.random.normal((144, inputs)).astype(mx.bfloat16)
        whole = ours(x, several[0])
        few = [
            rows for rows in (*range(1, 17), 17, 64) if not mx.array_equal(ours(x[:rows], several[0]), whole[:rows])
        ]
        floats = [array if array.dtype == mx.uint32 else array.astype(mx.float32) for array in several[0].arrays()]
        each = mx.dequantize(*floats)[choices[:16]]  # [16, 8, N, K]
        wrong = error(whole[:16], (each @ x[:16, None, :, None].astype(mx.float32)).squeeze(-1))
        for name, product in (("mlx", theirs), ("ours", ours)):
            cells = [microseconds(product, x[:rows], several) for rows in ROWS]
            line(f"{inputs}→{outputs}, {name}", *cells, f"{wrong:.1e}", few or "none")
            note(f"experts {inputs} {outputs} {name}", [*cells, wrong, few])


def main() -> None:
    mx.set_default_device(mx.gpu)
    parts: dict[str, Callable[[], None]] = {"products": products, "experts": experts}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
