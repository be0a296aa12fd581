"""Gemma 4: trunks, configs and drafts of assistants are those of transformers 5.23, whatever the shape."""

import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from fixtures import generate
from gemma4 import SHAPES, write_assistant, write_shape
from headstart.checkpoint import load_model
from headstart.engine.draft import assistant_drafts
from headstart.engine.step import prefill_prompts
from headstart.models import Model
from headstart.models.assistant import Assistant

RECORDED = json.loads((Path(__file__).parents[1] / "reference/gemma4.json").read_text())


def prompt_of(length: int) -> list[int]:
    return [(37 * length + 59 * place + place * place) % 256 for place in range(length)]


@lru_cache
def loaded(shape: str) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write_shape(Path(folder, "model"), shape), dtype=mx.float32)


def logits_after(model: Model, text: list[int]) -> np.ndarray:
    hidden = model.trunk(mx.array([text]), model.make_state(1), certain=len(text))
    return np.array(model.logits(hidden)[0, -1])


@pytest.mark.parametrize("shape", SHAPES)
def test_trunks_are_those_of_transformers(shape: str) -> None:
    recorded, model, text = RECORDED["shapes"][shape], loaded(shape), prompt_of(64)
    expected = np.array(recorded["logits"])
    assert np.abs(logits_after(model, text) - expected).max() < 1e-4 * np.ptp(expected)
    assert generate(model, text, max_tokens=32, k=0).tokens == recorded["greedy"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_config_as_transformers_writes_it_is_the_same_model(shape: str, tmp_path: Path) -> None:
    folder = write_shape(tmp_path / "model", shape)
    (folder / "config.json").write_text(json.dumps(RECORDED["shapes"][shape]["config"]))
    model, text = load_model(folder, dtype=mx.float32), prompt_of(64)
    assert np.array_equal(logits_after(model, text), logits_after(loaded(shape), text))


def test_fields_that_transformers_leaves_out_have_its_defaults(tmp_path: Path) -> None:
    folder = write_shape(tmp_path / "model", "gemma4_unified")
    config = json.loads((folder / "config.json").read_text())
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp", "enable_moe_block"):
        del config["text_config"][name]  # mlx-lm's defaults are E2B's
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    model, text = load_model(folder, dtype=mx.float32), prompt_of(20)
    assert np.array_equal(logits_after(model, text), logits_after(loaded("gemma4_unified"), text))


@lru_cache
def assisted(shape: str, **fields: Any) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        target = write_shape(Path(folder, "model"), shape)
        assistant = write_assistant(Path(folder, "assistant"), target, **fields)
        return load_model(target, drafter=assistant, dtype=mx.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_assistant_drafts_what_transformers_drafts(shape: str) -> None:
    model, k = assisted(shape), RECORDED["k"]
    for length, recorded in zip(RECORDED["lengths"], RECORDED["shapes"][shape]["drafts"], strict=True):
        prompt = [*prompt_of(length), recorded["token"]]
        batch = prefill_prompts(model, [prompt], max_k=k)
        assert assistant_drafts(model, batch, k).tokens[0].tolist() == recorded["drafts"]
        assert isinstance(model.drafter, Assistant)
        token, hidden, draft = batch.last, batch.unseen.hidden, model.assistant_drafts(batch.trunk_state)
        for drafted in recorded["drafts"]:
            logits, hidden = draft(model.backend, model.embed, hidden, token)
            token = mx.array([drafted])
        found, expected = np.array(logits[0, 0, :32]), np.array(recorded["logits"])
        scored = np.isfinite(found)  # transformers gives the others one less than the least that it scores
        assert np.allclose(expected[~scored], recorded["lowest"], atol=1e-4)
        assert np.abs(found - expected)[scored].max(initial=0) < 1e-4 * max(np.ptp(expected), 1)
