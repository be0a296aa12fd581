"""Ling 3.0: limits of activations, which transformers and mlx-lm leave out, and the models that share its name."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from families import write_family
from headstart.checkpoint import load_model, read_layout
from headstart.errors import CheckpointError

EXPERTS, SHARED = [0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.4, 0.3]


def test_activations_of_experts_are_limited_as_config_json_says(tmp_path: Path) -> None:
    lists = {"expert_swiglu_limit_list": EXPERTS, "share_expert_swiglu_limit_list": SHARED}
    model = load_model(write_family(tmp_path, "bailing_hybrid", **lists), dtype=mx.float32)
    x = mx.random.normal((1, 5, 64), key=mx.random.key(0))
    for layer in (1, 2, 3):
        module = model.weights.layers[layer].mlp
        indices, scores = (np.array(each) for each in module.gate(x))

        def limited(parts: list[np.ndarray], row: np.ndarray, limit: float) -> np.ndarray:
            gate, up, down = (np.array(part, np.float64) for part in parts)
            made, limit = gate @ row, limit or np.inf
            return down @ (np.minimum(made / (1 + np.exp(-made)), limit) * np.clip(up @ row, -limit, limit))

        experts, shared = (
            [each[f"{name}_proj"].weight for name in ("gate", "up", "down")]
            for each in (module.switch_mlp, module.shared_experts)
        )
        made = np.array(model.backend.mlp_or_mixture(module, x))[0]
        for position, row in enumerate(np.array(x[0], np.float64)):
            expected = limited(shared, row, SHARED[layer])
            for index, score in zip(indices[0, position], scores[0, position], strict=True):
                expected += score * limited([part[int(index)] for part in experts], row, EXPERTS[layer])
            assert np.abs(made[position] - expected).max() < 1e-5 * np.abs(expected).max()


def test_other_places_of_latent_attention_are_refused(tmp_path: Path) -> None:
    kinds = ["full_attention", *["linear_attention"] * 3]
    with pytest.raises(CheckpointError, match="layer_types"):
        read_layout(write_family(tmp_path, "bailing_hybrid", layer_types=kinds))
