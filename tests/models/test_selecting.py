"""DeepSeek-V3.2 and GLM-5: which layers have an index, what stays of it in conversions, what it keeps of a token."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from families import write_family
from fixtures import random_prompt
from headstart.checkpoint import load_model, read_layout
from headstart.checkpoint.convert import convert, plan_conversion
from headstart.checkpoint.quantize import Recipe
from headstart.errors import CheckpointError
from headstart.models.deepseek_v32 import indexer_types


def test_indexer_types_are_read_as_in_transformers() -> None:
    full, shared = "full", "shared"
    assert indexer_types({"num_hidden_layers": 3}) == [full] * 3
    assert indexer_types({"num_hidden_layers": 3, "index_topk_pattern": "FSF"}) == [full, shared, full]
    every = {"num_hidden_layers": 8, "index_topk_freq": 3, "index_skip_topk_offset": 2}
    assert indexer_types(every) == [full, full, shared, shared, full, shared, shared, full]


@pytest.mark.parametrize("kinds", [["shared"] * 4, ["full"] * 3, ["full", "full", "other", "full"]])
def test_layers_without_an_index_to_follow_are_refused(kinds: list[str], tmp_path: Path) -> None:
    folder = write_family(tmp_path, "glm_moe_dsa")
    config = json.loads((folder / "config.json").read_text()) | {"indexer_types": kinds}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="indexer_types"):
        read_layout(folder)


def test_a_conversion_keeps_the_index_as_it_is(tmp_path: Path) -> None:
    raw = read_layout(write_family(tmp_path / "raw", "glm_moe_dsa", dtype=mx.bfloat16))
    convert(plan_conversion(raw, tmp_path / "kept", Recipe(mx.bfloat16, bits=4, group_size=32)))
    weights = load_model(tmp_path / "kept", dtype=mx.bfloat16).weights
    for layer in (weights.layers[0], weights.mtp.layers[0]):
        indexer = layer.self_attn.indexer
        assert indexer.weights_proj.weight.dtype == mx.float32
        assert "scales" not in indexer.wk
        assert "scales" in layer.self_attn.o_proj
    assert "indexer" not in weights.layers[1].self_attn


def test_layers_with_an_index_keep_its_keys(tmp_path: Path) -> None:
    model = load_model(write_family(tmp_path, "glm_moe_dsa"), dtype=mx.float32)
    state, tokens = model.make_state(1), mx.array([random_prompt(model, 9)])
    assert [len(layer.index) for layer in state.kv_layers] == [1, 0, 1, 1]
    model.trunk(tokens, state, certain=9)
    assert state.kv_layers[0].index[0].shape[::3] == (1, 32)
