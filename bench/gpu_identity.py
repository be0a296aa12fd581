"""Does a stage of a layer compute a token the same on this card, whatever stands beside it?

    python bench/gpu_identity.py [27b 35b]     a few layers of these shapes with random 4-bit weights

Every stage is given the same inputs in windows of 1..6 and batches of 1..4, and compared bit for bit with each token
alone; the whole pass also described against compiled. A stage that names no window has the same bits in all of them.
"""

import sys
from collections.abc import Callable, Iterator

import mlx.core as mx
from gpu import SHAPES, random_model
from gpu_products import line, table
from mlx_lm.models.activations import swiglu

from headstart.kernels.experts import combine, expert_products, route
from headstart.kernels.norm import add_and_norm
from headstart.kernels.products import product, products
from headstart.models import Model, graph
from headstart.models.feed_forward import chosen_experts, mlp_or_mixture
from headstart.state import BatchState

ROWS, WIDTH, BEFORE = 4, 6, 9  # at most
Stage = tuple[str, Callable[..., mx.array], list[mx.array]]  # every input and the output are [B, W, …]


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(mx.bfloat16)


def stages(model: Model) -> Iterator[Stage]:
    """Those that remember nothing."""
    layer, size = model.weights.layers[0], model.config["hidden_size"]
    x = normal(ROWS, WIDTH, size)
    norm = layer.input_layernorm
    yield "norm", lambda a, b: add_and_norm(a, b, norm.weight, norm.eps)[1], [x, normal(*x.shape)]
    net = layer.linear_attn
    yield "projections", lambda a: mx.concatenate(products(a, net.in_proj_qkv, net.in_proj_z), axis=-1), [x]
    yield "gates of the recurrence", lambda a: mx.concatenate(products(a, net.in_proj_b, net.in_proj_a), axis=-1), [x]
    yield "embedding", model.weights.embed_tokens, [mx.random.randint(0, model.vocabulary, x.shape[:2])]
    mlp = layer.mlp
    if "switch_mlp" in mlp:
        logits = product(x, mlp.gate)
        indices, scores = route(logits, mlp.top_k, mlp.norm_topk_prob)
        both = expert_products(x, indices, mlp.switch_mlp.up_proj, mlp.switch_mlp.gate_proj)
        assert both is not None
        parts, shared = chosen_experts(mlp.switch_mlp, x, indices), normal(*x.shape)
        yield "router", lambda a: product(a, mlp.gate), [x]
        yield "choice of experts", lambda a: route(a, mlp.top_k, mlp.norm_topk_prob)[0], [logits]
        yield "scores of experts", lambda a: route(a, mlp.top_k, mlp.norm_topk_prob)[1], [logits]
        yield "experts, up", lambda a, i: expert_products(a, i, mlp.switch_mlp.up_proj)[0], [x, indices]  # type: ignore[index]
        yield "experts, activation", mlp.switch_mlp.activation, both
        yield "experts", lambda a, i: chosen_experts(mlp.switch_mlp, a, i), [x, indices]
        yield "gate of the shared expert", lambda a: product(a, mlp.shared_expert_gate), [x]
        yield "sum of experts", combine, [parts, scores, shared, normal(*x.shape[:2], 1)]
    else:
        both = products(x, mlp.gate_proj, mlp.up_proj)
        yield "up and gate", lambda a: mx.concatenate(products(a, mlp.gate_proj, mlp.up_proj), axis=-1), [x]
        yield "activation", swiglu, both
        yield "down", lambda a: product(a, mlp.down_proj), [swiglu(*both)]
    yield "feed-forward", lambda a: mlp_or_mixture(mlp, a), [x]
    yield "logits", model.logits, [x]


def differing(run: Callable[[int, int], mx.array], expected: mx.array) -> list[str]:
    """Windows, as rows × width, in which a token has other bits than alone."""
    windows = [(rows, width) for rows in range(1, ROWS + 1) for width in range(1, WIDTH + 1)]
    return [f"{r} × {w}" for r, w in windows if not mx.array_equal(run(r, w), expected[:r, :w])]


def alone(stage: Stage) -> mx.array:
    _, run, inputs = stage
    rows = [[run(*[a[b : b + 1, w : w + 1] for a in inputs]) for w in range(WIDTH)] for b in range(ROWS)]
    return mx.concatenate([mx.concatenate(row, axis=1) for row in rows])


def passes(model: Model) -> Iterator[tuple[str, list[str]]]:
    """A whole pass, described and compiled, against tokens one by one."""
    tokens = mx.random.randint(0, model.vocabulary, (ROWS, BEFORE + WIDTH))

    def begin(first: int, last: int) -> BatchState:
        state = model.make_state(last - first)
        model.trunk(tokens[first:last, :BEFORE], state, certain=BEFORE)
        state.commit(mx.full((last - first,), BEFORE, mx.int32), most=BEFORE)
        return state

    def one_by_one(row: int) -> mx.array:
        state, out = begin(row, row + 1), []
        for at in range(BEFORE, BEFORE + WIDTH):
            out.append(model.trunk(tokens[row : row + 1, at : at + 1], state, 1))
            state.commit(mx.ones((1,), mx.int32), most=1)
        return mx.concatenate(out, axis=1)

    def described(rows: int, width: int) -> mx.array:
        return model.trunk(tokens[:rows, BEFORE : BEFORE + width], begin(0, rows), 1)

    def compiled(rows: int, width: int) -> mx.array:
        state = begin(0, rows)
        state.reserve(width)
        return model._score_graph(state, tokens[:rows, BEFORE : BEFORE + width], False)[0]

    expected = mx.concatenate([one_by_one(row) for row in range(ROWS)])
    yield "a pass, described", differing(described, expected)
    graph.OFTEN = 0
    yield "a pass, compiled", differing(compiled, expected)


def main() -> None:
    mx.set_default_device(mx.gpu)
    mx.random.seed(7)
    for name in sys.argv[1:] or SHAPES:
        model, _ = random_model(SHAPES[name] | {"num_hidden_layers": 4})
        table(f"{name}, stage", "windows in which a token has other bits than alone")
        for stage in stages(model):
            _, run, inputs = stage
            mx.eval(inputs)
            differ = differing(lambda r, w, run=run, given=inputs: run(*[a[:r, :w] for a in given]), alone(stage))
            line(stage[0], ", ".join(differ) or "none")
        for what, differ in passes(model):
            line(what, ", ".join(differ) or "none")


if __name__ == "__main__":
    main()
