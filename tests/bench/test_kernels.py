"""What `probe` says of the kernels that compute a model."""

import mlx.nn as nn
import pytest

from fixtures import random_model
from headstart.bench import kernels
from headstart.kernels import cpu


@pytest.mark.usefixtures("stock_ops")
def test_without_kernels_of_ours_everything_is_the_library_s() -> None:
    used = kernels.kernels_in_use(random_model())
    assert set(used) == {"products", "CPU", "attention", "recurrence"}
    assert used.pop("CPU") == "stock (this test)"
    assert not any(kernels.OURS in name for name in used.values())


@pytest.mark.skipif(cpu.native() is None, reason="no CPU kernels here")
@pytest.mark.parametrize("family", ["dense", "moe"])
def test_on_a_cpu_all_is_ours(family: str) -> None:
    used = kernels.kernels_in_use(random_model(family))
    assert used["CPU"].startswith("native (")
    assert used["attention"] == used["recurrence"] == kernels.OURS
    assert "mlx's" not in used["products"]


@pytest.mark.usefixtures("stock_ops")
def test_products_that_ours_do_not_take_are_counted_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on_cuda", lambda: True)
    model = random_model()
    matrices = [leaf for _, leaf in model.weights.named_modules() if isinstance(leaf, nn.Linear | nn.Embedding)]
    assert kernels._products(model) == f"Headstart's for 0, mlx's for {len(matrices)} (activations are float32)"
