"""Products with weights for a few rows on Metal: see `products.metal`."""

from math import prod

import mlx.core as mx

from ..products import Weights
from . import metal_kernel

OUTPUTS, SLICES, VALUES = 4, 4, 16  # as in products.metal
ROWS = (1, 2, 4, 6)  # side by side: with OUTPUTS of each, at most 24 sums in a thread's registers
EXPERT_ROWS = 4


def metal_refusal(dtype: mx.Dtype, weights: Weights) -> str | None:
    """Return why weights do not fit the kernel; None if they do."""
    if dtype not in (mx.bfloat16, mx.float16, mx.float32):
        return f"activations are {str(dtype).removeprefix('mlx.core.')}"
    if weights.scales is None:
        fits = weights.weight.dtype == dtype and dtype != mx.float32 and weights.inputs % VALUES == 0
        return None if fits else "weights are not of the activations' 16-bit type"
    if weights.biases is None or weights.scales.dtype != dtype:
        return "not quantised in the affine mode with scales of the activations' type"
    if weights.bits not in (4, 8) or weights.group not in (32, 64, 128):
        return f"{weights.bits} bits in groups of {weights.group}"
    return None


def metal_products(x: mx.array, weights: list[Weights]) -> list[mx.array]:
    """Return x [..., K] by every weight [N, K], in one launch. All have the same K, bits and group size."""
    rows = prod(x.shape[:-1])
    pass_rows = next((size for size in ROWS if rows <= size), ROWS[-1])
    source = f"""
        threadgroup float sums[{SLICES * OUTPUTS} * PASS_ROWS];
        int rows = 1, inputs[PASS_ROWS], outputs[PASS_ROWS];
        for (int i = 0; i + 1 < x_ndim; ++i) rows *= x_shape[i];
        for (int r = 0; r < PASS_ROWS; ++r) {{
          const int row = int(threadgroup_position_in_grid.z) * PASS_ROWS + r;
          inputs[r] = metal::min(row, rows - 1);
          outputs[r] = row < rows ? row : -1;
        }}
        {_multiply(weights, "w{i}", "s{i}", "b{i}")}
    """
    return _launch("product", x, [], weights, source, -(-rows // pass_rows), pass_rows, x.shape[:-1])


def metal_experts(x: mx.array, indices: mx.array, weights: list[Weights]) -> list[mx.array]:
    """Return x by the experts of each row's `indices` [..., E], for every weight [experts, N, K]: [..., E, N].

    x is [..., K], or [..., E, K] where each expert has an input of its own.
    """
    pairs = indices.size
    share = 1 if x.size // x.shape[-1] == pairs else indices.shape[-1]
    pass_rows = 1 if pairs == indices.shape[-1] else EXPERT_ROWS  # a single row never takes an expert twice
    source = f"""
        threadgroup float sums[{SLICES * OUTPUTS} * PASS_ROWS];
        const int pair = int(threadgroup_position_in_grid.z);
        int pairs = 1, inputs[PASS_ROWS], outputs[PASS_ROWS];
        for (int i = 0; i < indices_ndim; ++i) pairs *= indices_shape[i];
        if (!headstart::gather_pairs<PASS_ROWS>(indices, pairs, pair, outputs)) return;
        for (int r = 0; r < PASS_ROWS; ++r) inputs[r] = (outputs[r] < 0 ? pair : outputs[r]) / {share};
        const long expert = indices[pair];
        {_multiply(weights, "w{i} + expert * {words}", "s{i} + expert * {groups}", "b{i} + expert * {groups}")}
    """
    return _launch("experts", x, [indices.astype(mx.uint32)], weights, source, pairs, pass_rows, indices.shape)


def route(logits: mx.array, top: int, normed: bool) -> tuple[mx.array, mx.array]:
    """Return the `top` experts of each row by its logits [..., E], and their scores: [..., top] each."""
    experts, shape = logits.shape[-1], (*logits.shape[:-1], top)
    source = f"""
        const int row = int(threadgroup_position_in_grid.x);
        headstart::route<T, E, TOP>(logits + row * E, {str(normed).lower()}, indices + row * TOP,
                                    scores + row * TOP, int(thread_index_in_simdgroup));
    """
    indices, scores = metal_kernel("route", ("logits",), ("indices", "scores"), source, "experts")(
        inputs=[logits],
        template=[("T", logits.dtype), ("E", experts), ("TOP", top)],
        grid=(logits.size // experts * 32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[shape, shape],
        output_dtypes=[mx.uint32, logits.dtype],
    )
    return indices, scores


def combine(parts: mx.array, scores: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
    """Return the experts' outputs [..., E, N] weighted by `scores` [..., E], plus `shared` [..., N] weighted by the
    sigmoid of `gate` [..., 1]."""
    top, size = scores.shape[-1], shared.shape[-1]
    source = f"""
        const int element = int(thread_position_in_grid.x), row = element / {size}, column = element % {size};
        out[element] = headstart::combine<T>(
            parts + static_cast<long>(row) * {top * size} + column, scores + row * {top}, {top}, {size},
            shared_[element], gate[row]);
    """
    inputs = ("parts", "scores", "shared_", "gate")
    return metal_kernel("combine", inputs, ("out",), source, "experts")(
        inputs=[parts, scores.astype(parts.dtype), shared, gate],
        template=[("T", parts.dtype)],
        grid=(shared.size, 1, 1),
        threadgroup=(min(256, shared.size), 1, 1),
        output_shapes=[shared.shape],
        output_dtypes=[parts.dtype],
    )[0]


def _multiply(weights: list[Weights], weight: str, scales: str, biases: str) -> str:
    """Return the code that multiplies: threadgroups count through the outputs of all weights."""
    code, begin = [], 0
    for i, each in enumerate(weights):
        words, groups = each.outputs * each.weight.shape[-1], each.outputs * (each.inputs // each.group)
        pointers = [text.format(i=i, words=words, groups=groups) for text in (weight, scales, biases)]
        if each.scales is None:
            pointers[1:] = ["static_cast<const device T*>(nullptr)"] * 2
        end = begin + -(-each.outputs // OUTPUTS)
        code.append(f"""if (threadgroup_position_in_grid.y < {end}u) {{
          headstart::product<T, BITS, GROUP, PASS_ROWS>(
              x, {", ".join(pointers)}, out{i}, {each.outputs}, {each.inputs},
              {OUTPUTS} * (int(threadgroup_position_in_grid.y) - {begin}), inputs, outputs, sums,
              int(simdgroup_index_in_threadgroup), int(thread_index_in_simdgroup));
        }}""")
        begin = end
    return " else ".join(code)


def _launch(
    name: str,
    x: mx.array,
    extra: list[mx.array],
    weights: list[Weights],
    source: str,
    passes: int,
    pass_rows: int,
    shape: tuple[int, ...],
) -> list[mx.array]:
    letters = "w" if weights[0].scales is None else "wsb"
    names = ("x", *["indices"] * len(extra), *(f"{letter}{i}" for i in range(len(weights)) for letter in letters))
    kernel = metal_kernel(name, names, tuple(f"out{i}" for i in range(len(weights))), source, "products", "experts")
    tiles = sum(-(-each.outputs // OUTPUTS) for each in weights)
    return list(
        kernel(
            inputs=[x, *extra, *(array for each in weights for array in each.arrays())],
            template=[
                ("T", x.dtype),
                ("BITS", weights[0].bits),
                ("GROUP", weights[0].group),
                ("PASS_ROWS", pass_rows),
            ],
            grid=(32 * SLICES, tiles, passes),
            threadgroup=(32 * SLICES, 1, 1),
            output_shapes=[(*shape, each.outputs) for each in weights],
            output_dtypes=[x.dtype] * len(weights),
        )
    )
