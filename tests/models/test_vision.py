"""Pictures become pixel values, embeddings and positions as in transformers (see `reference/make_vision.py`)."""

import json
from hashlib import sha256
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from PIL import Image

from headstart.checkpoint import load_model
from headstart.images import read_image
from headstart.kernels.attention import rotate_at
from headstart.models import Model
from headstart.models.qwen3_5_vision import mrope_axes
from headstart.state import TokenPositions
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
    assert [digest(tower.rules.patches(image)) for image in images] == expected["pixels"]
    made = [list(tower.run(model.backend, image))[-1] for image in images]
    features = np.array(mx.concatenate(made))
    first, last, total = expected["tower"]
    np.testing.assert_allclose(features[0], first, atol=2e-5)
    np.testing.assert_allclose(features[-1], last, atol=2e-5)
    assert abs(features.sum(dtype=np.float64) - total) < 2e-3


def test_frequencies_take_time_row_and_column_in_turn() -> None:
    axes = mrope_axes([11, 11, 10], 32)  # of the released models
    assert axes == (*(0, 1, 2) * 10, 0, 1)


def test_rotation_by_positions_is_the_ordinary_one_where_they_follow_one_another() -> None:
    rope, axes = nn.RoPE(8, base=100.0), (0, 1, 2, 0)
    x = mx.random.normal((1, 2, 5, 16), key=mx.random.key(3))
    ids = mx.broadcast_to(mx.arange(7, 12), (1, 3, 5))
    assert mx.array_equal(rotate_at(rope, TokenPositions(ids, axes), x), rope(x, offset=mx.array([7])))
    ids = mx.array([[[4, 4, 4, 4, 9], [4, 4, 5, 5, 9], [4, 5, 4, 5, 9]]])
    angles = np.array(ids)[0][list(axes)].T * 100.0 ** (-np.arange(4) / 4)  # [W, 4]
    a, b, rest = np.split(np.array(x), [4, 8], axis=-1)
    expected = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles), rest]
    turned = rotate_at(rope, TokenPositions(ids, axes), x)
    np.testing.assert_allclose(np.array(turned), np.concatenate(expected, axis=-1), atol=1e-5)
