"""DeepSeek-V4 on emulated devices: our kernels where there are any, MLX's own for the rest."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cuda_on_cpu
import metal_on_cpu
import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

import headstart.kernels.cuda.backend as headstart_cuda
from deepseek_v4 import write_deepseek_v4
from headstart.checkpoint import load_model
from headstart.engine.invariance import _logits
from headstart.kernels import Backend
from headstart.kernels.cuda.backend import CudaBackend
from headstart.kernels.metal import backend, choice, device, experts, products, stock
from headstart.kernels.metal.backend import MetalBackend
from headstart.kernels.metal.choice import Candidate, KernelCheck
from headstart.kernels.metal.tune import operations

KERNELS = (device.metal_kernel, products._product_kernel, experts._experts_kernel)
SIZES = {"vocab_size": 64, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1}
SIZES |= {"num_attention_heads": 2, "index_topk": 2, "head_dim": 64, "index_n_heads": 2}


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(choice, "_decided", {})
    monkeypatch.setattr(choice, "cache_folder", lambda: tmp_path / "kernels")
    monkeypatch.setattr(choice, "identity", lambda: "Apple M4")
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_on_cpu.metal_kernel)
    monkeypatch.setattr(stock, "gated_delta_kernel", gated_delta_ops)
    mx.disable_compile()
    for kernel in KERNELS:
        kernel.cache_clear()
    yield
    mx.enable_compile()
    for kernel in KERNELS:
        kernel.cache_clear()


def test_metal_describes_its_operations_and_promises_no_exact_text(tmp_path: Path) -> None:
    model = load_model(write_deepseek_v4(tmp_path, **SIZES), dtype=mx.bfloat16)
    found = {each.operation for each in operations(model.weights, model.dtype, model.layers)}
    assert found == {"product", "norm", "experts", "streams"}  # what routes and attends is MLX's own
    assert not backend._may_be_exact(model.layers)
    assert not CudaBackend().is_exact(model.layers, model.weights, model.dtype)


@pytest.mark.slow
def test_metal_runs_it_with_the_kernels_that_are_chosen_by_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metal: None
) -> None:
    write_deepseek_v4(tmp_path, **SIZES)
    expected = _logits(load_model(tmp_path, dtype=mx.float32), 3, 1)
    model = replace(load_model(tmp_path, dtype=mx.bfloat16), backend=MetalBackend())
    described, refused = operations(model.weights, model.dtype), set()
    for operation in described:
        name, run = next(each for each in operation.candidates().items() if each[0].startswith("metal"))
        if isinstance(run, str):
            refused.add(f"{operation.operation} {operation.shape}")
            continue
        kernel = KernelCheck(operation.operation, operation.shape, name, True, (Candidate(name, None, True),))
        choice._decided[f"{operation.operation} {operation.shape}"] = kernel
    asked: set[tuple[str, str]] = set()
    monkeypatch.setattr(backend, "chosen_kernel", lambda *shape: asked.add(shape) or choice.chosen_kernel(*shape))
    found = _logits(model, 3, 1)
    assert mx.linalg.norm(found - expected) < 5e-2 * mx.linalg.norm(expected)
    assert refused
    assert all(each.startswith("product") and each.endswith("float32, float32") for each in refused)  # of streams
    assert asked <= {(each.operation, each.shape) for each in described}
    assert {name for name, _ in asked} == {"product", "norm", "experts", "streams"}


@pytest.mark.slow
def test_cuda_runs_it_with_our_products_experts_norms_and_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deepseek_v4(tmp_path, **SIZES)
    expected = _logits(load_model(tmp_path, dtype=mx.float32), 3, 1)
    model = load_model(tmp_path, dtype=mx.bfloat16, backend=CudaBackend())
    ours: set[str] = set()
    launches = ("launch_products", "launch_experts", "launch_norm", "launch_stream_weights")
    for name in launches:
        launch = getattr(headstart_cuda, name)
        monkeypatch.setattr(headstart_cuda, name, lambda *a, n=name, f=launch, **k: ours.add(n) or f(*a, **k))
    names = ("write_entries", "select_entries", "attend_compressed", "mix", "inject")
    stock_names = {name: getattr(Backend, name) for name in names}
    theirs: set[str] = set()
    for name, run in stock_names.items():
        monkeypatch.setattr(
            CudaBackend, name, lambda self, *a, n=name, f=run, **k: theirs.add(n) or f(self, *a, **k), raising=False
        )
    with cuda_on_cpu.emulated():
        found = _logits(model, 3, 1)
    assert mx.linalg.norm(found - expected) < 5e-2 * mx.linalg.norm(expected)
    assert theirs == set(stock_names)
    assert ours == {*launches}
