"""The vision tower in checkpoints: found, converted, loaded if wanted, and refused with a reason."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from checkpoints import save
from headstart.checkpoint import LoadPlan, load_model, read_layout
from headstart.checkpoint.convert import convert, plan_conversion
from headstart.checkpoint.quantize import Recipe
from headstart.checkpoint.vision import find_tower
from headstart.errors import CheckpointError
from headstart.models.vision import VisionTower
from towers import write_seeing
from vision_models import write_with_tower


def tower_of(folder: Path) -> VisionTower[Any]:
    tower = load_model(folder, vision=True).tower
    assert tower is not None
    return tower


@pytest.mark.parametrize("shape", ["qwen3_5", "gemma4_e2b", "gemma4_a4b", "gemma4_unified", "step3p7"])
def test_convert_keeps_it_in_half_precision(shape: str, tmp_path: Path) -> None:
    write = write_with_tower if shape == "qwen3_5" else partial(write_seeing, shape=shape, dtype=mx.bfloat16)
    source = write(tmp_path / "raw")
    plan = plan_conversion(read_layout(source), tmp_path / "new", Recipe(mx.bfloat16, bits=4))
    convert(plan)
    report = read_layout(tmp_path / "new").report()["vision"]
    assert report["available"]
    assert report["dtype"] == "bfloat16"
    assert report["parameters"] == read_layout(source).report()["vision"]["parameters"]
    before, after = (dict(tree_flatten(tower_of(tmp_path / name).parameters())) for name in ("raw", "new"))
    assert before.keys() == after.keys()
    assert all(bool(mx.array_equal(before[name], after[name])) for name in before)
    rules = [tower_of(tmp_path / name).rules for name in ("raw", "new")]
    assert rules[0] == rules[1] != type(rules[0])()  # preprocessor_config.json is kept


def test_is_loaded_only_if_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_with_tower(tmp_path / "raw")
    without = load_model(folder)
    assert without.tower is None
    assert "serve it with --images" in str(without.tower_unavailable)
    assert tower_of(folder).rules.max_pixels == 4096
    limited = load_model(folder, vision=True, max_image_pixels=1024).tower
    assert limited is not None
    assert limited.rules.max_pixels == 1024
    (folder / "model-visual.safetensors").unlink()  # as a download of the text alone leaves it
    assert load_model(folder).tower is None
    blind = load_model(folder, vision=True)
    assert blind.tower is None
    assert "no file here holds it" in str(blind.tower_unavailable)


def test_its_weights_count_before_it_is_loaded(tmp_path: Path) -> None:
    folder = write_with_tower(tmp_path)
    size = sum(array.nbytes for _, array in tree_flatten(tower_of(folder).parameters()))
    assert LoadPlan.of(folder, vision=True).needs.weights == LoadPlan.of(folder).needs.weights + size > size


def test_unusable_towers_name_the_reason(tmp_path: Path) -> None:
    folder = write_with_tower(tmp_path / "raw")
    config = json.loads((folder / "config.json").read_text())
    for field, value, reason in (
        ("hidden_size", 64, "has shape"),
        ("depth", 3, "missing"),
        ("patch_size", "large", "describes no vision tower"),
        ("out_hidden_size", -1, "tower"),
    ):
        changed = {**config, "vision_config": {**config["vision_config"], field: value}}
        assert reason in str(find_tower(folder, changed).reason)
    text_only = {name: value for name, value in config.items() if name != "vision_config"}
    assert "text only" in str(find_tower(folder, text_only).reason)


def test_inspect_shows_the_towers_of_other_families(tmp_path: Path) -> None:
    for shape in ("gemma4_unified", "step3p7"):
        folder = write_seeing(tmp_path / shape, shape)
        shown = read_layout(folder).report()["vision"]
        assert shown["available"]
        assert shown["dtype"] == "float32"
        assert shown["parameters"] == sum(array.size for _, array in tree_flatten(tower_of(folder).parameters()))
        config = json.loads((folder / "config.json").read_text())
        hidden = "mm_embed_dim" if shape == "gemma4_unified" else "hidden_size"
        changed = {**config, "vision_config": {**config["vision_config"], hidden: 128}}
        assert "has shape" in str(find_tower(folder, changed).reason)


def test_what_images_need_and_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write_seeing(tmp_path / "model", "step3p7")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    named = [each for each in tokenizer["added_tokens"] if each["content"] != "<patch_newline>"]
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "added_tokens": named}))
    with pytest.raises(CheckpointError, match="no token <patch_newline>"):
        load_model(folder, vision=True)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    for field, value, problem in (("patch_size", 12, "a field is wrong"), ("patch_size", 20, "not those of config")):
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "preprocessor_config.json").write_text(json.dumps({**processor, field: value}))
        with pytest.raises(CheckpointError, match=problem):
            load_model(folder, vision=True)


def test_conversions_of_mlx_vlm_are_the_same_tower(tmp_path: Path) -> None:
    folder = write_seeing(tmp_path / "model", "step3p7")
    expected = dict(tree_flatten(tower_of(folder).parameters()))
    arrays = mx.load(str(folder / "model-visual.safetensors"))
    assert isinstance(arrays, dict)
    renamed = {
        name.replace(".resblocks.", ".").replace("in_proj_", "in_proj."): array.moveaxis(1, -1)
        if array.ndim == 4
        else array
        for name, array in arrays.items()
    }
    save(folder / "model-visual.safetensors", renamed, {"format": "mlx"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    kept = {name: file for name, file in index["weight_map"].items() if name not in arrays}
    index["weight_map"] = kept | dict.fromkeys(renamed, "model-visual.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = dict(tree_flatten(tower_of(folder).parameters()))
    assert found.keys() == expected.keys()
    assert all(bool(mx.array_equal(expected[name], found[name])) for name in expected)
