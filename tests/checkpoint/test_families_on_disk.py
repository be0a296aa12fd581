"""Checkpoints of every family: converted with the head, stripped, grafted; heads from elsewhere; bad input."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as mlx_lm_load
from test_convert import converted
from test_load import assert_same

import gemma4
from checkpoints import save, write
from families import CONFIGS, HEADS, NOT_IN_MLX_LM, write_family
from headstart.checkpoint import load_model, read_layout
from headstart.checkpoint.convert import SIDECAR
from headstart.checkpoint.graft import graft, plan_graft
from headstart.engine.invariance import is_batch_invariant
from headstart.errors import CheckpointError, HeadError
from headstart.models import text_config

OTHER_ROPE = (
    "glm_moe_dsa",
    "glm5_next",
    "ministral3",
    "mistral3",
    "step3p5",
    "step3p7",
    "nemotron_h",
    *gemma4.CONFIGS,
)  # rope_parameters in both, a list, none at all


def stripped(kept: Path, folder: Path) -> Path:
    """What mlx-lm would have written: the same trunk without a head."""
    shutil.copytree(kept, folder, ignore=shutil.ignore_patterns("mtp"))
    change(folder, mlx_lm_extra_tensors=None)
    assert not read_layout(folder).mtp.available
    return folder


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    text_config(config).update(fields)
    (folder / "config.json").write_text(json.dumps(config))


QUANTISED = ("glm4_moe", "nemotron_h", "longcat_flash", "qwen3_moe")
LIKE_OTHERS = ("mistral", "mistral3", "qwen2")  # llama and ministral3, as far as files go
CONVERSIONS = [  # each one way in ordinary tests
    pytest.param(
        family,
        bits,
        marks=pytest.mark.slow if (bits == 4) != (family in QUANTISED) or family in LIKE_OTHERS else [],
    )
    for family in CONFIGS
    for bits in (None, 4)
]


@pytest.mark.parametrize(("family", "bits"), CONVERSIONS)
def test_a_conversion_is_the_release_and_a_graft_brings_its_head_back(
    tmp_path: Path, family: str, bits: int | None
) -> None:
    raw = write_family(tmp_path / "raw", family, dtype=mx.bfloat16)
    kept = converted(raw, tmp_path / "kept", bits=bits, group_size=32)
    layout = read_layout(kept)
    assert layout.layout == "converted"
    assert layout.mtp.available == (family in HEADS)
    assert is_batch_invariant(load_model(kept))  # in bfloat16 too, quantised or not
    if family not in (
        "ernie4_5_moe",
        *NOT_IN_MLX_LM,
    ):  # of which mlx-lm takes `moe_layer_end_index: -1` for no experts at all
        mlx_lm_load(kept, lazy=True)
    if bits is None:
        assert_same(load_model(raw, dtype=mx.float32), load_model(kept, dtype=mx.float32))
    if family in HEADS:
        lost = stripped(kept, tmp_path / "lost")
        graft(plan_graft(read_layout(lost), raw, group_size=32))
        assert (lost / SIDECAR).read_bytes() == (kept / SIDECAR).read_bytes()
        assert_same(load_model(kept), load_model(lost))


@pytest.mark.parametrize("family", [name for name in CONFIGS if name not in OTHER_ROPE])
def test_configs_of_transformers_4_and_5_are_the_same_model(tmp_path: Path, family: str) -> None:
    old = write_family(tmp_path / "old", family)
    new = Path(shutil.copytree(old, tmp_path / "new"))
    config = json.loads((new / "config.json").read_text())
    parameters = {
        "rope_type": "default",
        "rope_theta": config.pop("rope_theta"),
        **(config.pop("rope_scaling", None) or {}),
    }
    if "partial_rotary_factor" in config:
        parameters["partial_rotary_factor"] = config.pop("partial_rotary_factor")
    if family == "exaone_moe":
        config["mlp_layer_types"] = ["sparse" if experts else "dense" for experts in config.pop("is_moe_layer")]
    (new / "config.json").write_text(json.dumps({**config, "rope_parameters": parameters}))
    tokens = mx.array([[5, 17, 3, 200, 41, 8, 99]])
    first, second = (load_model(folder, dtype=mx.float32) for folder in (old, new))
    assert mx.array_equal(*(m.logits(m.trunk(tokens, m.make_state(1), certain=7)) for m in (first, second)))


def test_nemotrons_config_of_transformers_5_is_the_same_model(tmp_path: Path) -> None:
    old = write_family(tmp_path / "old", "nemotron_h", time_step_limit=[0.0, float("inf")])
    new = Path(shutil.copytree(old, tmp_path / "new"))
    config = json.loads((new / "config.json").read_text())
    kinds = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    for pattern, types in (
        ("hybrid_override_pattern", "layer_types"),
        ("mtp_hybrid_override_pattern", "mtp_layers_block_type"),
    ):
        config[types] = [kinds[each] for each in config.pop(pattern)]
    del config["num_hidden_layers"]
    config["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    (new / "config.json").write_text(json.dumps(config))
    models = [load_model(folder) for folder in (old, new)]
    assert_same(*models)
    assert [list(model.lm.args.time_step_limit) for model in models] == 2 * [[0.0, float("inf")]]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_head_without_copies_of_embedding_and_output_layer_uses_the_trunks(tmp_path: Path, family: str) -> None:
    whole = write_family(tmp_path / "whole", family)
    shared = drop(Path(shutil.copytree(whole, tmp_path / "shared")), "layers.2.embed_tokens", "shared_head.head")
    models = [load_model(folder, dtype=mx.float32) for folder in (whole, shared)]
    names = [{name for name, _ in tree_flatten(model.weights.parameters())} for model in models]
    assert names[0] - names[1] == {"mtp.layers.0.embed_tokens.weight", "mtp.layers.0.shared_head.head.weight"}
    tokens, hidden = mx.array([[5, 17, 3]]), mx.random.normal((1, 3, 64))
    outputs = [m.draft_logits(m.head(hidden, tokens, m.make_head_state(1))) for m in models]
    assert mx.array_equal(*outputs)  # the copies are the same


def drop(folder: Path, *parts: str) -> Path:
    """Remove tensors from the shards and the index."""
    for file in folder.glob("*.safetensors"):
        arrays: Any = mx.load(str(file))
        save(
            file, {name: a for name, a in arrays.items() if not any(part in name for part in parts)}, {"format": "pt"}
        )
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    kept = {name: file for name, file in content["weight_map"].items() if not any(part in name for part in parts)}
    index.write_text(json.dumps(content | {"weight_map": kept}))
    return folder


# -- heads from elsewhere


def drafter(folder: Path, family: str, **options: Any) -> Path:
    """What mlx-vlm's `split_mtp` writes: the head's tensors without their prefix, converted, in a folder."""
    source = write(folder.with_name("of-drafter"), family, "sidecar", **options)
    arrays: Any = mx.load(str(source / "mtp.safetensors"))
    folder.mkdir()
    save(folder / "model.safetensors", {n.removeprefix("mtp."): a for n, a in arrays.items()}, {"format": "mlx"})
    text = text_config(json.loads((source / "config.json").read_text()))
    config = {"model_type": "qwen3_5_mtp", "block_size": 3, "tie_word_embeddings": False, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "moe")), "next"]
)
def test_a_drafters_folder_is_a_head(tmp_path: Path, family: str) -> None:
    model = write(tmp_path / "model", family, "stripped")
    expected = load_model(write(tmp_path / "whole", family, "converted"))
    source = drafter(tmp_path / "drafter", family)
    loaded = load_model(model, head=source)
    assert loaded.has_head
    assert_same(expected, loaded)
    graft(plan_graft(read_layout(model), source))
    assert_same(expected, load_model(model))


def test_the_head_of_another_folder_replaces_the_models_own(tmp_path: Path) -> None:
    model, raw = write(tmp_path / "model", "dense", "converted", bits=4), write(tmp_path / "raw", "dense")
    arrays = [load_model(model, head=head).weights.mtp.layers[0].mlp.up_proj.weight for head in (None, raw)]
    assert load_model(model, head=raw, mtp=False).has_head is False
    assert mx.array_equal(arrays[0], arrays[1])


def test_the_head_of_a_family_with_layers_comes_from_the_release(tmp_path: Path) -> None:
    raw = write_family(tmp_path / "raw", "deepseek_v3", dtype=mx.bfloat16)
    lost = stripped(converted(raw, tmp_path / "kept"), tmp_path / "lost")
    assert_same(load_model(raw), load_model(lost, head=raw))


@pytest.mark.parametrize("family", ["dense", "next"])
def test_a_head_of_another_model_of_the_same_sizes_is_refused(tmp_path: Path, family: str) -> None:
    model, other = write(tmp_path / "model", family, "stripped"), write(tmp_path / "other", family, seed=1)
    message = r"other: another model of the same sizes: its final norm \(norm.weight\) is not that of .*model"
    with pytest.raises(HeadError, match=message):
        plan_graft(read_layout(model), other)
    with pytest.raises(HeadError, match=message):
        load_model(model, head=other)


def test_a_head_of_another_family_is_refused(tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", "glm4_moe")
    with pytest.raises(HeadError, match=r"another model, deepseek_v3 where .*model is glm4_moe"):
        load_model(model, head=write_family(tmp_path / "other", "deepseek_v3"))


# -- bad input


def test_an_unknown_model_type_is_named(tmp_path: Path) -> None:
    change(write_family(tmp_path, "llama"), model_type="bark")
    with pytest.raises(CheckpointError, match=r"model_type 'bark' is unknown. Headstart runs .*deepseek_v3"):
        load_model(tmp_path)


def test_a_text_model_inside_mistral_3_that_is_unknown_is_named(tmp_path: Path) -> None:
    change(write_family(tmp_path, "mistral3"), model_type="mistral4")
    with pytest.raises(CheckpointError, match=r"text_config.model_type 'mistral4' is none of"):
        load_model(tmp_path)


def test_a_head_at_another_layer_is_named(tmp_path: Path) -> None:
    write_family(tmp_path, "glm4_moe")
    for file in tmp_path.glob("*.safetensors"):
        arrays: Any = mx.load(str(file))
        save(file, {name.replace("layers.2.", "layers.3."): a for name, a in arrays.items()}, {"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("layers.2.", "layers.3."))
    with pytest.raises(CheckpointError, match=r"tensors unknown \(layers.3\."):
        load_model(tmp_path)


@pytest.mark.parametrize(("family", "part"), [("glm4_moe", "shared_head.norm"), ("mimo", "input_proj")])
def test_a_missing_part_of_a_head_is_named(tmp_path: Path, family: str, part: str) -> None:
    drop(write_family(tmp_path, family), part)
    with pytest.raises(HeadError, match=rf"1 tensor missing \(mtp.layers.0.{part}.weight\)"):
        load_model(tmp_path)


def test_a_missing_module_of_a_head_is_named(tmp_path: Path) -> None:
    drop(write_family(tmp_path, "step3p5"), "layers.4.")
    with pytest.raises(HeadError, match=r"tensors missing \(mtp.layers.2\."):
        load_model(tmp_path)


def test_another_pattern_of_nemotrons_head_is_named(tmp_path: Path) -> None:
    write_family(tmp_path, "nemotron_h", mtp_hybrid_override_pattern="*E*E")
    with pytest.raises(CheckpointError, match=r"the head's layers are '\*E\*E'; only '\*E' is known"):
        load_model(tmp_path)


@pytest.mark.parametrize("family", ["glm4_moe", "nemotron_h"])
def test_a_family_that_cannot_be_divided_is_refused_by_name(tmp_path: Path, family: str) -> None:
    write_family(tmp_path, family)
    with pytest.raises(CheckpointError, match=f"{family} models cannot be divided among several machines yet"):
        load_model(tmp_path, split=lambda config: pytest.fail("not asked"))


def test_float8_releases_of_latent_attention_load(tmp_path: Path) -> None:
    """DeepSeek-V3's release: one scale per 128 x 128 block, also of the `kv_b_proj` that is cut in two."""
    sizes = {"kv_lora_rank": 128, "qk_nope_head_dim": 32, "v_head_dim": 32}
    plain = write_family(tmp_path / "plain", "deepseek_v3", **sizes)
    eight = write_family(tmp_path / "eight", "deepseek_v3", fp8=True, **sizes)
    first, second = (load_model(folder, dtype=mx.float32).weights.layers[1].self_attn for folder in (plain, eight))
    for name in ("embed_q", "unembed_out", "o_proj"):
        ours, other = first[name].weight, second[name].weight
        assert 0 < mx.abs(ours - other).max() < 0.05 * mx.abs(ours).max()


def as_transformers_writes(config: dict[str, Any], **fields: Any) -> str:
    """A config of transformers' own class, with those of our fields that it has, as `save_pretrained` writes it."""
    from transformers import AutoConfig

    kind = AutoConfig.for_model(config["model_type"])
    derived = {"model_type", *(["num_hidden_layers"] if "num_layers" in config else [])}
    known = {name: value for name, value in config.items() if hasattr(kind, name) and name not in derived}
    return str(AutoConfig.for_model(config["model_type"], **known | fields).to_json_string())


@pytest.mark.parametrize("family", ["qwen3_moe", "longcat_flash", "mimo_v2_flash"])
def test_a_config_that_transformers_5_wrote_is_the_same_model(tmp_path: Path, family: str) -> None:
    """It renames fields, leaves out what is always so, and gives LongCat's experts without weights tensors."""
    changed = {"qwen3_moe": {"head_dim": 16}, "longcat_flash": {"rope_theta": 10000.0}}.get(family, {})
    old = write_family(tmp_path / "old", family, **changed)
    new = Path(shutil.copytree(old, tmp_path / "new"))
    config = json.loads((old / "config.json").read_text())
    fields: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}}
    if family == "mimo_v2_flash":
        share = {"rope_type": "default", "partial_rotary_factor": config["partial_rotary_factor"]}
        fields = {
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "sliding_window": config["sliding_window_size"],
            "rms_norm_eps": config["layernorm_epsilon"],
            "rope_parameters": {
                "full_attention": share | {"rope_theta": config["rope_theta"]},
                "sliding_attention": share | {"rope_theta": config["swa_rope_theta"]},
            },
        }
    (new / "config.json").write_text(as_transformers_writes(config, **fields))
    written = json.loads((new / "config.json").read_text())
    if family == "longcat_flash":
        expert = "model.layers.{}.mlp.experts.{}.{}.weight"
        shape = (config["expert_ffn_hidden_size"], config["hidden_size"])
        extra = {
            expert.format(layer, number, part): mx.zeros(shape)
            for layer in range(2)
            for number in range(8, 12)
            for part in ("gate_proj", "up_proj")
        }
        mx.save_safetensors(str(new / "model-extra.safetensors"), extra, {"format": "pt"})
        index = json.loads((new / "model.safetensors.index.json").read_text())
        index["weight_map"] |= dict.fromkeys(extra, "model-extra.safetensors")
        (new / "model.safetensors.index.json").write_text(json.dumps(index))
    assert config.keys() - written.keys(), "transformers writes the same fields: nothing is tested"
    tokens = mx.array([[5, 17, 3, 200, 41, 8, 99, 5, 17, 3, 200, 41]])
    first, second = (load_model(folder, dtype=mx.float32, mtp=False) for folder in (old, new))
    assert mx.array_equal(*(m.logits(m.trunk(tokens, m.make_state(1), certain=12)) for m in (first, second)))
