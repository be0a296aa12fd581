"""The towers of Gemma 4 and Step-3.7 are transformers': pixels, embeddings, logits and text (recorded by
`reference/make_towers.py`)."""

import json
import tempfile
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from headstart.checkpoint import load_model
from headstart.engine import Engine, Request, insert_images
from headstart.images import GemmaRules, StepRules, read_image
from headstart.models import Model
from headstart.models.vision import VisionTower
from headstart.sampling import SamplingParams
from reference.pictures import IMAGE, MODES, TOWER_CASES, picture
from towers import LIKE_OTHERS, SHAPES, write_seeing

RECORDED = json.loads((Path(__file__).parents[1] / "reference/towers.json").read_text())
NEAR = 1e-4  # of the spread
EVERY = [pytest.param(shape, marks=pytest.mark.slow) if shape in LIKE_OTHERS else shape for shape in SHAPES]


@lru_cache
def loaded(shape: str) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write_seeing(Path(folder, "model"), shape), dtype=mx.float32, vision=True)


def tower_of(shape: str) -> VisionTower[Any]:
    tower = loaded(shape).tower
    assert tower is not None
    return tower


def digest(values: np.ndarray) -> str:
    return sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def shown(shape: str, case: str) -> list[np.ndarray]:
    """Return the pixels of transformers: ours, and what its torchvision rounds otherwise."""
    found = []
    for seed, (size, recorded) in enumerate(
        zip(TOWER_CASES[case][0], RECORDED[shape]["cases"][case]["pixels"], strict=True)
    ):
        pixels = read_image(Image.fromarray(picture(*size, seed)), tower_of(shape).rules).copy()
        pixels.reshape(-1)[recorded["at"]] += np.array(recorded["differences"], np.int8).astype(np.uint8)
        assert digest(pixels) == recorded["digest"]
        found.append(pixels)
    return found


@pytest.mark.parametrize("shape", EVERY)
def test_pixels_are_nearly_those_of_transformers(shape: str) -> None:
    """Those of its processors that use Pillow are the same; torchvision rounds some to the next level."""
    count = size = most = 0
    for case, found in RECORDED[shape]["cases"].items():
        size += sum(pixels.size for pixels in shown(shape, case))
        for recorded in found["pixels"]:
            count += len(recorded["at"])
            most = max(most, *map(abs, recorded["differences"]), 0)
    allowed = {"gemma4_unified": (1, 0.002), "step3p7": (1, 0.01)}.get(shape, (0, 0))
    assert most <= allowed[0]
    assert count <= allowed[1] * size


@pytest.mark.parametrize("mode", MODES)
def test_pixels_of_every_mode(mode: str) -> None:
    pixels = read_image(Image.fromarray(picture(37, 50)).convert(mode), tower_of("gemma4_e2b").rules)
    assert digest(pixels) == RECORDED["gemma4_e2b"]["modes"][mode]["digest"]


@pytest.mark.parametrize("case", TOWER_CASES)
@pytest.mark.parametrize("shape", EVERY)
def test_embeddings_logits_and_text_of_transformers(shape: str, case: str) -> None:
    model, tower, recorded = loaded(shape), tower_of(shape), RECORDED[shape]["cases"][case]
    pixels = shown(shape, case)
    for image, expected, spelt in zip(pixels, recorded["embeddings"], recorded["spelt"], strict=True):
        assert digest(np.array(tower.spell(image), np.int32)) == spelt
        made = np.array(list(tower.run(model.backend, image))[-1])
        assert np.abs(made[0] - expected["first"]).max() < NEAR * expected["spread"]
        assert np.abs(made[-1] - expected["last"]).max() < NEAR * expected["spread"]
        assert abs(made.sum(dtype=np.float64) - expected["sum"]) < NEAR * made.size**0.5 * expected["spread"]
    prompt = [IMAGE if token < 0 else token for token in TOWER_CASES[case][1]]
    tokens, images = insert_images(prompt, pixels, tower)
    assert len(tokens) == recorded["length"]
    params = SamplingParams(max_tokens=24, k=0)
    events = list(Engine(model).submit(Request(tokens, params, keep_logits=True, images=images)))
    assert [token for event in events for token in event.tokens] == recorded["greedy"]
    logits = np.array(next(event.logits for event in events if event.logits is not None)[0])
    assert np.abs(logits[recorded["top"]] - recorded["logits"]).max() < NEAR * recorded["spread"]


def test_gemma_has_as_many_tokens_as_fit() -> None:
    rules = GemmaRules()
    assert rules.size(1000, 1000) == (768, 768)
    assert replace(rules, tokens=70).size(10, 2000) == (48, 48 * 70)  # a strip
    assert replace(rules, tokens=70).size(2000, 10) == (48 * 70, 48)
    assert replace(rules, max_pixels=512 * 512).most == 70  # 113 are no number that the model knows
    assert replace(rules, tokens=1120, max_pixels=1280 * 1024).most == 560
    assert replace(rules, max_pixels=48 * 48).most == 1


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        ((300, 400), (0, 0)),
        ((728, 728), (0, 0)),
        ((300, 600), (2, 1)),
        ((1000, 400), (1, 2)),
        ((1144, 1144), (3, 3)),
        ((3000, 700), (1, 5)),
        ((1500, 1500), (3, 3)),
        ((100, 20), (0, 0)),
        ((2000, 20), (4, 4)),
    ],
)
def test_step_cuts_large_and_long_images(size: tuple[int, int], parts: tuple[int, int]) -> None:
    rules = StepRules(max_pixels=1280 * 1024) if size != (2000, 20) else StepRules()
    pixels = rules.show(Image.new("RGB", size, (255, 0, 0)))
    assert rules.parts(pixels) == parts
    assert len(rules.views(pixels)) == parts[0] * parts[1] + 1
    if size == (2000, 20):
        assert not pixels[504:2016].any()  # filled up to a square
