"""A decoder layer in one launch of a persistent kernel, for a few rows (see layer.cu).

The kernel's text is put together from the phases of a layer. Between two phases all blocks meet, so all of them must
be resident, and two such kernels must not run at once: every launch takes the `status` of the one before.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

import mlx.core as mx

from ..weights import MatrixWeights
from .attention import SPLIT
from .compiler import cuda_kernel
from .device import include, launch_bounds, resident_blocks
from .formats import Format, arrays_of
from .gated_delta import draft_lines
from .layer_parts import GatedAttention, GatedDelta, LayerOutput, Mixture, Mlp, NormWeights
from .norm import norm_threads
from .packing import PackedWeights
from .persistent import SHARED_BYTES, STATUS
from .products import PARTS, ProductTile, SumOrder, has_whole_tiles, matrix_fields, shared_bytes, tiles_ahead

MOST_ROWS = 16
MOST_PAIRS = 144  # of rows and their experts, as in layer.cu
THREADS = 384  # of a block: three teams of a product's four slices
OWN_NORMS = 8192  # elements of the rows that every block norms for itself, at most
WARP_ROOM = 18432  # bytes of shared memory, as in layer.cu
STAGES = 4  # chunks of weights under way, at most
STREAMED = (
    1 << 23
)  # bytes of a layer from which on its weights are not kept in the L2 cache: all layers would not fit


def count_stages(weights: MatrixWeights, tile: ProductTile) -> int:
    """Return how many chunks of these weights a team may have under way in its shared memory; 0 if it has too little
    for such tiles."""
    order = SumOrder.of(weights)
    stages = STAGES
    while stages and shared_bytes(weights, order, tile, stages, several=True) > WARP_ROOM * order.slices:
        stages -= 1
    return stages


def launch_layer(
    x: mx.array,
    status: mx.array,
    before: NormWeights,
    mixer: GatedDelta | GatedAttention,
    between: NormWeights,
    ahead: Mlp | Mixture,
    packed: PackedWeights,
) -> LayerOutput:
    """Compute a layer of the residual stream x [B, W, H], with the norms before its mixer and before its MLP."""
    text = _Text(x, packed.buffer.nbytes >= STREAMED)
    text.take("middle", x.shape[-1])
    text.inputs |= {"x": x, "status": status, "first_norm": before.weight, "second_norm": between.weight}
    text.outputs |= {"out": (x.shape, x.dtype), "new_status": ((STATUS,), mx.int32)}
    text.lines.append("headstart::touch(x, sizeof(T) * rows * D), headstart::touch(first_norm, sizeof(float) * D);")
    first = text.norm("x", "first_norm", before, text.read_by("normed", mixer.projections))
    if isinstance(mixer, GatedDelta):
        _delta(text, mixer, first)
    else:
        _attention(text, mixer, first)
    text.lines.append("grid.arrive();")
    normed = text.read_by("normed", ahead.readers())
    second = f"grid.wait(); {text.norm('middle', 'second_norm', between, normed)}"
    if isinstance(ahead, Mlp):
        _mlp(text, ahead, second)
    else:
        _mixture(text, ahead, second)
    out, new_status, *rest = text.launch(packed)
    if isinstance(mixer, GatedAttention):
        return LayerOutput(out, new_status)
    state, conv, *fresh, _ = rest
    return LayerOutput(out, new_status, state, conv, fresh if mixer.drafts else None)


class _Text:
    """A kernel as it is put together from phases, and what it is given."""

    def __init__(self, x: mx.array, streams: bool):
        self.rows, self.size, self.dtype = x.size // x.shape[-1], x.shape[-1], x.dtype
        self.columns, self.streams = 8 if self.rows <= 8 else 16, streams
        self.blocks = resident_blocks(SHARED_BYTES)
        self.places: list[str] = []  # in scratch
        self.lines: list[str] = []
        self.inputs: dict[str, mx.array] = {}
        self.outputs: dict[str, tuple[Sequence[int], mx.Dtype]] = {}
        # So many rows every block norms for itself: as many as its threads have registers for.
        self.own = max(1, min(4, OWN_NORMS // self.size))
        norms = self.rows * (self.blocks if self.rows <= self.own else 1)
        self.scratch = -(-self.size * norms // 64) * 64  # elements
        self.slices = 0  # of the last product
        self.turn = 0  # the team that begins with the next product

    def take(self, name: str, each: int) -> None:
        """Declare scratch for `each` elements of every row."""
        self.scratch += -(-self.rows * each // 64) * 64
        self.places.append(f"T* const {name} = take({each});")

    def read_by(self, name: str, readers: list[MatrixWeights]) -> str:
        """Return a place as those matrices read it, and what computes it writes it."""
        fits = self.dtype == mx.bfloat16 and all((each.mode, each.bits) == ("affine", 4) for each in readers)
        return f"headstart::ready({name})" if fits else name

    def multiply(self, x: str, all_of_them: list[tuple[MatrixWeights, str]], ready: str = "") -> None:
        """Add products of the rows of x, which are there after `ready`. Neighbours that are summed in one order are
        one phase."""
        for order, some in groupby(all_of_them, key=lambda each: SumOrder.of(each[0])):
            each = list(some)
            teams = self.blocks * (THREADS // 32 // order.slices)
            tall, low = ProductTile(32, self.columns), ProductTile(16, self.columns)
            weights, matrices = [weights for weights, _ in each], [self._matrix(*pair) for pair in each]
            many = sum(weights.outputs for weights, _ in each) > 16 * teams
            tile = tall if many and count_stages(each[0][0], tall) else low
            self._rows(x, weights, matrices, tile, ready)
            ready = ""

    def gate(self, x: str, gate: MatrixWeights, up: MatrixWeights, to: str, ready: str = "") -> None:
        """Add `silu(gate) * up` of the rows of x, `to` where `down` reads it."""
        self._rows(x, [gate, up], [self._matrix(gate, to, up)], ProductTile(32, self.columns), ready)

    def add_product(self, x: str, weights: MatrixWeights, residual: str, to: str) -> None:
        """Add a product of the rows of x, once all blocks have computed them, and its sum with a residual."""
        matrix = self._matrix(weights, to, residual=residual)
        self._rows(x, [weights], [matrix], ProductTile(16, self.columns), "grid.wait();")

    def _rows(self, x: str, weights: list[MatrixWeights], matrices: list[str], tile: ProductTile, ready: str) -> None:
        sizes = self._sizes(weights, tile, len(matrices) < len(weights), f"{tile.columns // 8}, ")
        turn = self.turn % (self.blocks * (THREADS // 32 // self.slices))
        arguments = f"{turn}, {x}, rows, {{{', '.join(matrices)}}}, [&] {{ {ready} }}"
        self.lines.append(f"headstart::multiply_rows<{sizes}>(dynamic_shared, {arguments});")
        self.turn += sum(-(-each.outputs // tile.height) for each in weights)

    def experts(
        self, x: str, weights: list[MatrixWeights], shared: list[MatrixWeights], to: str, moe: Mixture
    ) -> None:
        """Add a product with the chosen experts, or, of every row of x, `silu(gate) * up` of theirs."""
        gated = len(weights) == 2
        own = str(not gated).lower()
        sizes = self._sizes(weights, ProductTile(32 if gated else 16, 8), gated)
        first = self._matrix(weights[0], to, weights[1] if gated else None)
        last = self._matrix(shared[0], to, shared[1] if gated else None) if moe.experts_per_row > moe.top else first
        arguments = f"{x}, {moe.experts_per_row if gated else 1}, choice, {first}, {last}"
        self.lines.append(
            f"headstart::multiply_experts<{sizes}, {moe.router.outputs}, {own}>(dynamic_shared, {arguments});"
        )

    def _sizes(self, all_of_them: list[MatrixWeights], tile: ProductTile, gated: bool, wide: str = "") -> str:
        """Return the template arguments of a product."""
        weights = all_of_them[0]
        order, stages = SumOrder.of(weights), count_stages(weights, tile)
        if self.slices != order.slices:
            self.lines.append("__syncthreads();")  # no team works in the shared memory of another
        self.slices = order.slices
        shape = f"{order.format.text()}, {order.chunk}, {order.slices}, {weights.inputs}"
        flags = f"{has_whole_tiles(all_of_them, tile, gated)}, {self.streams}".lower()
        ahead = tiles_ahead(weights, order, stages)
        return f"T, {shape}, {tile.height // 16}, {wide}{stages}, {ahead}, {flags}"

    def _matrix(
        self, weights: MatrixWeights, to: str, up: MatrixWeights | None = None, residual: str = "nullptr"
    ) -> str:
        """Return the text of a matrix whose product, added to a `residual`, goes `to` a place."""
        gate = self._arrays(up) if up is not None else None
        kind = "T, headstart::Ready<T>" if to.startswith("headstart::ready") else "T"
        fields = matrix_fields(self._arrays(weights), str(weights.outputs), to, gate, residual)
        return f"headstart::Matrix<{kind}>{fields}"

    def _arrays(self, weights: MatrixWeights) -> dict[str, str]:
        """Return the names of its arrays, which become inputs."""
        names = Format.of(weights).names(len(self.inputs))
        self.inputs |= dict(zip(names.values(), arrays_of(weights), strict=True))
        return names

    def prefetch_norm(self, weight: str) -> None:
        self.lines.append(f"headstart::prefetch_norm({weight}, {self.size});")

    def norm(self, x: str, weight: str, norm: NormWeights, to: str) -> str:
        """Return the statement that norms the rows of x to `normed`, which products read as `to`."""
        sizes, is_ready = f"{self.size}, {norm_threads(self.size)}, {self.own}", str(to != "normed").lower()
        return f"headstart::norm_rows<{sizes}>(grid, rows, {x}, {weight}, {norm.eps!r}f, normed, {is_ready});"

    def launch(self, packed: PackedWeights) -> list[mx.array]:
        self.outputs["scratch"] = ((self.scratch,), self.dtype)
        inputs, declared = packed.replace(self.inputs)
        body = declared + "\n".join(self.places + self.lines)
        made: list[mx.array] = _layer_kernel(tuple(inputs), tuple(self.outputs), body)(
            inputs=list(inputs.values()),
            template=[("T", self.dtype), ("D", self.size), ("OWN", self.own)],
            grid=(self.blocks * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[shape for shape, _ in self.outputs.values()],
            output_dtypes=[dtype for _, dtype in self.outputs.values()],
        )
        return made


START = """
extern __shared__ __align__(512) unsigned char dynamic_shared[];
__shared__ headstart::Grid::Shared barrier;
__shared__ headstart::Choice<T> choice;
const headstart::Grid grid(status, new_status, &barrier);
const int B = x_shape[0], W = x_shape[1], rows = B * W;
T* free_scratch = scratch;
auto take = [&](int each) {
  T* const at = free_scratch;
  free_scratch += (rows * each + 63) / 64 * 64;
  return at;
};
const bool own = rows <= OWN;
T* const normed = take(own ? D * gridDim.x : D) + (own ? blockIdx.x * rows * D : 0);
"""


@cache
def _layer_kernel(inputs: tuple[str, ...], outputs: tuple[str, ...], text: str) -> Any:
    names = (*PARTS, "experts", "norm", "gated_delta", "attention", "layer")
    return cuda_kernel(
        name="decoder_layer",
        input_names=list(inputs),
        output_names=list(outputs),
        header=include(*names) + launch_bounds(THREADS),
        source=START + text,
        shared_memory=THREADS // 32 * WARP_ROOM,
    )


def _delta(text: _Text, net: GatedDelta, ready: str) -> None:
    _, Hv, Dv, Dk = net.state.shape
    C = net.conv.shape[-1]
    Hk, taps = (C - Hv * Dv) // (2 * Dk), net.weights.conv.shape[1]
    names = ["qkv", "z", "b", "a"]
    for name, weights in zip([*names, "y"], [*net.projections, net.projections[1]], strict=True):
        text.take(name, weights.outputs)
    text.multiply(text.read_by("normed", net.projections), list(zip(net.projections, names, strict=True)), ready)
    text.inputs |= {"state": net.state, "conv": net.conv, "accepted": net.accepted}
    text.inputs |= dict(zip(["conv_weight", "A_log", "dt_bias", "head_norm"], net.weights[:-1], strict=True))
    text.outputs |= {"new_state": (net.state.shape, mx.float32), "new_conv": (net.conv.shape, text.dtype)}
    folds, keeps, certain = "", "", "W"
    if net.pending is not None:
        (text.inputs["old_drafts"],) = net.pending
        text.outputs["new_drafts"] = draft_lines(net.state, net.conv, max(1, net.drafts))
        folds, keeps, certain = "(const float*)old_drafts, old_drafts_shape[1]", "(float*)new_drafts, W - 1", "1"
    y = text.read_by("y", [net.out])
    groups = next(n for n in range(1, 17) if 4 * Dv // n <= THREADS and Dv // 8 % n == 0)
    text.lines.append(f"""grid.arrive();
        headstart::run_heads<{Hk}, {Hv}, {Dk}, {Dv}, {taps}, {groups}>(
            grid, B, state, conv, accepted,
            headstart::Drafts<const float>{{{folds}}}, (const T*)qkv, (const T*)z, (const T*)b, (const T*)a,
            conv_weight, A_log, dt_bias, head_norm, {net.weights.eps!r}f, W, {certain}, {y}, new_state, new_conv,
            headstart::Drafts<float>{{{keeps}}});
        grid.arrive();""")
    text.prefetch_norm("second_norm")
    text.add_product(y, net.out, "x", "middle")


def _attention(text: _Text, layer: GatedAttention, ready: str) -> None:
    B, Hkv, S, D = layer.keys.shape
    H, W, pieces = layer.projections[0].outputs // (2 * D), text.rows // B, -(-S // SPLIT)
    names = ["both", "new_keys", "new_values"]
    for name, each in zip([*names, "queries", "y"], [2 * H * D, Hkv * D, Hkv * D, H * D, H * D], strict=True):
        text.take(name, each)
    text.multiply(text.read_by("normed", layer.projections), list(zip(layer.projections, names, strict=True)), ready)
    y = text.read_by("y", [layer.out])
    text.inputs |= {"keys": layer.keys, "values": layer.values, "offset": layer.offset}
    text.inputs |= {"query_norm": layer.norms[0], "key_norm": layer.norms[1]}
    text.outputs["partial"] = ((B * H * pieces * W * (D + 2),), mx.float32)
    text.lines.append(f"""grid.arrive();
        headstart::attend<{H}, {Hkv}, {D}, {layer.rope.dims}>(
            grid, B, W, keys_shape[2], (const T*)both, (const T*)new_keys, (const T*)new_values,
            query_norm, key_norm, offset, {layer.eps!r}f, {math.log2(layer.rope.base)!r}f,
            {layer.scale * math.log2(math.e)!r}f, queries, const_cast<T*>(keys), const_cast<T*>(values), partial,
            {y});
        grid.arrive();""")
    text.prefetch_norm("second_norm")
    text.add_product(y, layer.out, "x", "middle")


def _mlp(text: _Text, mlp: Mlp, ready: str) -> None:
    """Add the phases of an MLP."""
    text.take("hidden", mlp.gate.outputs)
    hidden = text.read_by("hidden", [mlp.down])
    text.gate(text.read_by("normed", mlp.readers()), mlp.gate, mlp.up, hidden, ready)
    text.lines.append("grid.arrive();")
    text.add_product(hidden, mlp.down, "middle", "out")


def _mixture(text: _Text, moe: Mixture, ready: str) -> None:
    """Add the phases of a mixture of experts. A shared expert like the others is computed with them: a product for
    itself would be more code, which has to be read in every layer."""
    shared, experts, count, top, each = moe.shared, moe.experts, moe.router.outputs, moe.top, moe.experts_per_row
    text.take("logits", count)
    text.take("opening", 1)
    text.take("hidden", each * experts.gate.outputs)
    text.take("parts", each * text.size)
    normed, hidden = text.read_by("normed", moe.readers()), text.read_by("hidden", [experts.down])
    text.multiply(normed, [(moe.router, "logits"), (moe.shared_gate, "opening")], ready)
    always = f"parts + (row * {each} + {top}) * D"
    if each == top:
        text.take("shared_hidden", shared.gate.outputs)
        text.take("made", text.size)
        shared_hidden, always = text.read_by("shared_hidden", [shared.down]), "made + row * D"
        text.gate(normed, shared.gate, shared.up, shared_hidden)
    sizes, is_normed = f"{count}, {top}, {each}", str(moe.normed).lower()
    text.lines.append(f"grid.sync(); headstart::choose_experts<{sizes}>(logits, rows, choice);")
    text.experts(normed, [experts.gate, experts.up], [shared.gate, shared.up], hidden, moe)
    if each == top:
        text.turn = top * -(-experts.gate.outputs // 16)  # teams that have no expert, where there is one row
        text.multiply(shared_hidden, [(shared.down, "made")])
    text.lines.append(
        f"grid.arrive(); headstart::score_experts<{sizes}>(logits, rows, {is_normed}, choice); grid.wait();"
    )
    text.experts(hidden, [experts.down], [shared.down], "parts", moe)
    combined = (
        f"headstart::combined_eight<{top}, D>(parts + row * {each} * D, choice.scores + row * {each}, "
        f"{always}, opening[row], at)"
    )
    whole = str(has_whole_tiles([experts.down], ProductTile(16, 8), False)).lower()
    added = f"[&](int row, int at) {{ return {combined}; }}"
    text.lines.append(f"headstart::add_columns<D, {whole}>(rows, middle, {added}, out);")
