"""Every family on a Mac: what it computes is described, computed by our kernels where there are any, and chosen for
speed where the model cannot be exact."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import metal_on_cpu
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from checkpoints import write
from families import CONFIGS, write_family
from headstart.checkpoint import load_model
from headstart.engine.invariance import _logits
from headstart.kernels import Backend
from headstart.kernels.layers import Layer
from headstart.kernels.metal import backend, choice, device, experts, products, stock
from headstart.kernels.metal.backend import MetalBackend
from headstart.kernels.metal.choice import Candidate, KernelCheck, Operation, Runs, checks, choose
from headstart.kernels.metal.tune import operations
from headstart.kernels.metal.tune_fused import model_operations

# Where half precision often chooses other experts, with which logits differ: fewer choices.
CALMER: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"first_k_dense_replace": 3},
    "glm5_next": {"mlp_layer_types": [*["dense"] * 4, "sparse"]},
}
KERNELS = (device.metal_kernel, products._product_kernel, experts._experts_kernel)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choice, "_decided", {})
    monkeypatch.setattr(choice, "cache_folder", lambda: tmp_path / "kernels")
    monkeypatch.setattr(choice, "identity", lambda: "Apple M4")


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_described(family: str, tmp_path: Path) -> None:
    model = load_model(write_family(tmp_path, family), dtype=mx.bfloat16)
    found = {each.operation for each in model_operations(model.weights, model.layers, model.dtype)}
    assert "undescribed" not in found
    assert ("experts" in found) == any(
        "switch_mlp" in module or "switch_glu" in module for module in model.weights.modules()
    )


class Timed:
    """An operation of two candidates, of which stock is twice as fast and depends on the number of rows."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def operation(self, name: str = "product") -> Operation:
        def run(seconds: float, exact: bool) -> Runs:
            def run(b: slice, w: slice) -> mx.array:
                self.now += seconds
                return mx.ones((16, 1, 4))[b, w] * (1.0 if exact or b.stop - b.start > 8 else 1 + 1e-6)

            return (run,)

        def candidates() -> Mapping[str, Runs | str]:
            return {"stock": run(1.0, exact=False), "metal": run(2.0, exact=True)}

        return Operation(name, "4", candidates)


def test_a_model_that_is_not_exact_for_another_reason_gets_the_fastest() -> None:
    timed = Timed()
    # A later model of this shape may be exact, and stays so.
    for exact, chosen in ((False, "stock"), (True, "metal"), (False, "metal")):
        choose([timed.operation()], clock=timed.clock, exact=exact)
        assert [each.chosen for each in checks()] == [chosen]


def test_what_cannot_be_described_costs_the_others_nothing_but_exactness() -> None:
    model = nn.Module()
    model.lm_head = nn.Linear(32, 12, bias=False)
    model.odd = nn.Module()
    model.odd.switch_mlp = nn.Module()  # a mixture that does not say how many experts a token takes
    found = {each.operation: each for each in operations(model, mx.float32)}
    assert sorted(found) == ["product", "undescribed"]
    timed, odd = Timed(), found["undescribed"]
    choose([timed.operation(), odd], clock=timed.clock)
    assert [(each.operation, each.chosen, each.exact) for each in checks()] == [
        ("product", "stock", False),  # the fastest
        ("undescribed", "stock", False),
    ]
    assert "not exact: product 4, undescribed Module" in choice.kernels_in_use()
    assert not choice.is_exact([odd])


class Asked(Backend):
    """Notes whether what it prepares may be exact on a Mac."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[bool] = []

    def prepare(
        self, weights: nn.Module, dtype: mx.Dtype, layers: Sequence[Layer] = (), *, images: bool = False
    ) -> None:
        self.said.append(backend._may_be_exact(layers))


def test_loading_tells_whether_a_family_may_be_exact(tmp_path: Path) -> None:
    asked = Asked()
    load_model(write(tmp_path / "gated"), backend=asked)
    load_model(write_family(tmp_path / "grouped", "llama"), backend=asked)
    load_model(write_family(tmp_path / "latent", "deepseek_v3"), backend=asked)
    assert asked.said == [True, False, False]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_on_cpu.metal_kernel)
    monkeypatch.setattr(stock, "gated_delta_kernel", gated_delta_ops)  # mlx-lm makes its kernel on a Mac alone
    mx.disable_compile()
    for kernel in KERNELS:
        kernel.cache_clear()
    yield
    mx.enable_compile()
    for kernel in KERNELS:
        kernel.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_runs_with_the_kernels_that_are_chosen_by_shape(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulated: None
) -> None:
    """The shapes of a model's operations are named when it is loaded, and asked for when it runs."""
    write_family(tmp_path, family, vocab_size=64, **CALMER.get(family, {}))
    expected = _logits(load_model(tmp_path, dtype=mx.float32), 3, 1)
    model = replace(load_model(tmp_path, dtype=mx.bfloat16), backend=MetalBackend())
    described, taken = model_operations(model.weights, model.layers, model.dtype), set()
    for operation in described:
        name, run = next(each for each in operation.candidates().items() if each[0].startswith("metal"))
        if not isinstance(run, str):
            taken.add(operation.operation)
            kernel = KernelCheck(operation.operation, operation.shape, name, True, (Candidate(name, None, True),))
            choice._decided[f"{operation.operation} {operation.shape}"] = kernel
    asked: set[tuple[str, str]] = set()
    monkeypatch.setattr(backend, "chosen_kernel", lambda *shape: asked.add(shape) or choice.chosen_kernel(*shape))
    found = _logits(model, 3, 1)
    assert mx.linalg.norm(found - expected) < 5e-2 * mx.linalg.norm(expected)
    assert asked <= {(each.operation, each.shape) for each in described}
    assert taken == {each.operation for each in described} >= {"product", "norm"}
