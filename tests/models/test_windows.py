"""Sliding windows of Llama, Mistral and Qwen, as transformers reads config.json."""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from families import TRUNKS, make_config, write_family, write_trunk
from fixtures import generate, random_prompt
from headstart.checkpoint import load_model
from headstart.errors import CheckpointError
from headstart.models import Model
from headstart.models.windows import attention_windows

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

WINDOW = 8
RECORDED = json.loads(Path(__file__).parents[1].joinpath("reference", "trunks.json").read_text())
ALL = ["sliding_attention"]
SLIDING: dict[str, dict[str, Any]] = {  # configs of which every layer slides
    "llama": {"layer_types": ALL, "sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "mistral3": {"sliding_window": WINDOW},
    "ministral3": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ALL},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WINDOW},
}


def write_sliding(folder: Path, family: str, fields: dict[str, Any], **changed: Any) -> Path:
    """mlx-lm, which shapes the weights, knows some of these fields and refuses lists of layers that all slide."""
    write_family(folder, family, **changed)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config).update(fields)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(model: Model, tokens: list[int]) -> mx.array:
    """Of the last token."""
    state = model.make_state(1)
    return model.logits(model.trunk(mx.array([tokens]), state, certain=len(tokens)))[0, -1]


@pytest.mark.parametrize("family", SLIDING)
def test_a_layer_sees_its_window_and_nothing_else(family: str, tmp_path: Path) -> None:
    """With one layer, the last logits are those of the last tokens alone, wherever they stand: RoPE is relative."""
    one = {"num_hidden_layers": 1, "mlp_only_layers": []} if family == "qwen3_moe" else {"num_hidden_layers": 1}
    if family == "ministral3":  # whose queries are scaled by their position otherwise
        parameters = make_config(family)["rope_parameters"] | {"llama_4_scaling_beta": 0.0}
        one["rope_parameters"] = parameters
    model = load_model(write_sliding(tmp_path, family, SLIDING[family], **one), dtype=mx.float32)
    tokens = random_prompt(model, 40)
    expected = logits(model, tokens[-WINDOW:])
    near = 1e-4 * mx.abs(expected).max()
    assert mx.abs(logits(model, tokens) - expected).max() < near
    assert mx.abs(logits(model, tokens[-WINDOW - 1 :]) - expected).max() < near
    assert mx.abs(logits(model, tokens[1 - WINDOW :]) - expected).max() > 10 * near, "the window is shorter"


def test_a_model_whose_layers_all_slide_answers_alike_at_every_depth_and_chunk(tmp_path: Path) -> None:
    model = load_model(write_family(tmp_path, "mistral", sliding_window=WINDOW), dtype=mx.float32)
    prompt = 4 * random_prompt(model, 9)
    answers = [generate(model, prompt, max_tokens=24, k=k).tokens for k in (0, "auto")]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 64}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 64}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "layer_types": 2 * ["full_attention", *ALL]}),
    ],
)
def test_the_layers_that_slide_are_those_of_transformers(kind: str, fields: dict[str, Any]) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(kind, num_hidden_layers=4, **fields)
    expected = [theirs.sliding_window if each in ALL else None for each in theirs.layer_types]
    assert attention_windows({"model_type": kind, "num_hidden_layers": 4, **fields}) == expected


@pytest.mark.parametrize("kind", ["mistral", "ministral3", "qwen3_moe"])
@pytest.mark.parametrize("fields", [{}, {"sliding_window": 64}, {"sliding_window": None}])
def test_all_layers_slide_where_transformers_has_one_mask_for_all(kind: str, fields: dict[str, Any]) -> None:
    from transformers import AutoConfig

    for used in (False, True):
        given = fields | ({"use_sliding_window": used} if kind == "qwen3_moe" else {})
        theirs = AutoConfig.for_model(kind, num_hidden_layers=2, **given)
        assert attention_windows({"model_type": kind, "num_hidden_layers": 2, **given}) == 2 * [theirs.sliding_window]


def test_a_llama_slides_where_layer_types_says_so_only() -> None:
    assert attention_windows({"model_type": "llama", "num_hidden_layers": 2, "sliding_window": 64}) == [None, None]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"sliding_window": "8"}, "sliding_window is '8'; it must be a whole number"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": 8, "layer_types": ALL}, "layer_types must name the attention of 2 layers"),
        ({"sliding_window": 8, "layer_types": 3}, "layer_types must name"),
    ],
)
def test_a_window_that_makes_no_sense_is_refused_by_name(
    fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        load_model(write_sliding(tmp_path, "mistral", fields))


@pytest.mark.parametrize("name", TRUNKS)
def test_a_model_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """As its config is, and as transformers writes it."""
    family, fields = TRUNKS[name]
    folder, recorded = write_trunk(tmp_path / "model", family, fields), RECORDED["trunks"][name]
    expected = mx.array(recorded["logits"])
    found = [logits(load_model(folder, dtype=mx.float32), RECORDED["prompt"])]
    (folder / "config.json").write_text(json.dumps(recorded["config"]))
    found.append(logits(load_model(folder, dtype=mx.float32), RECORDED["prompt"]))
    assert all(mx.abs(each - expected).max() < 1e-4 * mx.abs(expected).max() for each in found)
