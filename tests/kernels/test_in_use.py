"""What `probe` can say of the products."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from headstart.kernels import in_use


def test_every_matrix_is_named_with_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(
        nn.Linear(64, 64, bias=False), nn.Linear(40, 64, bias=False), nn.Linear(64, 64), nn.RMSNorm(64)
    )
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, class_predicate=lambda path, module: path == "layers.0")
    without = in_use.products_in_use(model, mx.bfloat16)
    assert set(without.values()) == {"mlx's, as there is no CUDA device"}
    monkeypatch.setattr(in_use, "on_cuda", lambda: True)
    assert in_use.products_in_use(model, mx.bfloat16) == {
        "layers.0": "ours, 4 bits in groups of 64",
        "layers.1": "mlx's, as 40 inputs are no multiple of 32",
        "layers.2": "ours, 16 bits",
    }
