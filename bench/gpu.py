"""What our CUDA kernels earn on this card: `python bench/gpu.py [PART ...]`, all parts where none is named.

    products  the product of a layer by rows, beside mlx's; bits; the same row for any number of rows
    experts   the same for a mixture of experts
    27b, 35b  models of these shapes with random 4-bit weights: a step by rows and k, decoding at k = 0..5 with an
              imposed acceptance, and mlx-lm's own decoding in the same run

Weights are drawn on the card, so nothing is downloaded. A product is timed over many matrices in turn, more than the
card's cache holds, and inside `mx.compile`; medians. With $OUT set, everything is also written to $OUT/gpu.json.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from headstart import models
from headstart.bench.cost import measure_costs
from headstart.bench.imposed import record, run_imposed
from headstart.bench.run import run
from headstart.kernels import experts as grouped
from headstart.kernels import products as dense
from headstart.models import Model

Product = Callable[[mx.array, dense.Weights], mx.array]
FOUND: dict[str, Any] = {}
ROWS = (1, 2, 3, 4, 8, 16)  # mlx compiles its own kernels for more, and takes long to
MORE = (32, 144)
COMMON: dict[str, Any] = {
    "vocab_size": 248320,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "27b": COMMON
    | {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "35b": COMMON
    | {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
}
ACCEPTANCE = {"27b": [0.88, 0.75, 0.62, 0.51, 0.42], "35b": [0.81, 0.58, 0.41, 0.29, 0.2]}


def note(name: str, value: Any) -> None:
    FOUND[name] = value
    if folder := os.environ.get("OUT"):
        Path(folder, "gpu.json").write_text(json.dumps(FOUND, indent=1))


def table(*heads: str) -> None:
    print("\n| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads), flush=True)


def line(*cells: Any) -> None:
    print("| " + " | ".join(f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells) + " |", flush=True)


def microseconds(product: Product, x: mx.array, weights: Sequence[dense.Weights]) -> float:
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


def random_codes(shape: Sequence[int]) -> mx.array:
    high, low = (mx.random.randint(0, 2**16, shape).astype(mx.uint32) for _ in range(2))
    return high * 2**16 + low


def random_weights(outputs: int, inputs: int, bits: int, group: int, experts: int = 0) -> dense.Weights:
    shape = (experts,) * bool(experts) + (outputs, inputs)
    scale = inputs**-0.5
    if bits == 16:
        weights = dense.Weights((mx.random.normal(shape) * scale).astype(mx.bfloat16))
    else:
        spread = 2 * scale / 2 ** (bits - 1)
        scales = (mx.random.uniform(0.5, 1.5, (*shape[:-1], inputs // group)) * spread).astype(mx.bfloat16)
        biases = (-scales * (2**bits - 1) / 2).astype(mx.bfloat16)
        codes = random_codes((*shape[:-1], inputs * bits // 32))
        weights = dense.Weights(codes, scales, biases, bits, group)
    mx.eval(weights.arrays())
    return weights


def stock(x: mx.array, weights: dense.Weights) -> mx.array:
    if weights.bits == 16:
        return x @ weights.weight.T
    return mx.quantized_matmul(x, *weights.arrays(), transpose=True, group_size=weights.group, bits=weights.bits)


def ours(x: mx.array, weights: dense.Weights) -> mx.array:
    return dense.launch(x, [weights])[0]


def exactly(x: mx.array, weights: dense.Weights) -> mx.array:
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

    shapes = [(5120, 17408, 4), (17408, 5120, 4), (5120, 248320, 4), (5120, 17408, 8), (5120, 17408, 16)]
    table("µs by rows", *map(str, ROWS + MORE), "TB/s at 1", "of copy")
    for inputs, outputs, bits in shapes:
        count = max(2, min(64, 400_000_000 // (outputs * inputs * bits // 8)))
        several = [random_weights(outputs, inputs, bits, 64) for _ in range(count)]
        read = sum(array.nbytes for array in several[0].arrays())
        for name, product in (("mlx", stock), ("ours", ours)):
            cells = []
            for rows in ROWS + MORE * (product is ours):
                cells.append(microseconds(product, mx.random.normal((rows, inputs)).astype(mx.bfloat16), several))
            rate = read / cells[0] * 1e6
            blank = ("",) * (len(ROWS + MORE) - len(cells))
            shares = (f"{rate / 1e12:.2f}", f"{rate / bandwidth:.0%}")
            line(f"{inputs}→{outputs} {bits} bits, {name}", *cells, *blank, *shares)
            note(f"product {inputs} {outputs} {bits} {name}", cells)


def remade(like: dense.Weights, arrays: Sequence[mx.array]) -> dense.Weights:
    return dense.Weights(*arrays, **{} if like.scales is None else {"bits": like.bits, "group": like.group})


def experts() -> None:
    table("experts, µs by rows", *map(str, ROWS), "error", "rows that differ")
    choices = mx.argsort(mx.random.uniform(shape=(144, 256)), axis=-1)[:, :8].astype(mx.uint32)
    mx.eval(choices)

    def theirs(x: mx.array, weights: dense.Weights) -> mx.array:
        wide = mx.expand_dims(x, (-2, -3))
        return mx.gather_qmm(wide, *weights.arrays(), rhs_indices=choices[: len(x)], transpose=True)

    def ours(x: mx.array, weights: dense.Weights) -> mx.array:
        return grouped.launch(x, choices[: len(x)], [weights])[0]

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


def random_model(shape: dict[str, Any]) -> tuple[Model, nn.Module]:
    """The model, and mlx-lm's own over the same weights with its own norms."""
    built = models.build(shape)
    for part in (built.lm, built.weights.mtp):
        nn.quantize(part, group_size=64, bits=4, class_predicate=quantises)
    model = Model(
        built.family,
        built.config,
        built.lm,
        models.Weights(built.family.text(built.lm), built.family.lm_head(built.lm), built.weights.mtp),
    )
    flat: Any = tree_flatten(model.weights.parameters())
    for name, array in flat:
        if array.dtype == mx.uint32:
            array = random_codes(array.shape)
        elif name.endswith((".scales", ".biases")):
            array = mx.zeros(array.shape, mx.bfloat16)
        elif not name.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight", "A_log")):
            array = (mx.random.normal(array.shape) * array.shape[-1] ** -0.5).astype(mx.bfloat16)
        mx.eval(array)
        model.weights.update(tree_unflatten([(name, array)]))
    for _, module in model.weights.named_modules():
        if "scales" in module:
            inputs = module.weight.shape[-1] * 32 // module.bits
            spread = 2 * inputs**-0.5 / 2 ** (module.bits - 1)
            scales = mx.random.uniform(0.5, 1.5, module.scales.shape) * spread
            module.scales = scales.astype(mx.bfloat16)
            module.biases = (-scales * (2**module.bits - 1) / 2).astype(mx.bfloat16)
            mx.eval(module.scales, module.biases)
    theirs = built.family.build(shape)
    nn.quantize(theirs, group_size=64, bits=4, class_predicate=quantises)
    kept: Any = tree_flatten(model.lm.parameters())
    theirs.update(tree_unflatten([(n, a.astype(mx.bfloat16) if n.endswith("norm.weight") else a) for n, a in kept]))
    mx.eval(theirs.parameters())
    return model, theirs


def quantises(path: str, module: nn.Module) -> bool:
    kinds = (nn.Linear, nn.Embedding, SwitchLinear)
    return isinstance(module, kinds) and not isinstance(module, QuantizedSwitchLinear) and path != "fc"


def prompts(count: int, length: int = 9) -> list[list[int]]:
    return [[(7919 * row + 104729 * i) % 200000 + 1 for i in range(length)] for row in range(count)]


def stock_rate(lm: nn.Module, tokens: int = 48) -> float:
    """mlx-lm's tokens a second, one sequence."""
    said = generate_step(mx.array(prompts(1)[0]), lm, max_tokens=2 * tokens)
    list(islice(said, 8))
    begun = time.perf_counter()
    list(islice(said, tokens))
    return tokens / (time.perf_counter() - begun)


def whole_model(name: str) -> None:
    model, theirs = random_model(SHAPES[name])
    print(f"\n{name}: {mx.get_active_memory() / 1e9:.1f} GB", flush=True)
    rate = stock_rate(theirs)
    note(f"{name} mlx-lm tokens/s", rate)
    print(f"mlx-lm, one sequence: {rate:.1f} tokens/s ({1e3 / rate:.2f} ms)", flush=True)
    del theirs

    recording = record(model, prompts(1), 200)
    table("rows", "k", "tokens/s", "to k = 0", "to mlx-lm", "tokens a round", "ms a round")
    plain = 0.0
    for k in range(6):
        done = max((run_imposed(model, recording, k, ACCEPTANCE[name]) for _ in range(3)), key=lambda r: r.rate)
        plain = plain or done.rate
        each = done.tokens / len(done.rounds)
        cells = (done.rate / plain, done.rate / rate, each, 1e3 * each / done.rate)
        line(1, k, done.rate, *[f"{cell:.2f}" for cell in cells])
        note(f"{name} imposed k={k}", [done.rate, *cells])

    table("rows", "k", "ms a step", "to k = 0", "window to a window of 1", "a draft")
    for cost in measure_costs(model, prompts(4), rows=(1, 4, 16), ks=(0, 3), repeats=2):
        draft = "" if cost.draft is None else f"{cost.draft:.3f}"
        line(cost.rows, cost.k, f"{1e3 * cost.seconds:.2f}", f"{cost.ratio:.2f}", f"{cost.verify:.2f}", draft)
        note(f"{name} step {cost.rows} {cost.k}", cost.as_dict())

    table("rows", "k = 0, tokens/s", "auto, tokens/s", "auto to k = 0")
    for rows in (1, 4, 16):
        for _ in range(2):  # the first time, auto learns what depths cost
            zero, auto = (run(model, prompts(rows), k, 128).rate for k in (0, "auto"))
        line(rows, zero, auto, f"{auto / zero:.2f}")
        note(f"{name} aggregate {rows}", [zero, auto])


def main() -> None:
    mx.set_default_device(mx.gpu)
    parts: dict[str, Callable[[], None]] = {"products": products, "experts": experts}
    for name in SHAPES:
        parts[name] = lambda name=name: whole_model(name)
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
