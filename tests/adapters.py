"""Random LoRA adapters for the tiny checkpoints, in the shapes and files that mlx-lm's trainer makes."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from headstart.checkpoint import LoadPlan


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    scale: float = 2.0,
    num_layers: int = 64,
    keys: list[str] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter for the checkpoint `model`: of all linear layers and experts of its last layers, or `keys`."""
    lm = LoadPlan.of(model).model.lm
    parameters: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": 0.0}
    parameters |= {"keys": keys} if keys is not None else {}
    linear_to_lora_layers(lm, num_layers, parameters)
    rng = np.random.default_rng(seed)
    arrays = {
        name: mx.array(rng.standard_normal(array.shape).astype(np.float32) / max(array.shape) ** 0.5)
        for name, array in tree_flatten(lm.parameters())
        if name.endswith((".lora_a", ".lora_b"))
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    written = {"fine_tune_type": "lora", "num_layers": num_layers, "lora_parameters": parameters, **config}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder
