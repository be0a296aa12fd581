"""GLM-5.3-Flash on emulated devices: our kernels where there are any, MLX's own for the rest.

Metal's kernels run it in `test_metal_families.py`.
"""

from pathlib import Path

import cuda_on_cpu
import mlx.core as mx
import pytest

import headstart.kernels.cuda.backend as headstart_cuda
from families import write_family
from headstart.checkpoint import load_model
from headstart.engine.invariance import _logits
from headstart.kernels import Backend
from headstart.kernels.cuda.backend import CudaBackend
from headstart.kernels.metal import backend
from headstart.kernels.metal.tune_fused import model_operations

STOCK = {"latent_attention", "select_latents", "remember_delta", "delta_recurrence"}
# Half precision chooses other experts and pools: there are few.
CALMER = {"mlp_layer_types": [*["dense"] * 4, "sparse"], "vocab_size": 64, "index_topk": 4}


def test_metal_describes_its_operations_and_promises_no_exact_text(tmp_path: Path) -> None:
    model = load_model(write_family(tmp_path, "glm5_next"), dtype=mx.bfloat16)
    found = {each.operation for each in model_operations(model.weights, model.layers, model.dtype)}
    assert found == {"product", "norm", "experts", "streams"}
    assert not backend._may_be_exact(model.layers)
    assert not CudaBackend().is_exact(model.layers, model.weights, model.dtype)


@pytest.mark.slow
def test_cuda_runs_it_with_our_products_experts_norms_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_family(tmp_path, "glm5_next", **CALMER)
    expected = _logits(load_model(tmp_path, dtype=mx.float32), 3, 1)
    model = load_model(tmp_path, dtype=mx.bfloat16, backend=CudaBackend())
    ours: set[str] = set()
    for name in ("launch_products", "launch_experts", "launch_norm", "launch_stream_weights"):
        launch = getattr(headstart_cuda, name)
        monkeypatch.setattr(headstart_cuda, name, lambda *a, n=name, f=launch, **k: ours.add(n) or f(*a, **k))
    theirs: set[str] = set()
    for name, run in [(name, getattr(Backend, name)) for name in STOCK]:
        monkeypatch.setattr(
            CudaBackend, name, lambda self, *a, n=name, f=run, **k: theirs.add(n) or f(self, *a, **k), raising=False
        )
    with cuda_on_cpu.emulated():
        found = _logits(model, 3, 1)
    assert mx.linalg.norm(found - expected) < 5e-2 * mx.linalg.norm(expected)
    assert theirs == STOCK
    assert ours == {"launch_products", "launch_experts", "launch_norm", "launch_stream_weights"}
