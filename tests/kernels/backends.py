"""The backends that an operation is tested on: the reference, this CPU's kernels, and those for GPUs.

On a machine with a card its kernels run there. Elsewhere those of CUDA and Metal are emulated, which is slow: for
tiny shapes, and most formats only in the slow tests.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import cuda_on_cpu
import metal_on_cpu
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from headstart.kernels import Backend, choose_backend
from headstart.kernels.cpu.backend import CpuBackend
from headstart.kernels.cuda.backend import CudaBackend
from headstart.kernels.layers import Pass, Residual
from headstart.kernels.metal import attention, choice, products, stock
from headstart.kernels.metal.backend import MetalBackend
from headstart.kernels.metal.choice import Candidate, KernelCheck
from headstart.kernels.metal.tune import operations
from headstart.kernels.metal.tune_fused import model_operations
from headstart.kernels.norms import Norm
from headstart.kernels.types import Window
from headstart.models import Model
from headstart.state import Recurrent

NATIVE = ("cpu", "cuda", "metal")
NAMES = ("reference", *NATIVE)
TYPES = {"cpu": ("bfloat16", "float32"), "cuda": ("bfloat16", "float16"), "metal": ("bfloat16", "float16", "float32")}
ROUNDING = {mx.bfloat16: 3e-3, mx.float16: 4e-4, mx.float32: 1e-6}  # of results alone, relative
SLOW = pytest.mark.slow


@contextmanager
def running(name: str) -> Iterator[Backend]:
    """Yield a backend by its name here."""
    if name == "reference":
        yield Backend()
    elif name == "cpu":
        ours = choose_backend()
        if not isinstance(ours, CpuBackend):
            pytest.skip("no CPU kernels here")
        yield ours
    elif name.startswith("metal"):
        with metal(name) as backend:
            yield backend
    elif mx.cuda.is_available():
        yield CudaBackend()
    else:
        with cuda_on_cpu.emulated():
            yield CudaBackend()


class EmulatedMetal(MetalBackend):
    kernels: str  # which of ours are chosen, by the beginning of their names


@contextmanager
def metal(kernels: str) -> Iterator[Backend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", metal_on_cpu.metal_kernel)
        patch.setattr(choice, "_decided", {})
        patch.setattr(stock, "gated_delta_kernel", gated_delta_ops)
        patch.setattr(products, "has_matrix_units", lambda: True)
        patch.setattr(attention, "SPLIT", 32)  # pieces that the emulator gets through
        mx.disable_compile()  # on a CPU, every compiled stock operation costs a run of g++
        cuda_on_cpu.forget_kernels("metal")
        backend = EmulatedMetal()
        backend.kernels = kernels
        yield backend
    mx.enable_compile()
    cuda_on_cpu.forget_kernels("metal")


def choose_kernels(
    backend: Backend, dtype: mx.Dtype, wanted: Sequence[str], *modules: nn.Module, fit: bool = True
) -> None:
    """Have ours chosen on Metal for the wanted operations of modules, which they `fit` or not."""
    if not isinstance(backend, EmulatedMetal):
        return
    weights = nn.Module()
    weights.given = list(modules)
    found = [each for each in operations(weights, dtype) if each.operation in wanted]
    assert {each.operation for each in found} == set(wanted)
    for operation in found:
        runs = operation.candidates()
        ours = [name for name, run in runs.items() if name.startswith("metal") and not isinstance(run, str)]
        name = next((name for name in ours if name.startswith(backend.kernels)), (ours or ["stock"])[0])
        assert (name == "stock") != fit, runs
        check = KernelCheck(operation.operation, operation.shape, name, True, (Candidate(name),))
        choice._decided[f"{operation.operation} {operation.shape}"] = check


def choose_all(model: Model) -> None:
    """Have a kernel of ours chosen on Metal for every operation of a model that has one."""
    layers = (*model.layers, *(model.head_layers if model.has_head else ()))
    for each in model_operations(model.weights, layers, model.dtype):
        runs = each.candidates().items()
        name = next((name for name, run in runs if name.startswith("metal") and not isinstance(run, str)), "stock")
        check = KernelCheck(each.operation, each.shape, name, True, (Candidate(name),))
        choice._decided[f"{each.operation} {each.shape}"] = check


def no_mask(window: int | None) -> mx.array:
    raise AssertionError("this operation needs no mask")


def nothing(x: mx.array) -> Residual:
    """A residual that leaves what is added to it as it is."""
    return Residual(mx.zeros_like(x), Norm(x.shape[-1], 1e-6))


def run_window(
    backend: Backend, net: nn.Module, window: Window, memory: Recurrent, accepted: mx.array, certain: int
) -> mx.array:
    """The outputs of a gated delta rule [B, W, Hv, Dv]; `memory` then holds what the window leaves."""
    run = Pass(no_mask, accepted, certain)
    y, memory.state, memory.conv, memory.pending = backend.gated_delta_rule(net, window, memory, run)
    return y


def normal(*shape: int, seed: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def error(found: mx.array, expected: mx.array | np.ndarray) -> float:
    """The distance relative to the norm, and not less than a tenth of the largest of an element."""
    right = exact(expected) if isinstance(expected, mx.array) else expected
    assert found.shape == right.shape
    apart, mean = np.abs(exact(found) - right), np.sqrt((right**2).mean())
    largest = (apart / np.maximum(np.maximum(np.abs(right), mean), 1e-30)).max()
    return float(max(np.linalg.norm(apart) / np.linalg.norm(right), largest / 10))


def linear(
    outputs: int, inputs: int, bits: int = 16, group: int = 1, dtype: str = "bfloat16", mode: str = "affine"
) -> nn.Module:
    """A linear layer whose second half of inputs has the weights of the first, where groups allow that."""
    kind, twice = getattr(mx, dtype), not inputs % (2 * group)
    weight = 0.1 * normal(outputs, inputs // (1 + twice), seed=bits + outputs, dtype=mx.float32)
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight = (mx.concatenate([weight] * (1 + twice), axis=1)).astype(kind)
    if bits == 16:
        return layer
    layer.weight = layer.weight.astype(mx.float32)
    made = nn.QuantizedLinear.from_linear(layer, group, bits, mode)
    made.set_dtype(kind)
    return made


def weights_of(layer: nn.Module) -> np.ndarray:
    """The weights that a layer's codes stand for."""
    if "scales" not in layer:
        return exact(layer.weight)
    wide = [array if array.dtype == mx.uint8 else array.astype(mx.float32) for array in (layer.scales,)]
    biases = layer["biases"].astype(mx.float32) if "biases" in layer else None
    return exact(mx.dequantize(layer.weight, *wide, biases, layer.group_size, layer.bits, layer.mode))


def same(*pairs: tuple[mx.array, mx.array]) -> bool:
    return all(bool(mx.array_equal(one, other)) for one, other in pairs)
