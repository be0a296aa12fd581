"""Checkpoints of other quantisers are read as their own readers read them: in one of MLX's modes without rounding,
or computed where there is none."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_convert import converted
from test_gguf import assert_same_numbers, numbers

from checkpoints import write
from families import write_family
from fixtures import generate
from headstart.checkpoint import load_model, read_layout
from headstart.checkpoint.names import Names
from headstart.errors import CheckpointError
from headstart.kernels.weights import ScaledLinear
from quantisers import quantised

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
EXACT = [  # and what most matrices become
    ("gptq", {}, "affine"),
    ("gptq", {"bits": 8, "group": 64, "sym": True}, "affine"),
    ("gptq", {"bits": 3, "group": 128}, "affine"),
    ("gptq", {"bits": 2, "v2": True}, "affine"),
    ("gptq", {"group": -1}, "affine"),
    ("awq", {}, "affine"),
    ("awq", {"group": 128}, "affine"),
    ("packed", {}, "affine"),
    ("packed", {"sym": False}, "affine"),
    ("packed", {"bits": 8, "group": -1}, "affine"),
    ("int8", {}, "affine"),
    ("int8", {"sym": False}, "affine"),
    ("fp4", {}, "nvfp4"),
    ("fp4", {"maker": "compressed"}, "nvfp4"),
    ("fp4", {"maker": "mx"}, "mxfp4"),
]
COMPUTED = [
    ("gptq", {"order": True}, "4 bits"),
    ("gptq", {"order": True, "sym": True, "bits": 8}, "8 bits"),
    ("gptq", {"group": 16}, "4 bits"),
    ("packed", {"order": True, "sym": False}, "4 bits"),
    ("fp8", {}, "fp8"),
    ("fp8", {"scales": "tensor"}, "fp8"),
    ("fp8", {"scales": "one"}, "fp8"),
    ("fp8", {"scales": "row"}, "fp8"),
]


@pytest.mark.parametrize(("kind", "options", "mode"), EXACT + COMPUTED)
def test_every_number_is_what_its_own_formula_says(
    tmp_path: Path, kind: str, options: dict[str, Any], mode: str
) -> None:
    folder = write_family(tmp_path, "llama", **SIZES)
    expected = quantised(folder, kind, **options)
    layout = read_layout(folder)
    assert layout.quantization is not None
    assert layout.quantization["mode"] == mode
    names, found = Names(layout.config), numbers(load_model(folder, dtype=mx.float32))
    for name, values in expected.items():
        ours = np.array(found[names.canonical(name)]).astype(np.float64)
        if mode == "nvfp4":  # whose scale for all numbers MLX has times 2688
            assert np.allclose(ours, values, rtol=3e-7, atol=0), name
        else:
            assert np.array_equal(ours, values.astype(np.float32)), name


@pytest.mark.parametrize(("kind", "options"), [("gptq", {}), ("awq", {"group": 32}), ("packed", {}), ("fp4", {})])
@pytest.mark.parametrize("family", ["moe", "deepseek_v3"])
def test_experts_heads_and_latent_attention_are_read_too(
    tmp_path: Path, family: str, kind: str, options: dict[str, Any]
) -> None:
    if family == "moe":
        folder = write(tmp_path, "moe", "raw-per-expert")
    else:
        folder = write_family(tmp_path, family, kv_lora_rank=64, q_lora_rank=64, v_head_dim=32)
    quantised(folder, kind, **options)
    layout = read_layout(folder)
    assert layout.mtp.available, layout.mtp.reason
    model = load_model(folder)
    assert model.has_head
    answer = generate(model, [5, 17, 130, 9], max_tokens=8, k=2)
    assert answer.tokens == generate(model, [5, 17, 130, 9], max_tokens=8, k=0).tokens


def test_a_scale_for_all_numbers_multiplies_the_product(tmp_path: Path) -> None:
    folder = write(tmp_path, "moe", "raw-per-expert")
    expected = quantised(folder, "fp4")
    model = load_model(folder, dtype=mx.float32)
    scaled = {path: m for path, m in model.weights.named_modules() if isinstance(m, ScaledLinear)}
    path, layer = next(iter(scaled.items()))
    x = mx.random.normal((3, layer.weight.shape[1] * 8))
    name = next(name for name in expected if name.endswith(f"{path.removeprefix('model.')}.weight"))
    assert np.allclose(np.array(layer(x)), np.array(x) @ expected[name].T, atol=1e-4)
    assert np.allclose(np.array(layer(x.astype(mx.float16))), np.array(x) @ expected[name].T, rtol=2e-2, atol=2e-2)
    experts = model.weights.layers[0].mlp.switch_mlp.up_proj
    x, chosen = mx.random.normal((1, 1, 64)), mx.array([[3]])
    three = next(
        values for name, values in expected.items() if name.endswith("layers.0.mlp.experts.3.up_proj.weight")
    )
    assert np.allclose(np.array(experts(x[:, None], chosen)).reshape(-1), np.array(x[0, 0]) @ three.T, atol=1e-4)


@pytest.mark.parametrize(("kind", "options"), [("gptq", {}), ("packed", {}), ("fp4", {}), ("fp8", {})])
def test_a_conversion_keeps_every_number(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    folder = write_family(tmp_path / "raw", "llama", **SIZES)
    quantised(folder, kind, **options)
    out = converted(folder, tmp_path / "out", mx.float32)
    assert_same_numbers(load_model(out, dtype=mx.float32), load_model(folder, dtype=mx.float32))
    assert "quant_method" not in json.dumps(json.loads((out / "config.json").read_text()))


def test_what_does_not_fit_together_is_one_line(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "llama", **SIZES)
    quantised(folder, "gptq")
    for file in folder.glob("*.safetensors"):
        arrays: Any = mx.load(str(file))
        cut = {name: a[:1] if name.endswith("scales") else a for name, a in arrays.items()}
        mx.save_safetensors(str(file), {name: mx.contiguous(a) for name, a in cut.items()}, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"config.json makes it|cannot be read as it is quantised"):
        load_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"quant_method": "awq", "version": "gemv"}
    (folder / "config.json").write_text(json.dumps(config))
