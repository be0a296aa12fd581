"""The table of modes in docs/reference/checkpoints.md: what is read, and which device has a kernel for it."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from headstart.checkpoint.parameters import BITS, GROUP_SIZES
from headstart.checkpoint.quantize import MODES
from headstart.kernels import choose_backend
from headstart.kernels.cpu import ops
from headstart.kernels.cpu.backend import CpuBackend
from headstart.kernels.cuda.products import product_refusal
from headstart.kernels.metal.products import metal_refusal
from headstart.kernels.weights import matrix_weights

PAGE = Path(__file__).parents[2] / "docs/reference/checkpoints.md"
HALF = mx.bfloat16
KINDS = [("affine", bits) for bits in BITS] + [("mxfp4", 4), ("mxfp8", 8), ("nvfp4", 4)]


def layer_in(mode: str, bits: int, group: int) -> nn.Module:
    layer = nn.Linear(512, 48, bias=False)
    layer.weight = mx.random.normal(layer.weight.shape, key=mx.random.key(bits)).astype(HALF)
    return nn.QuantizedLinear.from_linear(layer, group, bits, mode)


def kernels(mode: str, bits: int, group: int) -> tuple[bool, bool, bool]:
    """Whether this CPU's kernels take a matrix, and those for NVIDIA's and Apple's GPUs."""
    layer = layer_in(mode, bits, group)
    weights = matrix_weights(layer)
    on_gpus = product_refusal(HALF, weights) is None, metal_refusal(HALF, layer, weights) is None
    return ops.linear(layer, HALF) is not None, *on_gpus


@pytest.mark.parametrize(("mode", "bits"), KINDS)
def test_the_page_says_which_kernel_computes_a_mode(mode: str, bits: int) -> None:
    groups = sorted(GROUP_SIZES) if mode == "affine" else MODES[mode][1]
    (found,) = {kernels(mode, bits, group) for group in groups}  # the size of a group makes no difference
    says = ["kernel" if ours else "MLX's" for ours in found]
    line = f"| {mode} | {bits} | {', '.join(map(str, groups))} | {' | '.join(says)} |"
    assert line in PAGE.read_text().splitlines(), line


@pytest.mark.skipif(not isinstance(choose_backend(), CpuBackend), reason="no CPU kernels here")
@pytest.mark.parametrize(("mode", "bits"), KINDS)
def test_rows_of_every_mode_are_independent_on_this_cpu(mode: str, bits: int) -> None:
    layer, x = layer_in(mode, bits, 16 if mode == "nvfp4" else 32), mx.random.normal((9, 512)).astype(HALF)
    together = choose_backend().product(x, layer)
    for row in range(9):
        assert mx.array_equal(choose_backend().product(x[row : row + 1], layer)[0], together[row])
