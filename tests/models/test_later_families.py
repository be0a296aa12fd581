"""Families of 2026 that mlx-lm alone runs here."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.utils import load as mlx_lm_load

import others
from fixtures import collect, generate, random_prompt, submit
from headstart.checkpoint import load_model
from headstart.engine import Engine
from headstart.models.wrapped import WrappedModel

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
INDEX = {
    "sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_block_size": 4, "sparse_topk_blocks": 2,
    "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1],
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "minimax_m3_vl": {
        "text_config": others.BASE | {
            "model_type": "minimax_m3_vl_text", "num_hidden_layers": 3, "dense_intermediate_size": 128,
            "shared_intermediate_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
            "moe_layer_freq": [0, 1, 1], "rotary_dim": 16, "sparse_attention_config": INDEX,
        },
    },
    "kimi_k3": {
        "text_config": others.BASE | EXPERTS | LATENT | {
            "model_type": "kimi_linear", "num_hidden_layers": 4, "num_key_value_heads": 4, "num_experts": 4,
            "num_experts_per_token": 2, "num_shared_experts": 1, "attn_res_block_size": 2,
            "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
        },
    },
    "deepseek_v41": EXPERTS | {
        "num_hidden_layers": 3, "head_dim": 64, "q_lora_rank": 32, "qk_rope_head_dim": 16, "o_groups": 2,
        "o_lora_rank": 32, "n_routed_experts": 4, "sliding_window": 8, "compress_ratios": [0, 4, 4],
        "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2], "index_n_heads": 2, "index_head_dim": 32,
        "index_topk": 4, "candidate_topk_blocks": 0,
    },
    "bailing_hybrid": EXPERTS | LATENT | {  # Ling 2.6
        "num_hidden_layers": 4, "num_key_value_heads": 4, "num_experts": 8, "num_shared_experts": 1, "n_group": 4,
        "topk_group": 2, "layer_group_size": 2, "group_norm_size": 2, "routed_scaling_factor": 1.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_mlx_lm_runs_families_of_which_we_have_no_trunk(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(others.CONFIGS, family, CONFIGS[family])
    model = load_model(others.write_other(tmp_path, family), dtype=mx.float32)
    assert isinstance(model, WrappedModel)
    assert not model.has_head
    prompt = random_prompt(model, 24)
    theirs, tokenizer = mlx_lm_load(str(tmp_path))
    expected = [each.token for each in stream_generate(theirs, tokenizer, prompt, max_tokens=10)]
    assert generate(model, prompt, max_tokens=10).tokens == expected


@pytest.mark.parametrize("family", ["minimax_m3_vl", "kimi_k3"])
def test_text_does_not_depend_on_drafts_or_neighbours(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as its caches allow them: greedy and seeded, with what it can copy, beside others and after them."""
    monkeypatch.setitem(others.CONFIGS, family, CONFIGS[family])
    model = load_model(others.write_other(tmp_path, family), dtype=mx.float32)
    prompts = [3 * random_prompt(model, 7), random_prompt(model, 12), random_prompt(model, 24)]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {}]
    expected = [generate(model, p, max_tokens=12, k=0, **kind).tokens for p, kind in zip(prompts, kinds, strict=True)]
    engine = Engine(model)
    for k in ("auto", 0, "auto"):
        handles = [submit(engine, p, max_tokens=12, k=k, **kind) for p, kind in zip(prompts, kinds, strict=True)]
        assert [collect(each).tokens for each in handles] == expected
