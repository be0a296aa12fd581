"""What the check at load costs: pipelines that are compiled, waits for the device, bytes that are read."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from fixtures import builtin_model, write_any
from headstart.checkpoint import load_model
from headstart.kernels.metal import backend, choice, device, experts, fused, products, stock, tune_fused
from headstart.kernels.metal.backend import MetalBackend
from headstart.kernels.metal.tune import operations
from headstart.kernels.weights import matrix_weights
from headstart.models import Model

KERNELS = (device.metal_kernel, products._product_kernel, experts._experts_kernel)
# Heads as released models have them: MLX passes what there are fewer than 8 of in another address space.
SIZES = {"linear_num_value_heads": 8, "num_attention_heads": 8, "vocab_size": 64}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Counter[object]]:
    """Launches of each pipeline, on a simulated device that compiles what MLX would and returns zeros."""
    found: Counter[object] = Counter()

    def metal_kernel(**kernel: Any) -> Callable[..., list[mx.array]]:
        def launch(**given: Any) -> list[mx.array]:
            types = tuple((array.dtype, array.size < 8) for array in given["inputs"])
            found[kernel["name"], str(given["template"]), types] += 1
            made = zip(given["output_shapes"], given["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in made]

        return launch

    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    monkeypatch.setattr(stock, "gated_delta_kernel", gated_delta_ops)
    monkeypatch.setattr(choice, "_decided", {})
    monkeypatch.setattr(choice, "identity", lambda: "Apple M4")
    monkeypatch.setattr(choice, "cache_folder", lambda: tmp_path / "kernels")
    monkeypatch.setattr(choice, "REPEATS", 1)
    monkeypatch.setattr(choice, "LAUNCHES", 1)
    monkeypatch.setattr(choice, "_distance", lambda found, expected: (mx.zeros(()), mx.zeros(())))
    monkeypatch.setattr(choice, "_score", lambda candidate: candidate.name.startswith("stock"))  # ours are faster
    for kernel in KERNELS:
        kernel.cache_clear()
    yield found
    for kernel in KERNELS:
        kernel.cache_clear()


def quantised(family: str, folder: Path) -> Model:
    model = load_model(write_any(folder, family, **SIZES), dtype=mx.bfloat16)
    nn.quantize(model.weights, 32, 4, class_predicate=lambda _, module: hasattr(module, "to_quantized"))
    return model


@pytest.mark.parametrize(("family", "most"), [("dense", 25), pytest.param("moe", 36, marks=pytest.mark.slow)])
def test_no_more_is_compiled_than_a_model_uses(
    family: str, most: int, compiled: Counter[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(choice, "wait", lambda arrays: waits.append(len(arrays)) or mx.eval(arrays))
    model = quantised(family, tmp_path)
    MetalBackend().prepare(model.weights, mx.bfloat16, (*model.layers, *model.head_layers))
    assert 0 < len(compiled) <= most
    # Of each candidate: one to compare, six turns at two widths, one to look at all forms.
    candidates = sum(len(each.candidates) for each in choice.checks())
    assert len(waits) <= (1 + (1 + choice.REPEATS) * len(choice.TIMED) + 1) * candidates


def prepared(tmp_path: Path, **given: bool) -> tuple[Model, MetalBackend]:
    model, metal = quantised("dense", tmp_path), MetalBackend()
    metal.prepare(model.weights, mx.bfloat16, (*model.layers, *model.head_layers), **given)
    assert metal.is_exact(model.layers, model.weights, mx.bfloat16)
    return model, metal


def forms_of(operation: str) -> set[int]:
    return {each.forms for each in choice.checks() if each.operation == operation}


def test_what_replaces_kernels_that_are_not_chosen_is_checked(
    compiled: Counter[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepared(tmp_path / "as chosen")
    assert forms_of("attention") == set()
    assert (forms_of("product"), forms_of("norm")) == ({1}, {1})

    def fails(*given: object) -> None:
        raise RuntimeError("no such function")

    choice._decided.clear()
    (tmp_path / "kernels" / "metal.json").unlink()
    monkeypatch.setattr(tune_fused, "metal_attend_into", fails)
    order = ("metal-apart", "metal")
    monkeypatch.setattr(choice, "_score", lambda each: order.index(each.name) if each.name in order else 2)
    prepared(tmp_path / "apart")
    assert forms_of("attention") == {1}
    assert (forms_of("product"), forms_of("norm")) == ({4}, {2})


def test_attention_to_images_is_checked(compiled: Counter[object], tmp_path: Path) -> None:
    prepared(tmp_path, images=True)
    assert forms_of("attention") == {1}


def test_products_of_layers_that_get_adapters_are_checked_again(
    compiled: Counter[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, metal = prepared(tmp_path)
    monkeypatch.setattr(fused, "has_adapters", lambda *layers: True)
    metal.prepare(model.weights, mx.bfloat16, model.layers)
    assert forms_of("product") == {4}


def test_weights_that_nothing_is_multiplied_beside_are_checked_alone() -> None:
    model = builtin_model("tiny-qwen3.5-moe")
    forms = {
        each.shape: each.forms
        for each in operations(model.weights, model.dtype, model.layers)
        if each.operation == "product"
    }
    assert max(forms.values()) > 1
    unknown = operations(model.weights, model.dtype)
    assert {each.forms for each in unknown if each.operation == "product"} == {4}, "all that there could be"


def test_of_a_large_matrix_a_part_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SAMPLED", 64 << 10)
    monkeypatch.setattr(products, "LEAST_OUTPUTS", 16)
    layer = nn.QuantizedLinear(256, 1024, bias=True, group_size=64, bits=4)
    weights = matrix_weights(layer)
    part = products.first_outputs(layer, weights)
    assert 256 <= part.weight.shape[0] < 512
    assert sum(array.nbytes for array in matrix_weights(part).arrays()) <= 64 << 10
    x = mx.random.normal((3, 256))
    assert mx.array_equal(part(x), layer(x)[:, : part.weight.shape[0]])
    assert layer.weight.shape[0] == 1024
    small = nn.Linear(64, 64, bias=False)
    assert products.first_outputs(small, matrix_weights(small)) is small


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_once_it_takes_a_moment(
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    progress = backend.CheckProgress(lambda: now[0])
    monkeypatch.setattr(backend.sys.stderr, "isatty", lambda: terminal)
    said = lambda: capsys.readouterr().err if terminal else caplog.text  # noqa: E731
    progress(0, 40, "product 12×32")
    now[0] = 0.9
    progress(1, 40, "norm 64")
    assert not said()
    now[0] = 1.1
    progress(2, 40, "norm 128")
    assert ("2 of 40 norm 128" if terminal else "Checking 40 Metal kernels") in said()
    progress(40, 40, "")
    if terminal:
        assert said() == "\r\x1b[K", "nothing is left of it"
