"""The operations of a model, for which kernels are chosen when it is loaded on a Mac, and what may compute them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ...state import KV, Recurrent
from ..experts import stock_combine, stock_experts, stock_route
from ..layers import Attention, Layer, Pass
from ..norms import is_sigmoid_gated, stock_norm
from ..streams import HyperConnection
from ..types import ArrangedHeads, GatedDeltaWeights, HeadNorms, Ran, Window
from ..weights import matrix_weights
from .attention import WIDEST, heads_refusal, heads_shape, is_plain_rope, metal_arrange, metal_attend
from .choice import MOST_ROWS, WIDE_ROWS, Operation, Run, Runs
from .experts import combine_shape, experts_per_token, metal_combine, metal_experts, metal_route, route_shape
from .fused import may_be_launched
from .gated_delta import gated_delta_refusal, gated_delta_shape, metal_gated_delta
from .norm import metal_norm, norm_shape
from .products import (
    KERNELS,
    MOST_FUSED,
    NARROWER,
    STOCK_ROWS,
    beside,
    first_outputs,
    metal_products,
    metal_refusal,
    product_shape,
    split_product,
)
from .stock import StockMetal
from .streams import streams_operation
from .used import Format, most_fused, weights_format

STOCK = StockMetal()
# Of sequences, before the windows that attention is checked with; the first is timed. From 8 on MLX passes what there
# is one of for each in another address space: these forms are compiled, and looked at, with the first request.
LENGTHS: tuple[int, ...] = (1021, 300, 5, 64, 0, 511, 255)
STRIDE = 64  # attention reads whole strides, as in `state/kv.py`
DRAFTS = 15  # pending
ACCEPTED = (0, 1, 7, 8, 9, 14, 15)  # of these, by sequence; tiles have 8
Fused = Callable[[], dict[Format, int] | None]  # how many weights of a format have one input at most, if it is known


def operations(weights: nn.Module, dtype: mx.Dtype, layers: Sequence[Layer] = ()) -> list[Operation]:
    """Return every distinct operation of a model. `layers` say how many products share an input, where they are not
    launched with it."""
    found: dict[tuple[str, str], Operation] = {}
    apart = [layer for layer in layers if not may_be_launched(layer, dtype)]
    fused = cache(lambda: most_fused(apart, dtype) if apart or not layers else {})
    # Attention norms its heads itself.
    within = {id(norm) for each in weights.modules() if _has_gated_heads(each) for norm in (each.q_norm, each.k_norm)}
    for path, module in weights.named_modules():
        tied = path == "embed_tokens" and "lm_head" not in weights
        if id(module) in within:
            continue
        try:
            described = list(_operations(module, dtype, tied, fused))
        except Exception as error:
            described = [_undescribed(module, error)]
        for each in described:
            found.setdefault((each.operation, each.shape), each)
    return list(found.values())


def _undescribed(module: nn.Module, error: Exception) -> Operation:
    """Return the operation of a module that cannot be described: its check fails with the error."""

    def candidates() -> Mapping[str, Runs | str]:
        raise error

    return Operation("undescribed", type(module).__name__, candidates)


def _has_gated_heads(module: nn.Module) -> bool:
    return "q_norm" in module and "num_key_value_heads" in vars(module)


def _operations(module: nn.Module, dtype: mx.Dtype, tied: bool, fused: Fused) -> Iterator[Operation]:
    if isinstance(module, nn.Linear | nn.QuantizedLinear) or tied:
        wide = module.get("scales") is None and module.weight.dtype == mx.float32  # means of streams
        yield _product(module, mx.float32 if wide else dtype, fused)
    elif _has_gated_heads(module):
        yield from _attention(module, dtype)
    elif "A_log" in module and "num_v_heads" in vars(module):  # Mamba-2 has stock ops
        if not is_sigmoid_gated(module):
            yield _gated_delta(module, dtype)
    elif "switch_mlp" in module:
        yield from _mixture(module, dtype)
    elif isinstance(module, HyperConnection) and module.scale.size == 3:
        yield streams_operation(module)
    elif "o_a_proj" in module:  # DeepSeek-V4's groups of heads, each with a matrix of its own
        yield _experts(module.o_a_proj, module.o_a_proj.weight.shape[0], True, dtype)
    elif "switch_glu" in module:  # Gemma 4's
        yield from _expert_layers(module.switch_glu, module.top_k, dtype)
        yield _route(module.switch_glu.up_proj.weight.shape[0], module.top_k, True, dtype)
    elif "eps" in vars(module) and "weight" in module and module.weight.dtype == mx.float32:
        yield _norm(module, dtype, 1 if fused() == {} else 2)


def _random(*shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)


def _spread(*shape: int, dtype: mx.Dtype) -> mx.array:
    """Return inputs of many magnitudes: sums of alike ones, of few bits, are exact in any order."""
    return (_random(*shape, dtype=mx.float32) * mx.exp(1.5 * _random(*shape[::-1], dtype=mx.float32).T)).astype(dtype)


def _same(made: list[mx.array]) -> mx.array:
    """Return what several products with one weight made; NaN where they differ."""
    first, *others = made
    return mx.where(mx.all(mx.stack([first == other for other in others])), first, mx.nan) if others else first


def _product(layer: nn.Module, dtype: mx.Dtype, fused: Fused) -> Operation:
    weights, most = matrix_weights(layer), fused()
    rows = WIDE_ROWS if metal_refusal(dtype, layer, weights, "metal-matrix") is None else MOST_ROWS
    most_beside = beside(MOST_FUSED if most is None else most.get(weights_format(weights), 1))

    def candidates() -> Mapping[str, Runs | str]:
        part = first_outputs(layer, weights)
        x = _spread(rows, 1, weights.inputs, dtype=dtype)

        def stock(least: int, most: int) -> Runs:
            return (lambda b, w: split_product(x[b, w], part, least, most),)

        def ours(kernel: str) -> Runs | str:
            held = matrix_weights(part)

            def together(count: int) -> Run:
                return lambda b, w: _same(metal_products(x[b, w], [held] * count, kernel))

            refusal = metal_refusal(dtype, layer, weights, kernel)
            return refusal or tuple(together(count) for count in (1, 2, MOST_FUSED) if count <= most_beside)

        return {name: stock(*rows) for name, rows in STOCK_ROWS.items()} | {name: ours(name) for name in KERNELS}

    shape = product_shape(dtype, layer, weights)
    return Operation("product", shape, candidates, rows, forms=most_beside, narrower=NARROWER)


def _experts(layer: nn.Module, top: int, own: bool, dtype: mx.Dtype) -> Operation:
    weights = matrix_weights(layer)

    def candidates() -> Mapping[str, Runs | str]:
        x = _random(MOST_ROWS, 1, *[top] * own, weights.inputs, dtype=dtype)
        # Neighbours share experts, as rows of a window often do.
        indices = (mx.arange(MOST_ROWS)[:, None, None] // 2 + mx.arange(top)) % weights.weight.shape[0]
        refusal = metal_refusal(dtype, layer, weights)

        def stock(b: slice, w: slice) -> mx.array:
            return stock_experts(x[b, w], indices[b, w], layer)

        def fused(count: int) -> Run:
            return lambda b, w: _same(metal_experts(x[b, w], indices[b, w], [weights] * count))

        ours = tuple(fused(count) for count in range(1, 2 if own else 3))  # gate and up together
        return {"stock": (stock,), "metal": refusal or ours}

    return Operation("experts", product_shape(dtype, layer, weights), candidates)


def _mixture(module: nn.Module, dtype: mx.Dtype) -> Iterator[Operation]:
    gated = "shared_expert_gate" in module  # Qwen3.5's; others are summed by stock ops
    if gated and module.sharding_group is not None:
        return
    top = experts_per_token(module)
    yield from _expert_layers(module.switch_mlp, top, dtype)
    if not isinstance(module.get("gate"), nn.Linear | nn.QuantizedLinear):
        return
    yield _route(module.gate.weight.shape[0], top, module.norm_topk_prob, dtype)
    if not gated:
        return
    size = matrix_weights(module.shared_expert.down_proj).outputs
    parts, shared = _random(MOST_ROWS, 1, top, size, dtype=dtype), _random(MOST_ROWS, 1, size, dtype=dtype)
    scores, gate = mx.softmax(_random(MOST_ROWS, 1, top, dtype=dtype), axis=-1), _random(MOST_ROWS, 1, 1, dtype=dtype)

    def combine(kernel: Callable[..., mx.array]) -> Runs:
        return (lambda b, w: kernel(parts[b, w], scores[b, w], shared[b, w], gate[b, w]),)

    sums = {"stock": combine(stock_combine), "metal": combine(metal_combine)}
    yield Operation("combine", combine_shape(parts), lambda: sums)


def _expert_layers(switch: nn.Module, top: int, dtype: mx.Dtype) -> Iterator[Operation]:
    layers = [each for each in switch.children().values() if isinstance(each, SwitchLinear | QuantizedSwitchLinear)]
    for layer in layers:
        yield _experts(layer, top, layer is switch.get("down_proj", switch.get("fc2")), dtype)


def _route(experts: int, top: int, normed: bool, dtype: mx.Dtype) -> Operation:
    order = mx.argsort(_random(MOST_ROWS, 1, experts, dtype=mx.float32), axis=-1)
    logits = mx.maximum(8 - order / 16, 0).astype(dtype)  # no equals among the best, of which any may be chosen

    def route(kernel: Callable[..., tuple[mx.array, mx.array]]) -> Runs:
        def run(b: slice, w: slice) -> mx.array:
            indices, scores = kernel(logits[b, w], top, normed)
            return mx.concatenate([indices.astype(mx.float32), scores.astype(mx.float32)], axis=-1)

        return (run,)

    def by_expert(made: mx.array) -> mx.array:
        """Stock ops name the experts in any order."""
        indices, scores = mx.split(made, 2, axis=-1)
        zeros = mx.zeros((*made.shape[:-1], experts))
        return mx.put_along_axis(zeros, indices.astype(mx.int32), scores, axis=-1).astype(dtype)

    kernels = {"stock": route(stock_route), "metal": route(metal_route)}
    return Operation("route", route_shape(logits, top), lambda: kernels, comparable=by_expert)


def _norm(module: nn.Module, dtype: mx.Dtype, forms: int = 2) -> Operation:
    x = mx.zeros((1, module.weight.shape[0]), dtype)

    def candidates() -> Mapping[str, Runs | str]:
        x, added = (_random(MOST_ROWS + i, 1, module.weight.shape[0], dtype=dtype)[i:] for i in (0, 1))
        weight, eps = module.weight, module.eps
        ours: Runs = (
            lambda b, w: metal_norm(x[b, w] + added[b, w], None, weight, eps)[0],
            lambda b, w: metal_norm(x[b, w], added[b, w], weight, eps)[1],
        )
        return {"stock": (lambda b, w: stock_norm(x[b, w] + added[b, w], weight, eps),), "metal": ours[:forms]}

    return Operation("norm", norm_shape(x), candidates, forms=forms)


def _attention(layer: nn.Module, dtype: mx.Dtype) -> Iterator[Operation]:
    B, H, Hkv, D = len(LENGTHS), layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    offset, refusal, shape = mx.array(LENGTHS, mx.int32), heads_refusal(layer), heads_shape(layer, dtype)
    norms = HeadNorms(layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
    described = Attention(layer, H, Hkv, gated=True)

    def arrangements() -> Mapping[str, Runs | str]:
        both = _random(B, WIDEST, 2 * H * D, dtype=dtype)
        keys, values = (_random(B, WIDEST, Hkv * D + i, dtype=dtype)[..., i:] for i in (0, 1))

        def joined(heads: ArrangedHeads) -> mx.array:
            return mx.concatenate([*heads], axis=1).swapaxes(1, 2)

        def stock(b: slice, w: slice) -> mx.array:
            memory = KV(keys[b, w], values[b, w], offset[b] + w.start)
            return joined(STOCK.arrange(described, both[b, w], keys[b, w], values[b, w], memory))

        def ours(b: slice, w: slice) -> mx.array:
            given = both[b, w], keys[b, w], values[b, w]
            return joined(metal_arrange(*given, norms, layer.rope, offset[b] + w.start))

        rotated = None if is_plain_rope(layer.rope) else "another rotation than RoPE"
        return {"stock": (stock,), "metal": refusal or rotated or (ours,)}

    def attentions() -> Mapping[str, Runs | str]:
        def reach(b: slice, w: slice) -> int:
            """Return how many positions are read: where a neighbour is longer, more."""
            return -(-(max(LENGTHS[b]) + w.stop) // STRIDE) * STRIDE

        size = reach(slice(None), slice(0, WIDEST))
        queries, both = _random(B, H, WIDEST, D, dtype=dtype), _random(B, WIDEST, 2 * H * D, dtype=dtype)
        keys, values = (_random(B, Hkv, size + i, D, dtype=dtype)[:, :, i:] for i in (0, 1))

        def stock(b: slice, w: slice) -> mx.array:
            read, positions = reach(b, w), offset[b, None] + mx.arange(w.start, w.stop)
            seen = mx.arange(read) <= positions[:, None, :, None]
            heads = ArrangedHeads(queries[b, :, w], keys[b, :, :read], values[b, :, :read])
            run = Pass(lambda window: seen, offset)
            return STOCK.attend_heads(described, heads, both[b, w], KV(keys, values, offset), run)

        def ours(b: slice, w: slice) -> mx.array:
            first = offset[b] + w.start
            return metal_attend(queries[b, :, w], both[b, w], keys[b], values[b], first, layer.scale, reach(b, w))

        return {"stock": (stock,), "metal": refusal or (ours,)}

    yield Operation("heads", shape, arrangements, B, WIDEST)
    yield Operation("attention", shape, attentions, B, WIDEST)


def _gated_delta(net: nn.Module, dtype: mx.Dtype) -> Operation:
    B, Hv, Dv, Dk = len(ACCEPTED), net.num_v_heads, net.head_v_dim, net.head_k_dim
    weights = GatedDeltaWeights.of(net)

    def window(width: int) -> Window:
        gates = [_random(B, width, Hv + i, dtype=dtype)[..., i:] for i in (0, 1)]
        return Window(_random(B, width, net.conv_dim, dtype=dtype), _random(B, width, Hv, Dv, dtype=dtype), *gates)

    state = 0.1 * _random(B, Hv, Dv, Dk, dtype=mx.float32)
    conv = _random(B, net.conv_kernel_size - 1, net.conv_dim, dtype=dtype)

    def ours(_: nn.Module, window: Window, memory: Recurrent, run: Pass) -> Ran:
        return metal_gated_delta(
            window, weights, memory.state, memory.conv, memory.pending, run.accepted, run.certain
        )

    def runs_of(kernel: Callable[..., Ran]) -> Runs:
        before, text = window(1 + DRAFTS), window(WIDEST)

        @cache
        def start() -> Ran:
            """A window whose drafts are pending."""
            return kernel(net, before, Recurrent(state, conv, None), _pass(mx.zeros((B,), mx.int32)))

        def step(b: slice, w: slice, then: Ran, accepted: mx.array) -> Ran:
            memory = Recurrent(then.state, then.conv, then.drafts)
            return kernel(net, Window(*[a[b, w] for a in text]), memory, _pass(accepted))

        def begin(b: slice) -> tuple[Ran, mx.array]:
            """Each sequence accepts another number of drafts."""
            y, state, conv, drafts = start()
            assert drafts is not None
            pending = [array[b] for array in drafts]
            return Ran(y[b], state[b], conv[b], pending), mx.array(ACCEPTED, mx.int32)[b]

        def run(b: slice, w: slice) -> mx.array:
            """Run the window after a window of all that `text` has before it."""
            ran, accepted = begin(b)
            if w.start:
                ran = step(b, slice(0, w.start), ran, accepted)
                accepted = mx.full(accepted.shape, w.start - 1, mx.int32)
            return step(b, w, ran, accepted).y

        def one_by_one(b: slice, w: slice) -> mx.array:
            """Run the tokens as a plain decode does: from the second on nothing is pending."""
            ran, accepted = begin(b)
            made = []
            for t in range(w.stop):
                ran = step(b, slice(t, t + 1), ran, accepted)
                made.append(ran.y)
            return mx.concatenate(made[w.start :], axis=1)

        return run, one_by_one

    def candidates() -> Mapping[str, Runs | str]:
        return {"stock": runs_of(STOCK.gated_delta_rule), "metal": gated_delta_refusal(Dk, Dv) or runs_of(ours)}

    return Operation("gated delta", gated_delta_shape(window(1), state, conv), candidates, B, WIDEST)


def _pass(accepted: mx.array) -> Pass:
    def mask(window: int | None) -> mx.array:
        raise NotImplementedError("recurrent layers need none")

    return Pass(mask, accepted)
