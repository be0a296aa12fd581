"""A model with Metal kernels in all places, run on the CPU: what loading checks, and that windows change no bit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import metal_on_cpu
import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from checkpoints import write
from fixtures import FAMILIES, random_model
from headstart.checkpoint import load_model
from headstart.engine.invariance import _logits
from headstart.kernels.metal import attention, choice, device, experts, products, stock, tune
from headstart.kernels.metal.backend import MetalBackend
from headstart.kernels.metal.choice import Candidate, KernelCheck
from headstart.kernels.metal.tune_fused import model_operations

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("stock_ops")]
KERNELS = (device.metal_kernel, products._product_kernel, experts._experts_kernel)
SIZES = {"head_dim": 32, "linear_value_head_dim": 32, "linear_key_head_dim": 32}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_on_cpu.metal_kernel)
    monkeypatch.setattr(choice, "_decided", {})
    monkeypatch.setattr(stock, "gated_delta_kernel", gated_delta_ops)
    monkeypatch.setattr(attention, "SPLIT", 8)
    mx.disable_compile()
    for kernel in KERNELS:
        kernel.cache_clear()
    yield
    mx.enable_compile()
    for kernel in KERNELS:
        kernel.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_loading_checks_is_found_right_and_independent(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "LENGTHS", (12, 3, 0, 5, 7, 1, 9, 2))
    monkeypatch.setattr(tune, "WIDEST", 4)
    monkeypatch.setattr(tune, "STRIDE", 8)
    monkeypatch.setattr(choice, "TIMED", (1,))
    monkeypatch.setattr(choice, "REPEATS", 1)
    monkeypatch.setattr(choice, "LAUNCHES", 1)
    monkeypatch.setattr(choice, "_score", lambda candidate: candidate.name.startswith("stock"))  # ours first
    model = random_model(family, **SIZES)
    for operation in model_operations(model.weights, model.layers, model.dtype, images=True):
        if operation.operation in ("product", "experts"):  # see test_metal_kernels.py
            continue
        check = choice.decide(operation)
        assert all(each.exact for each in check.candidates if each.name == "metal"), check
        assert check.candidates[-1].name == "metal"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_has_the_same_logits_alone_and_in_windows(family: str, tmp_path: Path) -> None:
    write(tmp_path, family, vocab_size=64, **SIZES)
    model = load_model(tmp_path, dtype=mx.bfloat16)
    plain = model if family == "dense" else load_model(tmp_path, dtype=mx.float32)  # mlx's CPU has no other experts
    expected = _logits(plain, 3, 1)
    mx.eval(expected)
    for operation in model_operations(model.weights, model.layers, model.dtype):
        name, run = next(each for each in operation.candidates().items() if each[0].startswith("metal"))
        assert not isinstance(run, str), run
        kernel = KernelCheck(operation.operation, operation.shape, name, True, (Candidate(name, None, True),))
        choice._decided[f"{operation.operation} {operation.shape}"] = kernel
    model = replace(model, backend=MetalBackend())
    found = _logits(model, 3, 1)
    assert mx.linalg.norm(found - expected) < 5e-2 * mx.linalg.norm(expected)  # sixteen bits, several layers
    assert not mx.array_equal(found, expected), "other kernels round in another way"
    assert family == "dense" or experts._experts_kernel.cache_info().currsize
    assert mx.array_equal(_logits(model, 1, 1)[0, 0], found[0, 0])
    assert mx.array_equal(_logits(model, 2, 2)[1], found[0, :2])
    count = len(choice.checks())
    assert str(model.backend) == f"native (metal, {count} of {count} operations)"
