"""The kernels of a model's layers beside stock ops: do they agree, are rows independent, which is faster?

On Metal this was measured when the model was loaded, because the kernels are chosen by it; elsewhere it is measured
here.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..kernels import Backend
from ..kernels.compressed import CompressedAttention
from ..kernels.layers import (
    Attention,
    DeltaAttention,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Mamba2,
    Mixer,
    MlpAndExperts,
    Part,
    Pass,
    Residual,
)
from ..kernels.memories import memories_of
from ..models import Model
from ..state import BatchState
from .report import table

MOST_ROWS = 16
CHECKED = (1, 2, 3, 4, 5, 9)  # rows that must have the bits that they have among MOST_ROWS
TIMED = (1, 2, 4)  # rows: a plain step, and windows with one and with three drafts
REPEATS = 7
PRODUCTS = 6  # the largest shapes of product that are shown
AGREE = {True: "yes", False: "no", None: "not compared"}
PATIENCE = 2.0  # seconds to time one operation; one repeat is always done

Run = Callable[[mx.array], mx.array]  # [1, rows, K] → [1, rows, N], each row from those up to itself


class Comparison(NamedTuple):
    name: str
    shape: str
    inputs: int  # K
    ours: Run
    stock: Run


@dataclass(frozen=True)
class KernelTime:
    """What computes one operation of a model. Seconds are by number of rows."""

    operation: str
    shape: str
    used: str
    exact: bool  # a row has the same bits among any number of rows
    seconds: dict[int, float] = field(default_factory=dict)
    stock_exact: bool | None = False  # None where that was not looked at
    stock_seconds: dict[int, float] = field(default_factory=dict)
    distance: float | None = None  # from stock ops, relative
    others: str = ""  # candidates that are not used, and why
    failed: bool = False  # a candidate did not run, or is wrong


def kernel_times(model: Model, progress: Callable[[str], None] = lambda doing: None) -> list[KernelTime]:
    """Return the operations of a model, each with what computes it, its checks and its times."""
    if checks := model.backend.checks():
        return [of_check(check) for check in checks]
    times = []
    for operation in comparisons(model):
        progress(f"{operation.name} {operation.shape}")
        rows = mx.random.normal((1, MOST_ROWS, operation.inputs), key=mx.random.key(0)).astype(model.dtype)
        times.append(time_kernel(operation, rows))
    return times


def of_check(check: Any) -> KernelTime:
    """Return what the tuning on Metal found out about an operation."""
    by_name = {candidate.name: candidate for candidate in check.candidates}
    used, stock = by_name[check.chosen], by_name["stock"]
    others = [each for each in check.candidates if each not in (used, stock)]
    return KernelTime(
        check.operation,
        check.shape,
        used.name,
        check.exact,
        used.seconds,
        stock.exact,
        stock.seconds,
        used.error,
        "; ".join(f"{each.name}: {each.refused or _measured(each)}" for each in others),
        bool(check.excluded),
    )


def _measured(candidate: Any) -> str:
    return f"{_microseconds(candidate.seconds)} µs" + (", rows do not agree" if candidate.exact is False else "")


def time_kernel(operation: Comparison, rows: mx.array) -> KernelTime:
    """Check and time an operation, ours and stock in turns."""
    name, shape, _, *runs = operation
    try:
        exact = [_is_independent(run, rows) for run in runs]
        seconds: list[dict[int, list[float]]] = [defaultdict(list) for _ in runs]
        begun = time.perf_counter()
        for _ in range(REPEATS):
            for width in TIMED:
                part = mx.contiguous(rows[:, :width])
                mx.eval(part)
                for run, taken in zip(runs, seconds, strict=True):
                    start = time.perf_counter()
                    mx.eval(run(part))
                    taken[width].append(time.perf_counter() - start)
            if time.perf_counter() - begun > PATIENCE:
                break
        found, wanted = (run(rows).astype(mx.float32) for run in runs)
        distance: Any = mx.linalg.norm(found - wanted) / mx.linalg.norm(wanted)
        ours, stock = ({width: median(each) for width, each in taken.items()} for taken in seconds)
        used = "ours"
        return KernelTime(name, shape, used, exact[0], ours, exact[1], stock, float(distance))
    except Exception as error:  # of a device's compiler, whose classes differ
        return KernelTime(name, shape, "failed", False, others=f"{type(error).__name__}: {error}", failed=True)


def kernel_table(times: Sequence[KernelTime]) -> str:
    """Return a Markdown table, times in microseconds."""
    rows = [
        [
            *(each.operation, each.shape, each.used, "yes" if each.exact else "no", _microseconds(each.seconds)),
            *(AGREE[each.stock_exact], _microseconds(each.stock_seconds)),
            *("" if each.distance is None else f"{each.distance:.0e}", each.others),
        ]
        for each in times
    ]
    widths = "/".join(map(str, max((each.seconds for each in times), key=len, default=TIMED)))
    at = f"µs at {widths} rows"
    heads = [
        "operation",
        "shape",
        "used",
        "rows agree",
        at,
        "stock: rows agree",
        f"stock {at}",
        "distance",
        "others",
    ]
    return table(heads, rows)


def comparisons(model: Model) -> Iterator[Comparison]:
    """Yield the parts of one layer of each kind, by the model's backend and by MLX's operations, then the largest
    products."""
    hidden, ours, stock = model.hidden_size, model.backend, model.backend.stock()
    found: dict[tuple[str, str], Comparison] = {}
    for part in (part for layer in model.layers for part in layer.parts):
        named = describe(part.does)
        if named not in found:
            runs = _run(ours, part, model.dtype), _run(stock, part, model.dtype)
            found[named] = Comparison(*named, hidden, *runs)
    yield from found.values()
    tied = [] if "lm_head" in model.weights or not model.layers else [model.weights.embed_tokens]
    linear = [each for each in model.weights.modules() if isinstance(each, nn.Linear | nn.QuantizedLinear)]
    products = {_shape(layer): layer for layer in (*linear, *tied)}
    for inputs, shape in sorted(products, key=lambda each: -products[each].weight.nbytes)[:PRODUCTS]:
        layer = products[inputs, shape]
        runs = partial(ours.product, layer=layer), partial(stock.product, layer=layer)
        yield Comparison("product", shape, inputs, *runs)


def describe(does: Mixer | FeedForward) -> tuple[str, str]:
    """Return the name of an operation and its shape in words."""
    if isinstance(does, Attention):
        key, value = does.head_sizes
        sizes = f"{key}" if key == value else f"{key} and {value}"
        return "attention", f"{does.heads} heads of {sizes}, {does.kv_heads} of keys"
    if isinstance(does, LatentAttention):
        latent, rotated = does.head_sizes
        return "latent attention", f"{does.module.num_heads} heads, {latent} latent and {rotated} rotated"
    if isinstance(does, CompressedAttention):
        blocks = f"entries of {does.every} tokens" if does.every else "no entries"
        return "compressed attention", f"{does.heads} heads of {sum(does.head_sizes)}, {blocks}"
    net: Any = does.module
    if isinstance(does, MlpAndExperts):
        return "feed-forward", f"dense and {net.experts.switch_glu.up_proj.weight.shape[0]} experts"
    if isinstance(does, GatedDeltaNet):
        return "gated delta net", f"{net.num_v_heads} heads of {net.head_k_dim}×{net.head_v_dim}"
    if isinstance(does, DeltaAttention):
        return "delta attention", f"{net.num_heads} heads of {net.head_dim}×{net.head_dim}"
    if isinstance(does, Mamba2):
        return "Mamba-2", f"{net.num_heads} heads of {net.ssm_state_size}×{net.head_dim}"
    if "switch_mlp" not in net:
        return "feed-forward", "dense"
    first = next(iter(net.switch_mlp.children().values()))
    return "feed-forward", f"{first.weight.shape[0]} experts"


def _run(backend: Backend, part: Part, dtype: mx.Dtype) -> Run:
    """Return the part alone: zeros are the residual stream. MLX may multiply experts in another type."""
    experts = describe(part.does)[1].endswith("experts")
    if (
        isinstance(part.does, FeedForward)
        and experts
        and (computes := backend.activations(dtype, True, set())) != dtype
    ):
        module = deepcopy(part.does.module)
        module.set_dtype(computes)
        part = part._replace(does=replace(part.does, module=module))
        dtype = computes

    def run(x: mx.array) -> mx.array:
        x = x.astype(dtype)
        memory = [] if isinstance(part.does, FeedForward) else memories_of(part.does, 1, dtype, False)
        state = BatchState.empty(memory, 1)
        tokens = mx.zeros(x.shape[:2], mx.int32)
        one_pass = Pass(state.reserve(x.shape[1]), state.accepted, tokens=tokens)
        return backend.run_part(part, x, iter(memory), one_pass, Residual(mx.zeros_like(x), part.norm))[0]

    return run


def _shape(layer: nn.Module) -> tuple[int, str]:
    """Return the inputs of a linear layer or an embedding, and its shape in words."""
    outputs, inputs = layer.weight.shape
    if "scales" not in layer:
        return inputs, f"{outputs}×{inputs}, {str(layer.weight.dtype).removeprefix('mlx.core.')}"
    inputs = layer.scales.shape[1] * layer.group_size
    return inputs, f"{outputs}×{inputs}, {layer.bits} bits in groups of {layer.group_size}"


def _is_independent(run: Run, rows: mx.array) -> bool:
    together = run(rows)
    return all(bool(mx.array_equal(run(rows[:, :width]), together[:, :width])) for width in CHECKED)


def _microseconds(seconds: dict[int, float]) -> str:
    return " / ".join(f"{1e6 * each:.0f}" for each in seconds.values())
