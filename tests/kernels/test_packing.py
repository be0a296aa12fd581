"""The weights of a layer in one buffer: the same weights, and few inputs for its kernel."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from headstart.kernels.cuda.packing import ALIGNMENT, packed_weights


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quantised = nn.Linear(64, 48, bias=False).to_quantized(32, 4)
        self.plain = nn.Linear(24, 10, bias=False)
        self.plain.set_dtype(mx.bfloat16)
        self.norm = nn.RMSNorm(33)
        self.odd = mx.zeros((3,), mx.bfloat16)  # no whole number of words


def address(array: mx.array) -> int:
    held = np.array(memoryview(array.view(mx.uint16) if array.itemsize == 2 else array), copy=False)
    return int(held.__array_interface__["data"][0])


def test_packed_weights_are_the_same_and_parts_of_one_buffer() -> None:
    layer = Layer()
    before = {name: mx.array(array) for name, array in tree_flatten(layer.parameters())}  # type: ignore[arg-type]
    packed = packed_weights(layer)
    after = dict(tree_flatten(layer.parameters()))  # type: ignore[arg-type]
    assert before.keys() == after.keys()
    inputs = {name.replace(".", "_"): array for name, array in after.items()} | {"x": mx.zeros((2,))}
    kept, declared = packed.replace(inputs)
    assert kept.keys() == {"packed", "odd", "x"}
    for name, array in after.items():
        assert array.dtype == before[name].dtype
        assert mx.array_equal(array, before[name])
        if name != "odd":
            begin = packed.places[id(array)][1]
            assert begin % ALIGNMENT == 0
            assert address(array) == address(packed.buffer) + 4 * begin
            assert f"{name.replace('.', '_')} = " in declared
    assert "__nv_bfloat16*>(packed + " in declared
    assert packed_weights(layer) is packed


def test_a_weight_that_is_exchanged_later_is_an_input_of_its_own() -> None:
    layer = Layer()
    packed = packed_weights(layer)
    layer.norm.weight = mx.ones((33,))
    kept, declared = packed.replace({"norm": layer.norm.weight, "w": layer.plain.weight})
    assert kept["norm"] is layer.norm.weight
    assert "norm" not in declared
