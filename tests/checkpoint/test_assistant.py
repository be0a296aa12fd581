"""Gemma 4's assistants on disk: what fits a model is read, quantised and described; what does not is refused."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from checkpoints import save, write
from fixtures import random_prompt
from gemma4 import write_assistant, write_shape
from headstart.checkpoint import load_model
from headstart.checkpoint.drafter import read_drafter
from headstart.checkpoint.load import LoadPlan
from headstart.cli.main import app
from headstart.engine.step import prefill_prompts
from headstart.errors import CheckpointError, DrafterError, HeadError
from headstart.models.memory import Footprint
from loopback_hub import running_hub


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape(tmp_path_factory.mktemp("gemma") / "gemma-4-E2B-it", "gemma4_e2b")


@pytest.fixture(scope="module")
def assistant(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assistant(tmp_path_factory.mktemp("assistants") / "assistant", target, dtype=mx.bfloat16)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def change(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        (config["text_config"] if name in config["text_config"] else config)[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 32}, "its backbone_hidden_size is 64, and .* needs 32"),
        ({"vocab_size": 128}, "its vocab_size is 256, and .* needs 128"),
        ({"global_head_dim": 32}, "its global_head_dim is 64, and .* needs 32"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "its 4 heads cannot share the 3 of keys"),
    ],
)
def test_an_assistant_for_another_model_is_refused(
    assistant: Path, tmp_path: Path, fields: Any, message: str
) -> None:
    other = write_shape(tmp_path, "gemma4_e2b", **fields)
    with pytest.raises(DrafterError, match=f"a drafter for another model: {message}.* Name the assistant"):
        load_model(other, drafter=assistant)


def test_only_a_gemma_4_has_assistants(assistant: Path, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"drafts for a Gemma 4, and .* is none"):
        load_model(write(tmp_path), drafter=assistant)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backbone_hidden_size": None}, "backbone_hidden_size is None; it must be a whole number from 1"),
        ({"num_centroids": 0}, "num_centroids is 0; it must be a whole number from 1 to 256"),
        ({"num_centroids": 48}, "num_centroids is 48, and vocab_size, 256, no multiple of it"),
        ({"centroid_intermediate_top_k": 17}, "centroid_intermediate_top_k is 17; it must .* to 16"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*; it must name"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    ],
)
def test_a_wrong_config_is_refused_by_its_field(target: Path, tmp_path: Path, fields: Any, message: str) -> None:
    folder = change(write_assistant(tmp_path / "assistant", target), **fields)
    with pytest.raises(CheckpointError, match=message):
        load_model(target, drafter=folder)


def test_missing_and_unknown_tensors_are_refused(target: Path, tmp_path: Path) -> None:
    for name, message in (("pre_projection.weight", r"1 tensor missing \(pre_projection"), ("x.weight", "unknown")):
        folder = write_assistant(tmp_path / name, target)
        arrays: Any = mx.load(str(folder / "model.safetensors"))
        changed = {**arrays, name: mx.zeros((2, 2))}
        save(folder / "model.safetensors", {n: a for n, a in changed.items() if n != name or n not in arrays}, {})
        with pytest.raises(DrafterError, match=message):
            load_model(target, drafter=folder)


def test_clusters_that_are_not_used_are_left_out(target: Path, tmp_path: Path) -> None:
    folder = change(write_assistant(tmp_path / "assistant", target), use_ordered_embeddings=False)
    assert read_drafter(folder).report()["clusters"] is None


def test_an_assistant_is_no_model_and_no_head(target: Path, assistant: Path) -> None:
    with pytest.raises(CheckpointError, match="an assistant of a Gemma 4: name that model, and this with --drafter"):
        load_model(assistant)
    with pytest.raises(HeadError, match="an assistant, which is no head: name it with --drafter"):
        load_model(target, head=assistant)


def test_its_memory_is_counted_and_none_by_the_token(target: Path, assistant: Path) -> None:
    alone, pair = LoadPlan.of(target), LoadPlan.of(target, drafter=assistant)
    assert Footprint.of(pair.model) == Footprint.of(alone.model)
    assert pair.needs.weights - alone.needs.weights == pair.drafter_nbytes > 0
    # Four layers write: three sliding ones with heads of 32 numbers and a full one with 64, keys and values.
    assert Footprint.of(alone.model).position == (3 * 32 + 64) * 2 * alone.dtype.size


def test_a_conversion_drafts_nearly_the_same(target: Path, tmp_path: Path) -> None:
    assistant = write_assistant(tmp_path / "assistant", target, dtype=mx.bfloat16, hidden_size=64)
    small = tmp_path / "small"
    run("convert", assistant, small, "--bits", 8, "--group-size", 32)
    names = mx.load(str(assistant / "model.safetensors")).keys()  # type: ignore[union-attr]
    made: Any = mx.load(str(small / "model.safetensors"))
    assert {name for name in made if not name.endswith((".scales", ".biases"))} == names
    assert "pre_projection.scales" not in made
    assert "model.layers.0.mlp.up_proj.scales" in made
    report = json.loads(run("inspect", small, "--json"))
    assert report["quantization"] == {"bits": 8, "group_size": 32, "mode": "affine"}
    logits = []
    for folder in (assistant, small):
        model = load_model(target, drafter=folder, dtype=mx.float32)
        batch = prefill_prompts(model, [random_prompt(model, 20)], max_k=4)
        draft = model.assistant_drafts(batch.trunk_state)
        logits.append(draft(model.backend, model.embed, batch.unseen.hidden, batch.last)[0])
    both = mx.isfinite(logits[0]) & mx.isfinite(logits[1])  # tokens of the clusters that both score
    assert both.sum() >= 3 * 16
    difference = mx.abs(mx.where(both, logits[0] - logits[1], 0)).max()
    assert 0 < difference < 0.2 * mx.abs(mx.where(both, logits[0], 0)).max()


def test_inspect_names_the_assistant_of_a_model_and_what_one_is_for(target: Path, assistant: Path) -> None:
    assert json.loads(run("inspect", target, "--json"))["known_drafter"] == "google/gemma-4-E2B-it-assistant"
    assert "google/gemma-4-E2B-it-assistant (--drafter)" in run("inspect", target)
    report = json.loads(run("inspect", assistant, "--json"))
    assert (report["family"], report["layers"], report["dtype"]) == ("gemma4_assistant", 4, "bfloat16")
    assert (report["clusters"], report["scored_clusters"]) == (16, 4)
    assert report["target"] == {"hidden_size": 64, "vocab_size": 256}
    assert "hidden_size 64, vocab_size 256" in run("inspect", assistant)


def test_commands_take_an_assistant_from_the_hub(
    target: Path, assistant: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        hub.models["google/assistant"] = assistant
        asked = ["generate", target, "--drafter", "google/assistant", "--raw", "-p", "a", "-n", 12, "--json"]
        plain = json.loads(run(*asked, "--k", 0).splitlines()[-1])
        drafted = json.loads(run(*asked, "--k", 7).splitlines()[-1])
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["stats"]["drafter_kind"] == "gemma4_assistant"
    assert drafted["stats"]["proposed_by_source"]["drafter"] > 0


def test_a_model_without_a_whole_tower_says_so(target: Path, tmp_path: Path) -> None:
    folder = write_shape(tmp_path, "gemma4_e2b")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": {"model_type": "gemma4_vision"}}))
    for place, reason in ((folder, "tensors of the vision tower are missing"), (target, "reads text only")):
        model = LoadPlan.of(place, vision=True).model
        assert model.tower is None
        assert reason in (model.tower_unavailable or "")
