"""DeepSeek-V4's files: as released in FP8 and FP4, as transformers writes them, converted and grafted."""

import json
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

from deepseek_v4 import in_released_types, make_config, released_arrays, write_deepseek_v4
from fixtures import generate, random_prompt
from headstart.checkpoint import load_model, read_layout
from headstart.checkpoint.convert import convert, plan_conversion
from headstart.checkpoint.graft import graft, plan_graft
from headstart.checkpoint.quantize import Recipe
from headstart.checkpoint.safetensors import read_header
from headstart.cli.main import app
from headstart.errors import CheckpointError
from headstart.kernels.streams import HyperConnection
from headstart.models import Model


def logits(model: Model) -> np.ndarray:
    tokens = mx.array([random_prompt(model, 24)])
    hidden = model.trunk(tokens, model.make_state(1), certain=24)
    state = model.make_head_state(1)
    drafted = model.head(hidden, tokens, state)
    return np.array(mx.concatenate([model.logits(hidden), model.draft_logits(drafted)]).astype(mx.float32))


def widened(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return what FP8 and FP4 stand for, in float32."""
    made = {}
    for name, array in arrays.items():
        scale = arrays.get(name.removesuffix("weight") + "scale")
        if name.endswith(".scale"):
            continue
        if array.dtype == mx.int8:
            array = mx.dequantize(array.view(mx.uint32), scale, None, 32, 4, "mxfp4", dtype=mx.float32)
        elif array.dtype == mx.uint8:
            assert scale is not None
            scale = 2.0 ** (scale.astype(mx.float32) - 127) if scale.dtype == mx.uint8 else scale
            wide = mx.repeat(mx.repeat(scale, 128, axis=0), 128, axis=1)[: array.shape[0], : array.shape[1]]
            array = mx.from_fp8(array, dtype=mx.float32) * wide
        made[name] = array
    return made


@pytest.mark.parametrize(("experts", "modes"), [("fp4", {"mxfp4", "mxfp8"}), ("fp8", {"fp8"})])
def test_the_release_is_read_in_its_own_types(tmp_path: Path, experts: str, modes: set[str]) -> None:
    """FP8 and FP4 with scales that are powers of two stay as they are; FP8 with others is computed."""
    wide = {"num_hidden_layers": 2, "compress_ratios": [0, 4, 0], "num_hash_layers": 1, "q_lora_rank": 160}
    arrays = in_released_types(released_arrays(make_config(**wide)), experts=experts)
    method = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    folder = write_deepseek_v4(tmp_path / "packed", arrays=arrays, dtype=mx.float32, **wide, **method)
    layout = read_layout(folder)
    assert {how["mode"] for how in layout.quantized.values()} == modes
    assert layout.mtp.available
    kept = [name for name, how in layout.quantized.items() if "compressor." in name or "hc" in name]
    assert not [name for name in kept if not name.endswith("indexer.q_b_proj")]
    expected = load_model(write_deepseek_v4(tmp_path / "wide", arrays=widened(arrays), **wide), dtype=mx.float32)
    found = logits(load_model(folder, dtype=mx.float32))
    assert np.abs(found - logits(expected)).max() < 1e-4 * np.ptp(found)


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    config, arrays = make_config(), released_arrays(make_config())
    released = load_model(write_deepseek_v4(tmp_path / "released", arrays=arrays), dtype=mx.float32)
    count = config["num_hidden_layers"]
    theirs = {name: value for name, value in config.items() if name not in ("compress_ratios", "compress_rate_hca")}
    theirs |= {
        "layer_types": [
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * (count - 2),
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "compress": {
                **config["rope_scaling"], "rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0,
            },
        },
    }  # fmt: skip
    for name in ("num_hash_layers", "qk_rope_head_dim", "rope_scaling"):
        theirs.pop(name)
    found = {}
    for name, array in arrays.items():
        if name.startswith("mtp."):
            continue
        for pattern, ours in (
            (r"^hc_head_", "model.hc_head.hc_"), (r"^embed\.", "model.embed_tokens."), (r"^head\.", "lm_head."),
            (r"^(layers|norm)\.", r"model.\1."), (r"\.hc_(attn|ffn)_(\w+)$", r".\1_hc.\2"),
        ):  # fmt: skip
            name = re.sub(pattern, ours, name)
        found[name] = array
    for mlp in {name.partition(".experts.")[0] for name in found if ".experts." in name}:
        parts = [
            mx.stack([found.pop(f"{mlp}.experts.{n}.{part}.weight") for n in range(8)]) for part in ("w1", "w3", "w2")
        ]
        found[f"{mlp}.experts.gate_up_proj"] = mx.concatenate(parts[:2], axis=1)
        found[f"{mlp}.experts.down_proj"] = parts[2]
    folder = write_deepseek_v4(tmp_path / "theirs", arrays=found)
    (folder / "config.json").write_text(json.dumps(theirs))
    model, prompt = load_model(folder, dtype=mx.float32), random_prompt(released, 30)
    assert not model.has_head
    assert generate(model, prompt, max_tokens=8).tokens == generate(released, prompt, max_tokens=8).tokens


def test_a_conversion_keeps_what_decides_mixes_and_compresses(tmp_path: Path) -> None:
    source = write_deepseek_v4(tmp_path / "raw", dtype=mx.bfloat16)
    new, four = tmp_path / "new", tmp_path / "four"
    convert(plan_conversion(read_layout(source), new, Recipe(mx.bfloat16)))
    assert np.array_equal(logits(load_model(new, dtype=mx.float32)), logits(load_model(source, dtype=mx.float32)))
    result = CliRunner().invoke(app, ["convert", str(source), str(four), "--bits", "4", "--group-size", "32"])
    assert result.exit_code == 0, result.output
    types = {name: tensor.dtype for name, tensor in read_header(four / "model.safetensors").tensors.items()}
    for ending, dtype in (
        ("hc.fn.weight", mx.float32),
        ("hc.base", mx.float32),
        ("position_bias", mx.float32),
        ("sinks", mx.float32),
        ("compressor.gate_proj.weight", mx.bfloat16),
        ("indexer.kv_proj.weight", mx.bfloat16),
        ("indexer.q_b_proj.weight", mx.bfloat16),
        ("scorer.weights_proj.weight", mx.bfloat16),
        ("self_attn.q_b_proj.weight", mx.uint32),
        ("self_attn.o_a_proj.weight", mx.uint32),
        ("switch_mlp.up_proj.weight", mx.uint32),
        ("shared_experts.up_proj.weight", mx.uint32),
    ):
        assert {found for name, found in types.items() if name.endswith(ending)} == {dtype}, ending
    head = read_header(four / "mtp/weights.safetensors").tensors
    assert {head[f"mtp.layers.0.{name}.weight"].dtype for name in ("e_proj", "h_proj")} == {mx.bfloat16}
    model, prompt = load_model(four, dtype=mx.float32), random_prompt(load_model(source), 20)
    assert generate(model, prompt, max_tokens=12, k=3).tokens == generate(model, prompt, max_tokens=12, k=0).tokens
    shown = json.loads(CliRunner().invoke(app, ["inspect", str(four), "--json"]).output)
    assert shown["native_mtp"]["available"]
    assert shown["index"]["layers"] == 2
    assert shown["entries"]["layers"] == 3
    assert shown["streams"] == {"layers": 5, "bytes": sum(a.nbytes for a in hyper(load_model(four)))}


def hyper(model: Model) -> list[mx.array]:
    return [
        array
        for module in model.weights.modules()
        if isinstance(module, HyperConnection)
        for array in (module.fn.weight, module.base, module.scale)
    ]


def test_a_graft_brings_back_the_head_that_a_conversion_keeps(tmp_path: Path) -> None:
    source, new = write_deepseek_v4(tmp_path / "raw", dtype=mx.bfloat16), tmp_path / "new"
    convert(plan_conversion(read_layout(source), new, Recipe(mx.bfloat16, bits=4, group_size=32)))
    kept = (new / "mtp/weights.safetensors").read_bytes()
    (new / "mtp/weights.safetensors").unlink()
    graft(plan_graft(read_layout(new), source))
    assert (new / "mtp/weights.safetensors").read_bytes() == kept
    other = write_deepseek_v4(tmp_path / "other", seed=1, dtype=mx.bfloat16)
    (new / "mtp/weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match="another model of the same sizes"):
        plan_graft(read_layout(new), other)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"compress_ratios": [0, 4, 128, 4, 4]}, "gives the head entries"),
        ({"compress_ratios": [0, 4, 64, 4, 0]}, "compress_ratios must be some of 0, 4, 128"),
        ({"compress_rate_hca": 48}, "only divisors of 256"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 1"),
        ({"n_shared_experts": 2}, "n_shared_experts must be 1"),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh' is none of"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rotation 'linear' is not yarn"),
        ({"hc_sinkhorn_iters": 10**9}, "hc_sinkhorn_iters is 1000000000; it must be a whole number from 1 to 100"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be a whole number from 1 to 8"),
        ({"num_hash_layers": 1, "mlp_layer_types": ["moe"]}, "mlp_layer_types must name"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, changed: dict, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config(**changed)))
    with pytest.raises(CheckpointError, match=reason):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    "table", [mx.full((256, 3), 8, mx.int64), mx.full((256, 3), -1, mx.int64), mx.zeros((256, 3))]
)
def test_a_table_that_names_experts_there_are_not_is_refused(tmp_path: Path, table: mx.array) -> None:
    arrays = released_arrays(make_config()) | {"layers.1.ffn.gate.tid2eid": table}
    with pytest.raises(CheckpointError, match="names experts that are none of the 8 there are"):
        load_model(write_deepseek_v4(tmp_path, arrays=arrays))
