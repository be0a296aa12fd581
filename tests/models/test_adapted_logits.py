"""Logits with a LoRA adapter are mlx-lm's with the same adapter, for every sequence of a batch."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.tuner.utils import load_adapters

from adapters import write_adapter
from checkpoints import write
from families import write_family
from headstart.checkpoint import load_model
from headstart.errors import AdapterError
from headstart.models import Model

TOKENS = mx.array([[3, 5, 7, 11, 13, 17, 19, 23]])
OTHERS = ("qwen3_moe", "deepseek_v3", "nemotron_h")


def logits(model: Model, *adapters: int) -> mx.array:
    """Of one window for each of these adapters."""
    state = model.make_state(len(adapters))
    state.adapt(list(adapters))
    return model.logits(model.trunk(mx.repeat(TOKENS, len(adapters), axis=0), state, certain=TOKENS.shape[1]))


@pytest.mark.parametrize(
    ("family", "bits", "kernels"),
    [
        pytest.param("dense", 4, "native", marks=pytest.mark.slow),
        ("moe", 4, "native"),
        pytest.param("moe", None, "stock", marks=pytest.mark.slow),
        pytest.param("next", None, "native", marks=pytest.mark.slow),
        ("qwen3_moe", None, "stock"),
        pytest.param("deepseek_v3", None, "native", marks=pytest.mark.slow),
        pytest.param("nemotron_h", None, "native", marks=pytest.mark.slow),
    ],
)
def test_each_sequence_has_the_logits_of_mlx_lm_with_its_adapter(
    family: str, bits: int | None, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "stock":
        monkeypatch.setattr("headstart.kernels.cpu.load._loaded", None)
        monkeypatch.setenv("HEADSTART_KERNELS", "stock")
    folder = tmp_path / "model"
    if family in OTHERS:
        write_family(folder, family)
    else:
        write(folder, family, "raw" if bits is None else "converted", dtype=mx.float32, bits=bits)
    first = write_adapter(tmp_path / "first", folder)
    last = write_adapter(tmp_path / "last", folder, seed=2, rank=7, scale=3.0, num_layers=1)  # leaves others alone
    model = load_model(folder, dtype=mx.float32, adapters={"first": first, "last": last})
    plain = logits(load_model(folder, dtype=mx.float32), -1)
    for index, path in enumerate((first, last)):
        expected = load_adapters(load_model(folder, dtype=mx.float32).lm, str(path))(TOKENS)
        found = logits(model, index)
        assert mx.abs(found - expected).max() < 1e-5 * mx.abs(expected).max()  # as without an adapter
        assert mx.abs(found - plain).max() > 0.1 * mx.abs(expected).max()
    base = logits(model, -1)
    if kernels == "native":
        assert mx.array_equal(base, plain)  # adapters that nobody uses change nothing
    assert mx.abs(base - plain).max() < 1e-5 * mx.abs(plain).max()
    mixed = logits(model, 1, -1, 0, 0)
    for row, alone in enumerate((logits(model, 1), base, logits(model, 0), logits(model, 0))):
        assert mx.array_equal(mixed[row], alone[0])


@pytest.mark.parametrize("family", ["step3p5", "longcat_flash"])
def test_a_router_that_mlx_lm_computes_itself_cannot_be_adapted(family: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", family)
    with pytest.raises(AdapterError, match=r"changes model\.layers\.\d\.mlp\.[\w.]+, which is not adapted"):
        load_model(folder, adapters={"all": write_adapter(tmp_path / "all", folder)})
