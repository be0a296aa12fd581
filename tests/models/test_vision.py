"""Pictures become pixel values, embeddings and positions as in transformers (see `reference/make_vision.py`)."""

import json
from hashlib import sha256
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from headstart.checkpoint import load_model
from headstart.images import read_image
from headstart.models import Model
from reference.pictures import CASES, MODES, picture
from vision_models import write_with_tower

REFERENCE = json.loads((Path(__file__).parents[1] / "reference/vision.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_with_tower(tmp_path_factory.mktemp("vision"), dtype=mx.float32), vision=True)


def digest(values: np.ndarray) -> str:
    return sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


@pytest.mark.parametrize("mode", MODES)
def test_pixel_values_of_every_mode(model: Model, mode: str) -> None:
    rules = model.tower.rules
    pixels = read_image(Image.fromarray(picture(37, 50)).convert(mode), rules)
    assert digest(rules.patches(pixels)) == REFERENCE["modes"][mode]


@pytest.mark.parametrize("case", CASES)
def test_pixel_values_and_embeddings(model: Model, case: str) -> None:
    tower, expected = model.tower, REFERENCE["dense"][case]
    images = [read_image(Image.fromarray(picture(*size, n)), tower.rules) for n, size in enumerate(CASES[case][0])]
    assert [list(tower.rules.grid(image)) for image in images] == expected["grids"]
    patches = [tower.rules.patches(image) for image in images]
    assert [digest(each) for each in patches] == expected["pixels"]
    grids = [tower.rules.grid(image) for image in images]
    made = [list(tower.run(mx.array(p), grid))[-1] for p, grid in zip(patches, grids, strict=True)]
    features = np.array(mx.concatenate(made))
    first, last, total = expected["tower"]
    np.testing.assert_allclose(features[0], first, atol=2e-5)
    np.testing.assert_allclose(features[-1], last, atol=2e-5)
    assert abs(features.sum(dtype=np.float64) - total) < 2e-3
