"""The backend that reads prompts on NVIDIA cards: hundreds to thousands of rows at a time.

A row's bits depend on the tokens before it alone, wherever a prompt is cut at multiples of CUT: products, norms and
experts take rows by themselves, attention and the delta rule take positions in steps that are counted from the
prompt's start.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from ...state import KV, Recurrent
from ..adapters import ChosenAdapters, has_adapters
from ..backend import Backend
from ..layers import Attention, FeedForward, GatedDeltaNet, Layer, MlpAndExperts, Pass
from ..products import add_biases
from ..types import ArrangedHeads, GatedDeltaWeights, Ran, Window, at_last
from ..weights import matrix_weights
from .attention import attention_fits
from .backend import HALVES, CudaBackend
from .delta_chunks import delta_chunks_fit, launch_delta_chunks
from .device import device_attribute
from .full_matrix import wide_product
from .prompt_attention import launch_prompt_attention, tile_bytes
from .prompt_experts import prompt_experts, prompt_experts_refusal

CUT = 64  # tokens of a chunk of the delta rule
SHARED_OF_A_BLOCK = 97  # attribute of a device: bytes


def reads_prompts(layers: Sequence[Layer], dtype: mx.Dtype) -> bool:
    """Return whether `CudaPrompts` takes every part of these layers."""
    parts = [part for layer in layers for part in layer.parts]
    return dtype in HALVES and all(part.beside is None and _takes(part.does, dtype) for part in parts)


def _takes(does: object, dtype: mx.Dtype) -> bool:
    if isinstance(does, Attention):
        fits = does.causal and attention_fits(does)
        return fits and tile_bytes(does.head_sizes[0]) <= device_attribute(SHARED_OF_A_BLOCK)
    if isinstance(does, GatedDeltaNet):
        state = does.state(1, dtype, eight_bits=False)
        return delta_chunks_fit(state.state, dtype, does.module.conv_kernel_size)
    if not isinstance(does, FeedForward) or isinstance(does, MlpAndExperts):
        return False
    module = does.module
    if "switch_mlp" not in module:
        return True
    gated = "shared_expert_gate" in module and module.sharding_group is None
    return gated and _takes_experts(module.switch_mlp, dtype)


def _takes_experts(module: nn.Module, dtype: mx.Dtype) -> bool:
    if not isinstance(module, SwitchGLU) or has_adapters(*module.children().values()):
        return False
    layers = module.gate_proj, module.up_proj, module.down_proj
    plain = not any("bias" in layer for layer in layers)
    return plain and not any(prompt_experts_refusal(dtype, matrix_weights(layer)) for layer in layers)


def _matrix_numbers(layer: Layer, rows: int) -> int:
    """Return how many numbers a layer's matrices and their products with so many rows have, without its experts."""
    matrices = [each for each in layer.module.modules() if isinstance(each, nn.Linear | nn.QuantizedLinear)]
    shapes = [(weights.outputs, weights.inputs) for weights in map(matrix_weights, matrices)]
    return sum(outputs * (inputs + rows) for outputs, inputs in shapes)


class CudaPrompts(CudaBackend):
    cut = CUT
    widest = 8192
    keeps = True
    layers_ahead = 2
    pass_overhead = 256

    def pass_bytes(self, layers: Sequence[Layer], dtype: mx.Dtype) -> int:
        """Count widened matrices and the outputs of products, of the layers that are under way."""
        most = max(_matrix_numbers(layer, self.widest) for layer in layers)
        return 2 * self.layers_ahead * dtype.size * most

    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        return add_biases([wide_product(x, layer) for layer in layers], layers)

    def gated_product(
        self, x: mx.array, gate: nn.Module, up: nn.Module, adapters: ChosenAdapters | None = None
    ) -> mx.array:
        return Backend.gated_product(self, x, gate, up, adapters)

    def chosen_experts(
        self, module: nn.Module, x: mx.array, indices: mx.array, adapters: ChosenAdapters | None
    ) -> mx.array:
        if not _takes_experts(module, x.dtype):
            return super().chosen_experts(module, x, indices, adapters)
        activation = None if isinstance(module.activation, SwiGLU) else module.activation
        gate, up, down = (matrix_weights(each) for each in (module.gate_proj, module.up_proj, module.down_proj))
        return prompt_experts(x, indices, gate, up, down, activation)

    def decoder_layer(
        self, layer: Layer, x: mx.array, normed: mx.array | None, memories: Sequence[KV | Recurrent], run: Pass
    ) -> tuple[mx.array, mx.array | None]:
        return Backend.decoder_layer(self, layer, x, normed, memories, run)

    def write(self, layer: Attention, both: mx.array, keys: mx.array, values: mx.array, memory: KV) -> ArrangedHeads:
        return Backend.write(self, layer, both, keys, values, memory)

    def attend_heads(self, layer: Attention, heads: ArrangedHeads, both: mx.array, memory: KV, run: Pass) -> mx.array:
        if layer.looks_ahead(memory) or not _takes(layer, both.dtype):
            return super().attend_heads(layer, heads, both, memory, run)
        keys, values = memory.keys, memory.values
        if memory.eight_bits:
            keys, values = heads.keys, heads.values  # as numbers, of the positions in reach
        queries, gates = at_last(heads.queries, run.last, 2), at_last(both, run.last) if layer.gated else None
        offset = memory.offset if run.last is None else memory.offset + run.last
        return launch_prompt_attention(
            queries, gates, keys, values, offset, layer.module.scale, memory.reach, layer.window
        )

    def gated_delta_rule(self, net: nn.Module, window: Window, memory: Recurrent, run: Pass) -> Ran:
        assert memory.pending is None, "a prompt has no drafts"
        assert run.certain == window.qkv.shape[1], "all of a prompt is certain"
        return launch_delta_chunks(window, GatedDeltaWeights.of(net), memory.state, memory.conv)

    def embed_and_norm(
        self, tokens: mx.array, embedding: nn.Module, norm: nn.Module, dtype: mx.Dtype
    ) -> tuple[mx.array, mx.array]:
        return Backend.embed_and_norm(self, tokens, embedding, norm, dtype)

    def pair(
        self,
        tokens: mx.array,
        hidden: mx.array,
        embedding: nn.Module,
        norms: tuple[nn.Module, nn.Module],
        embedding_first: bool,
    ) -> mx.array:
        return Backend.pair(self, tokens, hidden, embedding, norms, embedding_first)
