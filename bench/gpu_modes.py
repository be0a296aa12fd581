"""What other modes of quantisation cost beside affine 4 bits: the part `modes` of bench/gpu.py.

One model of a mode at a time stands beside that in 4 bits, and their runs take turns. `products`: all of a pass's
products with matrices alone, one row; `outside`: what the 4-bit step takes beyond them.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import mlx.core as mx
from harness import line, note, ratio, seconds_of, table, turns
from mlx.utils import tree_flatten
from random_model import SHAPES, Mode, random_model

from headstart.bench.local import decode_batch
from headstart.models import Model

WIDER = (("down_proj", 6), ("v_proj", 8), ("o_proj", 8), ("out_proj", 8), ("embed_tokens", 8), ("lm_head", 6))
MODES = {
    "nvfp4": Mode("nvfp4", 4, 16),
    "mxfp4": Mode("mxfp4", 4, 32),
    "mxfp8": Mode("mxfp8", 8, 32),
    "affine 3 bits": Mode("affine", 3),
    "affine 6 bits": Mode("affine", 6),
    "affine 4, 6 and 8 bits": Mode("affine", 4, 64, WIDER),
}
DEPTH = 3
TURNS = 3
TOKENS = 32


def weight_bytes(model: Model) -> int:
    """Return the bytes of all weights but the embedding's."""
    flat: Any = tree_flatten(model.weights.parameters())
    return sum(array.nbytes for name, array in flat if "embed" not in name)


def products(model: Model) -> Callable[[], None]:
    """Return what multiplies one row by every matrix of the model, each once."""
    layers = [
        module
        for name, module in model.weights.named_modules()
        if "scales" in module and module.weight.ndim == 2 and "embed" not in name
    ]
    rows = {inputs: mx.random.normal((1, inputs)).astype(model.dtype) for inputs in set(map(inputs_of, layers))}
    run = mx.compile(lambda rows: [model.backend.product(rows[inputs_of(layer)], layer) for layer in layers])
    return lambda: mx.eval(run(rows))


def inputs_of(layer: Any) -> int:
    return int(layer.weight.shape[-1]) * 32 // int(layer.bits)


def changed_tokens(model: Model, asked: Sequence[Sequence[int]]) -> int:
    """Return how many tokens of a greedy text are others with drafts than without."""
    texts = [decode_batch(model, asked, k, TOKENS).sequences for k in (0, DEPTH)]
    return sum(a != b for one, other in zip(*texts, strict=True) for a, b in zip(one, other, strict=True))


def modes(name: str, four: Model, asked: Sequence[Sequence[int]], step_time: Callable[[Model, int], float]) -> None:
    table(
        "mode",
        "GB",
        "ms: k = 0",
        f"k = {DEPTH}",
        "to k = 0",
        "4 bits in these turns",
        "products",
        "4 bits'",
        "products by GB, to 4 bits'",
        "step less outside by GB, to 4 bits'",
        "tokens changed",
    )
    for title, mode in MODES.items():
        model, _ = random_model(SHAPES[name], mode)
        found = times(model, four, step_time)
        step, _, plain, alone, plain_alone = map(median, found.values())
        each, base, outside = weight_bytes(model), weight_bytes(four), max(0.0, plain - plain_alone)
        by_bytes = alone / each * base / plain_alone, (step - outside) / each * base / (plain - outside)
        measured = 1e3 * step, 1e3 * median(found["window"]), ratio(found["window"], found["step"])
        changed = changed_tokens(model, asked)
        line(title, each / 1e9, *measured, 1e3 * plain, 1e3 * alone, 1e3 * plain_alone, *by_bytes, changed)
        note(f"{name} mode {title}", [each, base, found, changed])
        del model
        mx.clear_cache()


def times(model: Model, four: Model, step_time: Callable[[Model, int], float]) -> dict[str, list[float]]:
    """Return seconds of a step, of one with drafts, of 4 bits' step, and of either's products, in turns."""
    alone, plain_alone = products(model), products(four)
    alone(), plain_alone()
    return turns(
        {
            "step": lambda: step_time(model, 0),
            "window": lambda: step_time(model, DEPTH),
            "four": lambda: step_time(four, 0),
            "products": lambda: seconds_of(alone),
            "four products": lambda: seconds_of(plain_alone),
        },
        TURNS,
    )
