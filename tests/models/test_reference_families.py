"""Families that transformers computes too: trunks past their windows and budgets, greedy text, and heads' drafts."""

import json
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random

import mlx.core as mx
import numpy as np
import pytest

from families import REFERENCES, write_family
from fixtures import batch_of, generate
from headstart.checkpoint import load_model
from headstart.engine.draft import head_drafts
from headstart.models import Model

RECORDED = json.loads(Path(__file__).parents[1].joinpath("reference", "families.json").read_text())
WITH_DRAFTS = [name for name in REFERENCES if "drafts" in RECORDED[name]]


def prompt(length: int, seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@lru_cache
def loaded(name: str) -> Model:
    family, changed = REFERENCES[name]
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(write_family(Path(folder), family, **changed), dtype=mx.float32)
    return wired_as_in_transformers(model) if family == "step3p7" else model


def wired_as_in_transformers(model: Model) -> Model:
    """Step's head is given hidden states before the norm and has output layers of its own; not so in transformers."""
    head = replace(model.family.head, fed_after_norm=True, chains_after_norm=True)
    model = replace(model, family=replace(model.family, head=head))
    model.share_missing(())
    return model


@pytest.mark.parametrize("name", REFERENCES)
def test_trunk_logits_are_those_of_transformers(name: str) -> None:
    model, tokens = loaded(name), mx.array([prompt(RECORDED["length"], 0)])
    logits = model.logits(model.trunk(tokens, model.make_state(1), certain=tokens.shape[1]))[0]
    expected, every = np.array(RECORDED[name]["logits"]), RECORDED["every"]
    assert np.abs(np.array(logits)[every - 1 :: every] - expected).max() < 1e-4 * np.ptp(expected)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_config_that_transformers_wrote_is_the_same_model(name: str, tmp_path: Path) -> None:
    (family, changed), written = REFERENCES[name], RECORDED[name]["config"]
    folder = write_family(tmp_path, family, **changed)
    old = load_model(folder, dtype=mx.float32)
    (folder / "config.json").write_text(json.dumps(written))
    new, tokens = load_model(folder, dtype=mx.float32), mx.array([prompt(30, 1)])
    hidden = [model.trunk(tokens, model.make_state(1), certain=30) for model in (old, new)]
    assert mx.array_equal(*hidden)
    assert len(old.head_layers) == len(new.head_layers)  # whose limits of Step's are not in what it writes


@pytest.mark.parametrize("name", REFERENCES)
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    expected = RECORDED[name]["text"]
    answer = generate(loaded(name), prompt(RECORDED["length"], 0), max_tokens=len(expected), k="auto")
    assert answer.tokens == expected


@pytest.mark.parametrize("name", WITH_DRAFTS)
def test_drafts_are_those_of_transformers(name: str) -> None:
    model = loaded(name)
    for n, expected in enumerate(RECORDED[name]["drafts"]):
        made = head_drafts(model, batch_of(model, prompt(3 + n, n)), len(expected))
        assert made.tokens[0].tolist() == expected, n
