"""Every layout in the wild is recognised by its headers, and errors name what is wrong with a folder."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_in_mlx_lm

from checkpoints import (
    FAMILIES,
    LAYOUTS,
    convert,
    converted_names,
    make_config,
    random_arrays,
    save,
    write,
    write_empty,
)
from headstart import models
from headstart.checkpoint import load_model, read_layout
from headstart.checkpoint.convert import convert as write_conversion
from headstart.checkpoint.convert import plan_conversion
from headstart.checkpoint.layout import base_model_id
from headstart.checkpoint.quantize import Recipe
from headstart.errors import CheckpointError, HeadError

SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_tensors(path: Path, edit: Callable[[dict[str, mx.array]], Any], format: str | None = "pt") -> None:
    """Rewrite a file. Its index, if any, is left as it is."""
    arrays: Any = mx.load(str(path))
    edit(arrays)
    save(path, arrays, {"format": format} if format else None)


def as_single_file(folder: Path) -> Path:
    """Join the shards and drop the index, so that a test may edit tensors freely."""
    arrays: dict[str, Any] = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        loaded: Any = mx.load(str(shard))
        arrays |= loaded
        mx.eval(arrays)
        shard.unlink()
    (folder / INDEX).unlink()
    save(folder / "model.safetensors", arrays, {"format": "pt"})
    return folder / "model.safetensors"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_recognised(tmp_path: Path, family: str, layout: str) -> None:
    found = read_layout(write(tmp_path, family, layout))
    assert found.family == FAMILIES[family]
    assert found.layout == ("raw" if layout in ("raw", "raw-fused", "raw-per-expert", "fp8") else "converted")
    assert found.dtype == "bfloat16"
    assert (found.quantization or {}).get("mode") == ("fp8" if layout == "fp8" else None)
    assert found.mtp.available == (layout != "stripped")
    assert found.mtp.location == {
        "stripped": None, "sidecar": "mtp.safetensors", "raw-sidecar": "mtp.safetensors"
    }.get(layout, SHARD)  # fmt: skip
    assert found.mtp.num_layers == (0 if layout == "stripped" else 1)


@pytest.mark.parametrize("bits", [3, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (2, 4, 5, 6, 8))])
def test_quantisation_of_trunk_and_head_is_distinguished(tmp_path: Path, bits: int) -> None:
    plain = read_layout(write(tmp_path / "plain", "moe", "converted"))
    found = read_layout(write(tmp_path / "packed", "moe", "converted", bits=bits, group_size=32))
    assert found.quantization == {"bits": bits, "group_size": 32, "mode": "affine"}
    assert found.mtp.available
    assert found.mtp.quantization is None
    assert found.parameters == plain.parameters
    assert found.bytes < plain.bytes
    both = read_layout(write(tmp_path / "both", "moe", "sidecar", bits=bits, head_bits=8))
    assert both.mtp.quantization == {"bits": 8, "group_size": 64, "mode": "affine"}


def test_parameters_and_bytes_are_those_of_the_text_model(tmp_path: Path) -> None:
    folder = write(tmp_path)
    arrays = random_arrays(
        make_config("dense", tie=False, dtype=mx.bfloat16)["text_config"], seed=0, dtype=mx.bfloat16
    )
    before = read_layout(folder)
    assert before.parameters == sum(array.size for array in arrays.values())
    assert before.bytes == sum(array.nbytes for array in arrays.values())

    edit_tensors(
        as_single_file(folder), lambda a: a.update({"model.visual.blocks.0.attn.qkv.weight": mx.zeros((9, 3))})
    )
    assert (read_layout(folder).parameters, read_layout(folder).bytes) == (before.parameters, before.bytes)


@pytest.mark.parametrize("name", ["mtp.safetensors", "model-mtp.safetensors", "mtp/weights.safetensors"])
def test_sidecars_are_found_under_all_their_names(tmp_path: Path, name: str) -> None:
    mtp = read_layout(write(tmp_path, "moe", "sidecar", sidecar=name)).mtp
    assert (mtp.available, mtp.location) == (True, name)


def test_a_sidecar_is_found_where_the_config_says(tmp_path: Path) -> None:
    write(tmp_path, "dense", "sidecar", sidecar="optiq/head.safetensors")
    assert not read_layout(tmp_path).mtp.available
    edit_json(
        tmp_path / "config.json", lambda c: c.update(mlx_lm_extra_tensors={"mtp_file": "optiq/head.safetensors"})
    )
    assert read_layout(tmp_path).mtp.location == "optiq/head.safetensors"


def test_a_sidecar_may_leave_the_prefix_out(tmp_path: Path) -> None:
    write(tmp_path, "dense", "sidecar")
    path = tmp_path / "mtp.safetensors"
    arrays: Any = mx.load(str(path))
    save(path, {name.removeprefix("mtp."): array for name, array in arrays.items()}, {"format": "mlx"})
    assert read_layout(tmp_path).mtp.available


def provenance_of_head(folder: Path) -> set[str | None]:
    stored = read_layout(folder).stored
    return {s.provenance for name, part in stored.items() if name.startswith("mtp.") for s in part.sources}


def test_provenance_is_decided_for_each_file(tmp_path: Path) -> None:
    raw_beside_converted = write(tmp_path / "a", "dense", "raw-sidecar")
    assert read_layout(raw_beside_converted).layout == "converted"
    assert provenance_of_head(raw_beside_converted) == {"raw"}
    assert provenance_of_head(write(tmp_path / "b", "dense", "sidecar")) == {"converted"}


def test_the_shape_of_conv1d_outweighs_the_metadata(tmp_path: Path) -> None:
    """Raw shards that were saved again through mlx; the last holds the head and no conv1d."""
    folder = write(tmp_path, "dense", "raw", shards=8)
    for shard in folder.glob("model-*.safetensors"):
        edit_tensors(shard, lambda arrays: None, format="mlx")
    assert read_layout(folder).layout == "raw"
    assert provenance_of_head(folder) == {"raw"}


def test_a_raw_head_listed_in_a_converted_index_stays_raw(tmp_path: Path) -> None:
    folder = write(tmp_path, "next", "raw-sidecar", sidecar="model-00003-of-00003.safetensors")
    head: Any = mx.load(str(folder / "model-00003-of-00003.safetensors"))
    edit_json(
        folder / INDEX,
        lambda index: index["weight_map"].update(dict.fromkeys(head, "model-00003-of-00003.safetensors")),
    )
    assert read_layout(folder).layout == "converted"
    assert provenance_of_head(folder) == {"raw"}


def test_a_head_of_unknown_provenance_is_refused_not_guessed(tmp_path: Path) -> None:
    folder = write(tmp_path, "dense", "sidecar")
    edit_tensors(folder / "mtp.safetensors", lambda arrays: None, format=None)
    mtp = read_layout(folder).mtp
    assert not mtp.available
    assert "mtp.safetensors: nothing in the file says whether it is as released, with norms" in str(mtp.reason)
    assert "headstart graft" in str(mtp.reason)
    with pytest.raises(HeadError, match=r"as released, .* or converted"):
        load_model(folder)
    assert not load_model(folder, mtp=False).has_head


def test_metadata_and_names_that_disagree_decide_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, "moe", "sidecar")  # `switch_mlp` is converted, `format: pt` is raw
    edit_tensors(folder / "mtp.safetensors", lambda arrays: None, format="pt")
    assert not read_layout(folder).mtp.available


@pytest.mark.parametrize(
    ("layout", "head_bits", "expected"),
    [("raw-sidecar", None, "raw"), ("sidecar", None, "converted"), ("sidecar", 4, "converted")],
)
def test_names_decide_where_the_metadata_is_silent(
    tmp_path: Path, layout: str, head_bits: int | None, expected: str
) -> None:
    folder = write(tmp_path, "moe", layout, head_bits=head_bits)  # per expert; `switch_mlp`; `.scales`
    edit_tensors(folder / "mtp.safetensors", lambda arrays: None, format=None)
    assert provenance_of_head(folder) == {expected}


def test_a_manifest_beside_the_head_decides(tmp_path: Path) -> None:
    folder = write(tmp_path, "dense", "sidecar", sidecar="mtp/weights.safetensors")
    edit_tensors(folder / "mtp/weights.safetensors", lambda arrays: None, format=None)
    assert not read_layout(folder).mtp.available
    (folder / "mtp/manifest.json").write_text('{"rmsnorm_weight_format": "mlx_gamma"}')
    assert provenance_of_head(folder) == {"converted"}


def test_a_stripped_model_names_the_command_that_fixes_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "my model", "moe", "stripped", bits=4)
    assert f"headstart graft '{folder}' --from ORIGINAL" in str(read_layout(folder).mtp.reason)
    for base in ("base_model: Qwen/Qwen3.5-35B-A3B", "base_model:\n- Qwen/Qwen3.5-35B-A3B"):
        (folder / "README.md").write_text(f"---\nlicense: apache-2.0\n{base}\ntags:\n- mlx\n---\n# A model\n")
        assert f"headstart graft '{folder}' --from Qwen/Qwen3.5-35B-A3B" in str(read_layout(folder).mtp.reason)
    model = load_model(folder)
    assert not model.has_head
    assert "config.json promises an MTP head but no file holds it" in str(model.head_unavailable)


@pytest.mark.parametrize(
    ("readme", "base"),
    [
        ("---\r\nlicense: mit\r\nbase_model: org/a\r\n---\r\n# A model\r\n", "org/a"),
        ("---\nbase_model: [org/a, org/b]\n---\n", "org/a"),
        ("---\nlicense: mit\n---\n# How to use it\n\n    base_model: org/other\n---\n", None),
        ("---\nlicense: mit\n---\nbase_model: org/other\n---\n", None),
        ("---\nbase_model: {\n---\n", None),
        ("---\n- base_model\n---\n", None),
        ("---\nbase_model: []\n---\n", None),
        ("---\nbase_model: a\n---\n", None),
        ("# A model\n", None),
    ],
)
def test_what_a_model_was_made_from_is_read_from_the_front_of_its_readme(
    tmp_path: Path, readme: str, base: str | None
) -> None:
    (tmp_path / "README.md").write_bytes(readme.encode())
    assert base_model_id(tmp_path) == base


def test_a_model_without_a_head_upstream_is_not_called_broken(tmp_path: Path) -> None:
    folder = write(tmp_path, "next", head=False, num_nextn_predict_layers=0)
    assert "promises no MTP head" in str(read_layout(folder).mtp.reason)
    assert not load_model(folder).has_head


def shapes_27b() -> tuple[dict[str, Any], dict[str, list[int]]]:
    config = make_config(
        "dense", tie=False, dtype=mx.bfloat16, vocab_size=248320, hidden_size=5120, intermediate_size=17408,
        num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4, head_dim=256,
        linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip
    flat: Any = tree_flatten(models.build(json.loads(json.dumps(config))).weights.parameters())
    shapes = {}
    for name, array in flat:
        shape = list(array.shape)
        prefix = "" if name.startswith(("mtp.", "lm_head.")) else "model.language_model."
        shapes[prefix + name] = [shape[0], 1, shape[1]] if name.endswith("conv1d.weight") else shape
    return config, shapes


def test_a_27b_folder_is_inspected_from_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_empty(tmp_path, *shapes_27b())
    monkeypatch.setattr(mx, "load", None)
    layout = read_layout(folder)
    assert layout.parameters > 27e9
    assert layout.bytes == 2 * layout.parameters
    assert layout.mtp.available


def test_a_tied_model_may_carry_a_copy_of_its_embedding(tmp_path: Path) -> None:
    folder = write(tmp_path, tie=True)
    edit_tensors(as_single_file(folder), lambda a: a.update({"lm_head.weight": mx.zeros((256, 64))}))
    assert read_layout(folder).mtp.available


# Bad input: a typed error that names the file, the cause and the way out.


def refused(folder: Path, *words: str) -> None:
    for read in (read_layout, load_model):
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        assert all(word in str(caught.value) for word in words), str(caught.value)


def head_refused(folder: Path, *words: str) -> None:
    """Inspected with the reason, not loaded with the head, loaded without."""
    mtp = read_layout(folder).mtp
    assert not mtp.available
    assert all(word in str(mtp.reason) for word in (*words, "headstart graft")), mtp.reason
    with pytest.raises(HeadError) as caught:
        load_model(folder)
    assert str(mtp.reason) in str(caught.value)
    model = load_model(folder, mtp=False)
    assert not model.has_head
    assert model.head_unavailable == "loaded without the head"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / SHARD).unlink()
    refused(folder, SHARD, "is missing", "Download")
    (folder / INDEX).unlink()
    refused(folder, str(folder), "tensors missing", "Download")


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    path = write(tmp_path) / SHARD
    content = path.read_bytes()
    for size in (len(content) - 1, 200):
        path.write_bytes(content[:size])
        refused(tmp_path, SHARD, "truncated" if size > 200 else "not a safetensors file", "Download")


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", struct.pack("<Q", 2) + b"[]"],
)
def test_a_file_that_is_not_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / SHARD).write_bytes(content)
    refused(tmp_path, SHARD, "not a safetensors file", "Download")


def test_an_index_that_names_absent_tensors_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"model.layers.9.ghost.weight": SHARD}))
    refused(folder, SHARD, "lacks model.layers.9.ghost.weight", INDEX)


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    (write(tmp_path) / INDEX).write_text(content)
    refused(tmp_path, INDEX, "Download")


def test_missing_and_unknown_tensors_of_the_trunk_are_named(tmp_path: Path) -> None:
    path = as_single_file(write(tmp_path, "moe"))
    edit_tensors(path, lambda a: a.update({"model.language_model.layers.0.adapter.weight": mx.zeros((2, 2))}))
    refused(tmp_path, "1 tensor unknown (layers.0.adapter.weight)")
    edit_tensors(path, lambda a: [a.pop(name) for name in list(a) if "layers.2.mlp.experts" in name])
    refused(tmp_path, "3 tensors missing", "layers.2.mlp.switch_mlp.")


def test_weights_of_another_size_than_the_config_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config["text_config"].update(intermediate_size=192))
    refused(tmp_path, "mlp.", "[64, 128]", "[64, 192]", "config.json")


def test_a_quantisation_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = as_single_file(write(tmp_path))
    edit_json(tmp_path / "config.json", lambda c: c.update(quantization_config={"quant_method": "hqq"}))
    name = "model.language_model.layers.3.self_attn.q_proj"
    edit_tensors(path, lambda a: a.update({f"{name}.W_q": a.pop(f"{name}.weight")}))
    refused(tmp_path, "'hqq'", "MLX conversion")


def test_one_bit_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "trunk", "dense", "converted", bits=1)
    assert read_layout(folder).quantization == {"bits": 1, "group_size": 64, "mode": "affine"}
    model, tokens = load_model(folder, dtype=mx.float32), mx.array([[5, 17, 130, 9]])
    lm, _ = load_in_mlx_lm(folder, strict=False)
    lm.set_dtype(mx.float32)
    found, expected = model.logits(model.trunk(tokens, model.make_state(1), certain=4)), lm(tokens)
    assert mx.abs(found - expected).max() < 1e-4 * mx.abs(expected).max()


def test_an_incomplete_head_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, "dense", "sidecar")
    edit_tensors(folder / "mtp.safetensors", lambda a: a.pop("mtp.layers.0.mlp.up_proj.weight"), "mlx")
    head_refused(folder, "mtp.safetensors", "1 tensor missing (mtp.layers.0.mlp.up_proj.weight)")


def test_a_head_without_one_of_its_experts_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, "moe", "raw-sidecar")
    edit_tensors(folder / "mtp.safetensors", lambda a: a.pop("mtp.layers.0.mlp.experts.3.up_proj.weight"))
    head_refused(folder, "mtp.safetensors", "1 expert of mtp.layers.0.mlp.switch_mlp.up_proj.weight missing (3)")


@pytest.mark.parametrize("layout", ["sidecar", "raw-sidecar"])
def test_a_head_of_another_expert_count_is_named(tmp_path: Path, layout: str) -> None:
    folder = write(tmp_path / "trunk", "moe", "stripped", num_experts=6)
    other = write(tmp_path / "other", "moe", layout)
    (other / "mtp.safetensors").rename(folder / "mtp.safetensors")
    head_refused(folder, "mtp.safetensors", "has 8 experts, config.json says 6")


@pytest.mark.parametrize("width", [10, *(pytest.param(width, marks=pytest.mark.slow) for width in (200, 0))])
def test_scales_of_groups_that_mlx_does_not_have_are_refused(tmp_path: Path, width: int) -> None:
    def edit(arrays: dict[str, mx.array]) -> None:
        for name in arrays:
            if name.endswith(("q_proj.scales", "q_proj.biases")):
                arrays[name] = mx.zeros((arrays[name].shape[0], width), mx.bfloat16)

    folder = write(tmp_path / "head", "dense", "sidecar", bits=4, head_bits=4)
    edit_tensors(folder / "mtp.safetensors", edit, "mlx")
    head_refused(folder, "the scales of mtp.layers.0.self_attn.q_proj.weight do not fit it")
    folder = write(tmp_path / "trunk", "dense", "converted", bits=4)
    edit_tensors(as_single_file(folder), edit, "mlx")
    refused(folder, "self_attn.q_proj.weight do not fit it")


def test_a_missing_shard_that_held_only_the_head_leaves_the_trunk_usable(tmp_path: Path) -> None:
    folder = write(tmp_path, "next", "stripped")
    config = make_config("next", tie=False, dtype=mx.bfloat16)
    head = {k: v for k, v in random_arrays(config, seed=0, dtype=mx.bfloat16).items() if k.startswith("mtp.")}
    names = converted_names(convert(head), "next")
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(dict.fromkeys(names, "model-mtp.safetensors")))
    head_refused(folder, "model-mtp.safetensors: is missing", INDEX)


def test_an_unknown_model_type_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.update(model_type="bark"))
    refused(tmp_path, "config.json", "'bark'", "qwen3_5")


@pytest.mark.parametrize("content", ["", "[]", '{"model_type": "qwen3_next"}'])
def test_a_config_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    (write(tmp_path) / "config.json").write_text(content)
    refused(tmp_path, "config.json")


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "no config.json")
    (tmp_path / "config.json").write_text(json.dumps(make_config("dense", tie=False, dtype=mx.bfloat16)))
    refused(tmp_path, "no safetensors file")


@pytest.mark.parametrize("family", FAMILIES)
def test_rope_is_read_as_transformers_4_and_5_write_it(tmp_path: Path, family: str) -> None:
    """`rope_theta` at the top, or `rope_parameters`: mlx-lm knows one name for each family."""
    rope = {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    found = []
    for version in (4, 5):
        folder = write(tmp_path / str(version), family)

        def as_written(config: dict[str, Any], version: int = version) -> None:
            text = config.get("text_config", config)
            for name in ("rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters"):
                text.pop(name, None)
            text.update(rope if version == 4 else {"rope_parameters": {"rope_type": "default", **rope}})

        edit_json(folder / "config.json", as_written)
        model = load_model(folder, dtype=mx.float32)  # the only type in which mlx-lm runs experts on a CPU
        attention = model.weights.layers[3].self_attn
        assert (attention.rope.base, attention.rope.dims) == (5000.0, 16)
        found.append(model.lm(mx.array([[5, 17, 130, 9]])))
    assert mx.array_equal(*found)


def test_a_conversion_of_a_config_by_transformers_5_runs_in_mlx_lm(tmp_path: Path) -> None:
    folder = write(tmp_path / "raw", "next")

    def as_transformers_5(config: dict[str, Any]) -> None:
        rope = {name: config.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
        del config["rope_scaling"]
        config["rope_parameters"] = {"rope_type": "default", **rope}

    edit_json(folder / "config.json", as_transformers_5)
    write_conversion(plan_conversion(read_layout(folder), tmp_path / "out", Recipe(mx.bfloat16)))
    model, _ = load_in_mlx_lm(tmp_path / "out")
    assert model.args.rope_theta == 10000.0
