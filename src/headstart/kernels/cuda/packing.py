"""All weights of a decoder layer in one buffer, so that the layer's kernel has few inputs.

MLX copies a kernel's list of inputs for every one of its outputs, whenever a launch is described. With forty inputs
and ten outputs that takes the host longer than anything else in a step.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .compiler import TYPES

ALIGNMENT = 64  # words: a weight begins at a line of memory, and wherever MLX's own kernels expect it


@dataclass(frozen=True)
class PackedWeights:
    buffer: mx.array  # [words] uint32
    places: dict[int, tuple[mx.array, int]]  # by its id: an array of the module, and where it begins, in words

    def replace(self, inputs: dict[str, mx.array]) -> tuple[dict[str, mx.array], str]:
        """Return a kernel's inputs with the buffer in place of what is in it, and declarations of the others."""
        kept, lines = {"packed": self.buffer}, []
        for name, array in inputs.items():
            if (place := self.places.get(id(array))) is None:
                kept[name] = array
            else:
                pointer = f"reinterpret_cast<const {TYPES[array.dtype][0]}*>(packed + {place[1]})"
                lines.append(f"const auto* const {name} = {pointer};\n")
        return kept, "".join(lines)


def packed_weights(module: nn.Module) -> PackedWeights:
    """Return the buffer of a module's weights. The first call moves them there; the module's arrays become parts of
    it, which other kernels read as before."""
    if (packed := getattr(module, "_packed", None)) is None:
        packed = module._packed = _pack(module)
    return packed


def _pack(module: nn.Module) -> PackedWeights:
    flat: Any = tree_flatten(module.parameters())
    arrays = {name: array for name, array in sorted(flat) if array.dtype in TYPES and array.nbytes % 4 == 0}
    words = [mx.contiguous(array).reshape(-1).view(mx.uint32) for array in arrays.values()]
    buffer = mx.concatenate([mx.pad(each, (0, -each.size % ALIGNMENT)) for each in words])
    parts, at = {}, 0
    for (name, array), each in zip(arrays.items(), words, strict=True):
        part = buffer[at : at + each.size].view(array.dtype).reshape(array.shape)
        parts[name] = (part, at)
        at += -(-each.size // ALIGNMENT) * ALIGNMENT
    mx.eval(buffer, [part for part, _ in parts.values()])
    module.update(tree_unflatten([(name, part) for name, (part, _) in parts.items()]))
    mx.clear_cache()  # the arrays that were replaced
    return PackedWeights(buffer, {id(part): (part, at) for part, at in parts.values()})
